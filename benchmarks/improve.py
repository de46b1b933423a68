"""`burnish improve` against every fixed method, from the same bases, with the same control steps of training.

    python benchmarks/improve.py [--quick] [--tasks ...] [--seeds 0 1 2] [--jobs 1] [--report]

A run is `burnish improve policy.path=BASE env=... steps=100000 seed=SEED` with its defaults, in a process of its own
with one thread. It leaves one JSON file in `results/improve/`; runs that are there are not repeated, and one that was
killed goes on from its last share. The fixed methods are the committed runs of `refine_quality.py`. Where ``searched``
says so, each has the settings that won a search on its task, which `improve` does not have; elsewhere it has those of
its experiment. Runs that played more than the budget, but for their last round, are left out.

The policies that runs deliver are compared, on the seeds of the stream "refine_quality", which were used for no
training, tuning or choice. The best fixed method of a task is the one with the highest mean there, so luck speaks for
it; a task without any has a dash. Steps of training are equal; those of evaluation stand beside them, because a race
plays more of them.

RESULT, over the tasks with a fixed method: ``improve_median_change``, the median of the mean of `improve` less that of
the best fixed method; ``improve_regret``, by how much the best fixed method is better in the worst task (0 where it is
better in none).
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, embed, machine, markdown, page, publish, results_of, run_options, table
from refine_bases import RUNS, base_folder, configured, fingerprint
from refine_minutes import timed
from refine_quality import SUITE
from refine_runs import valid_runs
from refine_settings import BUDGET, TASKS

from burnish.finetune.improve.race import RACE
from burnish.policies.core.config import to_data
from burnish.policies.measure.evaluate import Evaluation
from burnish.sim.build import env_name

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "improve.md"
ROUND = 0.05  # of the budget, that a run may play beyond it: it ends with a whole round of its worlds
COLUMNS = {"task": "", "base": ".3f", "searched": "", "best_fixed": "", "fixed": ".3f", "improve": ".3f"}
COLUMNS |= {"worst": ".3f", "change": "+.3f", "runs": "d", "chosen": "", "steps": ",.0f"}
COLUMNS |= {"evaluation_steps": ",.0f", "minutes": ".1f"}


@dataclass(frozen=True)
class Case:
    """One run of `improve`."""

    task: str
    seed: int
    results: Path
    quick: bool

    @property
    def result(self) -> Path:
        return self.results / self.task / f"{self.seed}.json"

    @property
    def folder(self) -> Path:
        return RUNS.parent / ("improve_quick" if self.quick else "improve") / f"{self.task}-{self.seed}"

    def command(self) -> list[str]:
        """In the world, with the rewards, that the fixed methods had."""
        env = configured(f"experiment={self.task}/residual_ppo").env
        words = [] if env is None else [f"env={env_name(env)}", *_changed(env)]
        words += ["steps=6000", "eval.episodes=8", "eval.confirm=8"] if self.quick else [f"steps={BUDGET}"]
        words += [f"seed={self.seed}", "threads=1", f"out={self.folder}", "resume=true"]
        return ["improve", f"policy.path={base_folder(self.task, 1)}", f"eval.worlds={SUITE.worlds}", *words]


def _changed(env: Any) -> list[str]:
    usual = to_data(type(env)())
    return [f"env.{key}={x}" for key, x in to_data(env).items() if x != usual[key]]


def play(case: Case) -> None:
    case.folder.parent.mkdir(parents=True, exist_ok=True)
    with case.folder.with_suffix(".log").open("a", encoding="utf-8") as log:
        status, spent = timed(case.command(), log)
    if status:
        sys.stderr.write(f"{case.task} {case.seed} ended with status {status}; see {log.name}\n")
        return
    told = json.loads((case.folder / RACE).read_text(encoding="utf-8"))
    scores = SUITE.scores(case.task, SUITE.examined(case.folder, 16 if case.quick else SUITE.episodes))
    steps: dict[str, int] = {}
    for share in told["shares"]:
        steps[share["entrant"]] = steps.get(share["entrant"], 0) + share["steps"]
    found = {
        "task": case.task,
        "seed": case.seed,
        "base": fingerprint(case.task),
        "budget": BUDGET,
        "chosen": told["chosen"] if told["delivered"] else "base",
        "delivered": scores,
        "steps": steps,
        "evaluation_steps": told["evaluation_steps"],
        "shares": told["shares"],
        "failed": told["failed"],
        "machine": machine(torch.device("cpu")),
        "minutes": spent["cpu_s"] / 60,  # of processor time, of the last sitting
    }
    case.result.parent.mkdir(parents=True, exist_ok=True)
    case.result.write_text(json.dumps(found) + "\n", encoding="utf-8")
    shutil.rmtree(case.folder)
    sys.stderr.write(f"{case.task} {case.seed}: {statistics.mean(scores):.3f}, {found['chosen']}\n")
    sys.stderr.flush()


def fixed() -> dict[str, dict[str, float]]:
    """Task -> method -> mean of what its runs from the first base delivered."""
    scores: dict[str, dict[str, list[float]]] = {}
    for run in valid_runs(SUITE, RESULTS / SUITE.name):
        within = run["budget"] == BUDGET and run["steps"] <= (1 + ROUND) * BUDGET
        if run["base"] == fingerprint(run["task"]) and within:
            methods = scores.setdefault(run["task"], {})
            methods.setdefault(run["method"], []).append(statistics.mean(run["delivered"]))
    return {task: {name: statistics.mean(x) for name, x in methods.items()} for task, methods in scores.items()}


def rows(results: Path) -> list[dict[str, Any]]:
    """One for each task that `improve` has runs of."""
    found, known = [], fixed()
    for task in TASKS:
        runs = [json.loads(path.read_text()) for path in sorted((results / task).glob("*.json"))]
        runs = [run for run in runs if run["base"] == fingerprint(task)]
        if not runs:
            continue
        means = [statistics.mean(run["delivered"]) for run in runs]
        best, score = max(known.get(task, {}).items(), key=lambda method: method[1], default=(None, None))
        base = SUITE.scores(task, Evaluation.load(RESULTS / SUITE.name / task / "base.json"))
        found.append(
            {
                "task": task,
                "base": statistics.mean(base),
                "searched": "yes" if (RESULTS / SUITE.name / "search" / task).is_dir() else "no",
                "best_fixed": best,
                "fixed": score,
                "improve": statistics.mean(means),
                "worst": min(means),
                "change": None if score is None else statistics.mean(means) - score,
                "runs": len(runs),
                "chosen": " ".join(run["chosen"] for run in runs),
                "steps": statistics.mean(sum(run["steps"].values()) for run in runs),
                "evaluation_steps": statistics.mean(run["evaluation_steps"] for run in runs),
                "minutes": statistics.mean(run["minutes"] for run in runs),
            }
        )
    return found


def main() -> None:
    parser = run_options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = results_of("improve", chosen)
    if chosen.quick:
        chosen.tasks, chosen.seeds = ["push"], [0]
        shutil.rmtree(RUNS.parent / "improve_quick", ignore_errors=True)
    cases = [Case(task, seed, results, chosen.quick) for seed in chosen.seeds for task in chosen.tasks]
    if not chosen.report:
        left = [case for case in cases if not case.result.exists()]
        _ = [case.command() for case in left]  # Hydra knows no threads
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(play, left))
    publish_rows(results, rows(results), chosen.quick)


def publish_rows(results: Path, found: Sequence[dict[str, Any]], quick: bool) -> None:
    """The table on the screen, in its files, and in the document where these are the committed ones."""
    changes = [row["change"] for row in found if row["change"] is not None]
    result = {
        "improve_median_change": statistics.median(changes) if changes else -1.0,
        "improve_regret": max(0.0, -min(changes)) if changes else -1.0,
    }
    text = table(found, COLUMNS) if found else "no run is there yet"
    path = results.with_suffix(".json")
    publish(path, {"quick": quick, "rows": list(found), "machine": machine(torch.device("cpu"))}, text, result)
    if found:
        page(path, markdown(found, COLUMNS))
        if results.parent == RESULTS and not quick:
            embed(DOCUMENT, "improve", markdown(found, COLUMNS))


if __name__ == "__main__":
    main()
