"""A value with its interval, drawn into the cell of a table, on one scale for all rows and with the base as a mark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .charts import Axis, axis
from .words import Measure


class Mark(NamedTuple):
    """An interval and its value, as they are drawn: left end, width and place in percent of the scale."""

    low: float
    width: float
    at: float


class Forest(NamedTuple):
    """The common scale of the intervals of a table, and the base's place on it."""

    axis: Axis
    base: float | None  # percent

    def mark(self, value: float | None, low: float | None, high: float | None) -> Mark | None:
        if value is None:
            return None
        left, right = (self.axis.place(value if end is None else end) for end in (low, high))
        return Mark(left, max(0.0, round(right - left, 2)), self.axis.place(value))


def forest(measure: Measure, intervals: Iterable[tuple[float | None, float | None]], base: float | None) -> Forest:
    """The scale on which all ``intervals`` and the base fit; that of success is 0 to 1."""
    ends = [0.0, 1.0] if measure.success else [x for pair in intervals for x in (*pair, base) if x is not None]
    scale = axis(ends, measure.tick, pad=0.0 if measure.success else 0.05)
    return Forest(scale, None if base is None else scale.place(base))
