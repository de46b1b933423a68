"""Geometry of the drawings: places in percent of a plot, and paths in a square of 1000 that is stretched over it.

Text and marks are placed by percent and keep their size at every width; only lines and bands are stretched. The SVG
itself is written by `charts.html`, where everything is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SQUARE = 1000  # side of the drawing that is stretched over a plot


class Point(NamedTuple):
    """One value of a curve, with its interval where known, in units of the axes."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Curve(NamedTuple):
    """A curve to be drawn, in units of the axes."""

    label: str
    style: int  # which colour, dash and mark
    points: Sequence[Point]


class Tick(NamedTuple):
    """A mark of an axis."""

    at: float  # percent
    label: str


@dataclass(frozen=True)
class Axis:
    """A linear axis from ``low`` to ``high`` with its marks."""

    low: float
    high: float
    ticks: list[Tick]

    def place(self, x: float) -> float:
        """In percent of the axis; outside of it at its end."""
        share = (x - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)


class Line(NamedTuple):
    """A curve as it is drawn: SVG paths, and marks (x, y) in percent of the plot."""

    label: str
    style: int
    path: str
    band: str  # a closed path; empty where no interval is known
    marks: list[tuple[float, float]]
    label_at: float  # percent from the top, spread so that no two labels overlap


class Level(NamedTuple):
    """A horizontal line of a plot, in percent from the top."""

    at: float
    label: str


class Chart(NamedTuple):
    """Everything that the template needs to draw one plot."""

    x: Axis
    y: Axis
    x_title: str
    y_title: str
    lines: list[Line]
    level: Level | None


def ticks(low: float, high: float, at_most: int = 5) -> list[float]:
    """Round numbers between two ends, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    width = high - low
    power = 10.0 ** math.floor(math.log10(width / at_most))
    step = next(power * m for m in (1, 2, 2.5, 5, 10, 20) if width / (power * m) <= at_most)
    return [round(step * i, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def axis(values: Iterable[float], label: Callable[[float], str], *, at_most: int = 5, pad: float = 0.0) -> Axis:
    """From the least to the largest of ``values``, with ``pad`` of the width added on both sides."""
    known = [x for x in values if math.isfinite(x)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):  # a single number, or none that can be told apart
        half = 0.5 * abs(low) or 0.5
        low, high = low - half, high + half
    low, high = low - pad * (high - low), high + pad * (high - low)
    wide = Axis(low, high, [])
    return Axis(low, high, [Tick(wide.place(x), label(x)) for x in ticks(low, high, at_most)])


def finite(rows: Iterable[Sequence[float | None]], x: int, scale: float = 1.0) -> list[Point]:
    """Points of a stored curve; ``x`` is 0 for control steps and 1 for seconds. Rows without a value are left out."""
    points = []
    for row in rows:
        at, value, low, high = row[x], row[2], row[3], row[4]
        if at is None or value is None or not (math.isfinite(at) and math.isfinite(value)):
            continue
        ends = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
        points.append(Point(at * scale, value, low if ends else None, high if ends else None))
    return sorted(points)


def together(label: str, style: int, curves: Sequence[Sequence[Point]]) -> Curve:
    """The mean of several runs where all of them are known, interpolated between their points. The band reaches from
    the lowest to the highest end of their intervals: for one run it is the interval itself."""
    curves = [points for points in curves if points]
    if len(curves) < 2:
        return Curve(label, style, curves[0] if curves else [])
    begin, end = max(c[0].x for c in curves), min(c[-1].x for c in curves)
    grid = sorted({p.x for points in curves for p in points if begin <= p.x <= end})
    if not grid:
        return Curve(label, style, [])

    def at(points: Sequence[Point], name: str) -> np.ndarray:
        known = [(p.x, getattr(p, name)) for p in points if getattr(p, name) is not None]
        if not known:
            return np.full(len(grid), np.nan)
        return np.interp(grid, [x for x, _ in known], [y for _, y in known])

    mean = np.mean([at(points, "y") for points in curves], axis=0)
    low = np.min([at(points, "low") for points in curves], axis=0)
    high = np.max([at(points, "high") for points in curves], axis=0)
    rows = zip(grid, mean.tolist(), low.tolist(), high.tolist(), strict=True)
    return Curve(label, style, [Point(x, y, *(None, None) if math.isnan(a) else (a, b)) for x, y, a, b in rows])


def draw(curves: Sequence[Curve], x: Axis, y: Axis, *, x_title: str, y_title: str, level: Level | None = None) -> Chart:
    """The plot of these curves; those without points are left out."""
    shown = [curve for curve in curves if curve.points]
    ends = spread([100 - y.place(curve.points[-1].y) for curve in shown])
    lines = [_line(curve, x, y, end) for curve, end in zip(shown, ends, strict=True)]
    return Chart(x, y, x_title, y_title, lines, level)


def level(value: float, label: str, y: Axis) -> Level:
    """The horizontal line at ``value`` of the axis y."""
    return Level(100 - y.place(value), label)


def spread(wanted: Sequence[float], gap: float = 5.5) -> list[float]:
    """The wanted heights, moved apart until each is ``gap`` percent from the next, and none is below the plot."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], placed[-1] + gap) if placed else wanted[i])
    limit = 100.0
    for k in reversed(range(len(placed))):  # what was pushed out at the bottom pushes back
        placed[k] = min(placed[k], limit)
        limit = placed[k] - gap
    result = [0.0] * len(wanted)
    for k, i in enumerate(order):
        result[i] = round(placed[k], 2)
    return result


def path(points: Iterable[tuple[float, float]]) -> str:
    """``points`` in percent from the left and from the top."""
    size = SQUARE / 100
    return "M" + "L".join(f"{size * x:.1f} {size * y:.1f}" for x, y in points)


def sparkline(values: Sequence[tuple[float, float]]) -> str:
    """A path without axes, through (x, y)."""
    known = [(x, y) for x, y in values if math.isfinite(x) and math.isfinite(y)]
    if len(known) < 2:
        return ""
    xs, ys = axis([x for x, _ in known], str), axis([y for _, y in known], str, pad=0.08)
    return path((xs.place(x), 100 - ys.place(y)) for x, y in known)


def _line(curve: Curve, x: Axis, y: Axis, end: float) -> Line:
    marks = [(x.place(p.x), round(100 - y.place(p.y), 2)) for p in curve.points]
    known = [p for p in curve.points if p.low is not None and p.high is not None]
    upper = [(x.place(p.x), 100 - y.place(p.high or 0.0)) for p in known]
    lower = [(x.place(p.x), 100 - y.place(p.low or 0.0)) for p in reversed(known)]
    band = path([*upper, *lower]) + "Z" if len(known) > 1 else ""
    return Line(curve.label, curve.style, path(marks), band, marks, end)
