"""A comparison: its runs read from disk, a row per method, the best run, and a sentence for each.

Curves are of the seeds kept for selection; ``final`` and all differences are of other seeds, paired with the base where
the world honours its seeds (``unpaired`` says why not). The criterion is success, or the mean return where the world
knows no success. Methods are sorted by the last policies of their runs (``final`` of a run, ``mean`` of a method);
beside stands what the runs deliver.

Each method is held against the best of the base and the free baselines, seed by seed where there are pairs. Which one
is the best is seen on the same episodes, so luck speaks for the baseline: rather too few methods are said to beat it,
and rather too many to be worse. The confidence of these intervals allows for the number of methods (Bonferroni).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...policies.best import BEST, Best, criterion
from ...policies.core.errors import plain
from ...policies.measure.by_instruction import by_instruction
from ...policies.measure.evaluate import Comparison, Evaluation, compare, why_unpaired
from ...policies.measure.statistics import (
    interquartile_mean,
    mean_interval,
    pooled_interval,
    stratified_bootstrap,
    unpaired_mean_difference,
    wilson,
)
from ...policies.runs.run import read_metrics
from .free_baselines import ALSO_GREEDY, NAMES, lacking
from .report.timing import of_metrics

COMPARISON, EVALUATIONS, RUNS = "compare.json", "evaluations", "runs"
BASE, GREEDY, DELIVERED, LAST = "base", "greedy", "delivered", "last"
BEATS, UNCLEAR, WORSE = "beats", "does not beat beyond doubt", "is worse"
# The same in a sentence about a method and what it is held against.
SAID = {BEATS: "beats {}", UNCLEAR: "does not beat {} beyond doubt", WORSE: "is worse than {}"}
COUNTS = ("control_steps", "decisions", "gradient_steps")
METHOD_NUMBERS = ("mean", "low", "high", "delivered", "worst", "iqm", "iqm_low", "iqm_high")
METHOD_NUMBERS += ("difference", "difference_low", "difference_high", "area", "dip", "minutes", *COUNTS)
METHOD_NUMBERS += ("time_to_goal_s", "folder")


class Entry(NamedTuple):
    """One run, and where in the folder of a comparison things of it lie."""

    method: str
    seed: int
    how: str = ""  # it was evaluated: the last policy as it draws, else GREEDY, or DELIVERED

    @property
    def label(self) -> str:
        return f"{self.method}_{self.how}" if self.how else self.method

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"

    @property
    def folder(self) -> str:
        return f"{RUNS}/{self.name}"

    @property
    def evaluation(self) -> str:
        return f"{EVALUATIONS}/{self.name}{'.' if self.how else ''}{self.how}.json"


def summarize(
    out: Path, entries: Sequence[Entry], free: Sequence[Entry] = (), *, budget: int, goal: float
) -> dict[str, Any]:
    """Everything that tables and pages show, as plain data."""
    base = Evaluation.load(out / EVALUATIONS / f"{BASE}.json")
    runs = [run_row(out, entry, base, budget=budget, goal=goal) for entry in entries]
    every = [each for x in free for each in ([x, x._replace(how=GREEDY)] if x.method in ALSO_GREEDY else [x])]
    baselines = sorted((free_row(out, each, base) for each in every), key=_by("final"))
    ended = [row for row in baselines if row["status"] == "finished"]
    drawn = {"method": BASE, "seed": 0, "how": "", "label": BASE, "final": own(base)["final"]}
    best_free = max([*ended, drawn], key=lambda row: row["final"])
    names = dict.fromkeys(entry.method for entry in entries)
    methods = [method_row(name, [run for run in runs if run["method"] == name], out) for name in names]
    confidence = 1 - 0.05 / max(1, len(methods))
    methods = [row | against(row, runs, best_free, out, confidence) for row in methods]
    finished = [run for run in runs if run["status"] == "finished"]
    best = max(finished, key=lambda run: run["selected_by"], default=None)
    instructions = {BASE: by_instruction(base)}
    for row in methods:
        if row["runs"]:
            instructions[row["method"]] = by_instruction(*_evaluations(row["method"], finished, out))
    shown = ("method", "seed", "folder", "selected_by", "final", "delivered", "low", "high")
    shown += ("difference", "difference_low")
    return {
        "criterion": criterion(base),
        "unpaired": next((row["unpaired"] for row in runs + baselines if row.get("unpaired")), ""),
        "base": {**own(base), "episodes": len(base.seeds)},
        "budget": budget,
        "goal": goal,
        "runs": runs,
        "methods": sorted(methods, key=_by("mean")),
        "free": baselines,
        "best_free": best_free["label"],
        "confidence": confidence,
        "lacking": lacking([name for name in NAMES if all(x.method != name for x in free)]),
        "best": None if best is None else {key: best[key] for key in shown},
        "instructions": instructions,
    }


def _evaluations(method: str, finished: Sequence[Mapping[str, Any]], out: Path) -> list[Evaluation]:
    """Of the last policies of a method's finished runs."""
    return [Evaluation.load(out / Entry(method, x["seed"]).evaluation) for x in finished if x["method"] == method]


