"""A learner and its loop, to an end: what the commands do, without files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.finetune.loops import OffPolicy, OffPolicyConfig, OnPolicy, planned
from burnish.offline.loop import Hook, Offline, repeat
from burnish.offline.replay import Replay
from burnish.policies.build import load_policy
from burnish.policies.core.chunk import DecisionEnv
from burnish.policies.core.types import Learner, Metrics


def run_on_policy(
    learner: Learner,
    env: DecisionEnv,
    *,
    decisions_per_update: int,
    total: int,
    seed: int = 0,
    hooks: Sequence[Hook] = (),
) -> Metrics:
    """Until ``total`` decisions of all worlds together; ``decisions_per_update`` is per world."""
    loop = OnPolicy(learner, env, decisions_per_update=decisions_per_update, seed=seed)
    metrics = repeat(loop, planned(loop, total), hooks)
    return {**metrics, **loop.report()}


def run_off_policy(
    learner: Learner,
    env: DecisionEnv,
    replay: Replay,
    config: OffPolicyConfig,
    *,
    total: int,
    prior: Replay | None = None,
    seed: int = 0,
    hooks: Sequence[Hook] = (),
) -> Metrics:
    """Until ``total`` decisions of all worlds together."""
    loop = OffPolicy(learner, env, replay, config, prior=prior, seed=seed)
    metrics = repeat(loop, loop.iterations(total), hooks)
    return {**metrics, **loop.report()}


def check_resumed(fresh: Callable[[int], Any], before: int, after: int) -> tuple[Any, Any]:
    """``fresh(seed)`` makes a loop. Both loops after ``before`` and ``after`` iterations: the second, of another seed,
    took up the first one's state between them and measured and learnt the same, bit for bit."""
    straight, resumed = fresh(0), fresh(5)
    for _ in range(before):
        straight.iterate()
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for _ in range(after):
        a, b = straight.iterate(), resumed.iterate()
        assert a and a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
    mine, theirs = (loop.learner.policy.state_dict() for loop in (straight, resumed))
    assert mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())
    return straight, resumed


def ending(run: Path) -> tuple[list[dict[str, float]], Tensor]:
    """What must be equal in two runs: the metrics without timings, and the weights."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]
    policy, _ = load_policy(run)
    return metrics, torch.cat([p.flatten() for p in policy.state_dict().values()])


def train_offline(
    learner: Learner, replay: Replay, *, batch: int, total: int, n_step: int = 1, hooks: Sequence[Hook] = ()
) -> Metrics:
    """``total`` updates."""
    return repeat(Offline(learner, replay, batch=batch, n_step=n_step), total, hooks)
