"""The first things that a page says: a title, one sentence, and a few facts beside it."""

from __future__ import annotations

from typing import NamedTuple

from ..comparison import BEATS, SAID
from .curves import evaluations, measure_of
from .read import Comparison, Entry, RunFolder
from .words import duration, number, plural, probability

Facts = list[tuple[str, str, str]]  # name, value, what is to be added in small


class Verdict(NamedTuple):
    """The first sentence of a page, and the detail below it."""

    sentence: str
    detail: str


# ---- of a comparison ----


def comparison_title(comparison: Comparison) -> str:
    """The title of a comparison: its world and its number of methods."""
    methods = len({run.method for run in comparison.runs})
    return f"{comparison.world or 'Unknown world'}: {plural(methods, 'method')} from one base"


def of_comparison(comparison: Comparison) -> Verdict:
    """The verdict of a comparison: whether its best run is better than the base."""
    best, failed = comparison.best, [run for run in comparison.runs if not run.finished]
    run = next((r for r in comparison.runs if best is not None and r.name == best.name), None)
    lost = f" {plural(len(failed), 'run')} of {len(comparison.runs)} failed." if failed else ""
    if best is None or run is None:
        return Verdict("No run of this comparison finished, so there is nothing to compare.", lost.strip())
    measure, base = comparison.measure, base_value(comparison)
    final = run.final if run.final is not None else best.final
    alike = "" if comparison.unpaired else " on the same seeds"
    if measure.success:
        beside = "" if base is None else f", its base{alike} in {measure.value(base)}"
        reached = f"succeeds in {measure.value(final)} of the episodes{beside}."
    else:
        beside = "" if base is None else f", its base{alike} {measure.value(base)}"
        reached = f"returns {measure.value(final)}{beside}."
    low, high = run.difference_low, run.difference_high
    if low is None or high is None or low > 0:
        sentence = f"{best.method} {reached}"
    elif high < 0:
        sentence = f"No method improved on its base: the best, {best.method}, {reached}"
    else:
        sentence = f"No method is measurably better than its base: the best, {best.method}, {reached}"
    beaten = _against_free(comparison, best.method)
    return Verdict(sentence + beaten, f"{_difference(comparison, run)}{_selection(comparison, run)}{lost}")


def _against_free(comparison: Comparison, method: str) -> str:
    """Whether the chosen method beats what costs no episodes; where it does not, which others do."""
    free, measure = comparison.best_free, comparison.measure
    held = {row.method: row.standing for row in comparison.methods if row.standing in SAID}
    if free is None or method not in held:
        return ""
    rival = f"{free.label} (the best without new episodes, {measure.value(free.final)})"
    better = [name for name, standing in held.items() if standing == BEATS and name != method]
    also = f"; that is beaten by {', '.join(better)}" if better and held[method] != BEATS else ""
    return f" It {SAID[held[method] or ''].format(rival)}{also}."


def _difference(comparison: Comparison, run: Entry) -> str:
    measure = comparison.measure
    if run.difference is None:
        return ""
    interval = measure.interval(run.difference_low, run.difference_high)
    kind, name = ("Unpaired", "Fisher's exact") if run.unpaired else ("Paired", "exact McNemar")
    test = "" if run.p_value is None else f", {name} test p {_equals(run.p_value)}"
    why = f" Not paired: {run.unpaired}." if run.unpaired else ""
    return f"{kind} difference {measure.change(run.difference)}{measure.unit_of_change} {interval} (95%){test}.{why}"


def _equals(p: float) -> str:
    text = probability(p)
    return text if text.startswith("<") else f"= {text}"


def _selection(comparison: Comparison, run: Entry) -> str:
    among = plural(sum(r.finished for r in comparison.runs), "run")
    return f" Seed {run.seed} of {run.method} was chosen among {among} on other seeds than those reported here."


