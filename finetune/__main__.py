"""Entry point: ``burnish finetune``. A policy, a method, a world, and a folder to resume from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from ..offline.__main__ import Work, identity_of, improve, recordings, require_least, starting_policy
from ..policies.__main__ import WORLDS, TrialConfig, fingerprint, origin_of, say, trial_of, world_for
from ..policies.__main__ import prepare as prepare_machine
from ..policies.build import CheckpointConfig
from ..policies.core.cli import main
from ..policies.core.errors import BurnishError
from ..policies.core.spec import EnvSpec, PolicySpec, agent_spec
from ..sim.build import make_env, world_from
from .build import METHODS, method_name, prepare, prior_data, require

GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "finetune": {
        "policy": {"checkpoint": CheckpointConfig},
        "method": {name: method.config for name, method in METHODS.items()},
        "env": WORLDS,
    }
}


@dataclass
class FinetuneConfig:
    """``total`` and the intervals count decisions of all worlds together; they are rounded to whole iterations."""

    policy: Any = None  # where to start; null: from nothing, for methods that can
    method: Any = MISSING
    env: Any = None  # by default the world that the policy was trained for
    worlds: int = 8
    total: int = 100_000
    data: str | None = None  # a folder of recordings, part of every batch of the methods that can use them
    out: str = "runs/refined"
    log_every: int = 1000
    save_every: int = 20_000
    eval_every: int = 0  # 0: only before and after
    trial: TrialConfig = field(default_factory=TrialConfig)
    seed: int = 0
    device: str = "cpu"
    threads: int = 0  # 0: as torch chooses
    resume: bool = False

    def __post_init__(self) -> None:
        require_least(self, {**dict.fromkeys(("worlds", "total", "log_every", "save_every"), 1), "eval_every": 0})


def finetune(config: FinetuneConfig) -> int:
    device, name = prepare_machine(config.device, config.threads), method_name(config.method)
    base, origin = starting_policy(config.policy, device)
    require(name, base)
    warmup = getattr(config.method.loop, "warmup", 0)
    if config.total <= warmup:
        raise BurnishError(
            f"total={config.total} decisions end within the warm-up of {warmup}, so nothing would be learnt; "
            "raise total or lower method.loop.warmup"
        )
    world = origin_of(config.env) or origin.get("env")
    spec = base.spec if base is not None else _spec_in(world, getattr(config.method, "history", 1))
    env = world_for(spec, world, config.worlds, device, seed=config.seed)
    prior = None
    if config.data is not None:
        data = recordings(config.data)
        recorded_in = data.meta.get("env")
        if recorded_in and world and recorded_in["name"] != world["name"]:
            raise BurnishError(
                f"{config.data} was recorded in {recorded_in['name']}, but the policy is refined in {world['name']}; "
                "take recordings of the same world, or none"
            )
        prior, sentence = prior_data(
            config.method, base, env, data, limits=spec.action, seed=config.seed, device=device
        )
        say(sentence)
    loop = prepare(config.method, base, env, prior=prior, limits=spec.action, seed=config.seed, device=device)
    learner = loop.learner
    describe = getattr(learner, "describe", None)
    if describe is not None:
        say(describe())
    work = Work(
        training=loop,
        learner=learner,
        base=base,
        trial=trial_of(world, learner.policy.spec, config.trial, device),
        origin={"env": world, "method": name, "base": None if base is None else config.policy.path},
        identity={
            "method": name,
            "env": world,
            "policy": identity_of(config.policy),
            "data": None if config.data is None else fingerprint(config.data),
        },
        report=loop.report,
        iterations=loop.iterations(config.total),
        reached=lambda: loop.ledger.decisions,
    )
    return improve(config, work, config.total, per_iteration=loop.decisions_per_iteration, unit="decisions")


def _spec_in(world: dict[str, Any] | None, history: int) -> PolicySpec:
    """Of a policy that starts from nothing: it sees the world as it is, and commands the whole of its actuators."""
    if world is None:
        raise BurnishError("without a policy nothing says which world to act in; give env=...")
    raw: EnvSpec = make_env(world_from(world), 1).spec
    return replace(agent_spec(raw, history=1), history=history, action=raw.action)


if __name__ == "__main__":
    sys.exit(main())
