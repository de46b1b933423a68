"""Every refinement from one frozen base per task, beside what is free, by the same rules for all.

    python benchmarks/refine_quality.py [--quick] [--search] [--tasks ...] [--methods ...] [--seeds 0 1 2 3 4]
                                        [--budget 100000] [--base 1] [--jobs 1] [--report]

A run is `burnish finetune policy.path=BASE experiment=TASK/METHOD seed=SEED` with the settings that won the search, in
a process of its own with one thread. It leaves one JSON file in `results/refine_quality/`; runs that are
there are not repeated, and one that was killed goes on from its last checkpoint.

* **Bases** lie in `benchmarks/bases/`: imitated from 100 clumsy demonstrations by the recipe of `bases.py`; of the
  running robots, from 100 recordings of mixed quality (`runners.py`). `--bases` makes those that are missing; what is
  there never changes. `--base 2` is a second base, from another seed of imitation.
* **Search**: `--search` tries every method equally often (`--trials`, at most 10) with settings from one declared space
  (`refine_settings.py`), on a training seed of its own, and logs each trial. The best by the last policy on 256 seeds
  of the stream "refine_search" is used; a run that was made with other settings does not count.
* **Like with like**: one discount per task; the base's recordings for every method that can use any; the same control
  steps. Gradient steps and minutes of processor time (one thread, evaluations included) stand beside them.
* **Free baselines**: the base with noise 0; more imitation, IQL and the best of 32 draws by the critic of IQL, each
  trained on the recordings for as long as the median run of the methods.
* **Two numbers**: the last policy, and the policy that the run delivers (`policies/best.py`), each on 256 seeds of the
  stream "refine_quality", unused for training, tuning or choice, paired with the base and with the base at noise 0,
  which have 512 for their own rows. Intervals of a method are over its runs and those seeds together
  (`statistics.pooled_interval`).
* **Running robots** report no success; what stands for it is the return over that of the expert of D4RL.

RESULT, of the runs with 100,000 control steps from the first base: ``greedy_beaten``, the share of pairs of a method
and a task whose last policies beat the base at noise 0 (their interval lies above 0); ``delivered_worse``, the share of
runs whose delivery is worse than their base (the 95 % interval of that run lies below 0; chance gives 0.025 where all
are equal); ``insert_best``, ``push_best``, ``pick_place_best``, the mean of the last policies of the best method;
``insert_minutes``, the slowest run of the best latent and the best residual method. A number that is not there is -1.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine, options
from refine_bases import RUNS, base_folder, configured, fingerprint, make_base, recordings_of
from refine_settings import (
    BUDGET,
    FAMILIES,
    FURTHER,
    RANKED,
    TASKS,
    TRIALS,
    common_settings,
    family_of,
    methods_of,
    reads_recordings,
    trial_settings,
)
from refine_tables import publish_tables, rows_of

from burnish.finetune.__main__ import FinetuneConfig
from burnish.finetune.compare.free_baselines import free_baseline, steps_in
from burnish.policies.best import Best
from burnish.policies.build import load_policy
from burnish.policies.cli.verb_process import MAIN
from burnish.policies.controllers import controller_for
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.rewards import RewardConfig
from burnish.policies.measure.evaluate import Evaluation, evaluate, evaluation_seeds
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import world_for

WORLDS, TRIED, SELECTED = 64, 5, 64
BASE_EPISODES, EPISODES = 512, 256  # each run is on the first of the seeds that the base was on
SEARCH_SEED, SEARCH_EPISODES = 1000, 256
QUICK = 0.01  # of the budget


def examined(path: Path, episodes: int, *, stream: str = "refine_quality", greedy: bool = False) -> Evaluation:
    """A policy on seeds that were used for no training, tuning or choice."""
    policy, origin = load_policy(path)
    env = world_for(policy.spec, origin["env"], min(WORLDS, episodes), torch.device("cpu"))
    controller = controller_for(policy, env.num_envs, greedy=greedy)
    return evaluate(env, controller, evaluation_seeds(episodes, stream=stream))


def scores(task: str, evaluation: Evaluation) -> list[float]:
    """One per episode: success, or the return in the task's unit."""
    unit = TASKS[task].unit
    if unit is None:
        assert evaluation.success is not None, task
        return [float(x) for x in evaluation.success]
    return [round(x / unit, 4) for x in evaluation.returns]


