"""MBPO against SAC at equal real control ticks, from nothing, on tasks of Gymnasium.

    python benchmarks/mbpo_quality.py [--quick] [--tasks ...] [--variants ...] [--seeds 0 1 2] [--jobs 1] [--report]

* ``sac``: `method=sac` as shipped, one update for each real tick.
* ``sac_more``: the control of the updates: the same with as many as MBPO makes, all of them on real rows.
* ``mbpo``: `method=mbpo` as shipped: SAC with 95 % of each batch imagined.
* ``shuffled``: the control of the model: MBPO whose model is fitted to the outcomes of other actions.

All have the SAC that `from_scratch.py` compares with Stable-Baselines3, and the warm-up of the task below, which is a
part of the budget. Every ``EVERY`` ticks the policy is tried without noise on ``EPISODES`` fresh episodes, which are
not counted. **Reached** is the number of real ticks at which it first had the level of the task. **Return** is that at
the end of the budget. RESULT has the mean return over the seeds of each task and variant; what is not there is -inf.

A run leaves one JSON file in `results/mbpo_quality/`; runs that are there are not repeated.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from from_scratch import SETTINGS
from measure import machine, play_apart, publish, results_of, run_options, table

from burnish.finetune.api import refine
from burnish.finetune.world_model.ticks import Ticks

EVERY, EPISODES = 250, 10
VARIANTS = ("sac", "sac_more", "mbpo", "shuffled")
UPDATES = 10  # for each real tick, of all but sac
# Ticks, the warm-up among them; the level that counts as reached; and the depth of rollouts, where not as shipped.
TASKS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {"ticks": 1500, "warmup": 500, "level": -250.0, "depth": {}},
    "Hopper-v5": {"ticks": 10_000, "warmup": 1000, "level": 1000.0, "depth": {}},
}
LESS = {"ticks": 80, "warmup": 40}


def settings(variant: str, warmup: int, depth: dict[str, int], quick: bool) -> dict[str, Any]:
    s = SETTINGS["sac"]
    network = {"hidden": [16] if quick else s["hidden"]}
    loop = {"warmup": warmup, "batch": s["batch"], "updates_per_decision": 1 if variant == "sac" else UPDATES}
    sac = {"loop": loop, "sac": {"lr": s["lr"], "actor_lr": s["lr"], "agent": network, "critic": network}}
    if variant.startswith("sac"):
        return {"method": "sac", **sac}
    small: dict[str, Any] = {"refit": 20, "refit_updates": 5, "imagined_worlds": 50, "model": {"updates": 20}}
    return {"method": "mbpo", "inner": sac, "depth": depth, **(small if quick else {})}


def misled() -> None:
    """From now on models of this process are fitted to outcomes that belong to other actions."""
    split = Ticks.split

    def shuffled(self: Ticks) -> tuple[dict[str, Any], dict[str, Any]]:
        fitted, held = split(self)
        order = torch.randperm(len(fitted["reward"]), generator=torch.Generator().manual_seed(0))
        moved = {key: x[order] for key, x in fitted["next_obs"].items()}
        return {**fitted, "next_obs": moved, "reward": fitted["reward"][order]}, held

    Ticks.split = shuffled


def played(task: str, variant: str, seed: int, kept: Path, quick: bool) -> None:
    """One run, in a process of its own, written to ``kept``."""
    chosen = {**TASKS[task], **(LESS if quick else {})}
    if variant == "shuffled":
        misled()
    curve: list[tuple[int, float]] = []
    latest: dict[str, float] = {}

    def note(step: int, numbers: Mapping[str, float]) -> None:
        latest.update({key: float(x) for key, x in numbers.items() if key in ("model/r2", "imagined/reward")})
        if "eval/return_mean" in numbers:
            curve.append((step, float(numbers["eval/return_mean"])))

    run: dict[str, Any] = {"worlds": 1, "threads": 1, "log_every": EVERY, "eval_every": 40 if quick else EVERY}
    run |= {"eval.episodes": 2 if quick else EPISODES, "eval.worlds": 2 if quick else EPISODES, "eval.greedy": True}
    began = time.process_time()
    method = settings(variant, chosen["warmup"], chosen["depth"], quick)
    refine(None, task, total=chosen["ticks"], seed=seed, on_log=note, **run, **method)
    found = {
        "task": task,
        "variant": variant,
        "seed": seed,
        "ticks": chosen["ticks"],
        "reached": min((step for step, score in curve if score >= chosen["level"]), default=None),
        "return": curve[-1][1],
        "r2": latest.get("model/r2"),
        "curve": curve,
        "core_s": time.process_time() - began,
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found) + "\n", encoding="utf-8")
    sys.stderr.write(f"{kept.stem}: {found['return']:.1f} after {chosen['ticks']} ticks\n")


def main() -> None:
    parser = run_options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: %(default)s")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: %(default)s")
    chosen = parser.parse_args()
    results = results_of("mbpo_quality", chosen)
    if chosen.quick:
        chosen.tasks, chosen.seeds = ["Pendulum-v1"], [0]
    cases = [
        (t, v, s, results / f"{t}-{v}-{s}.json") for s in chosen.seeds for t in chosen.tasks for v in chosen.variants
    ]
    if not chosen.report:
        left = [(*case, chosen.quick) for case in cases if not case[3].exists()]
        play_apart(played, left, chosen.jobs)
    rows: list[dict[str, Any]] = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))
    ]
    result = {}
    for task in TASKS:
        for variant in VARIANTS:
            found = [row["return"] for row in rows if (row["task"], row["variant"]) == (task, variant)]
            result[f"{task.partition('-')[0].lower()}_{variant}"] = statistics.mean(found) if found else float("-inf")
    columns = {"task": "", "variant": "", "seed": "", "ticks": "", "reached": "", "return": ".1f", "core_s": ".0f"}
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, columns), result)


if __name__ == "__main__":
    main()
