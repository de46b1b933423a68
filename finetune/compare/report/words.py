"""Numbers as a page shows them: short, with a true minus sign, and a sentence where there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"  # in a cell that has no number


def number(x: float | None, digits: int = 3) -> str:
    """At least ``digits`` significant digits; whole numbers from a thousand on, with separators."""
    if x is None or not math.isfinite(x):
        return NOTHING
    text = f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.{digits}g}"
    return text.replace("-", MINUS)


def percent(x: float | None, digits: int = 1) -> str:
    """A share as percent with a true minus sign; ``NOTHING`` where it is not finite."""
    return NOTHING if x is None or not math.isfinite(x) else f"{100 * x:.{digits}f}%".replace("-", MINUS)


def counted(x: float) -> str:
    """For the ticks of an axis: 25k, 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:g}{unit}".replace("-", MINUS)
    return f"{x:g}".replace("-", MINUS)


def duration(seconds: float | None) -> str:
    """A time in seconds as s, min or h, by its size."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def probability(p: float | None) -> str:
    """A p value with three digits, "< 0.001" where it is smaller."""
    if p is None:
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def plural(count: int, one: str, many: str = "") -> str:
    """A count with its noun; ``many`` is the plural where it is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


@dataclass(frozen=True)
class Measure:
    """The compared quantity: the share of successful episodes, or the mean return where a world knows no success."""

    success: bool

    @property
    def name(self) -> str:
        return "success" if self.success else "return"

    def value(self, x: float | None) -> str:
        return percent(x) if self.success else number(x)

    def tick(self, x: float) -> str:
        return percent(x, 0) if self.success else counted(x)

    def interval(self, low: float | None, high: float | None) -> str:
        """In brackets, or nothing where an end is not known."""
        if low is None or high is None:
            return ""
        if not self.success:
            return f"[{number(low)}, {number(high)}]"
        return f"[{100 * low:.1f}, {100 * high:.1f}]".replace("-", MINUS)

    def change(self, x: float | None) -> str:
        """With its sign; differences of percentages are points."""
        if x is None or not math.isfinite(x):
            return NOTHING
        text = f"{100 * x:+.1f}" if self.success else f"{x:+,.0f}" if abs(x) >= 1000 else f"{x:+.3g}"
        zero = float(text.replace(",", "")) == 0  # which has no sign
        return text[1:] if zero else text.replace("-", MINUS)

    @property
    def unit_of_change(self) -> str:
        return " points" if self.success else ""
