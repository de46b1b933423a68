"""A robot's guard in simulated worlds: ``env.guard.velocity=2 env.guard.acceleration=10``.

On a robot a guard stands between policy and motors and changes set-points that are too fast
(`real_robot/safety/guard.py`). A policy that never met it meets it there for the first time. Here the same code, not
a copy, stands before the actuators of N worlds, with set-points as often as a robot's control loop sends them, so that
refinement learns and evaluation measures with the limits active. It is part of a world's settings,
so whatever remembers a world remembers its guard.

A task observes the request as the command, as on a robot (`sim/mirror.py`); ``info["executed"]`` is the action
within its limits, because a guarded set-point is in general no action. Positions are limited to the actuators' ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.ranges import check_ranges
from ..real_robot.safety.guard import JointGuard, Limits

if TYPE_CHECKING:
    from .physics import Array, Rows


@dataclass
class GuardConfig:
    """Limits of every joint alike, as drivers have them; 0 and 0: no guard."""

    velocity: float = 0.0  # limit of the velocity of set-points, in rad/s
    acceleration: float = 0.0  # limit of the acceleration of set-points, in rad/s^2
    rate_hz: float = 100.0  # rate of a robot's control loop, in Hz; a control tick is divided into so many parts

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "velocity acceleration", "(0, inf)": "rate_hz"}, "guard.")
        if (self.velocity > 0) != (self.acceleration > 0):
            missing = "acceleration" if self.velocity > 0 else "velocity"
            raise BurnishError(f"a guard limits velocity and acceleration; guard.{missing} is missing, or give neither")

    def any(self) -> bool:
        return self.velocity > 0

    def limits(self, ranges: Array) -> Limits:
        """``ranges`` (n, 2) are those of the actuators' set-points, in rad."""
        full = np.ones(len(ranges))
        low, high = np.array(ranges, np.float64).T
        return Limits(low, high, self.velocity * full, self.acceleration * full, 1 / self.rate_hz)


class Guarding:
    """A `JointGuard` of N rows as what stands between a task and its actuators (`batch.Shaper`). A tick of
    ``frame_skip`` physics steps takes ``tick_s``."""

    def __init__(self, limits: Limits, num_envs: int, frame_skip: int, tick_s: float) -> None:
        self.parts = round(tick_s / limits.period_s)
        if abs(self.parts * limits.period_s - tick_s) > 1e-9 or self.parts < 1 or frame_skip % self.parts:
            whole = [k / tick_s for k in range(1, frame_skip + 1) if frame_skip % k == 0]
            raise BurnishError(
                f"a guard at {1 / limits.period_s:g} Hz does not divide a tick of {tick_s:g} s into whole physics "
                f"steps; choices: {', '.join(f'{rate:g}' for rate in whole)} Hz"
            )
        self.changed = np.zeros(num_envs, np.int64)
        self._guard = JointGuard(limits, (num_envs,))

    def begin(self, ctrl: Array, rows: Rows) -> None:
        mask = np.zeros(len(ctrl), bool)
        mask[rows] = True
        limits = self._guard.limits  # beyond them an actuator aims at the end of its range
        self._guard.reset(np.clip(ctrl, limits.lower, limits.upper), mask)
        self.changed[rows] = 0

    def shape(self, ctrl: Array, rows: Rows | None) -> Array:
        if rows is None:
            guarded = self._guard(ctrl)
            self.changed += guarded.changed
            return guarded.q
        kept = self._guard.state()
        guarded = self._guard(ctrl)
        idle = np.ones(len(ctrl), bool)
        idle[rows] = False
        self._guard.restore(kept, idle)
        self.changed += guarded.changed & ~idle
        return guarded.q

    def state_dict(self) -> dict[str, Tensor]:
        state = {name: torch.from_numpy(x.copy()) for name, x in self._guard.state().items()}
        return {**state, "changed": torch.from_numpy(self.changed.copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        numbers = {name: x.numpy() for name, x in state.items()}
        self.changed[:] = numbers.pop("changed")
        self._guard.restore(numbers)