def best_trial(results: Path, task: str, method: str) -> int:
    """The winner among the logged trials; the shipped experiment where none was made."""
    found = [json.loads(path.read_text()) for path in (results / "search" / task).glob(f"{method}-*.json")]
    return max(found, key=lambda trial: (trial["score"], -trial["trial"]), default={"trial": 0})["trial"]


@dataclass(frozen=True)
class Case:
    """One run. ``trial`` is set where it belongs to the search."""

    task: str
    method: str
    seed: int
    quick: bool
    results: Path
    budget: int = BUDGET
    base: int = 1
    trial: int | None = None

    @property
    def name(self) -> str:
        further = ("" if self.budget == BUDGET else f"-{self.budget}") + ("" if self.base == 1 else f"-base{self.base}")
        return f"{self.method}{further}-{self.seed if self.trial is None else self.trial}"

    @property
    def result(self) -> Path:
        searched = () if self.trial is None else ("search",)
        return self.results.joinpath(*searched, self.task, f"{self.name}.json")

    @property
    def folder(self) -> Path:
        kind = "quick" if self.quick else "full" if self.trial is None else "search"
        return RUNS / kind / self.task / self.name

    @property
    def chosen(self) -> list[str]:
        """The settings that are compared: those of the experiment, of the task, and of the trial."""
        trial = best_trial(self.results, self.task, self.method) if self.trial is None else self.trial
        experiment = [f"experiment={self.task}/{self.method}"]
        common = common_settings(self.task, configured(*experiment).method)
        return experiment + common + trial_settings(self.task, self.method, trial)

    @property
    def config(self) -> FinetuneConfig:
        return configured(*self.chosen)

    def command(self) -> list[str]:
        if family_of(self.method) == "free":
            return self._free()
        share = QUICK if self.quick else self.budget / BUDGET
        total = max(1, round(self.config.total * share))
        start = f"env={self.task}" if family_of(self.method) == "from nothing" else f"policy.path={self._base}"
        words = ["finetune", start, *self.chosen, f"seed={self.seed}", f"total={total}", *self._run()]
        words += [f"save_every={max(1, total // 4)}", f"log_every={max(1, total // 50)}"]
        looks = 1 if self.trial is not None else 2 if self.quick else TRIED
        words += [f"eval_every={max(1, total // looks)}"]
        words += [f"data={recordings_of(self.task)}"] if reads_recordings(self.config.method) else []
        learns = self.quick and hasattr(self.config.method.loop, "warmup")
        return words + (["method.loop.warmup=64", "method.loop.initial_updates=16"] if learns else [])

    def _run(self) -> list[str]:
        selected, confirmed = (16, 16) if self.quick else (SELECTED, 256) if self.trial is None else (16, 2)
        trial = [f"eval.episodes={selected}", f"eval.worlds={WORLDS}", f"eval.confirm={confirmed}"]
        return [f"out={self.folder}", "threads=1", "resume=true", *trial]

    def _free(self) -> list[str]:
        """Trained for as long as the median run of the methods, by steps that are counted once per task."""
        kept = self.results / self.task / "free_steps.json"
        steps = json.loads(kept.read_text()) if kept.exists() else {}
        data = recordings_of(self.task)
        if self.method not in steps:
            runs = [json.loads(path.read_text()) for path in kept.parent.glob("*-[0-9].json")]
            minutes = [run["minutes"] for run in runs if run["method"] in RANKED and run["budget"] == BUDGET]
            spent = statistics.median(minutes) if minutes else 0.1
            steps[self.method] = 20 if self.quick else steps_in(spent, self.method, base=self._base, data=data)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(steps) + "\n", encoding="utf-8")
        words = free_baseline(self.method, base=self._base, data=data, steps=steps[self.method])
        return [*words, f"seed={self.seed}", *self._run()]

    @property
    def _base(self) -> Path:
        return base_folder(self.task, self.base)


