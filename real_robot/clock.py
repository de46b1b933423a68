"""Time for everything that controls: monotonic nanoseconds, never the wall clock, which a time server may set back.

All code that waits or measures is handed a clock. `VirtualClock` lets an hour of a robot pass in a minute, and lets a
seed replay a failure: time passes only where the code waits.
"""

from __future__ import annotations

import time
from typing import Protocol

SECOND = 1_000_000_000


def ns(seconds: float) -> int:
    """A time in seconds as whole nanoseconds."""
    return round(seconds * SECOND)


class Clock(Protocol):
    """The interface of a clock in nanoseconds, real or virtual."""

    def now_ns(self) -> int: ...
    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Return at the deadline or later; at once where it has passed."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC of the machine, the same for all its processes."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        # An interrupted sleep is resumed by Python itself, against the same deadline.
        left_ns = deadline_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / SECOND)


class VirtualClock:
    """Begins at ``start_ns`` and moves only by ``sleep_until_ns`` and ``advance_ns``."""

    def __init__(self, start_ns: int = SECOND) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until_ns(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)

    def advance_ns(self, duration_ns: int) -> None:
        if duration_ns < 0:
            raise ValueError(f"time does not go back, but {duration_ns} ns were asked for")
        self._now_ns += duration_ns
