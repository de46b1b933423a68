"""Limits of jerk for tests, and the yardstick of `guard_lab` for jerk too."""

from __future__ import annotations

import numpy as np
from guard_lab import Excess

from burnish.real_robot.safety.guard import Limits

JERK = np.linspace(80, 200, 7)


def random_limits(rng: np.random.Generator) -> tuple[Limits, np.ndarray]:
    """Full speed in 2 to 60 ticks, full acceleration in 1 to 20: then positions in float64 can express J h^3 > 1e-7."""
    h = float(10 ** rng.uniform(-2.7, -1.3))
    velocity = 10 ** rng.uniform(-1, 0.8, 7)
    acceleration = velocity / (h * rng.uniform(2, 60, 7))
    jerk = acceleration / (h * rng.uniform(1, 20, 7))
    middle, half = rng.uniform(-3, 3, 7), 10 ** rng.uniform(-2, 0.5, 7)
    return Limits(middle - half, middle + half, velocity, acceleration, h), jerk


class JerkExcess(Excess):
    """Also of the jerk."""

    def __init__(self, limits: Limits, jerk: np.ndarray, start: np.ndarray) -> None:
        super().__init__(limits, start)
        self.jerk_limit, self.a, self.jerk = jerk, np.zeros_like(start), -1.0

    def add(self, q: np.ndarray) -> None:
        v = self.v
        super().add(q)
        a = (self.v - v) / self.limits.period_s
        j = (a - self.a) / self.limits.period_s
        self.jerk, self.a = max(self.jerk, float((np.abs(j) / self.jerk_limit).max()) - 1), a

    def holds(self) -> bool:
        return super().holds() and self.jerk <= 1e-6
