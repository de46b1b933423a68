"""Motion of emulated servos without a physics model: the profile of velocity of their registers, and no load."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from burnish.real_robot.clock import ns
from burnish.real_robot.emulators.servo import QUANTUM_RAD, Array, Drive, Plant

STEP_NS = ns(0.002)


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

    def __init__(self, start_ticks: Sequence[int]) -> None:
        start = np.array(start_ticks) * QUANTUM_RAD
        self._q, self._v, self._goal = start, np.zeros_like(start), start.copy()
        self._velocity, self._acceleration = np.ones_like(start), np.ones_like(start)
        self._moving = False
        self._blocked = np.zeros(len(start), bool)
        self._now_ns = 0

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