def _by(name: str) -> Any:
    """The highest first, and behind all of them those without a number."""
    return lambda row: (row[name] is None, -(row[name] or 0.0))


def own(*runs: Evaluation) -> dict[str, float]:
    """The mean of the criterion over one evaluation or several, with its interval. Several play the same seeds, so they
    have no more independent episodes than one of them."""
    scores = np.stack([_scores(each) for each in runs])
    mean, episodes = float(scores.mean()), scores.shape[1]
    if criterion(runs[0]) == "success":
        low, high = wilson(float(scores.sum()) / len(runs), episodes)
    else:
        low, high = mean_interval(scores.mean(0)) if episodes > 1 else (mean, mean)
    return {"final": mean, "low": low, "high": high}


def curve_of(folder: Path, name: str) -> list[tuple[float, float, float, float, float]]:
    """(control steps, seconds, value, low, high) of each evaluation along a run."""
    key = {"success": "eval/success_rate", "return": "eval/return_mean"}[name]
    found = {}
    for row in read_metrics(folder):
        if key in row:
            low, high = (row.get(f"eval/{name}_{end}", row[key]) for end in ("low", "high"))
            # By the step of the log: updates before the first decision add none to the control steps.
            found[row["step"]] = (row.get("control_steps", 0.0), row["time/elapsed_s"], row[key], low, high)
    return list(found.values())


def run_row(out: Path, entry: Entry, base: Evaluation, *, budget: int, goal: float) -> dict[str, Any]:
    """One row of a comparison, read from the files of a run: status, curve, when it reached ``goal``, and result."""
    row = _begun(out, entry)
    if row["status"] != "finished":
        return row | {"curve": []}
    end, curve = Evaluation.load(out / entry.evaluation), curve_of(out / entry.folder, criterion(base))
    reached = next((point for point in curve if point[2] >= goal), None)
    delivery = delivered(out, entry, end, base)
    return row | {
        "curve": curve,
        **_against_base(end, base),
        "delivers": delivered_by(out / entry.folder),
        "delivered": None if delivery is None else own(delivery)["final"],
        "selected_by": curve[-1][2],
        "area": area(curve, budget),
        "steps_to_goal": reached and reached[0],
        "time_to_goal_s": reached and reached[1],
        "dip": min(point[2] for point in curve) - curve[0][2],
        "minutes": curve[-1][1] / 60,
        **_counted(out / entry.folder),
        "timing": of_metrics(read_metrics(out / entry.folder)),
    }


def free_row(out: Path, entry: Entry, base: Evaluation) -> dict[str, Any]:
    """A free baseline, evaluated in one way. It has one run, or none; new episodes it plays none."""
    row = _begun(out, entry) | {"label": entry.label, "how": entry.how}
    if row["status"] != "finished":
        return row | {"final": None}
    folder = out / entry.folder
    trained = [r for r in read_metrics(folder) if "time/elapsed_s" in r] if folder.is_dir() else []
    counts = {"minutes": trained[-1]["time/elapsed_s"] / 60, "gradient_steps": trained[-1]["step"]} if trained else {}
    usual = {"minutes": 0.0, "gradient_steps": 0.0, "control_steps": 0.0}
    return row | _against_base(Evaluation.load(out / entry.evaluation), base) | usual | counts


