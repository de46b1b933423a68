"""`burnish quickstart` with ten seeds: does what a newcomer sees first work every time?

    python benchmarks/quickstart.py [--quick] [--seeds 0 1 ... 9] [--jobs 1] [--report]

Each seed is `burnish quickstart seed=SEED` in a process of its own: other demonstrations, another base, other runs,
other episodes. The better of its two refined policies is chosen on 50 seeds kept for selection, and judged, beside the
base, on 200 others. Each seed leaves one JSON file, so seeds that are there are not repeated; one that was
stopped goes on. Minutes are those of the whole command.

RESULT: ``pooled_low`` and ``worst``, the lower end of the 95 % Wilson interval of the chosen policies' episodes
together and the worst of them; ``base`` and ``base_worst``, the mean success of the bases and that of the best of them;
``minutes`` of the slowest seed; ``seeds``.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measure import machine, markdown, options, page, publish, table

from burnish.finetune.quickstart import SETTINGS
from burnish.policies.cli.verb_process import verb_command
from burnish.policies.measure.statistics import wilson
from burnish.policies.runs.manifest import plain_yaml

RUNS = Path(__file__).resolve().parents[1] / "runs" / "quickstart_seeds"
# Shows that every part works; nothing is learnt in so little time.
QUICK = ("demonstrations=8", "steps=40", "methods=residual_ppo", "budget=3000", "evaluation_episodes=4", "episodes=8")
QUICK += ("videos=0",)
COLUMNS = {"seed": "d", "base": ".3f", "method": "", "selected_by": ".3f", "success": ".3f", "minutes": ".1f"}


def play(seed: int, folder: Path, result: Path, words: Sequence[str]) -> None:
    out, began = folder / str(seed), time.perf_counter()
    fresh = not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(
            verb_command(["quickstart", f"seed={seed}", f"out={out}", *words]),
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    minutes = (time.perf_counter() - began) / 60
    found = json.loads((out / "compare" / "compare.json").read_text(encoding="utf-8"))
    asked = plain_yaml((out / SETTINGS).read_text(encoding="utf-8"))
    asked.pop("seed")
    row = {
        "seed": seed,
        "settings": asked,
        "refinements": {run["method"]: settings_of(out / "compare" / run["folder"]) for run in found["runs"]},
        "base": found["base"]["final"],
        "episodes": found["base"]["episodes"],
        "method": found["best"]["method"],
        "selected_by": found["best"]["selected_by"],
        "success": found["best"]["final"],
        "minutes": minutes if fresh else None,  # of one that was continued nobody knows them
        "methods": {each["method"]: each["mean"] for each in found["methods"]},
        "machine": machine(torch.device("cpu")),
    }
    result.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(out)
    sys.stderr.write(f"seed {seed}: {row['base']:.3f} -> {row['success']:.3f} ({row['method']})\n")


def settings_of(run: Path) -> dict[str, Any]:
    return plain_yaml((run / "config.yaml").read_text(encoding="utf-8"))["method"]


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    wins = sum(round(row["success"] * row["episodes"]) for row in rows)
    return {
        "pooled_low": wilson(wins, sum(row["episodes"] for row in rows))[0],
        "worst": min(row["success"] for row in rows),
        "base": statistics.mean(row["base"] for row in rows),
        "base_worst": max(row["base"] for row in rows),
        "minutes": max((row["minutes"] for row in rows if row["minutes"] is not None), default=-1.0),
        "seeds": len(rows),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)), help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, which share the cores (%(default)s)")
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    chosen = parser.parse_args()
    results = chosen.out / ("quickstart_quick" if chosen.quick else "quickstart")
    folder = RUNS / ("quick" if chosen.quick else "full")
    if chosen.quick:
        chosen.seeds = chosen.seeds[:1]
        for old in (results, folder):
            shutil.rmtree(old, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    files = {seed: results / f"{seed}.json" for seed in chosen.seeds}
    if not chosen.report:
        with ThreadPoolExecutor(chosen.jobs) as pool:
            words = QUICK if chosen.quick else ()
            list(pool.map(lambda seed: files[seed].exists() or play(seed, folder, files[seed], words), files))
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("[0-9]*.json"))]
    if not rows:
        parser.error("no seed has been played yet")
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, COLUMNS), result_of(rows))
    page(results.with_suffix(".json"), markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
