"""The path of an owner of a LeRobot checkpoint, from `pip install` to a refined policy: docs/lerobot.md, as printed.

    python benchmarks/lerobot_owner.py [--quick] [--report]

The commands of the page are run in its order, by a shell, in a fresh clone of this repository; blocks that call LeRobot
in its environment, all others in the environment that the page makes. A command that fails ends the run. The checkpoint
is the ACT policy that LeRobot trained for `lerobot_round_trip.py`, which has to be run before.

RESULT: ``minutes`` and ``cpu_minutes`` of all commands, and the success of the checkpoint and of the policy that came
back to LeRobot, as `lerobot-eval` found them.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lerobot_round_trip import HOME, LEROBOT, read_evaluation
from measure import embed, machine, markdown, options, page, publish, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "lerobot.md"
COLUMNS = {"command": "", "minutes": ".1f", "cpu_minutes": ".1f"}
# A quick run makes each command shorter, and plays in the environments that are there.
SHORTER = {
    "minutes=10": "steps=600 eval.episodes=4 eval.confirm=4",
    " against=": " eval.episodes=4 against=",
    "n_episodes=100": "n_episodes=2",
    "batch_size=25": "batch_size=2",
    "pip install": "pip install --no-deps --no-build-isolation",
}


def commands(text: str) -> list[tuple[str, bool]]:
    """Those of a page, in order, and whether each is for the environment of LeRobot."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(line, "lerobot-" in block) for block in blocks for line in block.splitlines()]


def called(command: str) -> str:
    """The first words, for a table."""
    words = command.split()[: 3 if command.startswith("python") else 2]
    return " ".join(word for word in words if "=" not in word)


def run(command: str, clone: Path, variables: dict[str, str], lerobot: bool) -> dict[str, Any]:
    place = HOME / "bin" if lerobot else clone / ".venv" / "bin"
    known = {**os.environ, **variables, "PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    began, spent = time.perf_counter(), _spent()
    with open(clone / "path.log", "a", encoding="utf-8") as log:
        log.write(f"\n$ {command}\n")
        log.flush()
        status = subprocess.run(command, shell=True, cwd=clone, stdout=log, stderr=log, env=known, check=False)
    found = {"command": called(command), "printed": command, "minutes": (time.perf_counter() - began) / 60}
    found["cpu_minutes"] = (_spent() - spent) / 60
    sys.stderr.write(f"{found['command']}: {found['minutes']:.1f} minutes\n")
    if status.returncode:
        raise RuntimeError(f"{command}\nfailed: {(clone / 'path.log').read_text()[-2000:]}")
    return found


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(path: Path, quick: bool) -> None:
    trained = HOME.parent / ("lerobot_round_trip_quick" if quick else "lerobot_round_trip") / "act"
    if not (trained / "checkpoints" / "last").exists():
        raise SystemExit(f"there is no LeRobot policy in {trained}; lerobot_round_trip.py makes it")
    clone = HOME.parent / path.stem
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    shutil.copytree(trained, clone / "outputs" / "train" / "act", symlinks=True)
    asked = commands(PAGE.read_text(encoding="utf-8"))
    if quick:
        (clone / ".venv").symlink_to(sys.prefix)
        asked = [(line, lerobot) for line, lerobot in asked if not re.search("venv|constraints", line)]
        for long, short in SHORTER.items():
            asked = [(line.replace(long, short), lerobot) for line, lerobot in asked]
    variables: dict[str, str] = {}
    rows = []
    for line, lerobot in asked:
        if line.startswith("export "):
            variables |= dict([line.removeprefix("export ").split("=", 1)])
        elif "refined/plugin" not in line or (clone / "refined" / "plugin").exists():  # LeRobot's own kinds need none
            rows.append(run(line, clone, variables, lerobot))
    result = {key: float(sum(row[key] for row in rows)) for key in ("minutes", "cpu_minutes")}
    for policy in ("base", "refined"):
        found = read_evaluation(clone / "outputs" / "eval" / policy)
        result[policy] = sum(found) / len(found)
    about = {"machine": machine(torch.device("cpu")), "quick": quick, "lerobot": LEROBOT}
    publish(path, {**about, "rows": rows}, table(rows, COLUMNS), result)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing; write the table of the JSON file again")
    chosen = parser.parse_args()
    path = chosen.out / ("lerobot_owner_quick.json" if chosen.quick else "lerobot_owner.json")
    if not chosen.report:
        measure(path, chosen.quick)
    written = json.loads(path.read_text(encoding="utf-8"))
    base, refined = (f"{written['result'][name]:.0%}" for name in ("base", "refined"))
    text = markdown(written["rows"], COLUMNS)
    text += f"\nIn `lerobot-eval` the checkpoint succeeds in {base} of the episodes, what came back in {refined}.\n"
    page(path, text)
    if not chosen.quick:
        embed(PAGE, "lerobot_owner", text)


if __name__ == "__main__":
    main()
