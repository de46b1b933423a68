"""Refinement in a learned world against refinement in the world itself: how many real control ticks a success takes.

    python benchmarks/imagine_quality.py [--quick] [--seeds 0 1 2] [--jobs 1] [--report]

From one frozen base, with the settings of the shipped experiments:

* ``imagine``: `method=imagine method.inner=dsrl`, on 15 seeds, each with trials, models and an agent of its own.
* ``unguarded``: the negative control. The same without any trial between fits: one model, refined in for as long, no
  gap that stops it and no guard. Imagined success rises; real success need not.
* ``dsrl``: the same method in the world itself, with its shipped settings, tried every 50 episodes' worth of decisions.

**Ticks** are control ticks of the real world until a policy was first tried at ``LEVEL`` or above. Those of trials are
counted for ``imagine``, because a run cannot do without them; the evaluations of ``dsrl`` on its way are not, which
favours it. Evaluations before and after a run count for neither. **Success** is that of the last policy on 400 fresh
seeds. ``insert_fewer_steps`` is the median over the seeds of dsrl's ticks over the median of imagine's; a run that
never reaches the level counts as all its ticks.

A run leaves one JSON file in `results/imagine_quality/`; runs that are there are not repeated.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import machine, publish, results_of, run_options, table
from refine_runs import timed

from burnish.policies.build import load_policy
from burnish.policies.controllers import controller_for
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import world_for

BASES = Path(__file__).resolve().parent / "bases"
LEVEL, EPISODES = 0.95, 400
IMAGINE = ["experiment=insert/imagine"]
VARIANTS = {
    "imagine": IMAGINE,
    # One round of as many imagined decisions, and nothing that could notice.
    "unguarded": [*IMAGINE, "total=1440", "method.imagined=40000", "method.gap=2", "method.guard.kind=none"],
    "dsrl": ["experiment=insert/dsrl", "eval_every=750"],
}
LESS = {
    "imagine": ["total=1500", "method.imagined=200", "method.inner.loop.warmup=64", "method.model.updates=20"],
    "unguarded": ["total=1500", "method.imagined=200", "method.inner.loop.warmup=64", "method.model.updates=20"],
    "dsrl": ["total=1500"],
}


def command(variant: str, seed: int, out: Path, quick: bool) -> list[str]:
    words = ["finetune", f"policy.path={BASES / 'insert'}", *VARIANTS[variant], f"seed={seed}", f"out={out}"]
    words += ["threads=1", "log_every=16", "eval.worlds=50", "eval.episodes=100", "eval.confirm=100"]
    few = ["eval.episodes=16", "eval.confirm=16", "eval_every=0"]
    return [*words, *LESS[variant], *few] if quick else words


def played(variant: str, seed: int, kept: Path, quick: bool) -> None:
    """One run, written to ``kept``."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        with log.open("w", encoding="utf-8") as file:
            status, spent = timed(command(variant, seed, out, quick), file)
        if status:
            sys.stderr.write(f"{kept.stem} ended with status {status}: {log.read_text()[-300:]}\n")
            return
        policy, origin = load_policy(out)
        env = world_for(policy.spec, origin["env"], 50, torch.device("cpu"))
        seeds = evaluation_seeds(32 if quick else EPISODES, stream="imagine_quality", base=seed)
        last = evaluate(env, controller_for(policy, 50), seeds).summary()
        rows = read_metrics(out)
    tried = "eval/success_rate" if variant == "dsrl" else "real/score"
    curve = [(row["control_steps"], row[tried]) for row in rows if tried in row and row.get("control_steps")]
    curve = [point for i, point in enumerate(curve) if i == 0 or point[1] != curve[i - 1][1]]
    imagined = [(row["control_steps"], row["imagined/promised"]) for row in rows if "imagined/promised" in row]
    reached = [steps for steps, score in curve if score >= LEVEL]
    found = {
        "variant": variant,
        "seed": seed,
        "reached": min(reached, default=None),
        "ticks": max(row.get("control_steps", 0) for row in rows),
        "success": last["success_rate"],
        "low": last["success_low"],
        "high": last["success_high"],
        "promised": imagined[-1][1] if imagined else None,
        "curve": curve,
        "minutes": spent["cpu_s"] / 60,
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found) + "\n", encoding="utf-8")
    sys.stderr.write(f"{kept.stem}: {found['success']:.3f}, level reached after {found['reached']} ticks\n")


def main() -> None:
    parser = run_options(__doc__, range(15))
    chosen = parser.parse_args()
    results = results_of("imagine_quality", chosen)
    seeds = chosen.seeds[:1] if chosen.quick else chosen.seeds
    # The control and the method in the world itself need no more seeds than tell them from it.
    cases = [(v, s) for s in seeds for v in VARIANTS if v == "imagine" or s < 5]
    if not chosen.report:
        left = [(v, s, kept) for v, s in cases if not (kept := results / f"{v}-{s}.json").exists()]
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(lambda case: played(case[0], case[1], case[2], chosen.quick), left))
    files = [results / f"{v}-{s}.json" for v, s in sorted(cases)]
    rows: list[dict[str, Any]] = [json.loads(kept.read_text(encoding="utf-8")) for kept in files if kept.exists()]
    ticks = {v: [row["reached"] or row["ticks"] for row in rows if row["variant"] == v] for v in VARIANTS}
    success = {v: [row["success"] for row in rows if row["variant"] == v] for v in VARIANTS}
    result: dict[str, float] = {f"insert_{v}": statistics.median(x) if x else -1 for v, x in success.items()}
    both = ticks["dsrl"] and ticks["imagine"]
    fewer = statistics.median(ticks["dsrl"]) / statistics.median(ticks["imagine"]) if both else -1
    columns = {"variant": "", "seed": "", "reached": "", "ticks": "", "success": ".3f", "low": ".3f", "high": ".3f"}
    columns |= {"promised": "", "minutes": ".1f"}
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, columns), {**result, "insert_fewer_steps": fewer})


if __name__ == "__main__":
    main()
