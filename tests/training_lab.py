"""A learner and its loop, to an end: what the commands do, without files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from burnish.finetune.loops import DecisionEnv, OffPolicy, OffPolicyConfig, OnPolicy, planned
from burnish.offline.loop import Hook, Offline, repeat
from burnish.offline.replay import Replay
from burnish.policies.build import load_policy
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
