"""Ranges of settings, checked in ``__post_init__``: intervals as in mathematics, each with the names it holds for.

    check_ranges(self, {"(0, inf)": "lr actor_lr", "(0, 1]": "tau", "[1, inf)": "count"}, "method.")

A round bracket leaves its end out, and infinity is never a value. A setting that is None is one that was not given.
Words behind an interval, "[0, inf); 0 leaves it out", are said too where it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from .errors import BurnishError


def check_ranges(
    config: Any, names_of: Mapping[str, str], prefix: str = "", refusal: type[Exception] = BurnishError
) -> None:
    """Refuse the first of ``config``'s settings that lies outside its interval; ``prefix`` names its place."""
    for rule, names in names_of.items():
        interval, semicolon, why = rule.partition(";")
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not _inside(value, interval):
                raise refusal(f"{prefix}{name}={value} {_must(interval)}{semicolon}{why}")


def require_usual(config: Any, usual: Any, names: str, why: str, prefix: str = "method.") -> None:
    """Refuse settings that differ from ``usual`` and that nothing would read."""
    for name in names.split():
        if (value := getattr(config, name)) != getattr(usual, name):
            raise BurnishError(f"{prefix}{name}={getattr(value, 'value', value)} is not read {why}; leave it out")


def _inside(x: float, interval: str) -> bool:
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
        return f"must lie in {interval}"
    if low == -math.inf:
        return "must be a finite number"
    if opened == "[":
        return f"must be at least {low:g}"
    return "must be a positive number" if low == 0 else f"must be more than {low:g}"