def _begun(out: Path, entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {"method": entry.method, "seed": entry.seed, "folder": entry.folder, "error": None}
    if (out / entry.evaluation).exists():
        return row | {"status": "finished"}
    failure = (out / entry.folder).with_suffix(".failed")
    said = failure.read_text(encoding="utf-8") if failure.exists() else "it has not ended"
    return row | {"status": "failed", "error": said}


def _against_base(end: Evaluation, base: Evaluation) -> dict[str, Any]:
    found = compare(end, base)
    return {
        **own(end),
        "difference": found.difference,
        "difference_low": found.difference_low,
        "difference_high": found.difference_high,
        "p_value": found.p_value if isinstance(found, Comparison) else None,
        "unpaired": found.unpaired,
    }


def _counted(folder: Path) -> dict[str, float | None]:
    rows = read_metrics(folder)
    return {name: max((row[name] for row in rows if name in row), default=None) for name in COUNTS}


def delivered_by(folder: Path) -> str:
    """Which policy a run delivers: its base, its LAST one, or BEST, another one of its folder."""
    best = Best(folder, {})
    if not best.path.is_dir():
        return BASE
    return LAST if best.confirmed is not None and best.confirmed["chosen"] == LAST else BEST


def delivered(out: Path, entry: Entry, last: Evaluation, base: Evaluation) -> Evaluation | None:
    """The delivered policy, on the seeds that nothing is chosen on; None where an older comparison did not try it."""
    path = out / entry._replace(how=DELIVERED).evaluation
    other = Evaluation.load(path) if path.exists() else None
    return {BASE: base, LAST: last, BEST: other}[delivered_by(out / entry.folder)]


def against(
    row: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], free: Mapping[str, Any], out: Path, confidence: float
) -> dict[str, Any]:
    """A method, by the last policies of its runs, held against a free baseline on the same seeds. Of a single run the
    interval is that of its episodes, and of several that of both, runs and episodes. Without pairs, the means of the
    runs and the episodes of the baseline are two independent samples."""
    ended = [run for run in runs if run["method"] == row["method"] and run["status"] == "finished"]
    if not ended:
        return dict.fromkeys(("standing", "over_free", "over_free_low", "over_free_high"))
    name, mine = Entry(free["method"], free["seed"], free["how"]).evaluation, _evaluations(row["method"], ended, out)
    yardstick = Evaluation.load(out / (f"{EVALUATIONS}/{BASE}.json" if free["method"] == BASE else name))
    if len(mine) == 1:
        found = compare(mine[0], yardstick, confidence)
        difference, low, high = found.difference, found.difference_low, found.difference_high
    elif any(why_unpaired(x, yardstick) for x in mine):
        means = [_scores(x).mean() for x in mine]
        difference, low, high = unpaired_mean_difference(means, _scores(yardstick), confidence)
    else:
        difference, low, high = pooled_interval([_scores(x) - _scores(yardstick) for x in mine], confidence)
    standing = BEATS if low > 0 else WORSE if high < 0 else UNCLEAR
    return {"standing": standing, "over_free": difference, "over_free_low": low, "over_free_high": high}


def _scores(evaluation: Evaluation) -> np.ndarray:
    return np.asarray(evaluation.returns if evaluation.success is None else evaluation.success, dtype=np.float64)


def area(curve: Sequence[Sequence[float]], budget: int) -> float:
    """The mean height of a curve over the budget: linear between evaluations, and as in the last one from there on."""
    points = [(min(point[0], budget), point[2]) for point in curve]
    points.append((float(budget), points[-1][1]))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)) / (budget - points[0][0])


