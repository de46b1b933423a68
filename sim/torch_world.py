"""The common part of pure-torch worlds: a clock that makes a world a function of its seed alone, exact sums, a raster.

Bit equality between 2 worlds and 4 is promised, so sums over components are written out: a matrix product or a
reduction may round differently for another number of rows, an addition of two tensors may not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.errors import BurnishError
from ..policies.core.seed import EpisodeSeeds, RowNoise, derive, normal
from ..policies.core.spec import EnvSpec

Config = TypeVar("Config")


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
        return RowNoise(self._seeds.current ^ derive(0, name), self.tick)

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


class TorchWorld(Clocked, Generic[Config]):
    """``dtype=torch.float64`` is for tests of formulae; policies need float32."""

    Settings: type[Config]

    def __init__(
        self,
        num_envs: int,
        config: Config | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = self.Settings() if config is None else config
        self.num_envs, self.device, self.dtype = num_envs, torch.device(device), dtype
        self._clock = Clock(num_envs, seed, device)
        self.spec, self._state = self._set_up()

    @abstractmethod
    def _set_up(self) -> tuple[EnvSpec, dict[str, Tensor]]:
        """The specification of the world, and its state before the first reset."""

    def _disturbed(self, x: Tensor, deviation: float) -> Tensor:
        if deviation == 0:
            return x
        return x + deviation * normal(x.shape, self._clock.noise("dynamics"), device=self.device, dtype=self.dtype)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """(N, D), (N, D) or (D,) -> (N,)."""
    total = x[:, 0] * y[..., 0]
    for i in range(1, x.shape[1]):
        total = total + x[:, i] * y[..., i]
    return total


def linear(matrix: Tensor, x: Tensor) -> Tensor:
    """(E, D), (N, D) -> (N, E), row by row ``matrix @ x``."""
    return torch.stack([dot(x, row) for row in matrix], dim=-1)


def distance(x: Tensor, y: Tensor) -> Tensor:
    """(N, D), (N, D) or (D,) -> (N,), Euclidean."""
    return dot(x - y, x - y).sqrt()


def pixel_distance(point: Tensor, size: int, extent: float) -> Tensor:
    """(N, 2) -> (N, size, size): metres from ``point`` to each pixel's centre, in a picture of the square
    [-extent, extent]^2, x to the right and y upwards (so row 0 is the largest y)."""
    line = ((torch.arange(size, device=point.device, dtype=point.dtype) + 0.5) * (2 / size) - 1) * extent
    dx = line[None, None, :] - point[:, 0, None, None]
    dy = -line[None, :, None] - point[:, 1, None, None]
    return (dx * dx + dy * dy).sqrt()


def paint(picture: Tensor, where: Tensor, colour: tuple[int, int, int]) -> Tensor:
    """(N, H, W, 3) uint8 with ``colour`` where ``where`` (N, H, W) holds."""
    return torch.where(where[..., None], torch.tensor(colour, dtype=torch.uint8, device=picture.device), picture)
