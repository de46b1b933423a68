"""The expert of discs: straight to the disc that the instruction names, or beside it (clumsy).

It looks at the world, not at the observation, as a person does who hears the words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError, did_you_mean
from ...policies.core.types import Obs
from ..discs import COLOURS, Discs
from .toy import FeedbackExpert


@dataclass(frozen=True)
class Aim:
    """How an expert of discs aims."""

    beside_m: float = 0.0  # aims so far beside the disc, for each colour in another direction, always the same
    noise: float = 0.0  # of the hand


LEVELS = {"clean": Aim(), "noisy": Aim(noise=0.3), "clumsy": Aim(beside_m=0.23, noise=0.1)}


def expert(env: Discs, level: str, seed: int = 0, aim: Aim | None = None) -> FeedbackExpert:
    """A controller of the worlds ``env``; ``aim`` takes the place of that of the level."""
    if aim is None and level not in LEVELS:
        raise BurnishError(f"discs has no expert of level {level!r}; {did_you_mean(level, LEVELS)}")
    aim = aim or LEVELS[level]
    angle = 2 * math.pi * torch.arange(len(COLOURS), device=env.device) / len(COLOURS)
    beside = (aim.beside_m * torch.stack([angle.cos(), angle.sin()], 1)).to(env.dtype)

    def law(obs: Obs) -> Tensor:
        target = env.discs[torch.arange(env.num_envs, device=env.device), env.wanted] + beside[env.wanted]
        return (5.0 * (target - obs["state"][:, :2])).clamp(-1, 1)  # 1/s, and the limit is 1 m/s

    return FeedbackExpert(law, env.num_envs, noise=aim.noise, seed=seed, device=env.device)
