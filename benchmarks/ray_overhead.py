"""How much longer a comparison takes as tasks of Ray than as local processes, on the same cores of this machine.

    python benchmarks/ray_overhead.py [--quick] [--out DIR]

`burnish compare` plays the same runs of `reach` from one small base on two cores, by `on=local jobs=2` and on a Ray
node of this machine with two cores, now one first and now the other. A turn is the whole command, from its start to the
written comparison. The node starts once before, as a cluster does that is there anyway; `cluster_s` is the time of
that. Both must end in the same numbers, or nothing is written. Numbers are medians over the turns; other work on the
machine falls on both.

RESULT: ``ray_overhead``, the seconds of a turn on Ray over those of the local turn beside it, less 1 (at most 0.05).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from measure import machine, options, publish, table

from burnish.policies.cli.cli import main as burnish

CORES = 2
COLUMNS = {"turn": "d", "local_s": ".1f", "ray_s": ".1f", "overhead": "+.3f"}


def verb(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = burnish(list(words))
    if status:
        raise RuntimeError(f"burnish {words[0]} ended with status {status}: {said.getvalue()[-500:]}")


def compared(words: list[str], out: Path) -> tuple[float, list[Any]]:
    """Seconds of a comparison, and its numbers without those of the clock."""
    began = time.monotonic()
    verb(*words, f"out={out}")
    spent = time.monotonic() - began
    runs = json.loads((out / "compare.json").read_text())["runs"]
    return spent, [(row["seed"], row["final"], [point[2:] for point in row["curve"]]) for row in runs]


def main() -> None:
    chosen = options(__doc__).parse_args()
    torch.set_num_threads(1)
    try:
        ray: Any = import_module("ray")
    except ImportError:
        sys.exit("there is no Ray: pip install 'burnish[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    turns, seeds, budget = (1, 1, 400) if chosen.quick else (4, 4, 100_000)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        verb("collect", "env=reach", "expert=noisy", "episodes=8", f"out={folder}/data")
        small = ["policy.net.mlp.hidden=[32]", "policy.steps=2", "train.steps=50", "eval.episodes=4", "eval.confirm=4"]
        verb("pretrain", "policy=flow", *small, f"data={folder}/data", f"out={folder}/base")
        words = ["compare", f"base={folder}/base", "methods=residual_ppo", f"seeds={seeds}", f"budget={budget}"]
        fewer = ["episodes=8", "evaluation_episodes=8", "confirm_episodes=8"] if chosen.quick else []
        words += [*fewer, "videos=0", "evaluations=2"]
        began = time.monotonic()
        ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False, logging_level="warning")
        cluster_s = time.monotonic() - began
        ways = {"local": ["on=local", f"jobs={CORES}"], "ray": ["on=ray"]}
        for turn in range(turns):
            order = ["local", "ray"][:: 1 if turn % 2 == 0 else -1]  # a machine that slows down falls on both
            found = {way: compared([*words, *ways[way]], folder / f"{way}-{turn}") for way in order}
            (local_s, mine), (ray_s, theirs) = found["local"], found["ray"]
            if mine != theirs:
                raise RuntimeError(f"the runs differ: {mine} here and {theirs} on Ray")
            rows.append({"turn": turn, "local_s": local_s, "ray_s": ray_s, "overhead": ray_s / local_s - 1})
        ray.shutdown()
    about = machine(torch.device("cpu"))
    setting = {"cores": CORES, "seeds": seeds, "budget": budget, "ray": ray.__version__, "cluster_s": cluster_s}
    report = {"machine": about, "quick": chosen.quick, "setting": setting, "rows": rows}
    head = f"{about['processor']}, {CORES} cores, load {about['load']}; the node starts in {cluster_s:.1f} s"
    result = {"ray_overhead": statistics.median(row["overhead"] for row in rows)}
    name = "ray_overhead_quick" if chosen.quick else "ray_overhead"
    publish(chosen.out / f"{name}.json", report, f"{head}\n\n{table(rows, COLUMNS)}", result)


if __name__ == "__main__":
    main()
