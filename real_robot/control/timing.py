"""Statistics of a loop's punctuality, in a fixed amount of memory, computed only when they are read.

A tick serves the first deadline that no tick has served yet. So after deadlines that were skipped it is as late as the
first of these, and a loop that skips what it has missed does not look punctual for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

KEPT = 1 << 17  # of the latest ticks: eleven minutes at 200 Hz
SHARES = (50.0, 99.0, 99.9)


class Timing:
    """``lateness`` is how long after the deadline that it serves a tick began, ``work`` how long it took."""

    def __init__(self, kept: int = KEPT) -> None:
        self._due, self._late, self._work = np.zeros((3, kept), np.int64)
        self.ticks = self.misses = self.longest_run = self._run = 0

    def add(self, due_ns: int, began_ns: int, ended_ns: int, missed: bool) -> None:
        at = self.ticks % len(self._due)
        self._due[at], self._late[at], self._work[at] = due_ns, began_ns - due_ns, ended_ns - began_ns
        self.ticks += 1
        self.misses += missed
        self._run = self._run + 1 if missed else 0
        self.longest_run = max(self.longest_run, self._run)

    def kept(self) -> np.ndarray:
        """(ticks, 3): deadline, lateness and work of the latest ticks in ns, in their order."""
        whole = np.stack([self._due, self._late, self._work], axis=1)
        at = self.ticks % len(whole)
        return np.roll(whole, -at, axis=0) if self.ticks > len(whole) else whole[: self.ticks]

    def summary(self) -> dict[str, float]:
        """Microseconds, and shares of the ticks."""
        count = min(self.ticks, len(self._due))
        found: dict[str, float] = {"ticks": self.ticks, "misses": self.misses, "longest_run": self.longest_run}
        found["miss_share"] = self.misses / max(self.ticks, 1)
        for name, values in (("late", self._late[:count]), ("work", self._work[:count])):
            if count:
                points = np.percentile(values, SHARES) / 1e3
                found |= {f"{name}_p{share:g}_us": float(x) for share, x in zip(SHARES, points, strict=True)}
                found[f"{name}_max_us"] = float(values.max()) / 1e3
        return found

    def save(self, path: Path) -> None:
        """The record as a file of NumPy's."""
        np.save(path, self.kept(), allow_pickle=False)
