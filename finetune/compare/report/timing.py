"""The time of a run, as shares of a bar."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .words import duration, number, percent

ENDING = "_s"  # of the names of seconds


class Part(NamedTuple):
    """One share of a bar, in percent of its length."""

    name: str
    style: int
    begin: float  # percent
    width: float
    text: str


class Bar(NamedTuple):
    """The time of a run as a bar of shares."""

    label: str
    total: str
    parts: list[Part]


def bar(
    label: str, timing: Mapping[str, float | None] | None, minutes: float | None, names: Sequence[str]
) -> Bar | None:
    """``names`` give every bar of a page the same colours. Time that no part accounts for is the rest."""
    parts = seconds(timing)
    known = sum(parts.values())
    total = max(known, 60 * (minutes or 0.0))
    if not parts or total <= 0:
        return None
    if total - known > 0.005 * total:
        parts["rest"] = total - known
    drawn, begin = [], 0.0
    for name, value in parts.items():
        share = value / total
        style = names.index(name) if name in names else len(names)
        text = f"{duration(value)}, {percent(share, 0)}"
        drawn.append(Part(name.replace("_", " "), style, round(100 * begin, 2), round(100 * share, 2), text))
        begin += share
    return Bar(label, duration(total), drawn)


def seconds(timing: Mapping[str, float | None] | None) -> dict[str, float]:
    """The parts by their names, without the unit."""
    known = {name: x for name, x in (timing or {}).items() if x is not None and math.isfinite(x) and x >= 0}
    return {name.removesuffix(ENDING): x for name, x in known.items() if name.endswith(ENDING)}


def of_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The last line's ``time/..._s``, which add up over a run; the whole is no part of itself."""
    last = {name: x for row in rows for name, x in row.items() if name.startswith("time/")}
    named = {name.removeprefix("time/"): x for name, x in last.items() if not name.endswith(("_per_s", "elapsed_s"))}
    return {name: x for name, x in named.items() if name.endswith(ENDING)}


def pace(rows: Sequence[Mapping[str, float]]) -> str:
    """The whole time and the speed, or why they are not known."""
    last = next((row for row in reversed(rows) if "time/elapsed_s" in row), None)
    if last is None:
        return "This run logged no time."
    elapsed_s, steps = last["time/elapsed_s"], last.get("control_steps")
    if not steps or elapsed_s <= 0:
        return f"It took {duration(elapsed_s)}, evaluations included."
    speed = f"{number(steps / elapsed_s)} per second"
    return f"It took {duration(elapsed_s)} for {steps:,.0f} control steps, {speed}, evaluations included."
