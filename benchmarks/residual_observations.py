"""Residual methods with and without sight of what their base's chunk hides, the phase and the queue (`core/views.py`).

The same base, experiment, budget and seeds; `method.observe=[phase,queue]` is the only difference. Each refined policy,
the last one and not a chosen one, plays the same fresh seeds. Reported: success for each task, method and seed, and the
mean over seeds of what seeing both gains, with its standard error.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine, options, publish, table

from burnish.finetune import evaluate, load, refine

BASES = Path(__file__).resolve().parent / "bases"
TASKS, METHODS, SEEDS = ("insert", "push"), ("residual_ppo", "residual_td3"), (0, 1, 2)
EPISODES = 400
WHAT = {"plain": [], "seeing": ["phase", "queue"]}


def refined(task: str, method: str, seed: int, quick: bool) -> dict[str, Any]:
    """One pair of refinements."""
    base, row = load(BASES / task / "policy"), {"task": task, "method": method, "seed": seed}
    less: dict[str, Any] = {"total": 3000} if quick else {}
    start = time.perf_counter()
    for name, observe in WHAT.items():
        run = refine(base, experiment=f"{task}/{method}", observe=observe, seed=seed, threads=1, **less)
        played = evaluate(run.policy, episodes=40 if quick else EPISODES, seed=seed + 1000)
        row[name] = played.summary()["success_rate"]
    return row | {"gain": row["seeing"] - row["plain"], "minutes": (time.perf_counter() - start) / 60}


def main() -> None:
    chosen = options(__doc__).parse_args()
    torch.set_num_threads(1)
    cases = [("insert", "residual_ppo")] if chosen.quick else [(task, method) for task in TASKS for method in METHODS]
    rows, result = [], {}
    for task, method in cases:
        gains = []
        for seed in SEEDS[: 1 if chosen.quick else None]:
            rows.append(refined(task, method, seed, chosen.quick))
            gains.append(rows[-1]["gain"])
            sys.stderr.write(f"{task} {method} seed {seed}: {rows[-1]['plain']:.3f}, seeing {rows[-1]['seeing']:.3f}\n")
        result[f"{task}_{method}_gain"] = statistics.mean(gains)
        if len(gains) > 1:
            result[f"{task}_{method}_error"] = statistics.stdev(gains) / len(gains) ** 0.5
    columns = {"task": "", "method": "", "seed": "", "plain": ".3f", "seeing": ".3f", "gain": "+.3f", "minutes": ".1f"}
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    name = "residual_observations_quick.json" if chosen.quick else "residual_observations.json"
    publish(chosen.out / name, report, table(rows, columns), result)


if __name__ == "__main__":
    main()
