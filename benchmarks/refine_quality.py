"""Every refinement from one frozen base per task, with the same control steps, on the same evaluation seeds.

    python benchmarks/refine_quality.py [--quick] [--tasks ...] [--methods ...] [--seeds 0 1 2] [--jobs 1] [--report]

A run is `burnish finetune policy.path=BASE experiment=TASK/METHOD seed=SEED`, in a process of its own; what remains of
it is one JSON file, `results/refine_quality/TASK/METHOD-SEED.json`, so runs that are there are not repeated, and one
that was killed goes on from its last checkpoint. The budget is the task's number of control steps, for every method.

* **Bases** lie in `benchmarks/bases/TASK`: imitated from 100 clumsy demonstrations by the recipe of `bases.py`; of the
  running robots, from 100 recordings of mixed quality (`runners.py`). `--bases` makes those that are missing; what is
  there never changes.
* **Curves** are success on 32 to 128 seeds of the stream "select", at tenths of the budget. By them, and by nothing
  else, a run chooses the policy that it delivers: its best, or the base where none was better beyond doubt.
* **The end** is what was delivered, on 512 seeds of the stream "refine_quality" (`pick_place` and `avoid`: 256), paired
  with the base on the same seeds; the last policy was examined in the same way.
* **Running robots** report no success; what stands for it is the return over that of the expert of D4RL (arXiv
  2004.07219), on 16 seeds for the curves and 64 in the end.
* **Minutes** are by the clock of the run, with its exams and its checkpoints.

`--report` prints the tables of the runs that are there and writes them, into docs/choosing.md too. RESULT: of the best
latent and the best residual method on `insert` (by the worst seed, then by the slowest), the better one
(``insert_best``), the other one (``insert_second``), and the minutes of the slowest run of the two
(``insert_minutes``); the best worst seed on the hidden level (``insert_hard``); the lowest bound of the 95 % intervals
of the paired differences, of all runs that began with the base (``worst_lower_bound``); what is not there is -1.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bases import DEMONSTRATIONS_SEED, demonstrations, imitated, world
from measure import RESULTS, embed, machine, markdown, options, page, publish, table
from runners import IMITATION, STAGES, recordings

from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.policies.__main__ import origin_of, world_for
from burnish.policies.best import Best
from burnish.policies.build import describe, load_policy
from burnish.policies.core.checkpoint import save
from burnish.policies.core.cli import compose, to_object
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.evaluate import Evaluation, compare_returns, compare_two, evaluate, evaluation_seeds
from burnish.policies.core.run import read_metrics
from burnish.policies.core.threads import usable_cores
from burnish.policies.horizon import controller_for

HERE = Path(__file__).resolve().parent
BASES = HERE / "bases"
CHOOSING = HERE.parent / "docs" / "choosing.md"
RUNS = HERE.parent / "runs" / "refine_quality"
WORLDS, EXAMS = 64, 10
GOAL = 0.95
QUICK = 0.01  # of the budget


@dataclass(frozen=True)
class Task:
    methods: tuple[str, ...]
    unit: float | None = None  # the return that counts as 1 where a world knows no success
    episodes: int = 512
    exam: int = 64  # episodes at each point of the curves


FAMILIES = {
    "latent": ("dsrl", "dsrl_aliased", "rfs"),
    "residual": ("residual_sac", "residual_td3", "residual_ppo"),
    "chain": ("reinflow", "dppo", "flow_sde"),
    "action": ("expo", "rpd"),  # those that make or choose actions of their own
    # They refine Gaussians, which the base is not, so they begin without any policy: the yardstick for all others.
    "from nothing": ("rlpd", "gaussian_ppo"),
}
WITH_DATA = ("rlpd",)  # the demonstrations that the base has imitated
EVERY = tuple(name for names in FAMILIES.values() for name in names)
SOME = ("dsrl", "rfs", "residual_sac", "residual_ppo", "reinflow", "dppo")
TASKS = {
    "insert": Task(EVERY, exam=128),
    "insert_hidden": Task(("residual_ppo",)),
    "push": Task(EVERY, exam=32),
    "pick_place": Task(SOME, episodes=256, exam=32),
    "avoid": Task(SOME, episodes=256, exam=32),
    "hopper": Task(SOME, unit=3234.3, episodes=64, exam=16),
    "walker2d": Task(SOME, unit=4592.3, episodes=64, exam=16),
}


def make_base(task: str) -> None:
    config = world(task)
    running = TASKS[task].unit is not None
    data = (
        recordings(config, STAGES[task], 100, DEMONSTRATIONS_SEED) if running else demonstrations(config, "clumsy", 100)
    )
    policy = imitated(data, IMITATION.get(task), seed=2)
    save(BASES / task / "policy", config=describe(policy, {"env": origin_of(config)}), state=policy.state_dict())


def fingerprint(task: str) -> str:
    """Of the base's weights: results of another base are not compared with these."""
    return hashlib.sha256((BASES / task / "policy" / "state.safetensors").read_bytes()).hexdigest()[:16]


