"""Several comparisons, each of one task, brought together: how a method does over tasks.

Scores are the success of each run in the end, which has the same unit on every task. They are given as Agarwal et al.
(2021, arXiv 2108.13264) ask: by the interquartile mean over all runs, with an interval from a bootstrap that is
stratified by task. A method is ranked only if it has finished runs on every task, and so is a free baseline.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....policies.core.errors import BurnishError
from ....policies.measure.statistics import interquartile_mean, stratified_bootstrap
from .forest import forest
from .read import Comparison
from .verdict import Verdict, base_value
from .words import NOTHING, Measure, number, plural

MEASURE = Measure(success=True)


class MethodOverTasks(NamedTuple):
    """One method over all tasks."""

    method: str
    runs: int
    failed: int
    iqm: float
    low: float | None  # of runs on other seeds, which a single run on a task says nothing of
    high: float | None
    mean: float  # over tasks, of its means
    worst: float
    worst_task: str


class Cell(NamedTuple):
    """A method's value on one task, with its interval where known."""

    value: float
    low: float | None
    high: float | None


Scores = Mapping[str, Mapping[str, Sequence[float]]]  # method -> task -> one number per finished run


def named(comparisons: Sequence[Comparison]) -> dict[str, Comparison]:
    """By their worlds, or by their folders where two are of one world."""
    for comparison in comparisons:
        if not comparison.measure.success:
            raise BurnishError(
                f"{comparison.path} is judged by returns, which have no unit in common with other worlds; give "
                "comparisons of worlds that know success"
            )
    worlds = [comparison.world or comparison.path.name for comparison in comparisons]
    unique = len(set(worlds)) == len(worlds)
    names = worlds if unique else [str(comparison.path) for comparison in comparisons]
    if len(set(names)) < len(names):
        raise BurnishError("compare=... names a folder twice; each is one task")
    return dict(zip(names, comparisons, strict=True))


def scores_of(tasks: Mapping[str, Comparison]) -> dict[str, dict[str, list[float]]]:
    """The final values of all finished runs, as method -> task -> one value per run."""
    found: dict[str, dict[str, list[float]]] = {}
    for task, comparison in tasks.items():
        for run in comparison.runs + comparison.free:
            if run.finished and run.final is not None:
                found.setdefault(run.label or run.method, {}).setdefault(task, []).append(run.final)
    return found


def over(method: str, scores: Mapping[str, Sequence[float]], failed: int = 0) -> MethodOverTasks:
    """A method's scores over tasks: interquartile mean with bootstrap interval, mean, and worst task."""
    strata = list(scores.values())
    everything = [x for runs in strata for x in runs]
    means = {task: statistics.mean(runs) for task, runs in scores.items()}
    worst = min(means, key=lambda task: means[task])
    low, high = stratified_bootstrap(strata) if min(map(len, strata)) > 1 else (None, None)
    mean = statistics.mean(means.values())
    return MethodOverTasks(
        method, len(everything), failed, interquartile_mean(everything), low, high, mean, means[worst], worst
    )


def ranking(scores: Scores, tasks: Sequence[str], failed: Mapping[str, int]) -> list[MethodOverTasks]:
    """The methods that ran on every task, the highest interquartile mean first."""
    rows = [over(method, mine, failed.get(method, 0)) for method, mine in scores.items() if len(mine) == len(tasks)]
    return sorted(rows, key=lambda row: -row.iqm)


def pooled(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The content of the page."""
    tasks = named(comparisons)
    scores = scores_of(tasks)
    refined = list(dict.fromkeys(run.method for comparison in tasks.values() for run in comparison.runs))
    everyone = [*refined, *dict.fromkeys(run.label for comparison in tasks.values() for run in comparison.free)]
    failed = Counter(run.method for comparison in tasks.values() for run in comparison.runs if not run.finished)
    rows = ranking(scores, list(tasks), failed)
    bases = [value for comparison in tasks.values() if (value := base_value(comparison)) is not None]
    base = statistics.mean(bases) if len(bases) == len(tasks) else None
    lacking = {method: [task for task in tasks if task not in scores.get(method, {})] for method in everyone}
    return {
        "title": f"{plural(len(refined), 'method')} on {plural(len(tasks), 'task')}",
        "verdict": _verdict(rows, base, len(tasks)),
        "facts": [
            ("Tasks", str(len(tasks)), ", ".join(tasks)),
            ("Runs", str(sum(len(runs) for mine in scores.values() for runs in mine.values())), "finished"),
            *([("Bases", MEASURE.value(base), "mean over tasks")] if base is not None else []),
        ],
        "measure": MEASURE,
        "scale": forest(MEASURE, [(row.low, row.high) for row in rows], base),
        "tasks": list(tasks),
        "rows": rows,
        "remarks": [
            *(
                f"{method} has no finished run on {', '.join(missing)}, so it is not pooled over tasks."
                for method, missing in lacking.items()
                if missing
            ),
            *_uneven(scores, rows),
            *_budgets(tasks),
        ],
        "each": _each(tasks, [row.method for row in rows] + [method for method in everyone if lacking[method]]),
        "parts": [
            {
                "task": task,
                "folder": str(comparison.path),
                "budget": NOTHING if comparison.budget is None else f"{comparison.budget:,.0f}",
                "episodes": len(comparison.evaluations["base"].seeds) if "base" in comparison.evaluations else NOTHING,
                "command": comparison.command,
            }
            for task, comparison in tasks.items()
        ],
    }


def _each(tasks: Mapping[str, Comparison], methods: Sequence[str]) -> dict[str, list[Cell | None]]:
    """Label -> a cell per task, the base first."""
    base = [None if (value := base_value(x)) is None else Cell(value, None, None) for x in tasks.values()]
    rows: dict[str, list[Cell | None]] = {"base": base}
    for method in methods:
        mine = [next((row for row in x.rows if row.method == method), None) for x in tasks.values()]
        rows[method] = [None if x is None or x.mean is None else Cell(x.mean, x.low, x.high) for x in mine]
    return rows


def _uneven(scores: Scores, rows: Sequence[MethodOverTasks]) -> list[str]:
    found = []
    for row in rows:
        counts = {task: len(runs) for task, runs in scores[row.method].items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} on {task}" for task, count in counts.items())
            found.append(f"The runs of {row.method} are not as many on each task ({listed}), so tasks count unequally.")
    return found


def _budgets(tasks: Mapping[str, Comparison]) -> list[str]:
    budgets = {task: comparison.budget for task, comparison in tasks.items()}
    if len(set(budgets.values())) == 1:
        return []
    listed = ", ".join(f"{number(budget)} on {task}" for task, budget in budgets.items())
    return [f"The budgets differ: {listed} control steps."]


def _verdict(rows: Sequence[MethodOverTasks], base: float | None, tasks: int) -> Verdict:
    if not rows:
        return Verdict("No method finished on every task.", "")
    best = rows[0]
    begins = "" if base is None else f", where the bases have {MEASURE.value(base)} on average"
    sentence = (
        f"{best.method} has the highest interquartile mean over {tasks} tasks, {MEASURE.value(best.iqm)}{begins}."
    )
    if best.low is None:
        return Verdict(sentence, "It has a single run on some task, which says nothing of what other seeds would give.")
    near = [row.method for row in rows[1:] if row.high is None or row.high >= best.low]
    detail = f"More runs may turn the order: {', '.join(near)} may be as good." if near else ""
    return Verdict(sentence, detail)
