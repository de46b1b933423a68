"""Twelve public tasks of five other packages: what refinement makes of an imperfect base, beside what is free.

    python benchmarks/public_tasks.py [--quick] [--tasks ...] [--methods ...] [--seeds 0 1 2] [--budget 150000]
                                      [--jobs 2] [--on ray [--storage URL]] [--search --trials 3] [--bases] [--report]

A run is `burnish finetune policy.path=BASE experiment=TASK/METHOD seed=SEED`, in a process of its own with one thread,
and leaves one JSON file in `results/public_tasks/`; runs that are there are not repeated, and one that was killed goes
on from its last checkpoint. Its machinery is that of `refine_quality.py` (`refine_runs.py`).

* **Bases** are flows that imitated clumsy demonstrations, by the recipes of `public_bases.py`. They are made where they
  are missing. Runs of another base do not count. A base is refined if it succeeds in 20 to 60 % of its episodes, and at
  noise 0 in at most 60 %.
* **Settings**: one file per method for all tasks (`configs/experiment/sparse/`): one discount, -1 in every step until
  success, which ends the episode, and 16 worlds. `--search` tries others, from the space of `refine_settings.py`, on a
  training seed and on episodes of their own, and logs each trial in `trials/`; the winner is written into that file.
* **Like with like**: 150,000 control steps for each method, and the recordings of the base for those that use any.
  `rlpd` has no base. The fine-tuning of the base itself, and `rlpd`, run on Meta-World and PushT only.
* **Free baselines**: the base with noise 0; more imitation, IQL and the best of 32 draws by the critic of IQL, each
  trained for as long as the median run of the methods.
* **Two numbers**: the last policy and the one that a run delivers, on 500 episodes of the stream "public_tasks", paired
  with the base: a world that begins other episodes from equal seeds is left out. Intervals are over runs and episodes
  together.
* **Minutes** are those of processors, workers of the worlds included, and "-" where some of them were not counted
  (`refine_minutes.py`). ``steps_per_s`` is control steps per such second of the whole run; ``playing`` and ``learning``
  are the shares of the worlds and of updates in its time, of which the rest goes into actions and evaluations.

RESULT: ``tasks_above_90``, on how many tasks the last policies of some method succeed in more than 90 %;
``best_median_change``, of the methods that ran on all tasks the largest median, over tasks, of the change from the
base; ``free_beaten``, on how many tasks the best method beats the best free baseline beyond doubt: the interval of its
difference, at a confidence that allows for the number of methods, lies above 0. A method counts on a task once it has
three seeds, a trained baseline once it has one; ``missing`` is the number of runs that are not there. -1 is a number
that is not there yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bases import NOISE_FREE_LIMIT
from measure import machine, markdown, options, page, publish, table
from public_bases import RECIPES, RUNS, TASKS, WORLDS, Recipe, make_base, note_base, noted_base
from refine_runs import SEARCH_SEED, Case, Suite, add_place, play_all, valid_runs
from refine_settings import FAMILIES, TRIALS, trial_settings
from refine_tables import base_scores, rows_of

from burnish.policies.core.errors import BurnishError
from burnish.policies.measure.statistics import pooled_interval

BUDGET, SEEDS = 150_000, (0, 1, 2)
FREE_SEEDS = (0,)  # of the trained baselines, the best of which is chosen against the methods
FIT = (0.2, 0.6)  # success of a base
NOTE = "recipe.json"  # which base the results of a task are of
EVERYWHERE = ("dsrl", "residual_td3", "residual_ppo")
FURTHER = ("reinflow", "dppo", "rlpd")  # where steps are cheap
PARTS = ("acting", "playing", "learning", "evaluation")  # of the time of a run, as it logs them
TRAINED_FREE = FAMILIES["free"][1:]
COLUMNS = {"task": "", "budget": ",", "method": "", "family": "", "seeds": "d", "last": ".3f", "worst_last": ".3f"}
COLUMNS |= {"gain": "+.3f", "gain_low": "+.3f", "gain_high": "+.3f", "over_greedy": "+.3f", "over_free": "+.3f"}
COLUMNS |= {"over_free_low": "+.3f", "delivered": ".3f", "gradient_steps": ",.0f", "minutes": ".1f"}
COLUMNS |= {"steps_per_s": ",.0f", "playing": ".2f", "learning": ".2f"}


def methods_of(task: str) -> tuple[str, ...]:
    return EVERYWHERE + (FURTHER if task.startswith(("metaworld", "pusht")) else ())


def suite_of(results: Path, quick: bool) -> Suite:
    """The whole benchmark, or one that lasts a minute, with a base of its own."""
    place = RUNS / "quick" if quick else RUNS

    def folder(kind: str, task: str) -> Path:
        return place / kind / recipe_of(task, quick).folder(task)

    def fingerprint(task: str, number: int) -> str | None:
        return noted_base(results / task / NOTE) if number == 1 else None

    return Suite(
        name="public_tasks",
        tasks=TASKS,
        budget=BUDGET,
        runs=place,
        base=lambda task, number: folder("bases", task),
        fingerprint=fingerprint,
        recordings=lambda task: folder("recordings", task),
        common=lambda task, config: [],  # the experiment has them all
        tried=lambda task, method, trial: trial_settings("sparse", method, trial),
        episodes=500,
        base_episodes=500,
        worlds=WORLDS,
        looks=3,
        selected=32,
        confirmed=128,
    )


def recipe_of(task: str, quick: bool) -> Recipe:
    return replace(RECIPES[task], demonstrations=16, steps=100) if quick else RECIPES[task]


def with_bases(suite: Suite, tasks: Sequence[str], results: Path, quick: bool) -> list[str]:
    """Those of ``tasks`` with a base that is fit to be refined; it is made where it is missing. A task whose world or
    expert is not installed costs the others nothing."""
    found = []
    for task in tasks:
        recipe, base = recipe_of(task, quick), suite.base(task, 1)
        try:
            minutes = make_base(task, recipe, suite.recordings(task), base)
            note_base(task, recipe, base, minutes, results / task / NOTE)
            case = Case(suite, task, EVERYWHERE[0], 0, quick, results, BUDGET)
            success, still = (float(np.mean(case.of_base(greedy).success or [0])) for greedy in (False, True))
            fit = quick or (FIT[0] <= success <= FIT[1] and still <= NOISE_FREE_LIMIT)
            sys.stderr.write(f"{task}: the base succeeds in {success:.3f}, at noise 0 in {still:.3f}\n")
        except BurnishError as error:
            sys.stderr.write(f"{task} is left out: {error}\n")
            continue
        if fit:
            found.append(task)
        else:
            sys.stderr.write(f"{task} is left out: change its recipe in public_bases.py until its base is fit\n")
    return found


# ---- the tables ----


def scores_of(runs: Sequence[Mapping[str, Any]], folder: Path) -> dict[tuple[str, int, str], np.ndarray]:
    """(task, budget, method) -> success of the last policies, (runs, episodes); of a base a single row."""
    found: dict[tuple[str, int, str], Any] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault((run["task"], run["budget"], run["method"]), []).append(run["last"])
    for task in TASKS:
        for name in ("base", "base_greedy"):
            if (folder / task / f"{name}.json").exists():
                found[task, BUDGET, name] = [base_scores(folder / task, None, name)]
    return {key: np.asarray(x) for key, x in found.items()}


def over(scores: np.ndarray, free: np.ndarray, confidence: float) -> tuple[float, float | None]:
    """(mean, lower end) of the difference of runs on the same episodes; ``free`` is one run or as many."""
    runs = len(scores) if len(free) == 1 else min(len(scores), len(free))
    middle, low, _ = pooled_interval(scores[:runs] - free[:runs], confidence)
    return middle, low if runs > 1 else None


def measured(suite: Suite, results: Path) -> list[dict[str, Any]]:
    """The rows of the table: those of `refine_quality.py`, and what is said of the best free baseline and of time."""
    runs = valid_runs(suite, results)
    scores = scores_of(runs, results)
    rows = rows_of(results, runs, TASKS, BUDGET)
    for row in rows:
        task, budget, method = row["task"], row["budget"], row["method"]
        row |= dict.fromkeys(("over_free", "over_free_low", "steps_per_s", "playing", "learning"))
        own = [run for run in runs if (run["task"], run["budget"], run["method"]) == (task, budget, method)]
        if not own or row["family"] == "free":
            continue
        free = [scores[key] for name in FAMILIES["free"] if (key := (task, BUDGET, name)) in scores]
        free += [scores[key] for key in [(task, BUDGET, "base")] if key in scores]
        best = max(free, key=lambda x: float(x.mean()))
        confidence = 1 - 0.05 / len(methods_of(task))
        row["over_free"], row["over_free_low"] = over(scores[task, budget, method], best, confidence)
        rates = [run["steps"] / (60 * run["minutes"]) for run in own if run["minutes"] is not None]
        row["steps_per_s"] = statistics.median(rates) if rates else None
        spent = {name: sum(run["seconds"].get(f"time/{name}_s", 0.0) for run in own) for name in PARTS}
        total = sum(spent.values()) or 1.0
        row |= {name: spent[name] / total for name in ("playing", "learning")}
    return rows


def wanted_runs(task: str) -> dict[tuple[str, str], int]:
    """(task, method) -> seeds."""
    seeds = dict.fromkeys(methods_of(task), len(SEEDS)) | dict.fromkeys(TRAINED_FREE, len(FREE_SEEDS))
    return {(task, method): count for method, count in seeds.items()}


def missing_runs(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    """(task, method) -> seeds that have no run with the usual budget."""
    there = {(row["task"], row["method"]): row["seeds"] for row in rows if row["budget"] == BUDGET}
    found = {key: count - (there.get(key) or 0) for task in TASKS for key, count in wanted_runs(task).items()}
    return {key: count for key, count in found.items() if count > 0}


def result(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    missing = missing_runs(rows)
    counted: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["budget"]):  # the larger budget, where it has all seeds
        if row["family"] != "free" and row["seeds"] >= len(SEEDS):
            counted[row["task"], row["method"]] = row
    best = {
        task: max(own, key=lambda row: row["last"])
        for task in TASKS
        if (own := [row for (name, _), row in counted.items() if name == task])
    }
    complete = [task for task in best if not any((task, name) in missing for name in TRAINED_FREE)]
    changes = [
        statistics.median(counted[task, method]["gain"] for task in TASKS)
        for method in EVERYWHERE
        if all((task, method) in counted for task in TASKS)
    ]
    return {
        "tasks_above_90": sum(row["last"] > 0.9 for row in best.values()) if best else -1,
        "best_median_change": max(changes, default=-1.0),
        "free_beaten": sum(best[task]["over_free_low"] > 0 for task in complete) if complete else -1,
        "missing": sum(missing.values()),
    }


def publish_tables(suite: Suite, results: Path, quick: bool) -> None:
    rows = measured(suite, results)
    missing = missing_runs(rows)
    counts = {task: sum(count for (name, _), count in missing.items() if name == task) for task in TASKS}
    wanted = {task: sum(wanted_runs(task).values()) for task in TASKS}
    lacking = ", ".join(f"{task} {count} of {wanted[task]}" for task, count in counts.items() if count) or "none"
    said = f"Runs that are missing: {lacking}."
    path = results.with_suffix(".json")
    report = {"machine": machine(torch.device("cpu")), "quick": quick, "rows": rows}
    publish(path, report, f"{table(rows, COLUMNS)}\n\n{said}", result(rows))
    page(path, markdown(rows, COLUMNS), f"{said}\n")


def main() -> None:
    parser = options(__doc__)
    every = [*EVERYWHERE, *FURTHER, *TRAINED_FREE]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--methods", nargs="+", choices=every, default=every, help="default: those of the task")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=BUDGET, help="control steps of each run (default: %(default)s)")
    add_place(parser)
    parser.add_argument("--search", action="store_true", help="try settings; nothing is reported of these runs")
    parser.add_argument("--trials", nargs="+", type=int, default=[0, 1, 2], help="numbers of the trials of --search")
    parser.add_argument("--bases", action="store_true", help="make and examine the bases that are missing, no more")
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    chosen = parser.parse_args()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not all(0 <= trial <= TRIALS for trial in chosen.trials):
        parser.error(f"--trials must lie in [0, {TRIALS}]")
    results = chosen.out / ("public_tasks_quick" if chosen.quick else "public_tasks")
    suite = suite_of(results, chosen.quick)
    if chosen.quick:
        chosen.tasks, chosen.methods, chosen.seeds = ["metaworld_button_press"], ["residual_td3", "more_imitation"], [0]
        shutil.rmtree(suite.runs, ignore_errors=True)
        shutil.rmtree(results, ignore_errors=True)
    if not chosen.report:
        run(suite, chosen, results)
    if not chosen.search:
        publish_tables(suite, results, chosen.quick)


def run(suite: Suite, chosen: argparse.Namespace, results: Path) -> None:
    """The bases that are missing, and then the runs."""
    tasks = with_bases(suite, chosen.tasks, results, chosen.quick)
    cases = [
        Case(suite, task, method, seed, chosen.quick, place, chosen.budget, 1, trial)
        for seed, trial, place in planned(chosen, results)
        for method in (*EVERYWHERE, *FURTHER, *TRAINED_FREE)
        for task in tasks
        if method in chosen.methods
        and (method in methods_of(task) or (method in TRAINED_FREE and trial is None and seed in FREE_SEEDS))
    ]
    if not chosen.bases:
        play_all(cases, chosen.jobs, chosen.on, chosen.storage)


def planned(chosen: argparse.Namespace, results: Path) -> list[tuple[int, int | None, Path]]:
    """(seed, trial, folder) of each round of runs."""
    if chosen.search:
        return [(SEARCH_SEED, trial, results / "trials") for trial in chosen.trials]
    return [(seed, None, results) for seed in chosen.seeds]


if __name__ == "__main__":
    main()
