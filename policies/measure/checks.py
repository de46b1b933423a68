"""Checks that end an evaluation: of numbers that are none, of episodes without an end, and of worlds that fail."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import BurnishError, WorldError

_log = logging.getLogger(__name__)

TRIES = 10  # of an episode that errors of its world cut off


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


class Replays:
    """Counts the episodes that an error of their world cut off (``lost`` in the info of a step): they are played again
    on their seeds, since they say nothing of the policy."""

    def __init__(self) -> None:
        self._tries: Counter[int] = Counter()

    def count(self, row: int, seed: int) -> None:
        """One more of the episode ``row``; refused where it was cut off too often."""
        self._tries[row] += 1
        if self._tries[row] >= TRIES:
            raise WorldError(
                f"errors of the world cut off the episode of seed {seed} {TRIES} times, so it cannot be played to its "
                "end; correct the world"
            )

    def tell(self) -> None:
        if cut := self._tries.total():
            _log.warning("errors of the world cut off %d episodes, which were played again on their seeds", cut)
