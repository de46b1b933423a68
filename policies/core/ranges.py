"""Ranges of settings, checked in ``__post_init__``: each as an interval, as in mathematics.

    check_ranges(self, lr="(0, inf)", tau="(0, 1]", count="[1, inf)")

A round bracket leaves its end out, and infinity is never a value. A setting that is None is one that was not given.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from .errors import BurnishError


def check_ranges(config: Any, prefix: str = "", **intervals: str) -> None:
    """Refuse the first of ``config``'s settings that lies outside its interval; ``prefix`` names its place."""
    for name, interval in intervals.items():
        value = getattr(config, name)
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if x is not None and not _inside(x, interval):
                raise BurnishError(f"{prefix}{name}={value} {_must(interval)}")


def _inside(x: Any, interval: str) -> bool:
    opened, low, high, closed = _parts(interval)
    above = low <= x if opened == "[" else low < x  # a NaN is neither
    return above and (x <= high if closed == "]" else x < high)


@cache
def _parts(interval: str) -> tuple[str, float, float, str]:
    low, high = interval[1:-1].split(",")
    return interval[0], float(low), float(high), interval[-1]


def _must(interval: str) -> str:
    opened, low, high, _ = _parts(interval)
    if high < math.inf:
        return f"must lie in {interval}" if low > -math.inf else f"must be at most {high:g}"
    if low == -math.inf:
        return "must be a finite number"
    if opened == "[":
        return f"must be at least {low:g}"
    return "must be a positive number" if low == 0 else f"must be more than {low:g}"
