"""Scripted demonstrators: environment -> level -> builder.

``clean`` is as good as the expert gets; ``noisy`` has the errors of a hand, which show how to recover from them;
``multi_modal`` does the same thing in clearly different ways; ``clumsy`` errs in the same way again and again, which is
the error that imitation does not average away.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from ...policies.core.errors import BurnishError, did_you_mean
from ...policies.core.types import Controller, VecEnv
from ..build import env_config, env_name
from ..external.maniskill import ManiSkillConfig
from ..external.settings import GymConfig
from ..multi_task import MultiTask, MultiTaskExpert
from ..task import Backend
from . import discs, toy


class ExpertBuilder(Protocol):
    """The signature of a function that makes the expert of ``num_envs`` worlds of a configuration."""

    def __call__(self, config: Any, num_envs: int, *, seed: int, device: torch.device | str) -> Controller: ...


EXPERTS: dict[str, dict[str, ExpertBuilder]] = {
    "point_reach": {"clean": toy.point_reach, "noisy": partial(toy.point_reach, noise=0.3)},
    "lqr": {"clean": toy.lqr, "noisy": partial(toy.lqr, noise=0.05)},
    "two_mode": {"clean": toy.two_mode, "noisy": partial(toy.two_mode, noise=0.1)},
}


# Environments whose experts follow a script: the module of that name in this folder has a script for each of LEVELS. It
# is imported when it is first needed, because it needs the simulator.
SCRIPTED = ("reach", "push", "avoid", "insert", "pick_place", "stack", "tabletop")
LEVELS = ("clean", "noisy", "multi_modal", "clumsy")


def _of_each_task(env: MultiTask, level: str, seed: int) -> MultiTaskExpert:
    made = [make_expert(world.config, env.num_envs, level, seed, env.device, world) for world in env.worlds]
    return MultiTaskExpert(env, made)


# Others who look at the worlds themselves: a function of the worlds, the level and a seed.
LOOKING: dict[str, Callable[[Any, str, int], Controller]] = {"discs": discs.expert, "multi_task": _of_each_task}


def make_expert(
    name_or_config: Any,
    num_envs: int,
    level: str = "clean",
    seed: int = 0,
    device: torch.device | str = "cpu",
    env: VecEnv | None = None,
    errors: Any = None,
) -> Controller:
    """A controller of N worlds of that environment, in [-1, 1]. Scripted experts look at the worlds ``env`` themselves,
    as the person at the desk does, and must act in step with them. In worlds of other packages, ``level`` may also be
    ``module:callable``, and ``errors`` (`hosted.Errors`) take the place of those of the level."""
    config = env_config(name_or_config)
    name = env_name(config)
    if isinstance(config, GymConfig | ManiSkillConfig):
        from ..external.worlds import ExternalEnv
        from .hosted import hosted_expert

        if isinstance(config, ManiSkillConfig) and env is not None and not isinstance(env, ExternalEnv):
            raise BurnishError(f"experts of {config.id} act beside worlds on the CPU; say env.backend=cpu")
        if not isinstance(env, ExternalEnv) or env.num_envs != num_envs:
            raise BurnishError(f"the expert of {config.id} lives beside its environments; give them as env=")
        return hosted_expert(env, level, errors, seed)
    levels = LEVELS if name in (*SCRIPTED, *LOOKING) else EXPERTS.get(name, {})
    if not levels:
        raise BurnishError(f"{name} has no scripted expert; let a policy act, with policy=checkpoint policy.path=...")
    if level not in levels:
        raise BurnishError(f"{name} has no expert of level {level!r}; {did_you_mean(level, levels)}")
    if name in EXPERTS:
        return EXPERTS[name][level](config, num_envs, seed=seed, device=device)
    if type(getattr(env, "config", None)) is not type(config) or env is None or env.num_envs != num_envs:
        raise BurnishError(
            f"the expert of {name} looks at the worlds themselves; give {num_envs} worlds of {name} as env=, as "
            "make_env makes them, without a wrapper"
        )
    if name in LOOKING:
        return LOOKING[name](env, level, seed)
    if config.backend is Backend.warp:
        raise BurnishError(f"the expert of {name} plans with NumPy; let it act in worlds with env.backend=mujoco")
    scripted = importlib.import_module(".scripted", __package__)
    chosen = importlib.import_module(f".{name}", __package__).LEVELS[level]
    return scripted.ScriptedExpert(env, chosen.script, noise=chosen.noise, seed=seed)
