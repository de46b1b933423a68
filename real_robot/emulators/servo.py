"""Motion of emulated servos: by a trapezoidal profile of velocity, or by a physics model.

`Plant` is what an emulator asks for motion. `ProfilePlant` follows goals exactly as the profile generators of servos
do, without load; a MuJoCo model can stand in its place, so that registers show sag, inertia and contact. Angles are the
servo's own (tick zero is zero), in rad, in the order of the chain.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..clock import ns
from ..errors import Refused

Array = NDArray[np.float64]

TICKS = 4096  # per turn, of both families
QUANTUM_RAD = 2 * math.pi / TICKS
STEP_NS = ns(0.002)


@dataclass(frozen=True, slots=True)
class Drive:
    """The request of a servo's registers to its motor."""

    goal_rad: float
    powered: bool
    velocity: float  # of the profile, rad/s
    acceleration: float  # rad/s^2


class Plant(Protocol):
    """The interface of the motion behind a chain of servos."""

    def drive(self, index: int, drive: Drive) -> None:
        """From the time of the last ``advance`` on."""
        ...

    def advance(self, now_ns: int) -> None: ...

    def motion(self) -> tuple[Array, Array, Array]:
        """Position in rad, velocity in rad/s, and torque as a fraction of what the motor can give, -1 to 1."""
        ...


class Recorded:
    """Any plant, with a memory: where it was at every millisecond of the device's own clock. When an arm came to rest
    is then no matter of who looked when."""

    EVERY_NS = ns(0.001)

    def __init__(self, plant: Plant, rows: int = 20_000) -> None:
        self.history: deque[tuple[int, list[float]]] = deque(maxlen=rows)
        self._plant, self._next_ns = plant, 0
        self.drive, self.motion = plant.drive, plant.motion

    def advance(self, now_ns: int) -> None:
        self._next_ns = self._next_ns or now_ns
        while self._next_ns <= now_ns:
            self._plant.advance(self._next_ns)
            self.history.append((self._next_ns, self._plant.motion()[0].tolist()))
            self._next_ns += self.EVERY_NS
        self._plant.advance(now_ns)


class ProfilePlant:
    """Motors that follow their profile; one without power coasts to rest where it is, as geared servos do."""

    def __init__(self, start_rad: Array, now_ns: int = 0) -> None:
        start = np.array(start_rad, np.float64)
        if start.ndim != 1 or not np.isfinite(start).all():
            raise Refused(f"a chain of servos starts at one angle each, not at {start_rad}")
        self._q, self._v, self._goal = start, np.zeros_like(start), start.copy()
        self._velocity, self._acceleration = np.ones_like(start), np.ones_like(start)
        self._moving = False
        self._blocked = np.zeros(len(start), bool)
        self._now_ns = now_ns

    def block(self, index: int) -> None:
        """Something stronger than the motor holds this joint from now on."""
        self._blocked[index] = True

    def drive(self, index: int, drive: Drive) -> None:
        self._goal[index] = drive.goal_rad if drive.powered else self._q[index]
        self._velocity[index], self._acceleration[index] = drive.velocity, drive.acceleration
        if not drive.powered:
            self._v[index] = 0.0
        self._moving = True

    def advance(self, now_ns: int) -> None:
        if not self._moving:
            self._now_ns = max(self._now_ns, now_ns)
        while self._now_ns < now_ns:
            step_ns = min(STEP_NS, now_ns - self._now_ns)
            self._step(step_ns * 1e-9)
            self._now_ns += step_ns

    def _step(self, h: float) -> None:
        gap = self._goal - self._q
        push = self._acceleration * h
        # The fastest speed from which braking with the profile's acceleration still ends at the goal.
        reach = np.sqrt(2 * self._acceleration * np.abs(gap) + (push / 2) ** 2) - push / 2
        reach = np.minimum(reach, np.abs(gap) / h)
        want = np.copysign(np.minimum(reach, self._velocity), gap)
        self._v = np.clip(want, self._v - push, self._v + push)
        self._v[self._blocked] = 0.0
        self._q = self._q + h * self._v
        near = (np.abs(self._goal - self._q) < QUANTUM_RAD / 8) & (np.abs(self._v) <= push)
        self._q, self._v = np.where(near, self._goal, self._q), np.where(near, 0.0, self._v)
        self._moving = not near.all()

    def motion(self) -> tuple[Array, Array, Array]:
        stiffness = np.where(self._blocked, 50.0, 2.0)  # the error of a joint that moves is its profile's way to come
        load = np.clip((self._goal - self._q) * stiffness + 0.02 * np.sign(self._v), -1, 1)
        return self._q, self._v, load
