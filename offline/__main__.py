"""Entry point: ``burnish offline``. Recordings, a method, a fresh policy or one from a checkpoint."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import MISSING
from torch import nn

from ..finetune.diagnostics import q_against_return
from ..finetune.method import Phase, resolved
from ..finetune.methods.offline_to_online import offline_learner
from ..finetune.table import OFFLINE, method_name, method_of
from ..policies.__main__ import (
    WORLDS,
    Trial,
    TrialConfig,
    acting_policy,
    origin_of,
    say,
    spec_of,
    trial_of,
)
from ..policies.__main__ import prepare as prepare_machine
from ..policies.best import Best
from ..policies.build import CheckpointConfig, describe, weights_of
from ..policies.cli.cli import main
from ..policies.core.config import to_data
from ..policies.core.errors import BurnishError
from ..policies.core.normalize import Scaling
from ..policies.core.ranges import check_ranges
from ..policies.core.rewards import RewardConfig
from ..policies.core.spec import ChunkConfig
from ..policies.core.types import Metrics
from ..policies.data.episodes import Episodes
from ..policies.data.lerobot import fingerprint, read_lerobot
from ..policies.external.table import OUTSIDE, identity
from ..policies.runs.run import OnLog, Run, UnsavedRun
from ..policies.runs.training_loop import drive
from .dataset import BehindCut, decisions
from .loop import Offline, Training
from .returns import Discount

GROUPS: dict[str, dict[str, Mapping[str, type]]] = {
    "offline": {
        "policy": {"checkpoint": CheckpointConfig},
        "method": OFFLINE,
        "env": WORLDS,
    }
}


@dataclass
class OfflineConfig:
    data: str = MISSING  # a folder that `burnish collect` (or LeRobot) wrote
    method: Any = MISSING  # the method; each has a page in docs/methods
    policy: Any = None  # where to start; null: a fresh policy of the method's own kind
    env: Any = None  # where to try the policy; by default the world that the data came from
    chunk: ChunkConfig = field(default_factory=ChunkConfig)  # of a fresh policy; one from a checkpoint keeps its own
    normalize: Scaling = Scaling.standard  # of what a fresh policy observes
    discount: Discount = field(default_factory=Discount)  # of later rewards
    reward_scale: float = 1.0  # factor on every reward
    reward_shift: float = 0.0  # added to each scaled reward; -1 makes success-or-nothing a matter of time
    # Of the returns that method.calibrate compares with: what follows where a recording was cut off.
    behind_cut: BehindCut = BehindCut.worst
    n_step: int = 1  # decisions that a target sums up
    batch: int = 256  # rows of each update
    steps: int = 100_000  # updates in all
    out: str = "runs/offline"  # folder of the run
    track: list[str] = field(default_factory=list)  # besides JSONL and TensorBoard: wandb, trackio, rerun
    log_every: int = 1000  # updates between two rows of metrics
    save_every: int = 20_000  # updates between two checkpoints
    eval_every: int = 0  # 0: only before and after
    trial: TrialConfig = field(default_factory=TrialConfig)  # evaluations during training and at the end
    seed: int = 0  # of every random draw
    device: str = "cpu"  # where networks run: cpu, cuda, cuda:1
    threads: int = 0  # 0: as torch chooses
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "n_step batch steps log_every save_every", "[0, inf)": "eval_every"})
        check_ranges(self, {"(0, inf)": "reward_scale"})
        if not math.isfinite(self.reward_shift):
            raise BurnishError(f"reward_shift={self.reward_shift} must be a finite number")


def offline(config: OfflineConfig) -> int:
    device, name = prepare_machine(config.device, config.threads), method_name(config.method, Phase.offline)
    row = method_of(config.method, Phase.offline)
    episodes = recordings(config.data)
    policy, origin = starting_policy(config.policy, device)
    spec = policy.spec if policy is not None else spec_of(episodes, config.chunk)
    world = origin_of(config.env) or episodes.meta.get("env") or origin.get("env")
    replay = decisions(
        episodes,
        spec,
        config.discount.per_step(spec.execute),
        monte_carlo=row.returns,
        behind_cut=config.behind_cut,
        reward=RewardConfig(config.reward_scale, config.reward_shift),
        seed=config.seed,
        device=device,
    )
    options: dict[str, Any] = {"normalize": config.normalize, "seed": config.seed, "device": device}
    learner = offline_learner(resolved(row.learner), config.method, policy, spec, data=replay, **options)
    work = Work(
        training=Offline(learner, replay, batch=config.batch, n_step=config.n_step),
        learner=learner,
        base=policy,
        trial=trial_of(world, learner.policy.spec, config.trial, device),
        origin={"env": world, "data": config.data, "method": name},
        identity={
            "method": name,
            "env": world,
            "policy": identity_of(config.policy),
            "data": fingerprint(config.data),
        },
        report=lambda: q_against_return(learner, replay),
    )
    return improve(config, work, config.steps, unit="updates")


# ---- what `burnish finetune` does in the same way ----


class Learns(Protocol):
    policy: Any


@dataclass
class Work:
    """An improvement that is ready to start. ``identity`` is what must not have changed when it is resumed."""

    training: Training
    learner: Learns
    base: Any  # the policy at the beginning, or None
    trial: Trial | None
    origin: Mapping[str, Any]
    identity: Mapping[str, Any]
    report: Callable[[], Metrics] | None = None
    iterations: int | None = None  # where an iteration is not always as many units as the last
    reached: Callable[[], int] | None = None  # units so far, likewise
    pretrained: int = 0  # iterations after which the policy is tried once more


def improve(
    config: Any,
    work: Work,
    total: int,
    *,
    per_iteration: int = 1,
    unit: str,
    keep: bool = True,
    on_log: OnLog | None = None,
) -> int:
    """Try the base, iterate until ``total``, try the result. ``total`` and the intervals of ``config`` count in
    ``unit``, of which an iteration is ``per_iteration``; they are rounded to whole iterations. Unless it is to be
    kept, nothing is written."""
    training, learner, trial = work.training, work.learner, work.trial
    iterations = -(-total // per_iteration) if work.iterations is None else work.iterations

    def iterations_in(count: int) -> int:
        return max(1, round(count / per_iteration))

    def reached(number: int) -> int:
        return number * per_iteration if work.reached is None else work.reached()

    def evaluate(number: int) -> Metrics:
        return {} if trial is None else trial(learner.policy, reached(number))

    def children() -> dict[str, Any]:
        policy = {"config": describe(learner.policy, work.origin), "state": learner.policy.state_dict()}
        if isinstance(work.base, nn.Module):  # what a policy holds of the base that it refines is the base itself
            policy["frozen"] = work.base.state_dict().values()
        return {"policy": policy, "learner": {"config": {}, "state": training.state_dict()}}

    settings = to_data(config) | {"identity": to_data(work.identity)}
    # Other threads may round otherwise, and files may be moved; a run that was moved is still the same run.
    free = {"resume", "threads", "out", "data", "track", "policy.path", "policy.base"}
    free |= {f"policy.{name}" for kind in OUTSIDE.values() for name in kind.free}
    options: dict[str, Any] = {"resume": config.resume, "changeable": free, "trackers": config.track}
    kept = Run(config.out, settings, progress_every_s=10, on_log=on_log, **options) if keep else UnsavedRun(on_log)
    with kept as run:
        latest = run.latest()
        if trial is not None and keep:
            trial.best = Best(config.out, work.origin)
        if latest is not None:
            training.load_state_dict(latest.children["learner"].state)
        elif work.base is not None and trial is not None:
            with run.watch("exams"):
                exam = trial(work.base, 0, start=True)
            run.log(0, exam)
        if run.start >= iterations:
            say(f"{config.out} has reached its {total} {unit} already; nothing is trained")
        finished = drive(
            run,
            iterations,
            training.iterate,
            children,
            log_every=iterations_in(config.log_every),
            save_every=iterations_in(config.save_every),
            eval_every=iterations_in(config.eval_every) if config.eval_every else 0,
            eval_after=work.pretrained,
            evaluate=evaluate,
            report=work.report,
        )
        if finished and trial is not None:
            trial.confirm(work.base, learner.policy, reached(iterations))
    if not finished:
        say(f"stopped before its {total} {unit}" + ("; continue with resume=true" if keep else ""))
        return 130
    if not keep:
        return 0
    against = f" against={config.policy.path}" if isinstance(config.policy, CheckpointConfig) else ""
    say(f"policy: {config.out}  (burnish evaluate policy.path={config.out}{against})")
    if trial is not None and trial.best is not None:
        say(trial.best.sentence())
    return 0


def recordings(path: str) -> Episodes:
    if not Path(path).is_dir():
        raise BurnishError(f"there is no dataset at {path}; `burnish collect` makes one")
    return read_lerobot(path)


def starting_policy(chosen: Any, device: torch.device, env: Any = None) -> tuple[Any, dict[str, Any]]:
    """The policy of ``policy=...`` and its origin; nothing where none was chosen."""
    return (None, {}) if chosen is None else acting_policy(chosen, device, env)


def identity_of(chosen: Any, policy: Any = None) -> Any:
    """Which weights a path leads to. Of a ``policy`` that is not ours, what can be seen of it."""
    if chosen is None:
        return None
    if not isinstance(chosen, CheckpointConfig):
        return identity(policy)
    return weights_of(chosen.path)


if __name__ == "__main__":
    sys.exit(main())
