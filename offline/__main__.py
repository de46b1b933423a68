"""Entry point: ``burnish offline``. Recordings, a method, a fresh policy or one from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ..finetune.diagnostics import q_against_return
from ..finetune.method import Phase, resolved
from ..finetune.methods.offline_to_online import offline_learner
from ..finetune.table import OFFLINE, method_name, method_of
from ..policies.acting import complete, evaluator_of, recordings, starting_policy
from ..policies.build import SAVED, identity_of
from ..policies.cli.cli import main
from ..policies.cli.machine import prepare_machine
from ..policies.core.normalize import Scaling
from ..policies.core.ranges import check_ranges
from ..policies.core.rewards import RewardConfig
from ..policies.core.spec import ChunkConfig
from ..policies.data.read import fingerprint
from ..policies.evaluator import EvalConfig
from ..policies.external.reward_models import relabelled
from ..policies.improve import Improvement, improve
from ..policies.runs.run import occupied
from ..policies.runs.training_loop import to_end
from ..sim.build import WORLDS, origin_of
from .dataset import decisions
from .loop import Offline
from .recap import RecapConfig, require_single_steps
from .returns import Discount

GROUPS: dict[str, dict[str, Mapping[str, type]]] = {
    "offline": {
        "policy": SAVED,
        "method": OFFLINE,
        "env": WORLDS,
    }
}


@dataclass
class OfflineConfig:
    """Settings of `burnish offline`: recordings, a method, where the policy starts, and how it is tried."""

    data: str = MISSING  # a folder that `burnish collect` (or LeRobot) wrote
    method: Any = MISSING  # the method; each has a page in docs/methods
    policy: Any = None  # policy to start from; null: a fresh one of the method's own kind
    env: Any = None  # world in which the policy is tried; by default the one that the data came from
    # chunk of a fresh policy; one from a checkpoint keeps its own
    chunk: ChunkConfig = field(default_factory=ChunkConfig)
    normalize: Scaling = Scaling.standard  # scaling of the observations of a fresh policy
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    rewards: RewardConfig = field(default_factory=RewardConfig)  # changes to the rewards of the recordings
    n_step: int = 1  # decisions that a target sums up
    batch: int = 256  # rows of each update
    steps: int = 100_000  # updates in all
    out: str = "runs/offline"  # folder of the run
    track: list[str] = field(default_factory=list)  # trackers besides JSONL and TensorBoard: wandb, trackio, rerun
    log_every: int = 1000  # updates between two rows of metrics
    save_every: int = 20_000  # updates between two checkpoints
    eval_every: int = 0  # updates between two evaluations; 0: only before and after
    eval: EvalConfig = field(default_factory=EvalConfig)  # evaluations during training and at the end
    seed: int = 0  # seed of every random draw
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "n_step batch steps log_every save_every", "[0, inf)": "eval_every"})


def offline(config: OfflineConfig) -> int:
    """Training of a policy by one method on recordings alone, saved, tried and delivered as a run; exit status."""
    occupied(config.out, config.resume)
    device, name = prepare_machine(config.device, config.threads), method_name(config.method, Phase.offline)
    row = method_of(config.method, Phase.offline)
    if isinstance(config.method, RecapConfig):
        require_single_steps(config.n_step, "n_step")
    episodes = relabelled(recordings(config.data), config.rewards)
    policy, origin = starting_policy(config.policy, device)
    spec = episodes.policy_spec(config.chunk) if policy is None else complete(policy, episodes)
    world = origin_of(config.env) or episodes.meta.get("env") or origin.get("env")
    replay = decisions(
        episodes,
        spec,
        config.discount.per_step(spec.execute),
        returns=row.returns,
        seed=config.seed,
        device=device,
    )
    options: dict[str, Any] = {"normalize": config.normalize, "seed": config.seed, "device": device}
    learner = offline_learner(resolved(row.learner), config.method, policy, spec, data=replay, **options)
    work = Improvement(
        training=Offline(learner, replay, batch=config.batch, n_step=config.n_step),
        learner=learner,
        base=policy,
        evaluator=evaluator_of(world, learner.policy.spec, config.eval, device),
        origin={"env": world, "data": config.data, "method": name},
        identity={
            "method": name,
            "env": world,
            "policy": identity_of(config.policy),
            "data": fingerprint(config.data),
        },
        report=lambda: q_against_return(learner, replay),
    )
    return to_end(improve(config, work, config.steps, unit="updates"))


if __name__ == "__main__":
    sys.exit(main())