def examined(path: Path, episodes: int) -> Evaluation:
    """A policy on the seeds that nobody trained, tuned or chose on."""
    policy, origin = load_policy(path)
    env = world_for(policy.spec, origin["env"], min(WORLDS, episodes), torch.device("cpu"))
    controller = controller_for(policy, env.num_envs)
    return evaluate(env, controller, evaluation_seeds(episodes, stream="refine_quality"))


def compared_in(task: Task, a: Evaluation, b: Evaluation) -> dict[str, float]:
    """By success, or by returns in the task's unit under the same names."""
    if task.unit is None:
        return compare_two(a, b).to_dict()
    numbers = compare_returns(a, b).to_dict()
    counts = ("episodes", "confidence")
    return {key.replace("_mean", "_rate"): x if key in counts else x / task.unit for key, x in numbers.items()}


@functools.cache
def configured(experiment: str) -> FinetuneConfig:
    return to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], [experiment]))


@dataclass(frozen=True)
class Case:
    task: str
    method: str
    seed: int
    quick: bool
    results: Path

    @property
    def result(self) -> Path:
        return self.results / self.task / f"{self.method}-{self.seed}.json"

    @property
    def folder(self) -> Path:
        return RUNS / ("quick" if self.quick else "full") / self.task / f"{self.method}-{self.seed}"

    def words(self, threads: int) -> list[str]:
        chosen = configured(self.experiment)
        total = max(1, round(chosen.total * (QUICK if self.quick else 1)))
        start = f"env={self.task}" if self.method in FAMILIES["from nothing"] else f"policy.path={BASES / self.task}"
        words = [start, self.experiment, f"seed={self.seed}", f"total={total}"]
        words += [f"out={self.folder}", f"threads={threads}", "resume=true", f"save_every={max(1, total // 4)}"]
        words += [f"eval_every={max(1, total // (2 if self.quick else EXAMS))}", f"log_every={max(1, total // 50)}"]
        words += [
            f"trial.episodes={16 if self.quick else TASKS[self.task].exam}",
            f"trial.worlds={16 if self.quick else WORLDS}",
        ]
        words += [f"data={self.demonstrations}"] if self.method in WITH_DATA else []
        learns = self.quick and hasattr(chosen.method.loop, "warmup")
        return words + (["method.loop.warmup=64", "method.loop.initial_updates=16"] if learns else [])

    @property
    def demonstrations(self) -> Path:
        return RUNS / "demonstrations" / self.task

    @property
    def experiment(self) -> str:
        return f"experiment={self.task}/{self.method}"


