"""What a comparison found: its runs read from disk, a row per method, the best run, one sentence.

Curves are of the seeds kept for selection; ``final`` and all differences are of other seeds, paired with the base. The
criterion is success, or the mean return where the world knows no success.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..policies.core.evaluate import Comparison, Evaluation, compare
from ..policies.core.run import read_metrics
from ..policies.core.statistics import interquartile_mean, stratified_bootstrap
from .report.timing import of_metrics

COMPARISON, EVALUATIONS, RUNS = "compare.json", "evaluations", "runs"
METHOD_NUMBERS = ("mean", "low", "high", "worst", "iqm", "iqm_low", "iqm_high")
METHOD_NUMBERS += (
    "difference",
    "difference_low",
    "difference_high",
    "area",
    "dip",
    "minutes",
    "time_to_goal_s",
    "folder",
)


class Entry(NamedTuple):
    """One run, and where in the folder of a comparison things of it lie."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"

    @property
    def folder(self) -> str:
        return f"{RUNS}/{self.name}"

    @property
    def evaluation(self) -> str:
        return f"{EVALUATIONS}/{self.name}.json"


def summarize(out: Path, entries: Sequence[Entry], *, budget: int, goal: float) -> dict[str, Any]:
    """Everything that tables and pages show, as plain data."""
    base = Evaluation.load(out / EVALUATIONS / "base.json")
    runs = [run_row(out, entry, base, budget=budget, goal=goal) for entry in entries]
    names = dict.fromkeys(entry.method for entry in entries)
    methods = [method_row(name, [run for run in runs if run["method"] == name], out) for name in names]
    finished = [run for run in runs if run["status"] == "finished"]
    best = max(finished, key=lambda run: run["selected_by"], default=None)
    shown = ("method", "seed", "folder", "selected_by", "final", "low", "high", "difference", "difference_low")
    return {
        "criterion": criterion(base),
        "base": {**own(base), "episodes": len(base.seeds)},
        "budget": budget,
        "goal": goal,
        "runs": runs,
        "methods": sorted(methods, key=lambda row: (row["mean"] is None, -(row["mean"] or 0.0))),
        "best": None if best is None else {key: best[key] for key in shown},
    }


def criterion(evaluation: Evaluation) -> str:
    return "return" if evaluation.success is None else "success"


def own(evaluation: Evaluation) -> dict[str, float]:
    """The criterion of one evaluation, with its interval."""
    found, name = evaluation.summary(), criterion(evaluation)
    value = found["success_rate"] if name == "success" else found["return_mean"]
    return {"final": value, "low": found.get(f"{name}_low", value), "high": found.get(f"{name}_high", value)}


def curve_of(folder: Path, name: str) -> list[tuple[float, float, float, float, float]]:
    """(control steps, seconds, value, low, high) of each trial along a run."""
    key = {"success": "trial/success_rate", "return": "trial/return_mean"}[name]
    found = {}
    for row in read_metrics(folder):
        if key in row:
            low, high = (row.get(f"trial/{name}_{end}", row[key]) for end in ("low", "high"))
            steps = row.get("control_steps", 0.0)
            found[steps] = (steps, row["time/elapsed_s"], row[key], low, high)
    return list(found.values())


def run_row(out: Path, entry: Entry, base: Evaluation, *, budget: int, goal: float) -> dict[str, Any]:
    row: dict[str, Any] = {"method": entry.method, "seed": entry.seed, "folder": entry.folder, "error": None}
    failure, evaluated = (out / entry.folder).with_suffix(".failed"), out / entry.evaluation
    if not evaluated.exists():
        said = failure.read_text(encoding="utf-8") if failure.exists() else "it has not ended"
        return row | {"status": "failed", "error": said, "curve": []}
    end, curve = Evaluation.load(evaluated), curve_of(out / entry.folder, criterion(base))
    against = compare(end, base)
    reached = next((point for point in curve if point[2] >= goal), None)
    return row | {
        "status": "finished",
        "curve": curve,
        **own(end),
        "difference": against.difference,
        "difference_low": against.difference_low,
        "difference_high": against.difference_high,
        "p_value": against.p_value if isinstance(against, Comparison) else None,
        "selected_by": curve[-1][2],
        "area": area(curve, budget),
        "steps_to_goal": reached and reached[0],
        "time_to_goal_s": reached and reached[1],
        "dip": min(point[2] for point in curve) - curve[0][2],
        "minutes": curve[-1][1] / 60,
        "timing": of_metrics(read_metrics(out / entry.folder)),
    }