def play(case: Case) -> None:
    """The run, from wherever an earlier one was stopped. Its output goes into its folder; processor time adds up."""
    case.folder.parent.mkdir(parents=True, exist_ok=True)
    log, clock = case.folder.with_suffix(".log"), case.folder.with_suffix(".seconds")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        words = [
            sys.executable,
            "-c",
            MAIN,
            *case.command(),
        ]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    earlier = json.loads(clock.read_text()) if clock.exists() else {"cpu_s": 0.0, "wall_s": 0.0}
    spent = {"cpu_s": usage.ru_utime + usage.ru_stime, "wall_s": time.monotonic() - began}
    clock.write_text(json.dumps({name: earlier[name] + spent[name] for name in spent}))
    if process.returncode:
        raise RuntimeError(f"{case.task} {case.name} ended with status {process.returncode}: {log.read_text()[-500:]}")


def compared_settings(case: Case) -> dict[str, Any]:
    """Those by which a run is told from others: of the method, and of the rewards where they are changed."""
    rewards = {} if case.config.rewards == RewardConfig() else {"rewards": to_data(case.config.rewards)}
    return to_data(case.config.method) | rewards


def conclude(case: Case) -> dict[str, Any]:
    """The result of the run, as plain data."""
    free = family_of(case.method) == "free"
    spent = json.loads(case.folder.with_suffix(".seconds").read_text())
    found: dict[str, Any] = {
        "task": case.task,
        "method": case.method,
        "seed": case.seed,
        "base": fingerprint(case.task, case.base),
        "budget": case.budget,
        "settings": None if free else compared_settings(case),
        "machine": machine(torch.device("cpu")),
        "minutes": spent["cpu_s"] / 60,  # of processor time: other work on the machine does not count
        "wall_minutes": spent["wall_s"] / 60,
    }
    if case.trial is not None:
        tried = scores(case.task, examined(case.folder, SEARCH_EPISODES, stream="refine_search"))
        words = trial_settings(case.task, case.method, case.trial)
        return found | {"trial": case.trial, "changed": words, "score": statistics.mean(tried)}
    best = Best(case.folder, {})
    last = scores(case.task, examined(case.folder, _episodes(case)))
    rows = read_metrics(case.folder)
    key = "eval/success_rate" if TASKS[case.task].unit is None else "eval/return_mean"
    unit = TASKS[case.task].unit or 1
    curve = [(row.get("control_steps", 0.0), row["time/elapsed_s"], row[key] / unit) for row in rows if key in row]
    delivered = scores(case.task, _of_base(case))[: len(last)] if best.delivered is None else last
    if best.delivered is not None and best.delivered != _last_step(case):
        delivered = scores(case.task, examined(best.path, _episodes(case)))
    return found | {
        "delivered_step": best.delivered,  # None: the base
        "last": last,
        "delivered": delivered,
        "steps": max((row.get("control_steps", 0) for row in rows), default=0),
        "gradient_steps": max((row.get("gradient_steps", 0) for row in rows), default=0),
        "curve": curve,  # control steps, seconds, score on the seeds for selection
    }


def _last_step(case: Case) -> int | None:
    confirmed = Best(case.folder, {}).confirmed
    return None if confirmed is None else confirmed["steps"]["last"]


def _episodes(case: Case) -> int:
    return 32 if case.quick else EPISODES


def _of_base(case: Case, greedy: bool = False) -> Evaluation:
    """Made once. The base at noise 0 is a row of its own."""
    name = ("base" if case.base == 1 else f"base{case.base}") + ("_greedy" if greedy else "")
    kept = case.results / case.task / f"{name}.json"
    if not kept.exists():
        examined(base_folder(case.task, case.base), 32 if case.quick else BASE_EPISODES, greedy=greedy).save(kept)
    return Evaluation.load(kept)


