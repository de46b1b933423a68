"""Which settings differ: of a run from the defaults of its method, and of runs from each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ....policies.core.config import differences, to_data
from ...table import OFFLINE, ONLINE
from .read import RunFolder

# Settings of each single run, and those that only say where and how fast it ran.
OWN = ("seed", "out", "resume", "threads", "device", "identity", "method", "policy.path")


class Change(NamedTuple):
    """A setting that differs from its default."""

    name: str  # dotted
    usual: str
    value: str


class Row(NamedTuple):
    """A setting and its value in each run."""

    name: str
    values: list[str]  # one per column


class Table(NamedTuple):
    """Settings that differ between runs, one run to a column."""

    columns: list[str]
    rows: list[Row]


def from_defaults(run: RunFolder) -> list[Change] | str:
    """The settings of a run's method, or a sentence that says why they are unknown."""
    table = ONLINE if "total" in run.config else OFFLINE
    if run.method is None or run.method not in table:
        return "the defaults of this kind of run are not known here; its config.yaml holds every setting."
    usual, mine = to_data(table[run.method]()), run.config.get("method")
    found = [Change(f"method.{name}", shown(a), shown(b)) for name, a, b in differences(usual, mine)]
    return found or "every setting is as it is by default."


def between(runs: Mapping[str, RunFolder]) -> Table:
    """Settings outside of the method in which runs differ."""
    flat = {name: dict(leaves(run.config)) for name, run in runs.items()}
    return _table({name: {k: v for k, v in settings.items() if not _own(k)} for name, settings in flat.items()})


def within(runs: Mapping[str, RunFolder]) -> Table:
    """Settings of the method in which its own runs differ, which ought to be none."""
    return _table({name: dict(leaves(run.config.get("method"), "method")) for name, run in runs.items()})


def leaves(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested data as pairs of dotted name and value."""
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from leaves(value, f"{place}.{key}" if place else str(key))
    elif place:
        yield place, data


def shown(value: Any) -> str:
    """A value as the page shows it: text as it is, else JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):  # "nothing", and the dates that YAML knows
        return str(value)


def _own(name: str) -> bool:
    return any(name == own or name.startswith(f"{own}.") for own in OWN)


def _table(settings: Mapping[str, Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for each in settings.values() for name in each))
    rows = [Row(name, [shown(each[name]) if name in each else "" for each in settings.values()]) for name in names]
    return Table(list(settings), [row for row in rows if len(set(row.values)) > 1])