def area(curve: Sequence[Sequence[float]], budget: int) -> float:
    """The mean height of a curve over the budget: linear between trials, and as in the last one from there on."""
    points = [(min(point[0], budget), point[2]) for point in curve]
    points.append((float(budget), points[-1][1]))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)) / (budget - points[0][0])


def method_row(name: str, runs: Sequence[Mapping[str, Any]], out: Path) -> dict[str, Any]:
    """Over the runs of one method. ``low`` and ``high`` are for the mean over these very runs, all their episodes
    together; what other seeds of training would give is what the bootstrap over runs around the ``iqm`` speaks of, and
    a single run does not. The bounds of the difference from the base are the outermost of all runs. A method counts as
    there in the median run."""
    finished = [run for run in runs if run["status"] == "finished"]
    row: dict[str, Any] = {"method": name, "runs": len(finished), "failed": len(runs) - len(finished)}
    if not finished:
        return row | dict.fromkeys(METHOD_NUMBERS)
    finals, times = [run["final"] for run in finished], [run["time_to_goal_s"] for run in finished]
    iqm_low, iqm_high = stratified_bootstrap([finals]) if len(finals) > 1 else (None, None)
    reached = sorted(times, key=lambda t: (t is None, t))[len(times) // 2]
    together = joined([Evaluation.load(out / Entry(name, run["seed"]).evaluation) for run in finished])
    numbers = {
        **own(together),
        "mean": statistics.mean(finals),
        "worst": min(finals),
        "iqm": interquartile_mean(finals),
        "iqm_low": iqm_low,
        "iqm_high": iqm_high,
        "difference": statistics.mean(run["difference"] for run in finished),
        "difference_low": min(run["difference_low"] for run in finished),
        "difference_high": max(run["difference_high"] for run in finished),
        "area": statistics.mean(run["area"] for run in finished),
        "dip": min(run["dip"] for run in finished),
        "minutes": statistics.mean(run["minutes"] for run in finished),
        "time_to_goal_s": reached,
        "folder": max(finished, key=lambda run: run["selected_by"])["folder"],
    }
    return row | {key: numbers[key] for key in METHOD_NUMBERS}


def joined(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Episodes of several evaluations in one list, for what does not ask which seeds they had."""
    columns = [evaluation.to_dict() for evaluation in evaluations]
    kept = {name: x and list(chain(*(each[name] for each in columns))) for name, x in columns[0].items()}
    return Evaluation(**kept)


def verdict(found: Mapping[str, Any]) -> str:
    """One sentence, of seeds on which nothing was chosen."""
    best, base = found["best"], found["base"]
    if best is None:
        return "no run has finished, so there is nothing to compare"
    form = "{:.1%}" if found["criterion"] == "success" else "{:.4g}"
    number = {key: form.format(best[key]) for key in ("final", "low", "high")}
    return (
        f"{best['method']} (seed {best['seed']}), chosen on other seeds, has {found['criterion']} {number['final']} "
        f"[{number['low']}, {number['high']}] after {found['budget']:,} control steps; its base has "
        f"{form.format(base['final'])} [{form.format(base['low'])}, {form.format(base['high'])}]"
    )


TABLE: tuple[str, ...] = (
    "method",
    "runs",
    "failed",
    "mean",
    "low",
    "high",
    "difference_low",
    "iqm",
    "area",
    "dip",
    "time_to_goal_s",
    "minutes",
)


def table(found: Mapping[str, Any]) -> str:
    """The methods as aligned text."""
    rows: list[list[str]] = [[*TABLE]]
    for method in found["methods"]:
        cells = [method[key] for key in TABLE]
        rows.append(["-" if x is None else x if isinstance(x, str) else f"{x:.4g}" for x in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