def refine(case: Case, threads: int) -> None:
    """The run, from wherever an earlier one was stopped. What it says goes into its folder."""
    case.folder.parent.mkdir(parents=True, exist_ok=True)
    if case.method in WITH_DATA and not case.demonstrations.exists():
        words = [f"env={case.task}", "expert=clumsy", "episodes=100", f"seed={DEMONSTRATIONS_SEED}"]
        reward = getattr(configured(case.experiment).env, "reward", None)
        words += [] if reward is None else [f"env.reward={reward.value}"]
        subprocess.run(
            [sys.executable, "-m", "burnish.sim", "collect", *words, f"out={case.demonstrations}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    command = [sys.executable, "-m", "burnish.finetune", "finetune", *case.words(threads)]
    log = case.folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RuntimeError(f"{case.task} {case.method} {case.seed} ended with status {code}: {log.read_text()[-500:]}")


def conclude(case: Case) -> None:
    """Look at what the run left, and write it down."""
    task = TASKS[case.task]
    episodes = 32 if case.quick else task.episodes
    base_file = case.results / case.task / "base.json"
    if not base_file.exists():
        examined(BASES / case.task, episodes).save(base_file)
    base, best = Evaluation.load(base_file), Best(case.folder, {})
    last = examined(case.folder, episodes)
    end = base if best.exam is None else examined(best.path, episodes)
    compared = compared_in(task, end, base)
    key = "trial/success_rate" if task.unit is None else "trial/return_mean"
    rows = [row for row in read_metrics(case.folder) if key in row]
    curve = [(row.get("control_steps", 0.0), row["time/elapsed_s"], row[key] / (task.unit or 1)) for row in rows]
    taken = {row.get("decisions", 0): row.get("control_steps", 0.0) for row in rows}
    private = ("policy.path", "out=", "threads", "resume", "data=")
    found = {
        "task": case.task,
        "method": case.method,
        "seed": case.seed,
        "base": fingerprint(case.task),
        "words": [word for word in case.words(1) if not word.startswith(private)],
        "settings": to_data(configured(case.experiment).method),
        "machine": machine(torch.device("cpu")),
        "delivered": taken[best.step],  # after how many control steps; 0: the base
        "success": compared["a_rate"],
        "compared": compared,
        "last": compared_in(task, last, base),
        "steps": curve[-1][0],
        "minutes": curve[-1][1] / 60,
        "curve": curve,  # control steps, seconds, success on the seeds for selection
    }
    case.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def play(cases: Sequence[Case], jobs: int) -> None:
    threads = max(1, usable_cores() // jobs)
    for case in cases:
        configured(case.experiment)  # once, because Hydra knows no threads

    def one(case: Case) -> None:
        try:
            refine(case, threads)
            conclude(case)
        except (RuntimeError, BurnishError) as error:  # the others go on
            sys.stderr.write(f"{error}\n")
            return
        shutil.rmtree(case.folder)
        success = json.loads(case.result.read_text())["success"]
        sys.stderr.write(f"{case.task} {case.method} {case.seed}: {success:.3f}\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, cases))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """One row per task and method, over its seeds."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*-*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["base"] == fingerprint(run["task"]):
            runs.setdefault((run["task"], run["method"]), []).append(run)
    rows = []
    for (task, method), found in runs.items():
        success = [run["success"] for run in found]
        reached = [next((s / 60 for _, s, rate in run["curve"] if rate >= GOAL), None) for run in found]
        rows.append(
            {
                "task": task,
                "method": method,
                "family": next(name for name, names in FAMILIES.items() if method in names),
                "seeds": len(found),
                "base": statistics.mean(run["compared"]["b_rate"] for run in found),
                "success": statistics.mean(success),
                "worst": min(success),
                "change": statistics.median(run["compared"]["difference"] for run in found),
                "lower_bound": min(run["compared"]["difference_low"] for run in found),
                "last": statistics.mean(run["last"]["a_rate"] for run in found),
                "last_lower_bound": min(run["last"]["difference_low"] for run in found),
                "steps": statistics.median(run["steps"] for run in found),
                "minutes": max(run["minutes"] for run in found),
                "minutes_to_goal": None if None in reached else max(filter(None, reached), default=None),
            }
        )
    return sorted(rows, key=lambda row: (list(TASKS).index(row["task"]), -row["success"]))


COLUMNS = {"task": "", "method": "", "family": "", "seeds": "d", "base": ".3f", "success": ".3f", "worst": ".3f"}
COLUMNS |= {
    "change": "+.3f",
    "lower_bound": "+.3f",
    "last": ".3f",
    "steps": ",.0f",
    "minutes": ".1f",
    "minutes_to_goal": ".1f",
}


def over_tasks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per method, over the tasks that it has runs of."""
    found = []
    for method in EVERY:
        mine = [row for row in rows if row["method"] == method]
        if mine:
            found.append(
                {
                    "method": method,
                    "family": mine[0]["family"],
                    "tasks": len(mine),
                    "runs": sum(row["seeds"] for row in mine),
                    "median_change": statistics.median(row["change"] for row in mine),
                    "worst_change": min(row["change"] for row in mine),
                    "lower_bound": min(row["lower_bound"] for row in mine),
                    "last_lower_bound": min(row["last_lower_bound"] for row in mine),
                }
            )
    return sorted(found, key=lambda row: -row["median_change"])


OVER_TASKS = {"method": "", "family": "", "tasks": "d", "runs": "d", "median_change": "+.3f", "worst_change": "+.3f"}
OVER_TASKS |= {"lower_bound": "+.3f", "last_lower_bound": "+.3f"}


def result(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = dict.fromkeys(("insert_best", "insert_second", "insert_minutes", "insert_hard", "worst_lower_bound"), -1.0)
    easy = [row for row in rows if row["task"] == "insert"]
    best = [
        max((x for x in easy if x["family"] == family), key=lambda x: (x["worst"], -x["minutes"]), default=None)
        for family in ("latent", "residual")
    ]
    if None not in best:
        second, first = sorted((row["worst"], row["minutes"]) for row in best if row is not None)
        found |= {"insert_best": first[0], "insert_second": second[0], "insert_minutes": max(first[1], second[1])}
    hard = [row["worst"] for row in rows if row["task"] == "insert_hidden"]
    return found | {
        "insert_hard": max(hard, default=-1.0),
        "worst_lower_bound": min((row["lower_bound"] for row in rows if row["family"] != "from nothing"), default=-1.0),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=EVERY, default=list(EVERY), help="default: those of the task")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: %(default)s")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time; the cores are shared (default: %(default)s)"
    )
    parser.add_argument("--bases", action="store_true", help="make the bases that are missing, and nothing else")
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.bases:
        for task in chosen.tasks:
            if not (BASES / task).exists():
                make_base(task)
        return
    if chosen.quick:
        chosen.tasks, chosen.methods, chosen.seeds = ["insert"], ["dsrl", "residual_sac"], [0]
        shutil.rmtree(RUNS / "quick", ignore_errors=True)
    results = chosen.out / ("refine_quality_quick" if chosen.quick else "refine_quality")
    if chosen.quick:
        shutil.rmtree(results, ignore_errors=True)
    cases = [
        Case(task, method, seed, chosen.quick, results)
        for task in chosen.tasks
        for seed in chosen.seeds
        for method in TASKS[task].methods
        if method in chosen.methods
    ]
    without = sorted({case.task for case in cases if not (BASES / case.task).exists()})
    if without and not chosen.report:
        parser.error(f"no base of {', '.join(without)} yet; --bases --tasks {' '.join(without)} makes it")
    if not chosen.report:
        play([case for case in cases if not case.result.exists()], chosen.jobs)
    rows = rows_of(results)
    methods = over_tasks(rows)
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows, "methods": methods}
    path = results.with_suffix(".json")
    publish(path, report, table(rows, COLUMNS) + "\n\n" + table(methods, OVER_TASKS), result(rows))
    tables = {"refine_quality": markdown(rows, COLUMNS), "refine_quality_methods": markdown(methods, OVER_TASKS)}
    page(path, *tables.values())
    if chosen.out == RESULTS and not chosen.quick:
        for name, text in tables.items():
            embed(CHOOSING, name, text)


if __name__ == "__main__":
    main()