def play_all(cases: Sequence[Case], jobs: int) -> None:
    for task in dict.fromkeys(case.task for case in cases):
        recordings_of(task)  # once, and not by two threads
    for case in cases:
        if family_of(case.method) != "free":
            _ = case.config  # Hydra knows no threads

    def one(case: Case) -> None:
        try:
            play(case)
            found = conclude(case)
        except (RuntimeError, BurnishError) as error:  # the others go on
            sys.stderr.write(f"{error}\n")
            return
        case.result.parent.mkdir(parents=True, exist_ok=True)
        case.result.write_text(json.dumps(found) + "\n", encoding="utf-8")
        shutil.rmtree(case.folder)
        case.folder.with_suffix(".seconds").unlink()
        score = found["score"] if "score" in found else statistics.mean(found["last"])
        sys.stderr.write(f"{case.task} {case.name}: {score:.3f} in {found['minutes']:.1f} minutes\n")
        sys.stderr.flush()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, cases))


def valid_runs(results: Path) -> list[dict[str, Any]]:
    """The committed runs of today's bases and of the settings that won the search."""
    runs = []
    for path in sorted(results.glob("*/*-[0-9].json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if path.parent.parent != results or run["base"] not in (fingerprint(run["task"], n) for n in _numbers(run)):
            continue
        case = Case(run["task"], run["method"], run["seed"], False, results)
        if run["settings"] is None or run["settings"] == json.loads(json.dumps(compared_settings(case))):
            runs.append(run)
    return runs


def measured(results: Path) -> list[dict[str, Any]]:
    """The rows of the table."""
    return rows_of(results, valid_runs(results))


def _numbers(run: dict[str, Any]) -> list[int]:
    return [number for number in (1, 2) if base_folder(run["task"], number).exists()]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    every = [*RANKED, *FURTHER, *FAMILIES["free"]]
    parser.add_argument("--methods", nargs="+", choices=every, default=every, help="default: those of the task")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=BUDGET, help="control steps of each run (default: %(default)s)")
    parser.add_argument("--base", type=int, default=1, help="which base of the task (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core (default: %(default)s)")
    parser.add_argument("--search", action="store_true", help="try settings; nothing is reported of these runs")
    parser.add_argument("--trials", type=int, default=3, help=f"of each method, at most {TRIALS}")
    parser.add_argument("--bases", action="store_true", help="make the bases that are missing, and nothing else")
    parser.add_argument("--report", action="store_true", help="only print and write the tables of what is there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not 1 <= chosen.trials <= TRIALS:
        parser.error(f"--trials must lie in [1, {TRIALS}]")
    if chosen.bases:
        for task in chosen.tasks:
            if not base_folder(task, chosen.base).exists():
                make_base(task, chosen.base)
        return
    results = chosen.out / ("refine_quality_quick" if chosen.quick else "refine_quality")
    if chosen.quick:
        chosen.tasks, chosen.methods, chosen.seeds = ["insert"], ["dsrl", "residual_sac", "more_imitation"], [0]
        shutil.rmtree(RUNS / "quick", ignore_errors=True)
        shutil.rmtree(results, ignore_errors=True)
    numbers: Sequence[tuple[int, int | None]] = [(seed, None) for seed in chosen.seeds]
    if chosen.search:
        numbers = [(SEARCH_SEED, trial) for trial in range(chosen.trials)]
    cases = [
        Case(task, method, seed, chosen.quick, results, chosen.budget, chosen.base, trial)
        for task in chosen.tasks
        for seed, trial in numbers
        for method in (*methods_of(task), *FAMILIES["free"][1:])
        if method in chosen.methods and (trial is None or family_of(method) != "free")
    ]
    without = sorted({case.task for case in cases if not base_folder(case.task, case.base).exists()})
    if without and not chosen.report:
        parser.error(f"no base of {', '.join(without)} yet; --bases --tasks {' '.join(without)} makes it")
    if not chosen.report:
        for case in {(case.task, case.base): case for case in cases}.values():
            _of_base(case)
            _of_base(case, greedy=True)
        left = [case for case in cases if not case.result.exists()]
        play_all([case for case in left if family_of(case.method) != "free"], chosen.jobs)
        play_all([case for case in left if family_of(case.method) == "free"], chosen.jobs)  # they last as long
    if not chosen.search:
        publish_tables(results, valid_runs(results), quick=chosen.quick, embedded=chosen.out == RESULTS)


if __name__ == "__main__":
    main()
