"""Teachers whose law is written down, and students of them, for the tests of distillation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.finetune.methods.distill import Distillation
from burnish.finetune.people.teachers import Keep, StudentChunk, Teacher, record, scenes, shared_spec, student_spec
from burnish.policies.build import build_policy
from burnish.policies.controllers import controller_for
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import PolicySpec, agent_spec
from burnish.policies.core.types import Obs
from burnish.policies.data.episodes import Episodes
from burnish.policies.data.lerobot import read_lerobot
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.gaussian import GaussianConfig, GaussianLoss
from burnish.policies.imitate import ImitateConfig
from burnish.policies.measure.evaluate import evaluate
from burnish.sim.build import make_env
from burnish.sim.collect import stream
from burnish.sim.point_reach import PointReachConfig

LINE = PointReachConfig(dim=1, control_hz=10.0, max_steps=30)
LEAST_SQUARES = GaussianConfig(hidden=[64, 64], loss=GaussianLoss.least_squares)


def law(obs: Obs) -> Tensor:
    """To the goal, slowing down in the last decimetres: (B, A), where the limits of the world are +-1."""
    return (2 * (obs["goal"] - obs["state"])).clamp(-1, 1)


def spec_of(config: Any, keys: Sequence[str] = ("state", "goal")) -> PolicySpec:
    made = agent_spec(make_env(config, 1).spec)
    return student_spec(make_env(config, 1).spec, keys, StudentChunk(), made)


def teacher(
    answer: Callable[[Obs], Tensor] = law, config: Any = LINE, name: str = "teacher", worlds: int = 20
) -> Teacher:
    """``answer`` gives (B, A) in [-1, 1]."""
    policy = CallablePolicy(lambda obs: answer(obs)[:, None], spec_of(config))
    return as_teacher(policy, config, name, worlds)


def as_teacher(policy: Any, config: Any, name: str = "teacher", worlds: int = 20) -> Teacher:
    raw = make_env(config, worlds)
    env = raw if policy.spec.history == 1 else HistoryEnv(raw, policy.spec.history)
    return Teacher(name, policy, {"name": name, "config": repr(config)}, env)


def recorded(
    folder: Path, teachers: Sequence[Teacher], episodes: int = 60, *, keep: Keep = Keep.successes, seed: int = 0
) -> Episodes:
    spec, plays = shared_spec(teachers), scenes(teachers, episodes, seed=seed)
    assert record(folder, spec, {"env": None}, plays, stream, keep=keep)
    return read_lerobot(folder)


def training(steps: int, **changes: Any) -> ImitateConfig:
    usual: dict[str, Any] = {"batch": 128, "lr": 3e-3, "warmup": 20, "ema": 0.99}
    return ImitateConfig(steps=steps, **(usual | changes))


def trained(
    student: Any, episodes: Episodes, steps: int = 600, *, lr: float = 3e-3, seed: int = 0, **options: Any
) -> Any:
    """The averaged student after so many updates."""
    learner = Distillation(student, episodes, training(steps, lr=lr), seed=seed, **options)
    for _ in range(learner.config.steps):
        learner.update()
    learner.ema.copy_to(learner.average)
    return learner.average


def fresh(config: Any = LINE, keys: Sequence[str] = ("state", "goal"), kind: Any = LEAST_SQUARES, seed: int = 0) -> Any:
    return build_policy(kind, spec_of(config, keys), seed=seed)


def successes(policy: Any, config: Any = LINE, seeds: Sequence[int] = range(200)) -> Tensor:
    """(len(seeds),) bool."""
    env = ScaledEnv(make_env(config, len(seeds)), policy.spec.action)
    result = evaluate(env, controller_for(policy, len(seeds)), list(seeds))
    return torch.tensor(result.success)


def goals(config: Any = LINE, seeds: Sequence[int] = range(200)) -> Tensor:
    return make_env(config, len(seeds)).reset(seeds=list(seeds))["goal"]


def states(count: int = 500, config: Any = LINE) -> Obs:
    """First observations of episodes that nobody trained on."""
    return {key: x.clone() for key, x in make_env(config, count, seed=99).reset().items()}


def modes(policy: Any, count: int = 100) -> tuple[Tensor, Tensor]:
    """(success, side) of so many episodes of TwoMode."""
    env, controller, seeds = make_env("two_mode", count), controller_for(policy, count), list(range(count))
    active = torch.ones(count, dtype=torch.bool)
    won, side = ~active, torch.full((count,), -1)
    controller.reset(active, seeds)
    obs = env.reset(active, seeds)
    for _ in range(env.spec.max_steps):
        step = env.step(controller.step(obs), active)
        won, side = won | (active & step.info["success"]), torch.where(active, step.info["mode"], side)
        obs, active = step.obs, active & ~(step.terminated | step.truncated)
    return won, side
