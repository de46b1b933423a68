"""A stopwatch: the seconds of a run, by the work that they were spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """``with watch("learning"): ...`` adds to what was counted under that name before.

    It does not wait for a device that works while Python goes on: there, seconds are counted where a result is asked
    for next, which may be in another phase.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """As a run logs them: ``time/NAME_s``, which go on adding up when it is resumed (`run.py`)."""
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
