"""The interface of a task of `BatchedMujoco`: its model; observation, reward, ends as array operations over (N, ...).

Nothing here imports MuJoCo, so the table of worlds and their settings can be read without it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from ..policies.core.clock import Clock
from ..policies.core.spec import EnvSpec
from .arrays import constant

if TYPE_CHECKING:
    from .guard import GuardConfig
    from .physics import Array, Physics, Rows
    from .randomize import RandomizeConfig


class Backend(enum.Enum):
    """The physics of a task."""

    mujoco = "mujoco"  # MuJoCo in C, on all cores
    warp = "warp"  # mujoco-warp, on the device of the run: all worlds at once on a GPU


@dataclass(frozen=True)
class PixelConfig:
    """Which cameras of the model are seen, and how they are drawn."""

    cameras: tuple[str, ...]
    size: int = 84  # pixels, square
    lavish: bool = False  # shadows, reflections and multisampling


class Verdict(NamedTuple):
    """The outcome of a tick, each (N,)."""

    reward: Array
    terminated: np.ndarray
    success: np.ndarray | None = None  # None where a task knows no success
    info: Mapping[str, np.ndarray] = MappingProxyType({})


class Draw:
    """The random numbers with which episodes begin: a world's depend on its seed alone. NumPy arrays, or with
    ``tensors`` torch's, on the device of the clock."""

    def __init__(self, clock: Clock, tensors: bool = False) -> None:
        self._clock, self._tensors = clock, tensors
        self.seeds = clock.seeds

    def uniform(self, name: str, low: Sequence[float] | Array, high: Sequence[float] | Array) -> Array:
        """(N, D) between ``low`` and ``high``, each (D,)."""
        share = self._given(self._clock.noise(name).uniform((len(self.seeds), len(low))))
        least, most = constant(share, low), constant(share, high)
        return least + (most - least) * share

    def normal(self, name: str, std: Sequence[float] | Array) -> Array:
        """(N, D) of mean zero."""
        share = self._given(self._clock.noise(name).normal((len(self.seeds), len(std))))
        return constant(share, std) * share

    def _given(self, drawn: Tensor) -> Any:
        return drawn if self._tensors else drawn.numpy()


class Task(Protocol):
    """One task, for all worlds at once. Arrays have a leading N; only the worlds ``rows`` may be changed. Formulas take
    NumPy's arrays and torch's tensors alike (`arrays.py`), so that worlds in C and on a device have the same.

    ``memory`` holds what a world knows beside the simulator's state; it is saved with it. Quantities that MuJoCo
    derives from the state (poses of bodies, contact forces) are those of the last physics step; ``derive`` names
    MuJoCo functions that bring some of them up to date after each tick.
    """

    config: Any
    version: int  # raised by every change that changes what is measured on the task
    spec: EnvSpec  # without images
    frame_skip: int  # physics steps per control tick
    derive: tuple[str, ...]
    autoreset: bool  # let MuJoCo reset a world that diverges, in silence, instead of going on with NaN
    pixels: PixelConfig | None
    randomize: RandomizeConfig | None
    guard: GuardConfig | None  # of tasks whose set-points are joint angles
    memory: dict[str, Array]

    def mjcf(self) -> str: ...

    def bind(self, physics: Physics) -> None:
        """Look up what the task reads and writes. Called once."""
        ...

    def begin(self, rows: Rows, draw: Draw) -> None:
        """Write the initial state of the worlds ``rows``, which MuJoCo has just reset."""
        ...

    def settle(self, rows: Rows) -> None:
        """Set up the part that depends on derived quantities of the initial state, which are known now."""
        ...

    def control(self, action: Array, rows: Rows | None) -> Array:
        """(N, A) in actuator units, within limits -> (N, nu)."""
        ...

    def observe(self) -> dict[str, Array]: ...

    def judge(self, action: Array) -> Verdict: ...
