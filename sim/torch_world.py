"""The common part of pure-torch worlds: a clock that makes a world a function of its seed alone, exact sums, a raster.

Bit equality between 2 worlds and 4 is promised, so sums over components are written out: a matrix product or a
reduction may round differently for another number of rows, an addition of two tensors may not.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..policies.core.clock import Clock, Clocked
from ..policies.core.seed import normal
from ..policies.core.spec import EnvSpec

Config = TypeVar("Config")


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
