"""T decisions of N worlds in a row, as the on-policy methods want them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..policies.core.tree import Tree, assign, index, map_tree
from ..policies.core.types import Obs, Outcome

FACTS = ("reward", "discount", "ended", "terminated", "steps", "valid")


class Rollout:
    """Preallocated by the first ``add``. Where each decision led is the obs of the next row, except where a world ended
    and at the last row; those observations are kept in ``bootstrap``."""

    def __init__(self, length: int, num_envs: int) -> None:
        self.length, self.num_envs, self.filled = length, num_envs, 0
        self._obs: Tree = {}
        self._columns: Tree = {}
        self._led: list[tuple[Tensor, Obs]] = []  # (flat rows t * N + n, their next_obs)

    def add(self, obs: Obs, columns: Mapping[str, Tensor], outcome: Outcome) -> None:
        weighed = ("weight",) if "weight" in outcome.info else ()
        given = {**columns, **{name: getattr(outcome, name) for name in (*FACTS, *weighed)}}
        if not self._columns:
            self._obs, self._columns = (
                map_tree(lambda x: x.new_empty(self.length, *x.shape), tree) for tree in (obs, given)
            )
        assign(self._obs, self.filled, obs)
        assign(self._columns, self.filled, given)
        ends = outcome.ended.nonzero()[:, 0]
        if self.filled == self.length - 1:
            ends = torch.arange(self.num_envs, device=outcome.ended.device)
        if len(ends):
            self._led.append((self.filled * self.num_envs + ends, index(outcome.next_obs, ends)))
        self.filled += 1

    def batch(self) -> dict[str, Any]:
        """Columns and obs (T, N, ...); "bootstrap" holds "rows" (M,) into the flattened T * N and their "obs"."""
        rows, led = zip(*self._led, strict=True)
        seen = {key: torch.cat([obs[key] for obs in led]) for key in led[0]}
        return {**self._columns, "obs": self._obs, "bootstrap": {"rows": torch.cat(rows), "obs": seen}}


def flat(batch: Mapping[str, Any]) -> dict[str, Any]:
    """(T, N, ...) -> (T * N, ...), obs included; without "bootstrap"."""
    return map_tree(lambda x: x.flatten(0, 1), {key: x for key, x in batch.items() if key != "bootstrap"})
