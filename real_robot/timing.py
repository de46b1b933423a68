"""How punctual a loop is: a fixed amount of memory, and nothing computed until somebody asks."""

from __future__ import annotations

import numpy as np

KEPT = 1 << 17  # of the latest ticks: eleven minutes at 200 Hz
SHARES = (50.0, 99.0, 99.9)


class Timing:
    """``lateness`` is how long after its deadline a tick began, ``work`` how long it took."""

    def __init__(self, kept: int = KEPT) -> None:
        self._lateness, self._work = np.zeros(kept, np.int64), np.zeros(kept, np.int64)
        self.ticks = self.misses = self.longest_run = self._run = 0

    def add(self, lateness_ns: int, work_ns: int, missed: bool) -> None:
        at = self.ticks % len(self._work)
        self._lateness[at], self._work[at] = lateness_ns, work_ns
        self.ticks += 1
        self.misses += missed
        self._run = self._run + 1 if missed else 0
        self.longest_run = max(self.longest_run, self._run)

    def summary(self) -> dict[str, float]:
        """Microseconds, and shares of the ticks."""
        count = min(self.ticks, len(self._work))
        found: dict[str, float] = {"ticks": self.ticks, "misses": self.misses, "longest_run": self.longest_run}
        found["miss_share"] = self.misses / max(self.ticks, 1)
        for name, values in (("late", self._lateness[:count]), ("work", self._work[:count])):
            if count:
                points = np.percentile(values, SHARES) / 1e3
                found |= {f"{name}_p{share:g}_us": float(x) for share, x in zip(SHARES, points, strict=True)}
                found[f"{name}_max_us"] = float(values.max()) / 1e3
        return found
