"""Scripted demonstrators: environment -> level -> builder.

``clean`` is as good as the expert gets; ``noisy`` has the errors of a hand, which show how to recover from them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch

from ...policies.core.errors import BurnishError, did_you_mean
from ...policies.core.types import Controller
from ..build import env_config, env_name
from . import toy


class ExpertBuilder(Protocol):
    def __call__(self, config: Any, num_envs: int, *, seed: int, device: torch.device | str) -> Controller: ...


EXPERTS: dict[str, dict[str, ExpertBuilder]] = {
    "point_reach": {"clean": toy.point_reach, "noisy": partial(toy.point_reach, noise=0.3)},
    "lqr": {"clean": toy.lqr, "noisy": partial(toy.lqr, noise=0.05)},
    "two_mode": {"clean": toy.two_mode, "noisy": partial(toy.two_mode, noise=0.1)},
}


def make_expert(
    name_or_config: Any, num_envs: int, level: str = "clean", seed: int = 0, device: torch.device | str = "cpu"
) -> Controller:
    """A controller of N worlds of that environment, in [-1, 1]."""
    config = env_config(name_or_config)
    name = env_name(config)
    levels = EXPERTS.get(name, {})
    if level not in levels:
        raise BurnishError(f"{name} has no expert of level {level!r}; {did_you_mean(level, levels)}")
    return levels[level](config, num_envs, seed=seed, device=device)
