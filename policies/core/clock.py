"""The clock of N worlds, which makes each a function of its seed, and tensors that are saved beside it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tree
from .errors import BurnishError
from .seed import EpisodeSeeds, RowNoise, derive


@functools.cache
def _salt(name: str) -> int:
    return derive(0, name)


class Clock:
    """Which episode each world (or each row of a controller) is in: its seed, and the control ticks since it began."""

    def __init__(self, num_envs: int, seed: int = 0, device: torch.device | str = "cpu") -> None:
        if num_envs < 1:
            raise BurnishError(f"at least one world is needed, got {num_envs}")
        self._seeds = EpisodeSeeds(seed, num_envs, device)
        self.tick = torch.zeros_like(self._seeds.current)
        self._everyone = torch.ones_like(self.tick, dtype=torch.bool)

    @property
    def seeds(self) -> Tensor:
        """(N,) the seeds of the episodes under way."""
        return self._seeds.current

    def begin(self, mask: Tensor | None, seeds: Sequence[int] | None) -> Tensor:
        """Start an episode in the worlds of ``mask`` (all by default), which is returned as a tensor (N,)."""
        mask = self._rows(mask)
        self._seeds.begin(mask, seeds)
        self.tick = self.tick.masked_fill(mask, 0)
        return mask

    def advance(self, active: Tensor | None = None) -> Tensor:
        """One tick in the worlds of ``active`` (all by default), which is returned as a tensor (N,)."""
        active = self._rows(active)
        self.tick = self.tick + active
        return active

    def noise(self, name: str) -> RowNoise:
        """The numbers of this tick. They are salted by ``name``, because policies draw from the bare episode seed too
        and a world must not roll the same dice as the policy that it tests."""
        return RowNoise(self._seeds.current ^ _salt(name), self.tick)

    def state_dict(self) -> dict[str, Tensor]:
        return {"tick": self.tick.clone(), **{f"seeds.{key}": x.clone() for key, x in self._seeds.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tick = restored({"tick": self.tick}, state)["tick"]
        self._seeds.load_state_dict(restored(self._seeds.state_dict(), state, "seeds."))

    def _rows(self, mask: Tensor | None) -> Tensor:
        if mask is None:
            return self._everyone
        tree.check(mask, f"{len(self.tick)}")
        return mask.to(self.tick.device)


def restored(current: Mapping[str, Tensor], state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Copies of the entries of ``state`` that belong to ``current``, refused where a shape or a key does not fit."""
    loaded = {}
    for key, x in current.items():
        given = state.get(prefix + key)
        if given is None or given.shape != x.shape:
            found = "nothing" if given is None else tuple(given.shape)
            raise BurnishError(
                f"the saved state of a world has {found} as {prefix + key!r}, but needs {tuple(x.shape)}"
            )
        loaded[key] = given.to(device=x.device, dtype=x.dtype, copy=True)
    return loaded


class Clocked:
    """A clock, and tensors (N, ...) by name, which are saved together: those of a world, or of a controller."""

    _clock: Clock
    _state: dict[str, Tensor]

    def state_dict(self) -> dict[str, Any]:
        return {**self._clock.state_dict(), **tree.map_tree(torch.clone, self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self._state = restored(self._state, state)