def comparison_facts(comparison: Comparison) -> Facts:
    """The facts beside a comparison's verdict, as (name, value, note)."""
    measure, base = comparison.measure, comparison.evaluations.get("base")
    facts: Facts = []
    if (value := base_value(comparison)) is not None:
        summary = base.summary() if base is not None else {}
        interval = measure.interval(summary.get(f"{measure.name}_low"), summary.get(f"{measure.name}_high"))
        facts.append(("Base", measure.value(value), interval))
    run = next((r for r in comparison.runs if comparison.best and r.name == comparison.best.name), None)
    if run is not None:
        facts.append(("Best run", measure.value(run.final), measure.interval(run.low, run.high)))
        interval = measure.interval(run.difference_low, run.difference_high)
        facts.append(("Difference", measure.change(run.difference), f"{measure.unit_of_change} {interval}".strip()))
    if (free := comparison.best_free) is not None:
        facts.append(("Without new episodes", measure.value(free.final), free.label))
    if comparison.budget is not None:
        facts.append(("Budget", f"{comparison.budget:,.0f}", "control steps per run"))
    finished = sum(r.finished for r in comparison.runs)
    failed = len(comparison.runs) - finished
    facts.append(("Runs", f"{finished}", f"finished, {failed} failed" if failed else "all finished"))
    if base is not None:
        facts.append(
            (
                "Episodes",
                f"{len(base.seeds):,}",
                "per result, not paired" if comparison.unpaired else "per result, paired",
            )
        )
    return facts


def base_value(comparison: Comparison) -> float | None:
    """On the seeds of the report."""
    measure, base = comparison.measure, comparison.evaluations.get("base")
    if base is not None:
        return base.summary().get("success_rate" if measure.success else "return_mean")
    if comparison.base.final is None and measure.success:
        return comparison.base.success
    return comparison.base.final


# ---- of a run ----


def run_name(run: RunFolder) -> str:
    """The name of a run's method, or else of its folder."""
    return run.method or run.path.name


def run_title(run: RunFolder) -> str:
    """The title of a run: its name and its world."""
    return f"{run_name(run)} in {run.world}" if run.world else run_name(run)


def of_run(run: RunFolder) -> Verdict:
    """The verdict of a run: how its evaluations began and ended."""
    measure = measure_of(run)
    rows = [row for row in evaluations(run) if row[2] is not None]
    name, where = run_name(run), _spent(run)
    if not rows:
        return Verdict(f"{name} was never tried, so how good it is is not known.", where)
    last = rows[-1]
    if len(rows) < 2:
        return Verdict(f"{name} reached {measure.name} of {measure.value(last[2])}.", where)
    first = rows[0]
    span = f"from {measure.value(first[2])} to {measure.value(last[2])}"
    apart = None not in (first[3], first[4], last[3], last[4]) and not _overlap(first, last)
    if not apart:
        sentence = f"{name} moved {measure.name} {span}, which so few episodes do not tell apart."
    else:
        better = (last[2] or 0.0) > (first[2] or 0.0)
        sentence = f"{name} {'raised' if better else 'lowered'} {measure.name} {span}."
    return Verdict(
        sentence, f"{where} Tried on seeds kept for selection; `burnish evaluate` reports on others.".strip()
    )


def _overlap(a: list[float | None], b: list[float | None]) -> bool:
    return (a[3] or 0.0) <= (b[4] or 0.0) and (b[3] or 0.0) <= (a[4] or 0.0)


def _spent(run: RunFolder) -> str:
    if not run.rows:
        return "Nothing was logged yet."
    steps = max((row["control_steps"] for row in run.rows if "control_steps" in row), default=None)
    elapsed_s = max((row["time/elapsed_s"] for row in run.rows if "time/elapsed_s" in row), default=None)
    parts = [] if steps is None else [f"{steps:,.0f} control steps"]
    parts += [] if elapsed_s is None else [duration(elapsed_s)]
    spent = f"It took {' and '.join(parts)}." if parts else ""
    decisions, total = run.rows[-1].get("decisions"), run.config.get("total")
    if decisions is not None and isinstance(total, int) and decisions < total:
        spent += f" It stands at {decisions:,.0f} of {total:,} decisions."
    return spent.strip()


def run_facts(run: RunFolder) -> Facts:
    """The facts beside a run's verdict, as (name, value, note)."""
    measure, rows = measure_of(run), evaluations(run)
    facts: Facts = []
    for name, row in (("At first", rows[0]), ("In the end", rows[-1])) if len(rows) > 1 else ():
        facts.append((name, measure.value(row[2]), measure.interval(row[3], row[4])))
    best = max((row[2] for row in rows if row[2] is not None), default=None)
    if len(rows) > 2 and best is not None:
        facts.append(("Best on the way", measure.value(best), f"of {number(len(rows))} evaluations"))
    for name, key in (("Seed", "seed"), ("Worlds", "worlds")):
        value = run.config.get(key)
        if isinstance(value, int):
            facts.append((name, str(value), ""))
    return facts
