"""Whether another revision of this tree learns the same, bit for bit: what a change of the house must not change.

    python benchmarks/same_numbers.py [--before REVISION] [--quick]

Each method refines the frozen base of `insert` for a short while, in a process of its own, once by the code of
``--before`` (a worktree of git, removed afterwards) and once by the code of this tree, both through the command line.
Compared are the weights of all networks and the states of optimisers, replays and generators in the last checkpoint:
every tensor that the other revision has. State that is new is counted.
Offline methods learn from episodes that the same tree has recorded, so recording is compared as well.

RESULT ``equal``: methods whose checkpoints are equal; ``of``: how many were played.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import torch
from measure import machine, options, publish, table
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "benchmarks" / "bases" / "insert"
SILENT = ["seed=3", "threads=1", "trial.episodes=2", "trial.worlds=2", "trial.confirm=2", "save_every=1000000"]
SHORT = ["method.loop.warmup=64", "method.loop.initial_updates=8"]
METHODS = {
    "dsrl": ["finetune", f"policy.path={BASE}", "experiment=insert/dsrl", "total=400", *SHORT],
    "residual_ppo": ["finetune", f"policy.path={BASE}", "experiment=insert/residual_ppo", "total=4000"],
    "reinflow": ["finetune", f"policy.path={BASE}", "experiment=insert/reinflow", "total=1000"],
    "iql": ["offline", "method=iql", "data={data}", "steps=60", "batch=32"],
}
QUICK = ("dsrl", "iql")


def played(tree: Path, words: list[str]) -> None:
    """A command of the Burnish in ``tree``, whose folders are linked as the package."""
    subprocess.run(["make", "-C", str(tree), "dev"], check=True, capture_output=True)
    entry = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["burnish"].split(":")[0]
    # The folder stands before whatever is installed.
    code = f"import sys; sys.path.insert(0, {str(tree / '.dev')!r}); from {entry} import main; sys.exit(main())"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {done.returncode}: {done.stderr[-500:]}")


def tensors(folder: Path) -> dict[str, str]:
    """File and name of every tensor of the newest checkpoint -> a hash of its type, shape and bits."""
    files = sorted((folder / "checkpoints").rglob("*.safetensors"))
    newest = max(file.relative_to(folder).parts[1] for file in files)
    found = {}
    for file in (file for file in files if file.relative_to(folder).parts[1] == newest):
        for name, x in load_file(file).items():
            bits = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            place = f"{file.parent.relative_to(folder / 'checkpoints' / newest)}:{name}"  # in whichever of its files
            found[place] = hashlib.sha256(f"{x.dtype}{tuple(x.shape)}".encode() + bits).hexdigest()
    return found


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
    with tempfile.TemporaryDirectory() as made:
        other = Path(made) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(other), chosen.before], check=True, capture_output=True)
        try:
            for method in methods:
                before, now = (
                    learnt(tree, method, Path(made) / name / method) for name, tree in (("then", other), ("now", ROOT))
                )
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
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True, capture_output=True)
    head = ["git", "-C", str(ROOT), "rev-parse", chosen.before]
    revision = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "before": revision, "rows": rows}
    name = "same_numbers_quick.json" if chosen.quick else "same_numbers.json"
    text = table(rows, {"method": "", "tensors": "d", "changed": "d", "new": "d", "equal": ""})
    publish(chosen.out / name, report, text, {"equal": sum(row["equal"] for row in rows), "of": len(rows)})


if __name__ == "__main__":
    main()
