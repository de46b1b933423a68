"""Residuals on absolute joint targets, with and without an offset that lasts (`core/offset.py`).

Robots of LeRobot are told where each joint shall be. A base for them is imitated here, on `insert` and `push` with
`env.action=joint_target`, by the mean of a least-squares fit, which like ACT acts the same way each time. The same
base, method, budget and seeds; `method.offset` is the only difference. Each refined policy, the last one and not a
chosen one, plays the same fresh seeds as the base. The free baseline imitates the same demonstrations for about as long
as a refinement takes.

    python benchmarks/absolute_targets.py [--quick] [--seeds 3] [--report]

A run leaves one JSON file in `results/absolute_targets/`; runs that are there are not repeated, unless of another base
or other settings.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bases import demonstrations, imitated, world
from measure import machine, markdown, options, page, publish, table
from refine_bases import RUNS, fingerprint_of
from refine_settings import TASKS as REFINED

from burnish.finetune import evaluate, load, refine
from burnish.policies.build import describe
from burnish.policies.runs.checkpoint import save
from burnish.sim.build import origin_of
from burnish.sim.desk import ActionMode, DeskConfig, Reward


@dataclass(frozen=True)
class Task:
    level: str  # of the expert that is imitated
    demonstrations: int  # so few on insert that more imitation does not do what refinement is to do
    imitation: int  # updates of the base
    reward: Reward
    bound: float  # of the correction, in units of half a joint's range


# The bounds are the same with and without an offset, and were not tuned: at 0.25 m from the foot of the arm, 0.01 of
# half a joint's range is about 5 mm.
TASKS = {
    "insert": Task("noisy", 40, 4000, Reward.sparse, 0.01),
    "push": Task("noisy", 100, 4000, Reward.dense, 0.02),
}
OFFSET = {"half_life": 1.0, "rise": 0.25}  # seconds
METHOD, BUDGET, WORLDS = "residual_ppo", 100_000, 50
LEARNT = ("plain", "offset")
FREE, FREE_UPDATES = "more_imitation", 8000  # as long as a refinement, of 48 s of one core
EPISODES, UNTRIED = 400, {"episodes": 1, "worlds": 1, "confirm": 1}  # a run chooses nothing on the way


def settings(task: str, what: str) -> dict[str, Any]:
    own = {"offset": OFFSET} if what == "offset" else {}
    return {"bound": TASKS[task].bound, "discount": {"gamma": REFINED[task].gamma, "per": "step"}, **own}


def configured(task: str) -> DeskConfig:
    return replace(world(task), action=ActionMode.joint_target)


def base_of(task: str, quick: bool, steps: int | None = None, seed: int = 2) -> Path:
    """Made once."""
    steps, count = (100, 20) if quick else (steps or TASKS[task].imitation, TASKS[task].demonstrations)
    place = RUNS.parent / "absolute_targets" / f"{task}-{count}-{steps}-{seed}"
    if not (place / "policy").exists():
        data = demonstrations(configured(task), TASKS[task].level, count)
        policy = imitated(data, steps, seed, "least_squares")
        config = describe(policy, {"env": origin_of(configured(task))})
        save(place / "policy", config=config, state=policy.state_dict())
    return place / "policy"


def facts(task: str, what: str, quick: bool) -> dict[str, Any]:
    """A run counts as long as these are what they were."""
    return {"weights": fingerprint_of(base_of(task, quick)), "settings": settings(task, what)}


def run(task: str, what: str, seed: int, quick: bool) -> dict[str, Any]:
    """One refinement, or one more imitation, and the base on the same episodes."""
    base = base_of(task, quick)
    start = time.process_time()
    if what == FREE:
        policy = load(base_of(task, quick, FREE_UPDATES, seed=100 + seed))
    else:
        words: dict[str, Any] = {"total": 2000 if quick else BUDGET, "worlds": 16 if quick else WORLDS, "threads": 1}
        words |= {"loop": {"decisions_per_update": 60}, "eval": UNTRIED, **settings(task, what)}
        env = replace(configured(task), reward=TASKS[task].reward)
        policy = refine(load(base), env, method=METHOD, seed=seed, **words).policy
    minutes = (time.process_time() - start) / 60
    alone, last = (
        evaluate(x, configured(task), episodes=20 if quick else EPISODES, seed=seed + 1000).summary()["success_rate"]
        for x in (load(base), policy)
    )
    row = {"task": task, "what": what, "seed": seed, "base": alone, "last": last, "gain": last - alone}
    return row | {"minutes": minutes, **facts(task, what, quick)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = chosen.out / ("absolute_targets_quick" if chosen.quick else "absolute_targets")
    if chosen.quick:
        shutil.rmtree(results, ignore_errors=True)
    seeds = range(1 if chosen.quick else chosen.seeds)
    kinds = list(itertools.product(TASKS, LEARNT if chosen.quick else (*LEARNT, FREE)))
    rows: list[dict[str, Any]] = []
    for seed, (task, what) in itertools.product(seeds, kinds):
        kept = results / f"{task}-{what}-{seed}.json"
        row = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
        if not chosen.report and (row is None or row | facts(task, what, chosen.quick) != row):
            row = run(task, what, seed, chosen.quick)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(row) + "\n", encoding="utf-8")
            sys.stderr.write(f"{kept.stem}: {row['base']:.3f} -> {row['last']:.3f}, {row['minutes']:.1f} minutes\n")
        rows += [] if row is None else [row]
    result: dict[str, float] = {}
    for task, what in kinds:
        played = [row for row in rows if (row["task"], row["what"]) == (task, what)]
        if played:
            result[f"{task}_base"] = statistics.mean(row["base"] for row in played)
            result[f"{task}_{what}"] = statistics.mean(row["last"] for row in played)
    columns = {"task": "", "what": "", "seed": "", "base": ".3f", "last": ".3f", "gain": "+.3f", "minutes": ".1f"}
    rows.sort(key=lambda row: (row["task"], row["what"], row["seed"]))
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, columns), result)
    if not chosen.quick:
        page(results, markdown(rows, columns))


if __name__ == "__main__":
    main()
