"""Starts by outcome: the first observations of the evaluated seeds, to see where a policy fails."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....policies.measure.evaluate import Evaluation
from .charts import Axis, axis
from .read import Comparison, Starts
from .words import number, plural

POOR = 0.25  # where there is no success, returns below this quantile of the base's count as failures


class Coordinate(NamedTuple):
    """One coordinate of the first observations, with the place of each seed on its axis."""

    name: str
    axis: Axis
    places: list[float]  # percent, one per seed


class Field(NamedTuple):
    """Everything that the scatter shows, and can be switched to."""

    coordinates: list[Coordinate]
    x: int
    y: int
    outcomes: dict[str, list[int]]  # "base" and runs -> 1 where it went well, per seed
    shown: str  # the run beside the base
    rule: str  # what "failure" means here
    tallies: dict[str, str]  # run -> what it mended and what it broke, as a sentence

    def data(self) -> dict[str, Any]:
        """For the script of the page."""
        coordinates = [{"places": c.places, "ticks": [list(t) for t in c.axis.ticks]} for c in self.coordinates]
        return {"coordinates": coordinates, "outcomes": self.outcomes, "tallies": self.tallies}


def field_of(comparison: Comparison, runs: Sequence[str]) -> Field | str:
    """``runs`` in the order of interest; or the sentence why there is nothing to show."""
    base = comparison.evaluations.get("base")
    runs = [name for name in runs if name in comparison.evaluations]
    if base is None or not runs:
        return "Nothing is known of single episodes: the evaluation of the base, or of every run, is missing."
    if comparison.unpaired:
        return f"Not paired: {comparison.unpaired}, so no run can be shown at the starts of its base."
    starts = comparison.starts
    seeds = [str(seed) for seed in base.seeds]
    rows = [i for i, seed in enumerate(seeds) if seed in starts.values]
    if len(starts.names) < 2 or not rows:
        return "The first observations of the episodes were not kept, so the failures cannot be placed."
    judged, rule = _judged({"base": base, **{name: comparison.evaluations[name] for name in runs}})
    outcomes = {name: [marks[i] for i in rows] for name, marks in judged.items()}
    coordinates = _coordinates(starts, [seeds[i] for i in rows])
    x, y = _telling(coordinates, outcomes["base"])
    tallies = {name: _tally(judged["base"], judged[name], name) for name in runs}
    return Field(coordinates, x, y, outcomes, runs[0], rule, tallies)


def _judged(evaluations: Mapping[str, Evaluation]) -> tuple[dict[str, list[int]], str]:
    base = evaluations["base"]
    if all(evaluation.success is not None for evaluation in evaluations.values()):
        return {name: [int(x) for x in e.success or ()] for name, e in evaluations.items()}, ""
    limit = sorted(base.returns)[math.floor(POOR * len(base.returns))]
    rule = (
        f"This world knows no success, so an episode counts as poor here if it returns less than {number(limit)}, "
        f"which a quarter of the base's do."
    )
    return {name: [int(x >= limit) for x in e.returns] for name, e in evaluations.items()}, rule


def _coordinates(starts: Starts, seeds: Sequence[str]) -> list[Coordinate]:
    found = []
    for k, name in enumerate(starts.names):
        values = [starts.values[seed][k] for seed in seeds]
        along = axis(values, number, at_most=4, pad=0.05)
        found.append(Coordinate(name, along, [along.place(v) if math.isfinite(v) else 0.0 for v in values]))
    return found


def _telling(coordinates: Sequence[Coordinate], outcomes: Sequence[int]) -> tuple[int, int]:
    """The two coordinates in which the base's failures lie furthest from its successes, in standard deviations. One
    that repeats the first would show a line, so it has to do with less."""

    def between(coordinate: Coordinate) -> float:
        good = [p for p, ok in zip(coordinate.places, outcomes, strict=True) if ok]
        bad = [p for p, ok in zip(coordinate.places, outcomes, strict=True) if not ok]
        deviation = statistics.pstdev(coordinate.places)
        if deviation < 1e-9:
            return -1.0
        return abs(statistics.fmean(good) - statistics.fmean(bad)) / deviation if good and bad else 0.0

    order = sorted(range(len(coordinates)), key=lambda k: (-between(coordinates[k]), k))
    first = order[0]

    def repeats(k: int) -> float:
        a, b = coordinates[first].places, coordinates[k].places
        return abs(statistics.correlation(a, b)) if min(map(statistics.pstdev, (a, b))) > 1e-9 else 1.0

    second = next((k for k in order[1:] if repeats(k) < 0.95), order[1])
    return first, second


def _tally(base: Sequence[int], refined: Sequence[int], name: str) -> str:
    pairs = list(zip(base, refined, strict=True))
    failed, mended = sum(not b for b, _ in pairs), sum(r and not b for b, r in pairs)
    succeeded, broken = len(pairs) - failed, sum(b and not r for b, r in pairs)
    return (
        f"Of the {plural(failed, 'start')} on which the base fails, {name} succeeds on {mended}; of the {succeeded} on "
        f"which the base succeeds, it fails on {broken}."
    )
