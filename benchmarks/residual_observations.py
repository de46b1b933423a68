"""Residual methods with and without sight of what their base's chunk hides, the phase and the queue (`core/views.py`).

The same base, experiment, budget and seeds; `method.observe=[phase,queue]` is the only difference. Each refined policy,
the last one and not a chosen one, plays the same fresh seeds. Reported: success for each task, method and seed, and the
mean over seeds of what seeing both gains, with its standard error.

    python benchmarks/residual_observations.py [--quick] [--seeds 0 1 2] [--jobs 1] [--report]

A pair of runs leaves one JSON file in `results/residual_observations/`; pairs that are there are not repeated.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, embed, machine, markdown, publish, results_of, run_options, table

from burnish.finetune import evaluate, load, refine

BASES = Path(__file__).resolve().parent / "bases"
TASKS, METHODS = ("insert", "push"), ("residual_ppo", "residual_td3")
EPISODES = 400
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "choosing.md"
MEANS_OF = ("plain", "seeing", "gain")
MEANS = {"task": "", "method": "", "seeds": "d", "plain": ".3f", "seeing": ".3f", "gain": "+.3f", "error": ".3f"}
WHAT = {"plain": [], "seeing": ["phase", "queue"]}


def refined(task: str, method: str, seed: int, kept: Path, quick: bool) -> None:
    """One pair of refinements, written to ``kept``."""
    torch.set_num_threads(1)
    base, row = load(BASES / task / "policy"), {"task": task, "method": method, "seed": seed}
    less: dict[str, Any] = {"total": 3000} if quick else {}
    start = time.process_time()
    for name, observe in WHAT.items():
        run = refine(base, experiment=f"{task}/{method}", observe=observe, seed=seed, threads=1, **less)
        played = evaluate(run.policy, episodes=40 if quick else EPISODES, seed=seed + 1000)
        row[name] = played.summary()["success_rate"]
    row |= {"gain": row["seeing"] - row["plain"], "minutes": (time.process_time() - start) / 60}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row) + "\n", encoding="utf-8")
    sys.stderr.write(f"{kept.stem}: {row['plain']:.3f}, seeing {row['seeing']:.3f}\n")


def mean_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Over the seeds of a task and a method."""
    if not rows:
        return None
    gains, means = [row["gain"] for row in rows], {key: statistics.mean(row[key] for row in rows) for key in MEANS_OF}
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
    return {"task": rows[0]["task"], "method": rows[0]["method"], "seeds": len(rows), **means, "error": error}


def main() -> None:
    parser = run_options(__doc__)
    chosen = parser.parse_args()
    results = results_of("residual_observations", chosen)
    seeds, tasks = (chosen.seeds[:1], TASKS[:1]) if chosen.quick else (chosen.seeds, TASKS)
    pairs = list(itertools.product(tasks, METHODS[: len(tasks)]))
    cases = {results / f"{t}-{m}-{seed}.json": (t, m, seed) for seed in seeds for t, m in pairs}
    if not chosen.report:
        with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
            left = [(*case, kept, chosen.quick) for kept, case in cases.items() if not kept.exists()]
            list(pool.map(refined, *zip(*left, strict=True)) if left else [])
    rows, result = [json.loads(kept.read_text(encoding="utf-8")) for kept in sorted(cases) if kept.exists()], {}
    means = [mean_of([row for row in rows if (row["task"], row["method"]) == pair]) for pair in pairs]
    for mean in filter(None, means):
        result |= {
            f"{mean['task']}_{mean['method']}_{key}": mean[key] for key in ("gain", "error") if mean[key] is not None
        }
    columns = {"task": "", "method": "", "seed": "", "plain": ".3f", "seeing": ".3f", "gain": "+.3f", "minutes": ".1f"}
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, columns), result)
    if chosen.out == RESULTS and not chosen.quick and all(means):
        embed(DOCUMENT, "residual_observations", markdown([mean for mean in means if mean], MEANS))


if __name__ == "__main__":
    main()
