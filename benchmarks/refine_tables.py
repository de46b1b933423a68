"""The tables and the RESULT line of `refine_quality.py`, from the runs that are there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import embed, machine, markdown, page, publish, table
from refine_settings import BUDGET, RANKED, TASKS, Task, family_of

from burnish.policies.measure.evaluate import Evaluation
from burnish.policies.measure.statistics import mean_interval, pooled_interval

CHOOSING = Path(__file__).resolve().parent.parent / "docs" / "choosing.md"
NOTHING = ("from nothing",)  # families whose runs have no base to be worse than

Run = Mapping[str, Any]
Row = dict[str, Any]


def base_scores(folder: Path, unit: float | None, name: str) -> np.ndarray:
    """Of the base on the reporting seeds, one per seed: success, or the return in the task's unit."""
    found = Evaluation.load(folder / f"{name}.json")
    return np.asarray(found.success if unit is None else np.asarray(found.returns) / unit, dtype=float)


def against(scores: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """The paired difference of all runs, (runs, seeds), from a base on those seeds. A single run has no interval."""
    middle, low, high = pooled_interval(scores - base)
    return {"": middle} | ({} if len(scores) == 1 else {"_low": low, "_high": high})


def worse(delivered: Sequence[float], base: np.ndarray) -> bool:
    """One run, on fresh seeds, with 95 % confidence."""
    return mean_interval(np.asarray(delivered) - base)[1] < 0


def rows_of(folder: Path, runs: Sequence[Run], tasks: Mapping[str, Task] = TASKS, budget: int = BUDGET) -> list[Row]:
    """One row per task, base, budget and method, over its seeds; sorted by the last policies."""
    groups: dict[tuple[str, str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["base"], run["budget"], run["method"]), []).append(run)
    first = {task: next((run["base"] for run in runs if run["task"] == task), None) for task in tasks}
    rows: list[Row] = []
    for (task, fingerprint, played, method), found in groups.items():
        number = 1 if fingerprint == first[task] else 2
        name = "base" if number == 1 else f"base{number}"
        base, greedy = (base_scores(folder / task, tasks[task].unit, x) for x in (name, f"{name}_greedy"))
        last, delivered = (np.asarray([run[key] for run in found]) for key in ("last", "delivered"))
        base, greedy = base[: last.shape[1]], greedy[: last.shape[1]]  # the same seeds
        beaten, gained = against(last, greedy), against(last, base)
        nothing = family_of(method) in NOTHING
        rows.append(
            {
                "task": task,
                "base": number,
                "budget": played,
                "method": method,
                "family": family_of(method),
                "seeds": len(found),
                "last": float(last.mean()),
                "worst_last": float(last.mean(1).min()),
                "gain": gained[""],
                "gain_low": gained.get("_low"),
                "gain_high": gained.get("_high"),
                "over_greedy": beaten[""],
                "over_greedy_low": beaten.get("_low"),
                "delivered_over_greedy_low": against(delivered, greedy).get("_low"),
                "delivered": None if nothing else float(delivered.mean()),
                "delivered_worse": None if nothing else sum(worse(run["delivered"], base) for run in found),
                "steps": statistics.median(run["steps"] for run in found),
                "gradient_steps": statistics.median(run["gradient_steps"] for run in found),
                "minutes": max((run["minutes"] for run in found if run["minutes"] is not None), default=None),
            }
        )
    evaluated = [(path.parent.name, 1, budget) for path in sorted(folder.glob("*/base_greedy.json"))]
    for task, number, played in dict.fromkeys(evaluated + [(row["task"], row["base"], row["budget"]) for row in rows]):
        unit = tasks[task].unit
        rows += [_base_row(folder / task, task, unit, number, played, kind) for kind in ("base", "base_greedy")]
    # Machines sum in another order; the last bits of a mean are no result.
    rows = [{key: round(x, 12) if isinstance(x, float) else x for key, x in row.items()} for row in rows]
    return sorted(rows, key=lambda row: (list(tasks).index(row["task"]), row["base"], row["budget"], -row["last"]))


def _base_row(folder: Path, task: str, unit: float | None, number: int, budget: int, kind: str) -> Row:
    name = "base" if number == 1 else f"base{number}"
    base, greedy = (base_scores(folder, unit, x) for x in (name, f"{name}_greedy"))
    own = base if kind == "base" else greedy
    gained, beaten = own - base, own - greedy
    empty = dict.fromkeys(("seeds", "delivered", "delivered_worse", "minutes"))
    return {"task": task, "base": number, "budget": budget, "method": kind, "family": "free", **empty} | {
        "last": float(own.mean()),
        "worst_last": float(own.mean()),
        "gain": float(gained.mean()),
        "gain_low": mean_interval(gained)[0],
        "gain_high": mean_interval(gained)[1],
        "over_greedy": float(beaten.mean()),
        "over_greedy_low": mean_interval(beaten)[0],
        "steps": 0,
        "gradient_steps": 0,
    }


def over_tasks(rows: Sequence[Row]) -> list[Row]:
    """Ranked methods on the tasks that all of them ran, from the first base with the smaller budget."""
    mine = {(row["task"], row["method"]): row for row in rows if row["base"] == 1 and row["budget"] == BUDGET}
    tasks = [task for task in TASKS if all((task, method) in mine for method in RANKED)]
    found = []
    for method in RANKED if tasks else ():
        own = [mine[task, method] for task in tasks]
        found.append(
            {
                "method": method,
                "family": family_of(method),
                "tasks": len(tasks),
                "runs": sum(row["seeds"] for row in own),
                "mean_last": statistics.mean(row["last"] for row in own),
                "mean_gain": statistics.mean(row["gain"] for row in own),
                "worst_gain_low": min((row["gain_low"] for row in own if row["gain_low"] is not None), default=None),
                "beats_greedy": sum((row["over_greedy_low"] or 0) > 0 for row in own),
                "delivered_worse": None if method == "rlpd" else sum(row["delivered_worse"] for row in own),
            }
        )
    return sorted(found, key=lambda row: -row["mean_last"])


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Of each task, base and budget: the trained methods that differ from a base beyond doubt, and the best of all."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["base"], row["budget"]), []).append(row)
    found = []
    for (task, base, budget), own in groups.items():
        trained = [row for row in own if row["gain_low"] is not None and not row["method"].startswith("base")]
        if not trained:
            continue
        delivered = [row for row in own if row["delivered"] is not None and not row["method"].startswith("base")]
        free = max((row for row in own if row["family"] == "free"), key=lambda row: row["last"])
        best = {"best_last": max(own, key=lambda row: row["last"]), "best_free": free}
        best |= {"best_delivered": max(delivered, key=lambda row: row["delivered"])} if delivered else {}
        found.append(
            {"task": task, "base": base, "budget": budget}
            | {
                key: f"{x['method']} {x['delivered' if key == 'best_delivered' else 'last']:.2f}"
                for key, x in best.items()
            }
            | {
                "beat_noise_0": " ".join(row["method"] for row in trained if row["over_greedy_low"] > 0) or "none",
                "delivered_beats_noise_0": " ".join(
                    row["method"]
                    for row in delivered
                    if row["family"] != "free" and (row["delivered_over_greedy_low"] or 0) > 0
                )
                or "none",
                "below_the_base": " ".join(row["method"] for row in trained if row["gain_high"] < 0) or "none",
            }
        )
    return found


COLUMNS = {"task": "", "base": "d", "budget": ",", "method": "", "family": "", "seeds": "d", "last": ".3f"}
COLUMNS |= {"worst_last": ".3f", "gain": "+.3f", "gain_low": "+.3f", "gain_high": "+.3f", "over_greedy": "+.3f"}
COLUMNS |= {"over_greedy_low": "+.3f", "delivered": ".3f", "delivered_worse": "d", "steps": ",.0f"}
COLUMNS |= {"gradient_steps": ",.0f", "minutes": ".1f"}
OVER_TASKS = {"method": "", "family": "", "tasks": "d", "runs": "d", "mean_last": ".3f", "mean_gain": "+.3f"}
OVER_TASKS |= {"worst_gain_low": "+.3f", "beats_greedy": "d", "delivered_worse": "d"}
VERDICTS = {"task": "", "base": "d", "budget": ",", "best_last": "", "best_free": "", "best_delivered": ""}
VERDICTS |= {"beat_noise_0": "", "delivered_beats_noise_0": "", "below_the_base": ""}


def result(rows: Sequence[Row]) -> dict[str, float]:
    mine = [row for row in rows if row["base"] == 1 and row["budget"] == BUDGET and row["family"] != "free"]
    begun = [row for row in mine if row["family"] not in NOTHING]
    told = [row for row in mine if row["over_greedy_low"] is not None]
    found = {
        "greedy_beaten": sum(row["over_greedy_low"] > 0 for row in told) / len(told) if told else -1.0,
        "delivered_worse": -1.0,
    }
    if begun:
        found["delivered_worse"] = sum(row["delivered_worse"] for row in begun) / sum(row["seeds"] for row in begun)
    for task in ("insert", "push", "pick_place"):
        found[f"{task}_best"] = max((row["last"] for row in mine if row["task"] == task), default=-1.0)
    easy = [row for row in mine if row["task"] == "insert"]
    best = [
        max(
            (row for row in easy if row["family"] == family),
            key=lambda x: (x["worst_last"], -(x["minutes"] or math.inf)),
            default=None,
        )
        for family in ("latent", "residual")
    ]
    slowest = [row["minutes"] for row in best if row is not None and row["minutes"] is not None]
    return found | {"insert_minutes": max(slowest) if len(slowest) == 2 else -1.0}


def publish_tables(folder: Path, runs: Sequence[Run], *, quick: bool, embedded: bool) -> None:
    rows = rows_of(folder, runs)
    methods = over_tasks(rows)
    report = {"machine": machine(torch.device("cpu")), "quick": quick, "rows": rows, "methods": methods}
    path = folder.with_suffix(".json")
    all_tables = {
        "refine_quality": (rows, COLUMNS),
        "refine_quality_methods": (methods, OVER_TASKS),
        "refine_quality_verdicts": (verdicts(rows), VERDICTS),
    }
    publish(path, report, "\n\n".join(table(x, columns) for x, columns in all_tables.values() if x), result(rows))
    tables = {name: markdown(x, columns) for name, (x, columns) in all_tables.items()}
    page(path, *tables.values())
    if embedded and not quick:
        for name, content in tables.items():
            embed(CHOOSING, name, content)
