"""Checks that end an evaluation: of numbers that are none, and of episodes without an end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import BurnishError


def refuse_non_finite(values: Mapping[str, Tensor], active: Tensor, world_seeds: Sequence[int]) -> None:
    """A single NaN would spread into every mean, so the culprit is named instead."""
    names = [key for key, x in values.items() if x.is_floating_point()]
    if not names:
        return
    bad = torch.stack([~values[key].isfinite().reshape(len(active), -1).all(1) for key in names]) & active
    if bad.any():
        name, world = bad.nonzero()[0].tolist()
        raise BurnishError(
            f"{names[name]!r} is not finite in the episode of seed {world_seeds[world]}, so it cannot be evaluated"
        )


def refuse_endless(lengths: Tensor, active: Tensor, max_steps: int, world_seeds: Sequence[int]) -> None:
    """A check that each episode ends within ``max_steps``, as its world promises."""
    late = active & (lengths > max_steps)
    if late.any():
        seed = world_seeds[int(late.nonzero()[0])]
        raise BurnishError(
            f"the episode of seed {seed} runs past its max_steps={max_steps}; "
            "the world must report `truncated` there, or promise more steps"
        )
