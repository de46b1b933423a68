"""Imagined beside real, of a run in imagination: scores, the success head, and episodes from the same starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....policies.measure.statistics import wilson
from ...world_model.films import film_name
from ...world_model.record import Pair, Record
from .charts import Chart, Curve, Point, axis, draw
from .curves import measure_of
from .films import embedded
from .read import RunFolder
from .words import Measure, counted, number, plural

REAL, IMAGINED = 0, 1  # styles


class Imagined(NamedTuple):
    """The drawings of one run in imagination, with a sentence about them."""

    labels: tuple[str, str]  # of the two styles
    charts: list[tuple[str, Chart]]
    episodes: list[tuple[str, list[tuple[str, Chart]], str]]  # title, curves, and a film or an empty string
    sentence: str


def imagined_of(run: RunFolder, room: int) -> Imagined:
    """The drawings of a run that kept a record; its films share ``room`` bytes of the page."""
    assert run.imagined is not None, "was asked before"
    record, measure = run.imagined, measure_of(run)
    charts = [(f"{measure.name} of trials".capitalize(), _scores(record, measure))]
    if record.reliability:
        charts.append(("Success head, on episodes it was not fitted to", _reliability(record)))
    share = room // max(len(record.episodes), 1)
    episodes = [
        (_title(i, pair), _courses(pair, record.names), embedded(run.path / film_name(i), share))
        for i, pair in enumerate(record.episodes)
    ]
    return Imagined(("real", "imagined"), charts, episodes, _sentence(record, measure))


def _scores(record: Record, measure: Measure) -> Chart:
    real = [Point(ticks or 0.0, score or 0.0) for ticks, score, _ in record.trials]
    imagined = [Point(ticks or 0.0, score) for ticks, _, score in record.trials if score is not None]
    every = [point.y for point in (*real, *imagined)]
    up = axis([0.0, 1.0], measure.tick) if measure.success else axis(every, measure.tick, pad=0.05)
    along = axis([0.0, *(point.x for point in real)], counted, at_most=3)
    return draw(_both(real, imagined), along, up, x_title="real control steps", y_title=measure.name)


def _reliability(record: Record) -> Chart:
    """A head that says what happens lies on the diagonal, which is drawn as what is real."""
    points = [
        Point(said, share, *wilson(min(round(share * count), round(count)), round(count)))
        for said, share, count in record.reliability
    ]
    share = axis([0.0, 1.0], number, at_most=3)
    diagonal = [Point(0.0, 0.0), Point(1.0, 1.0)]
    return draw(_both(diagonal, points), share, share, x_title="highest score of success", y_title="succeeded")


def _courses(pair: Pair, names: Sequence[str]) -> list[tuple[str, Chart]]:
    found = []
    along = axis([0.0, float(max(len(pair.real), len(pair.imagined)) - 1)], counted, at_most=3)
    for i, name in enumerate(names):
        both = [[Point(float(t), row[i]) for t, row in enumerate(rows)] for rows in (pair.real, pair.imagined)]
        up = axis([point.y for points in both for point in points], number, at_most=3, pad=0.05)
        found.append((name, draw(_both(*both), along, up, x_title="control steps", y_title="")))
    return found


def _both(real: Sequence[Point], imagined: Sequence[Point]) -> list[Curve]:
    return [Curve("real", REAL, real), Curve("imagined", IMAGINED, imagined)]


def _title(i: int, pair: Pair) -> str:
    if not pair.succeeded:
        return f"Episode {i + 1}"
    real, imagined = ("success" if x else "failure" for x in pair.succeeded)
    return f"Episode {i + 1}: really a {real}, imagined a {imagined}"


def _sentence(record: Record, measure: Measure) -> str:
    gaps = [score - (real or 0.0) for _, real, score in record.trials if score is not None]
    words = f"{plural(len(record.trials), 'trial')} in the world. "
    if gaps:
        largest = max(gaps, key=abs)
        words += f"Of {plural(len(gaps), 'policy', 'policies')} a score was imagined before; it was off by up to "
        words += f"{measure.change(largest)}{measure.unit_of_change}. "
    if record.reliability:
        words += "The success head is right where it lies on the diagonal, which stands for what is real. "
    if record.episodes:
        words += "Episodes are those of the last trial; each imagined one has the start and the noise of the real one, "
        words += (
            "and the numbers that moved most are shown. A film, of worlds that can draw what was imagined, has the "
        )
        words += "real one on the left."
    return words.strip()
