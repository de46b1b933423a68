"""Whether another revision of this tree learns the same, bit for bit: what a change of the house must not change.

    python benchmarks/same_numbers.py [--before REVISION] [--quick]

Each method refines the frozen base of `insert` for a short while, in a process of its own, once by the code of
``--before`` (a worktree of git, removed afterwards) and once by the code of this tree, both through the command line.
Compared are the weights of all networks and the states of optimisers, replays and generators in the last checkpoint:
every tensor that the other revision has, but copies of the base. State that is new is counted.
Offline methods learn from episodes that the same tree has recorded, so recording is compared as well.

RESULT ``equal``: methods whose checkpoints are equal; ``of``: how many were played.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import machine, options, publish, table
from revisions import ROOT, entry, linked, translated, worktree

from burnish.policies.runs.checkpoint import Checkpoint, load

BASE = ROOT / "benchmarks" / "bases" / "insert"
SILENT = ["seed=3", "threads=1", "eval.episodes=2", "eval.worlds=2", "eval.confirm=2", "save_every=1000000"]
SHORT = ["method.loop.warmup=64", "method.loop.initial_updates=8"]
METHODS = {
    "dsrl": ["finetune", f"policy.path={BASE}", "experiment=insert/dsrl", "total=400", *SHORT],
    "residual_ppo": ["finetune", f"policy.path={BASE}", "experiment=insert/residual_ppo", "total=4000"],
    "dppo": ["finetune", f"policy.path={BASE}", "experiment=insert/dppo", "total=1000"],
    "reinflow": ["finetune", f"policy.path={BASE}", "experiment=insert/reinflow", "total=1000"],
    "iql": ["offline", "method=iql", "data={data}", "steps=60", "batch=32"],
}
QUICK = ("dsrl", "iql")


def played(tree: Path, words: list[str]) -> None:
    """A command of the Burnish in ``tree``, whose folders are linked as the package."""
    words = translated(tree, words)
    # The folder stands before whatever is installed.
    code = f"import sys; sys.path.insert(0, {str(linked(tree))!r}); from {entry(tree)} import main; sys.exit(main())"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {done.returncode}: {done.stderr[-500:]}")


def tensors(folder: Path) -> dict[str, str]:
    """Part and name of every tensor of the newest checkpoint -> a hash of its type, shape and bits."""
    found: dict[str, str] = {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            bits = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            found[name] = hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + bits).hexdigest()
        elif isinstance(value, dict | list | tuple):
            if isinstance(value, dict) and value.get("segments"):  # of a replay, whose rows were one tensor before
                value = {**value, **joined(value["segments"]), "segments": []}
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                note(f"{name}.{key}", part)

    def visit(name: str, saved: Checkpoint) -> None:
        note(name, saved.state)
        for child, inner in saved.children.items():
            visit(f"{name}/{child}", inner)

    visit("", load(max((folder / "checkpoints").iterdir())))
    return found


def joined(trees: list[dict[str, Any]]) -> dict[str, Any]:
    values = {key: [tree[key] for tree in trees] for key in trees[0]}
    return {key: torch.cat(x) if isinstance(x[0], torch.Tensor) else joined(x) for key, x in values.items()}


def learnt(tree: Path, method: str, folder: Path) -> dict[str, str]:
    words = METHODS[method]
    if "data={data}" in words:
        played(tree, ["collect", "env=insert", "episodes=6", "worlds=2", f"out={folder}/data"])
        words = [word.format(data=folder / "data") for word in words]
    played(tree, [*words, *SILENT, f"out={folder}/run"])
    return tensors(folder / "run")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--before", default="HEAD", help="the revision to compare with (default: %(default)s)")
    chosen = parser.parse_args()
    methods = QUICK if chosen.quick else tuple(METHODS)
    rows = []
    with tempfile.TemporaryDirectory() as made, worktree(chosen.before, Path(made) / "before") as other:
        for method in methods:
            before, now = (
                learnt(tree, method, Path(made) / name / method) for name, tree in (("then", other), ("now", ROOT))
            )
            before = {name: x for name, x in before.items() if "actor.frozen." not in name}
            changed = [name for name, x in before.items() if now.get(name) != x]
            rows.append(
                {
                    "method": method,
                    "tensors": len(before),
                    "changed": len(changed),
                    "new": len(now.keys() - before.keys()),
                    "equal": not changed,
                }
            )
            sys.stderr.write(f"{method}: {', '.join(changed[:5]) or 'equal'}\n")
    head = ["git", "-C", str(ROOT), "rev-parse", chosen.before]
    revision = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "before": revision, "rows": rows}
    name = "same_numbers_quick.json" if chosen.quick else "same_numbers.json"
    text = table(rows, {"method": "", "tensors": "d", "changed": "d", "new": "d", "equal": ""})
    publish(chosen.out / name, report, text, {"equal": sum(row["equal"] for row in rows), "of": len(rows)})


if __name__ == "__main__":
    main()
