"""Learning curves of a page: against control steps and against minutes, together and each seed by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .charts import Axis, Chart, Curve, Point, axis, draw, finite, level, together
from .read import Comparison, RunFolder
from .words import Measure, counted, number

STEPS, SECONDS = 0, 1  # columns of a stored curve


class View(NamedTuple):
    """All curves against one of the two."""

    key: str
    title: str
    together: Chart
    apart: list[tuple[str, Chart]]  # per method, where there is more to see than in the first


class Curves(NamedTuple):
    """The learning curves of a page, in one or two views, and a sentence about them."""

    views: list[View]
    sentence: str  # why there is none, or what the band is


def of_comparison(comparison: Comparison, styles: Mapping[str, int]) -> Curves:
    """The learning curves of each method: against control steps, and against minutes."""
    rows = {run.name: run.curve for run in comparison.runs if run.curve}
    if not any(len(finite(curve, STEPS)) > 1 for curve in rows.values()):
        return Curves([], "No run was tried along the way, so there are no learning curves.")
    measure, views = comparison.measure, []
    for key, column, scale in (("steps", STEPS, 1.0), ("minutes", SECONDS, 1 / 60)):
        known = {
            method: {run.name: finite(run.curve, column, scale) for run in comparison.runs if run.method == method}
            for method in styles
        }
        whole = {run.name for run in comparison.runs if run.finished}
        means = [
            together(
                method,
                styles[method],
                [points for name, points in runs.items() if name in whole] or list(runs.values()),
            )
            for method, runs in known.items()
        ]
        every = [points for runs in known.values() for points in runs.values()]
        views.append(_view(key, measure, means, every, known if len(rows) > len(means) else {}, styles))
    band = "bands reach from the lowest to the highest end of their 95% intervals"
    lines = "Lines are means over the finished seeds of a method"
    return Curves(views, f"{lines}; {band}. Measured on the seeds kept for selection.")


def of_run(run: RunFolder) -> Curves:
    """The learning curve of one run: against its steps or updates, and against minutes."""
    measure, rows = measure_of(run), evaluations(run)
    if len(rows) < 2:
        return Curves(
            [], "This run was tried less than twice, so there is no learning curve; eval_every=... makes one."
        )
    name = run.method or "run"
    in_steps = any("control_steps" in row for row in run.rows)
    views = []
    for key, column, scale in (("steps", STEPS, 1.0), ("minutes", SECONDS, 1 / 60)):
        points = finite(rows, column, scale)
        views.append(_view(key, measure, [Curve(name, 0, points)], [points], {}, {}, in_steps))
    return Curves(views, "The band is the 95% interval. Measured on the seeds kept for selection.")


def measure_of(run: RunFolder) -> Measure:
    """The measure of a run: success where its log has it, else return."""
    return Measure(not run.rows or any("eval/success_rate" in row for row in run.rows) or not _returns(run))


def evaluations(run: RunFolder) -> list[list[float | None]]:
    """As a comparison stores them. A run that counts no control steps counts its updates."""
    kind = "success" if measure_of(run).success else "return"
    name = "eval/success_rate" if kind == "success" else "eval/return_mean"
    rows: list[list[float | None]] = []
    for row in run.rows:
        if name in row:
            steps = row.get("control_steps", row.get("step"))
            ends = [row.get(f"eval/{kind}_{end}") for end in ("low", "high")]
            rows.append([steps, row.get("time/elapsed_s"), row[name], *ends])
    return rows


def _returns(run: RunFolder) -> bool:
    return any("eval/return_mean" in row for row in run.rows)


def _view(
    key: str,
    measure: Measure,
    curves: Sequence[Curve],
    every: Sequence[Sequence[Point]],
    apart: Mapping[str, Mapping[str, Sequence[Point]]],
    styles: Mapping[str, int],
    in_steps: bool = True,
) -> View:
    points = [p for each in (*every, *(c.points for c in curves)) for p in each]
    along, up = _x(points, key), _y(points, measure)
    x_title = "minutes" if key == "minutes" else "control steps" if in_steps else "updates"
    titles = {"x_title": x_title, "y_title": measure.name}
    starts = [each[0].y for each in every if each and each[0].x == min(p.x for p in points)]
    base = level(starts[0], f"base {measure.value(starts[0])}", up) if starts else None
    panels = []
    few = _x(points, key, at_most=3)
    for method, runs in apart.items():
        seeds = [Curve(name, styles[method], own) for name, own in runs.items()]
        chart = draw(seeds, few, up, **titles, level=None if base is None else base._replace(label=""))
        if chart.lines:
            panels.append((method, chart))
    return View(key, f"Against {x_title}", draw(curves, along, up, **titles, level=base), panels)


def _x(points: Sequence[Point], key: str, at_most: int = 5) -> Axis:
    return axis([0.0, *(p.x for p in points)], counted if key == "steps" else number, at_most=at_most)


def _y(points: Sequence[Point], measure: Measure) -> Axis:
    if measure.success:
        return axis([0.0, 1.0], measure.tick)
    return axis([v for p in points for v in p[1:] if v is not None], measure.tick, pad=0.05)
