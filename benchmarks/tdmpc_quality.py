"""TD-MPC2 of ours on three tasks of the DeepMind Control Suite, beside its published curves and our SAC, from nothing.

    python benchmarks/tdmpc_quality.py [--quick] [--tasks ...] [--methods ...] [--seeds 0 1 2] [--preset tdmpc_cpu]
    python benchmarks/tdmpc_quality.py [--jobs 2] | --report

Both methods are what a user runs: `burnish finetune method=tdmpc_cpu|sac env=dm_control worlds=1`, with the warm-up and
the action repeat of 2 that were published, and no prediction of terminations, which the suite does not have. The budget
is 100,000 steps of the task, thus 50,000 decisions, as the published curves count them.

* A run is one JSON file, `results/tdmpc_quality/TASK/METHOD-SEED.json`, so runs that are there are not repeated; one
  that was interrupted is resumed.
* The **return** is the mean over 10 episodes at the end, as many as were published, on the same seeds for all. TD-MPC2
  draws among its best plans, SAC plays its mean. **prior** is the same planner that does not plan (`policy.steps=0`).
* ``PUBLISHED`` are the means over three seeds at step 100,000 of results/{tdmpc2,sac}/TASK.csv in
  github.com/nicklashansen/tdmpc2 (revision e9f5932), whose steps count the repeat (its issue 45).
* RESULT ``tdmpc_over_published``: the mean over tasks of our mean return over the published one;
  ``tdmpc_over_sac``: over that of our SAC. ``tasks`` counts those with a run; what is not there is -1.
* **Seconds** are of one core, with the worlds'.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import machine, markdown, page, play_apart, publish, results_of, run_options, table

from burnish.finetune.api import evaluate, refine
from burnish.sim.external.settings import GymConfig

EPISODES, SEED = 10, 1000  # of the examination at the end
PUBLISHED = {
    "walker-walk": {"tdmpc": 961.9, "sac": 708.2},
    "reacher-easy": {"tdmpc": 936.9, "sac": 540.4},
    "finger-spin": {"tdmpc": 947.5, "sac": 762.4},
}
METHODS = ("tdmpc", "sac")
DECISIONS, WARMUP = 50_000, 2500


@dataclass(frozen=True)
class Case:
    task: str
    method: str
    preset: str  # of tdmpc
    seed: int
    quick: bool
    results: Path

    @property
    def result(self) -> Path:
        return self.results / self.task / f"{self.method}-{self.seed}.json"

    @property
    def settings(self) -> dict[str, Any]:
        total, warmup = (60, 30) if self.quick else (DECISIONS, WARMUP)
        common = {"worlds": 1, "threads": 1, "total": total, "log_every": total // 20, "save_every": total // 5}
        if self.method == "sac":
            return {**common, "method": "sac", "loop": {"warmup": warmup}}
        loop = {"warmup": warmup, "initial_updates": warmup}
        return {**common, "method": self.preset, "loop": loop, "agent.model.ends": False}


def one(case: Case) -> None:
    torch.set_num_threads(1)
    env = GymConfig("dm_control", {"task": case.task, "repeat": 2}, max_steps=500, processes=0)
    folder, curve = case.result.with_suffix(".run"), list[list[float]]()
    cpu = time.process_time()

    def note(step: int, numbers: Mapping[str, float]) -> None:
        if "return" in numbers:
            curve.append([step, numbers["return"]])
            sys.stderr.write(f"{case.task} {case.method} {case.seed}: {step} {numbers['return']:.1f}\n")

    run: dict[str, Any] = {"out": folder, "resume": folder.exists(), "on_log": note, "eval.episodes": 0}
    policy = refine(None, env, seed=case.seed, **run, **case.settings).policy
    core_s, episodes = time.process_time() - cpu, 1 if case.quick else EPISODES
    played = {"": policy}
    if case.method == "tdmpc":
        alone = type(policy)(replace(policy.spec, horizon=1), replace(policy.config, steps=0))
        alone.load_state_dict(policy.state_dict())
        played["prior_"] = alone
    greedy = case.method == "sac"
    returns = {
        f"{name}returns": evaluate(x.eval(), env, episodes, seed=SEED, worlds=episodes, greedy=greedy).returns
        for name, x in played.items()
    }
    found = {
        **{"task": case.task, "method": case.method, "seed": case.seed, "settings": case.settings, "core_s": core_s},
        **{"return": statistics.mean(returns["returns"]), **returns, "training": curve},
        "machine": machine(torch.device("cpu")),
    }
    if "prior_returns" in returns:
        found["prior"] = statistics.mean(returns["prior_returns"])
    part = case.result.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(case.result)
    shutil.rmtree(folder)
    sys.stderr.write(f"{case.task} {case.method} {case.seed}: {found['return']:.1f}\n")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """One row per task and method, over its seeds."""
    rows = []
    for task, published in PUBLISHED.items():
        for method in METHODS:
            paths = sorted(folder.glob(f"{task}/{method}-*.json"))
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            if runs:
                returns = [run["return"] for run in runs]
                row = {"task": task, "method": method, "seeds": len(runs), "return": statistics.mean(returns)}
                row |= {"low": min(returns), "high": max(returns), "published": published[method]}
                row["prior"] = statistics.mean(run["prior"] for run in runs) if method == "tdmpc" else float("nan")
                row["ms"] = statistics.mean(1000 * run["core_s"] / run["settings"]["total"] for run in runs)
                rows.append(row)
    return rows


COLUMNS = {"task": "", "method": "", "seeds": "d", "return": ".1f", "low": ".1f", "high": ".1f", "prior": ".1f"}
COLUMNS |= {"published": ".1f", "ms": ".1f"}


def result(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    ours = {row["task"]: row for row in rows if row["method"] == "tdmpc"}
    sac = {row["task"]: row for row in rows if row["method"] == "sac" and row["task"] in ours}
    over = [row["return"] / row["published"] for row in ours.values()]
    beside = [ours[task]["return"] / max(row["return"], 1.0) for task, row in sac.items()]
    return {
        "tdmpc_over_published": statistics.mean(over) if over else -1.0,
        "tdmpc_over_sac": statistics.mean(beside) if beside else -1.0,
        "tasks": float(len(ours)),
    }


def main() -> None:
    parser = run_options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=PUBLISHED, default=list(PUBLISHED), help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: %(default)s")
    parser.add_argument("--preset", default="tdmpc_cpu", help="settings of tdmpc (default: %(default)s)")
    chosen = parser.parse_args()
    results = results_of("tdmpc_quality", chosen)
    if chosen.quick:
        chosen.tasks, chosen.seeds = ["reacher-easy"], [0]
    cases = [
        Case(task, method, chosen.preset, seed, chosen.quick, results)
        for seed in chosen.seeds
        for task in chosen.tasks
        for method in chosen.methods
    ]
    if not chosen.report:
        play_apart(one, [(case,) for case in cases if not case.result.exists()], chosen.jobs)
    rows = rows_of(results)
    path = results.with_suffix(".json")
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(path, report, table(rows, COLUMNS), result(rows))
    page(path, markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