def method_row(name: str, runs: Sequence[Mapping[str, Any]], out: Path) -> dict[str, Any]:
    """Over the runs of one method. ``low`` and ``high`` are for the mean over these very runs, on other episodes; what
    other seeds of training would give is what the bootstrap over runs around the ``iqm`` speaks of, and a single run
    does not. The bounds of the difference from the base are the outermost of all runs. A method counts as there in the
    median run."""
    finished = [run for run in runs if run["status"] == "finished"]
    row: dict[str, Any] = {"method": name, "runs": len(finished), "failed": len(runs) - len(finished)}
    if not finished:
        return row | dict.fromkeys(METHOD_NUMBERS)
    finals, times = [run["final"] for run in finished], [run["time_to_goal_s"] for run in finished]
    iqm_low, iqm_high = stratified_bootstrap([finals]) if len(finals) > 1 else (None, None)
    reached = sorted(times, key=lambda t: (t is None, t))[len(times) // 2]
    numbers = {
        **own(*_evaluations(name, finished, out)),
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
        **{name: _mean(run[name] for run in finished) for name in ("delivered", *COUNTS)},
        "time_to_goal_s": reached,
        "folder": max(finished, key=lambda run: run["selected_by"])["folder"],
    }
    return row | {key: numbers[key] for key in METHOD_NUMBERS}


def _mean(values: Iterable[float | None]) -> float | None:
    """Where every run has told it."""
    known = list(values)
    return None if None in known else statistics.mean(x for x in known if x is not None)


def verdict(found: Mapping[str, Any]) -> str:
    """The conclusion, from seeds on which nothing was chosen."""
    best, base = found["best"], found["base"]
    if best is None:
        return "no run has finished, so there is nothing to compare"
    form = "{:.1%}" if found["criterion"] == "success" else "{:.4g}"
    number = {key: form.format(best[key]) for key in ("final", "low", "high")}
    whole = (
        f"{best['method']} (seed {best['seed']}), chosen on other seeds, has {found['criterion']} {number['final']} "
        f"[{number['low']}, {number['high']}] after {found['budget']:,} control steps; its base has "
        f"{form.format(base['final'])} [{form.format(base['low'])}, {form.format(base['high'])}]"
    )
    yardstick = next((row for row in found["free"] if row["label"] == found["best_free"]), base | {"label": BASE})
    lines = [f"not paired: {found['unpaired']}; {whole}" if found["unpaired"] else whole]
    lines += [f"the best free baseline, {yardstick['label']}, has {form.format(yardstick['final'])}"]
    signed = form.replace(":", ":+")
    for row in found["methods"]:
        if row["standing"] is not None:
            over, low, high = (signed.format(row[f"over_free{end}"]) for end in ("", "_low", "_high"))
            said = SAID[row["standing"]].format(yardstick["label"])
            lines.append(f"{row['method']} {said}: {over} [{low}, {high}] at {found['confidence']:.3g}")
    return "\n".join([*lines, found["lacking"]] if found["lacking"] else lines)


TABLE = ("method", "kind", "runs", "failed", "mean", "low", "high", "delivered", "difference_low", "iqm", "area", "dip")
TABLE += ("time_to_goal_s", "control_steps", "gradient_steps", "minutes", "standing")
HEADS = {"mean": LAST, "standing": "best free baseline"}  # of those that need another name in front of people


def table(found: Mapping[str, Any]) -> str:
    """The base, the methods and the free baselines as aligned text, by the last policy."""
    base = {"method": BASE, "kind": BASE, "mean": found["base"]["final"], **found["base"]}
    methods = [row | {"kind": "method"} for row in found["methods"]]
    shown = sorted([base, *methods, *map(_as_method, found["free"])], key=_by("mean"))
    rows: list[list[str]] = [[HEADS.get(key, key) for key in TABLE]]
    for each in shown:
        cells = [each.get(key) for key in TABLE]
        rows.append(["-" if x is None else x if isinstance(x, str) else f"{x:.4g}" for x in cells])
    return "\n".join([aligned(rows), *instruction_table(found)])


def instruction_table(found: Mapping[str, Any]) -> Iterator[str]:
    """Success for each instruction, where the world gives several; a method's episodes of all runs together."""
    of: Mapping[str, Any] = found.get("instructions", {})
    if len(of.get(BASE, {})) < 2:
        return
    rows = [["success by instruction", "episodes", *of]]
    for text, row in of[BASE].items():
        each = [x.get(text) for x in of.values()]
        rates = ["-" if x is None else f"{x['success_rate']:.4g}" for x in each]
        rows.append([plain(text, 60), f"{row['episodes']:.0f}", *rates])
    yield "\n" + aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells as columns of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _as_method(row: Mapping[str, Any]) -> dict[str, Any]:
    ended = row["status"] == "finished"
    names = {"method": row["label"], "kind": "free", "runs": int(ended), "failed": int(not ended)}
    return {**row, **names, "mean": row["final"]}
