"""A camera without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from burnish.real_robot.camera import Frame, Image, frame
from burnish.real_robot.clock import SECOND, Clock, ns
from burnish.real_robot.errors import DeviceFault, StaleState


class FakeCamera:
    """A noisy picture every ``1 / fps`` by the clock, and faults that can be switched."""

    def __init__(self, clock: Clock, fps: float = 30.0, shape: tuple[int, int] = (48, 64), seed: int = 0) -> None:
        self.clock, self.shape, self._period_ns = clock, shape, round(SECOND / fps)
        self.silent = self.frozen = self.gone = self.closed = False
        self.spoil: Callable[[Image], Any] = lambda image: image
        self._rng = np.random.default_rng(seed)
        self._began_ns = clock.now_ns()
        self._given = 0
        self._image = self._noise()

    def read(self, timeout_s: float) -> Frame:
        if self.gone or self.closed:
            raise DeviceFault("the fake camera is gone")
        deadline_ns = self.clock.now_ns() + ns(timeout_s)
        newest = max(self._given + 1, (self.clock.now_ns() - self._began_ns) // self._period_ns)
        taken_ns = self._began_ns + newest * self._period_ns
        if self.silent or taken_ns > deadline_ns:
            self.clock.sleep_until_ns(deadline_ns)
            raise StaleState(f"no new picture within {timeout_s:g} s")
        self.clock.sleep_until_ns(taken_ns)
        self._given = newest
        self._image = self._image if self.frozen else self._noise()
        return frame(newest, taken_ns, self.spoil(self._image))

    def close(self) -> None:
        self.closed = True

    def _noise(self) -> Image:
        return self._rng.integers(0, 256, (*self.shape, 3), np.uint8)
