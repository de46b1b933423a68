"""Reads the files of `burnish compare` and of runs, without trust: wrong content is one sentence.

A folder may be untrusted. So nothing outside of it is read, whatever its files say, and every number is
checked to be one before it is shown. A value that is merely absent is None, or empty: the page says so at its place.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ....policies.core.config import from_data
from ....policies.core.errors import BurnishError
from ....policies.measure.evaluate import Evaluation
from ....policies.runs.manifest import kind_of, parse, plain_yaml
from ....policies.runs.run import CONFIG, METRICS, read_metrics
from ...world_model.record import RECORD, Record
from ..comparison import COMPARISON, EVALUATIONS
from .words import Measure

STARTS = ("starts.json", "evaluations/starts.json")  # the first that is there
T = TypeVar("T")


@dataclass(frozen=True)
class Base:
    """The base of a comparison: its checkpoint and how good it is."""

    path: str = ""
    success: float | None = None
    final: float | None = None  # success or the mean return, whichever is compared


@dataclass(frozen=True)
class Entry:
    """One run of a comparison. A row of ``curve`` is control steps, seconds, value, and the ends of its interval."""

    method: str
    seed: int
    status: str = "finished"
    error: str | None = None
    folder: str = ""
    curve: list[list[float | None]] = field(default_factory=list)
    final: float | None = None
    low: float | None = None
    high: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None
    unpaired: str = ""  # why its episodes and the base's are no pairs; empty where they are
    area: float | None = None
    time_to_goal_s: float | None = None
    dip: float | None = None
    minutes: float | None = None
    control_steps: float | None = None
    gradient_steps: float | None = None
    delivered: float | None = None
    delivers: str | None = None  # its base, its last policy, or the best on the way
    label: str = ""  # of a free baseline
    timing: dict[str, float | None] | None = None

    def __post_init__(self) -> None:
        if any(len(row) != 5 or row[0] is None or row[1] is None for row in self.curve):
            raise BurnishError(
                f"the curve of {self.name} must have rows of 5 numbers: steps, seconds, value, low, high"
            )

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"

    @property
    def finished(self) -> bool:
        return self.status == "finished"


@dataclass(frozen=True)
class MethodRow:
    """The row of one method: its runs, their mean with its interval, and the difference from the base."""

    method: str
    runs: int = 0
    failed: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    iqm: float | None = None
    iqm_low: float | None = None
    iqm_high: float | None = None
    area: float | None = None
    time_to_goal_s: float | None = None
    dip: float | None = None
    minutes: float | None = None
    control_steps: float | None = None
    gradient_steps: float | None = None
    delivered: float | None = None
    standing: str | None = None  # against the best free baseline
    over_free: float | None = None
    over_free_low: float | None = None
    over_free_high: float | None = None
    free: bool = False  # it is a free baseline itself


@dataclass(frozen=True)
class Best:
    """The best run of a comparison: how it was selected, and its result on fresh seeds."""

    method: str
    seed: int
    selected_by: float | None = None
    final: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"


@dataclass(frozen=True)
class Starts:
    """The first observation of each evaluated seed; seeds are words here, because they have 63 bits."""

    names: list[str] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(len(row) != len(self.names) for row in self.values.values()):
            raise BurnishError("starts.json must hold one number per name for every seed")


@dataclass(frozen=True)
class RunFolder:
    """A run as its folder tells: its settings and the lines of its log."""

    path: Path
    config: dict[str, Any]
    rows: list[dict[str, float]]
    imagined: Record | None = None  # of a run in imagination

    @property
    def method(self) -> str | None:
        name = self._identity.get("method")
        return name if isinstance(name, str) else None

    @property
    def world(self) -> str | None:
        return world_name(self._identity.get("env"))

    @property
    def _identity(self) -> Mapping[str, Any]:
        identity = self.config.get("identity")
        return identity if isinstance(identity, Mapping) else {}


@dataclass(frozen=True)
class Comparison:
    """A comparison as its folder tells: base, runs, methods, best run and evaluations."""

    path: Path
    base: Base
    measure: Measure
    world: str | None
    budget: float | None
    goal: float | None
    command: str
    burnish: str
    machine: dict[str, Any]
    runs: list[Entry]
    methods: list[MethodRow]
    best: Best | None
    starts: Starts
    evaluations: dict[str, Evaluation]  # "base" and names of runs; only those that are there
    folders: dict[str, RunFolder]  # of runs, likewise
    free: list[Entry]  # the free baselines; older comparisons have none
    lacking: str  # which of them are not there, and how to get them
    unpaired: str  # why the episodes of the runs and of the base are no pairs; empty where they are

    @property
    def best_free(self) -> Entry | None:
        """Of the base and the free baselines; older comparisons hold nothing against any."""
        base = Entry("base", 0, final=self.base.final, label="base")
        known = [x for x in [*self.free, base] if x.final is not None]
        return max(known, key=lambda x: x.final or 0.0, default=None) if self.free else None

    @property
    def rows(self) -> list[MethodRow]:
        """Methods and free baselines, by their last policies."""
        rows = self.methods + [_free_row(entry) for entry in self.free]
        return sorted(rows, key=lambda row: (row.mean is None, -(row.mean or 0.0)))


def _free_row(entry: Entry) -> MethodRow:
    names = (
        "low",
        "high",
        "difference",
        "difference_low",
        "difference_high",
        "minutes",
        "control_steps",
        "gradient_steps",
    )
    numbers: dict[str, Any] = {name: getattr(entry, name) for name in names}
    runs, name = int(entry.finished), entry.label or entry.method
    return MethodRow(name, runs, 1 - runs, entry.final, free=True, **numbers)


def read_run(path: Path) -> RunFolder:
    """The run in a folder; a folder without settings is refused."""
    if not (path / CONFIG).is_file():
        raise BurnishError(
            f"{path} is no run folder: it has no {CONFIG}{kind_of(path)}; give the out=... of a training"
        )
    if (path / "race.json").is_file():
        raise BurnishError(
            f"{path} is a race of several methods, which its improve.md describes; give a run in {path / 'runs'}"
        )
    config = parse(path / CONFIG, plain_yaml)
    if not isinstance(config, dict):
        raise BurnishError(f"{path / CONFIG} is malformed: it holds no settings")
    record = path / RECORD
    known = record.is_file() and not record.is_symlink()  # a link could lead to any file of this machine
    imagined = _table(Record, _json(record), RECORD) if known else None
    if not (path / METRICS).is_file():
        return RunFolder(path, config, [], imagined)
    try:
        return RunFolder(path, config, read_metrics(path), imagined)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BurnishError(f"{path / METRICS} is malformed: each line must hold numbers under their names") from error


def read_comparison(path: Path) -> Comparison:
    """The comparison in a folder; malformed content is refused."""
    if not (path / COMPARISON).is_file():
        raise BurnishError(f"{path} is no comparison: it has no {COMPARISON}; `burnish compare` makes one")
    data = _json(path / COMPARISON)
    runs = [_table(Entry, x, f"runs[{i}]") for i, x in enumerate(_list(data, "runs"))]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise BurnishError(f"{path / COMPARISON} is malformed: it names a run twice")
    best = None if data.get("best") is None else _table(Best, data["best"], "best")
    if best is not None and best.name not in names:
        raise BurnishError(f"{path / COMPARISON} is malformed: its best run, {best.name}, is not among its runs")
    starts = next((f for f in (inside(path, name) for name in STARTS) if f.is_file()), None)
    machine = data.get("machine")
    return Comparison(
        path=path,
        base=_table(Base, data.get("base") or {}, "base"),
        measure=Measure(data.get("criterion", "success") != "return"),
        world=world_name(data.get("world")),
        budget=_finite(data.get("budget")),
        goal=_finite(data.get("goal")),
        command=command_in(str(data.get("command") or "")),
        burnish=str(data.get("burnish") or ""),
        machine=dict(machine) if isinstance(machine, Mapping) else {},
        runs=runs,
        methods=[_table(MethodRow, x, f"methods[{i}]") for i, x in enumerate(_list(data, "methods"))],
        best=best,
        starts=Starts() if starts is None else _table(Starts, _json(starts), "starts.json"),
        evaluations=_evaluations(path, ["base", *names]),
        free=[_table(Entry, x, f"free[{i}]") for i, x in enumerate(_list(data, "free"))],
        lacking=str(data.get("lacking") or ""),
        unpaired=str(data.get("unpaired") or ""),
        folders={run.name: read_run(folder) for run in runs if (folder := _run_folder(path, run)) is not None},
    )


def command_in(text: str) -> str:
    """A command of `burnish` as one line in which a shell finds words and nothing else: it is there to be copied into
    one. Empty where ``text`` is no such command."""
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    return shlex.join(words) if words[:1] == ["burnish"] and all(map(str.isprintable, words)) else ""


def world_name(world: Any) -> str | None:
    """A world as an origin says it, ``{name: ..., config: ...}``, or by its name alone."""
    name = world.get("name") if isinstance(world, Mapping) else world
    return name if isinstance(name, str) else None


def inside(root: Path, name: str) -> Path:
    """A path below ``root``, or a refusal: a file must not make us read its neighbours."""
    path = root / name
    try:
        below = path.resolve().is_relative_to(root.resolve())
    except (ValueError, OSError):  # no file can be called so
        below = False
    if not below:
        raise BurnishError(
            f"{name!r} leads out of {root}, and nothing outside is read; repair the name in {COMPARISON}"
        )
    return path


def _run_folder(path: Path, run: Entry) -> Path | None:
    files = [inside(path, f"{run.folder}/{name}") for name in (CONFIG, METRICS)]
    return files[0].parent if run.folder and files[0].is_file() else None


def _evaluations(path: Path, names: list[str]) -> dict[str, Evaluation]:
    files = {name: inside(path, f"{EVALUATIONS}/{name}.json") for name in names}
    found = {name: _table(Evaluation, _json(file), file.name) for name, file in files.items() if file.is_file()}
    base = found.get("base")
    for name, evaluation in found.items():
        if base is not None and evaluation.seeds != base.seeds:
            raise BurnishError(
                f"{files[name]} ran other seeds than the base, so the two are no pairs; evaluate it anew"
            )
    return found


def _json(path: Path) -> dict[str, Any]:
    data = parse(path, lambda text: json.loads(text, parse_constant=_unknown, parse_float=_real, parse_int=_whole))
    if not isinstance(data, dict):
        raise BurnishError(f"{path} is malformed: it holds no table")
    return data


def _unknown(word: str) -> None:
    """JSON has no NaN, but Python writes it: such a number is not known."""


def _real(word: str) -> float | None:
    return x if math.isfinite(x := float(word)) else None


def _whole(word: str) -> int | None:
    return int(word) if len(word) <= 20 else None  # as long as a seed of 63 bits with its sign


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    found = data.get(name, [])
    if not isinstance(found, list):
        raise BurnishError(f"{COMPARISON} is malformed: {name} must be a list, but it is {found!r:.80}")
    return found


def _table(kind: type[T], data: Any, where: str) -> T:
    """``kind`` from a table that may hold more than it: its writer may know more than this page."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if isinstance(data, Mapping):
        data = {name: value for name, value in data.items() if name in fields}
        for name, f in fields.items():
            if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise BurnishError(f"{where} has no {name}, so it cannot be shown")
    return from_data(kind, data, where)


def _finite(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None
