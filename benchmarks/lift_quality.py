"""LIFT's recipe: a robot that learnt in many simulated worlds goes on in one that is new, with a model of it.

    python benchmarks/lift_quality.py [--quick] [--robots ...] [--variants ...] [--seeds 0 1 2] [--jobs 1] [--report]

Stage 1, once for each robot, is `experiment=lift_base`: SAC in worlds of random mass and friction. Stage 2 has a world
of which no factor is as simulated (``CHANGED``), and ``TICKS`` of its ticks:

* ``base``: the policy of stage 1 as it is.
* ``carried``: `experiment=lift` with `critic_from=`: the critic of stage 1 too.
* ``fresh``: the control of the critic: the same with a critic that begins anew.
* ``sac``: the control of the model: `method=sac` from the same policy and critic, as many updates for each tick, all
  of them on real rows, and noise on what is played.

Each last policy, and not a chosen one, plays ``EPISODES`` fresh episodes of the new world without noise, whose seeds
are the same for all. Networks and rollouts are smaller than LIFT's. A run leaves one JSON file in
`results/lift_quality/`; runs that are there are not repeated.

RESULT has for each robot and variant the mean return, over the seeds, as a multiple of the base's (``hopper_carried``,
...; -1: no run), and ``missing``, the number of runs that are not there.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, embed, machine, markdown, play_apart, publish, results_of, run_options, table

from burnish.finetune import evaluate, load, refine
from burnish.policies.runs.run import read_metrics
from burnish.sim.locomotion.settings import HopperConfig, Walker2dConfig
from burnish.sim.randomize import FactorsConfig

RUNS = Path(__file__).resolve().parents[1] / "runs" / "lift_quality"
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "methods" / "mbpo.md"
CHANGED = FactorsConfig(mass=1.2, friction=0.8)
ROBOTS = {"hopper": HopperConfig(factors=CHANGED), "walker2d": Walker2dConfig(factors=CHANGED)}
VARIANTS = ("carried", "fresh", "sac")
FIRST, TICKS, EPISODES = 300_000, 6000, 100  # decisions of stage 1, ticks and judged episodes of stage 2
SIZES = [128, 128]
UPDATES = 2  # of each real tick
COLUMNS = {"robot": "", "variant": "", "seeds": "d", "return": ".0f", "worst": ".0f", "over_base": ".2f"}


def base_of(robot: str, quick: bool) -> Path:
    """Stage 1, made once."""
    out = RUNS / ("quick" if quick else "full") / robot
    settings: dict[str, Any] = {"sac.agent.hidden": SIZES, "sac.critic.hidden": SIZES, "loop.updates_per_decision": 0.1}
    settings |= {"total": FIRST, "threads": 1, "eval.episodes": 10, "eval.worlds": 10, "resume": True}
    settings |= {"total": 1000, "loop.warmup": 500, "eval.confirm": 2} if quick else {}
    refine(None, robot, experiment="lift_base", out=out, **settings)
    return out


def settings_of(variant: str, base: Path, robot: str, quick: bool) -> dict[str, Any]:
    critic = {} if variant == "fresh" else {"critic_from": str(base)}
    loop: dict[str, Any] = {"warmup": 100 if quick else 500, "updates_per_decision": UPDATES}
    if variant == "sac":
        sac = {"actor_lr": 1e-4, "tau": 0.02, "alpha": 0.05, "critic": {"hidden": SIZES}}
        return {
            "method": "sac",
            "worlds": 1,
            "discount": {"gamma": 0.99, "per": "step"},
            "loop": loop,
            "sac": sac,
        } | critic
    found: dict[str, Any] = {"experiment": "lift", "twin": robot, "inner.sac.critic.hidden": SIZES, **critic}
    found |= {f"inner.loop.{name}": x for name, x in loop.items()}
    found |= {"refit": 500, "refit_updates": 200, "model.updates": 500, "model.hidden": SIZES, "rollouts": 5}
    found |= {"imagined_worlds": 125, "capacity": 20_000, "depth.first": 5, "depth.last": 10, "depth.end": 1500}
    return found | ({"refit": 200, "model.updates": 20, "refit_updates": 10} if quick else {})


def played(robot: str, variant: str, seed: int, kept: Path, quick: bool) -> None:
    """One run of stage 2, in a process of its own, written to ``kept``."""
    torch.set_num_threads(1)
    base, began = RUNS / ("quick" if quick else "full") / robot, time.process_time()
    ticks = 300 if quick else TICKS
    settings = {**settings_of(variant, base, robot, quick), "total": ticks, "threads": 1, "eval.episodes": 1}
    run = refine(str(base), ROBOTS[robot], seed=seed, **settings)
    row = {"robot": robot, "variant": variant, "seed": seed, "ticks": ticks, **judged(run.policy, robot, quick)}
    row |= {"minutes": (time.process_time() - began) / 60}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row) + "\n", encoding="utf-8")
    sys.stderr.write(f"{kept.stem}: {statistics.mean(row['returns']):.0f}\n")


def judged(policy: Any, robot: str, quick: bool) -> dict[str, Any]:
    found = evaluate(policy, ROBOTS[robot], 8 if quick else EPISODES, seed=1000, greedy=True)
    return {"returns": [round(float(x), 2) for x in found.returns]}


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each robot the base, and the variants over their seeds."""
    rows = []
    for robot in ROBOTS:
        of_base = [statistics.mean(x["returns"]) for x in found if (x["robot"], x["variant"]) == (robot, "base")]
        for variant in ("base", *VARIANTS):
            means = [statistics.mean(x["returns"]) for x in found if (x["robot"], x["variant"]) == (robot, variant)]
            if means and of_base:
                row = {"robot": robot, "variant": variant, "seeds": len(means), "return": statistics.mean(means)}
                rows.append(row | {"worst": min(means), "over_base": statistics.mean(means) / of_base[0]})
    return rows


def main() -> None:
    parser = run_options(__doc__)
    parser.add_argument("--robots", nargs="+", choices=ROBOTS, default=list(ROBOTS), help="default: %(default)s")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: %(default)s")
    chosen = parser.parse_args()
    results = results_of("lift_quality", chosen)
    if chosen.quick:
        chosen.robots, chosen.seeds = ["hopper"], [0]
        shutil.rmtree(RUNS / "quick", ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    cases = [
        (r, v, s, results / f"{r}-{v}-{s}.json") for r in chosen.robots for s in chosen.seeds for v in chosen.variants
    ]
    left = [] if chosen.report else [(*case, chosen.quick) for case in cases if not case[3].exists()]
    for robot in dict.fromkeys(case[0] for case in left):
        base, kept = base_of(robot, chosen.quick), results / f"{robot}-base.json"
        if not kept.exists():
            row = {"robot": robot, "variant": "base", **judged(load(base), robot, chosen.quick)}
            row["decisions"] = max(x["step"] for x in read_metrics(base))
            kept.write_text(json.dumps(row) + "\n", encoding="utf-8")
    play_apart(played, left, chosen.jobs)
    rows = rows_of([json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))])
    result: dict[str, float] = {f"{robot}_{variant}": -1.0 for robot in ROBOTS for variant in VARIANTS}
    result |= {f"{row['robot']}_{row['variant']}": row["over_base"] for row in rows if row["variant"] != "base"}
    result["missing"] = len(ROBOTS) * len(VARIANTS) * 3 - sum(row["seeds"] for row in rows if row["variant"] != "base")
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, COLUMNS), result)
    if chosen.out == RESULTS and not chosen.quick and rows:
        embed(DOCUMENT, "lift_quality", markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
