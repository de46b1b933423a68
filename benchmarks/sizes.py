"""The memory and the disk that a method takes, in sizes of its base; and the size of the house itself.

    python benchmarks/sizes.py [--before REVISION] [--quick]

Each method refines a flow policy whose weights outweigh all else (1024 wide; agents and critics are 8 wide), in a
process of its own, once by the code of ``--before`` (a worktree of git, removed afterwards) and once by this tree.

* **live**: bytes of all tensors when a checkpoint is written, each place in memory once, without gradients, over those
  of the base: the base itself, copies of it, what is trained, and the moments of its optimiser.
* **added**: bytes that one more checkpoint adds to the disk, over those of the base; a file with a name in both counts
  for the older.
* **The house**: lines of the product, files over 300 lines, imports that would have to go until no module
  imports itself through others, and pairs of files that share eight lines in a row.

``--quick`` measures the methods of RESULT by this tree only; the figures before are those of the committed full result.

RESULT ``NAME_live`` and ``NAME_added`` of this tree for dppo, dsrl and residual_td3; ``lines``, ``lines_before``,
``long_files``, ``cycles``, ``duplicates``.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, embed, machine, markdown, options, publish, table
from revisions import ROOT, entry, linked, translated, worktree

BEFORE = "c2fc547"  # the last revision before modules moved into rooms
ROOMS = ("policies", "sim", "finetune", "offline", "real_robot")
LONG, SHARED = 300, 8  # lines
SILENT = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2", "threads=1"]
PPO = ["method.ppo.value.hidden=[8]", "method.loop.decisions_per_update=4"]
LOOP = ["method.loop.warmup=8", "method.loop.batch=8", "method.loop.capacity=64", "method.loop.initial_updates=1"]
METHODS: dict[str, list[str]] = {
    "dppo": ["method=dppo", "method.trained_steps=1", *PPO],
    "reinflow": ["method=reinflow", "method.noise.hidden=[8]", *PPO],
    "flow_sde": ["method=flow_sde", *PPO],
    "residual_ppo": ["method=residual_ppo", *PPO, "method.agent.hidden=[8]"],
    "residual_td3": ["method=residual_td3", *LOOP, "method.td3.critic.hidden=[8]", "method.td3.agent.hidden=[8]"],
    "dsrl": ["method=dsrl", *LOOP, "method.sac.critic.hidden=[8]", "method.sac.agent.hidden=[8]"],
    "expo": ["method=expo", *LOOP, "method.critic.hidden=[8]", "method.edit.hidden=[8]"],
    "dppo, lora": ["method=dppo", "method.trained_steps=1", "method.train.part=lora", *PPO],
}
REPORTED = ("dppo", "residual_td3", "dsrl")

# In a process of its own: when a checkpoint is begun, the bytes of all tensors.
MEASURED = """
import gc, json, sys
sys.path.insert(0, sys.argv[1])
import safetensors.torch, torch
from importlib import import_module
main, live, save = import_module(sys.argv[2]).main, [0], safetensors.torch.save_file

def measured(tensors, path):
    if not tensors:  # of the folder as a whole, before any of its parts
        gc.collect()
        found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        places = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
        for x in found:
            if x.is_leaf and x.grad is not None:
                places.pop(x.grad.untyped_storage().data_ptr(), None)
        live[0] = max(live[0], sum(places.values()))
    save(tensors, path)

safetensors.torch.save_file = measured
status = main(sys.argv[4:])
open(sys.argv[3], "w").write(json.dumps(live[0]))
sys.exit(status)
"""


def burnish(tree: Path, words: list[str], note: Path) -> int:
    """A command of the Burnish in ``tree``; the most bytes of tensors that were alive at a checkpoint."""
    words = translated(tree, words)
    command = [sys.executable, "-c", MEASURED, str(linked(tree)), entry(tree), str(note), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {done.returncode}: {done.stderr[-500:]}")
    return json.loads(note.read_text())


def base_of(tree: Path, folder: Path) -> int:
    """Makes the base in ``folder``; the bytes of its weights."""
    data, note = f"{folder}/data", folder / "live"
    burnish(tree, ["collect", "env=point_reach", "env.max_steps=12", "episodes=4", f"out={data}"], note)
    net = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[1024,1024,1024]", "train.steps=1", "train.batch=8"]
    burnish(tree, ["pretrain", *net, f"data={data}", f"out={folder}/bc", *SILENT], note)
    return max((folder / "bc/checkpoints").iterdir()).joinpath("policy/state.safetensors").stat().st_size


def sizes(tree: Path, method: str, folder: Path) -> tuple[float, float]:
    """The live bytes, and those that one more checkpoint adds, in sizes of the base."""
    base = max((folder / "bc/checkpoints").iterdir()).joinpath("policy/state.safetensors").stat().st_size
    out = folder / method.replace(", ", "-")
    words = ["worlds=2", "total=48", "save_every=16", "log_every=16", f"policy.path={folder}/bc", f"out={out}"]
    live = burnish(tree, ["finetune", *METHODS[method], *words, *SILENT], folder / "live")
    older, newest = sorted((out / "checkpoints").iterdir())[-2:]
    files = [{f.stat().st_ino: f.stat().st_size for f in x.rglob("*") if f.is_file()} for x in (older, newest)]
    return live / base, sum(size for inode, size in files[1].items() if inode not in files[0]) / base


# ---- the house ----


def product(tree: Path) -> dict[str, str]:
    """The name of every module of the product, and its text."""
    found = (path for room in ROOMS for path in sorted((tree / room).rglob("*.py")))
    return {".".join(path.relative_to(tree).with_suffix("").parts): path.read_text() for path in found}


def imports(name: str, text: str) -> Iterator[str]:
    """The modules that a module needs to be imported: not those of functions, or for types alone."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            near = name.split(".")[: -node.level]
            place = ".".join([*near, *((node.module or "").split(".") if node.module else [])])
            yield place
            yield from (f"{place}.{alias.name}" for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def cycles(graph: dict[str, set[str]]) -> int:
    """How many imports have to go until none leads back to where it began."""
    gone = 0
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return gone
        except CycleError as found:
            needed, user, *_ = found.args[1]
            graph[user].discard(needed)
            gone += 1


def house(tree: Path) -> dict[str, int]:
    modules = product(tree)
    graph = {name: {*imports(name, text)} & {*modules} - {name} for name, text in modules.items()}
    windows: dict[tuple[str, ...], set[str]] = {}
    for name, text in modules.items():
        imported = (x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Import | ast.ImportFrom))
        left_out = {line for x in imported for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)}
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
        code = [line for number, line in lines if len(line) > 3 and number not in left_out and line[0] != "#"]
        for start in range(len(code) - SHARED + 1):
            windows.setdefault(tuple(code[start : start + SHARED]), set()).add(name)
    pairs = {pair for names in windows.values() for pair in itertools.combinations(sorted(names), 2)}
    return {
        "lines": sum(len(text.splitlines()) for text in modules.values()),
        "files": len(modules),
        "long_files": sum(len(text.splitlines()) > LONG for text in modules.values()),
        "cycles": cycles(graph),
        "duplicates": len(pairs),
    }


def refined(trees: dict[str, Path], methods: Iterable[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        for when, tree in trees.items():
            (Path(made) / when).mkdir()
            base_of(tree, Path(made) / when)
        for method in methods:
            row: dict[str, Any] = {"method": method, "live_before": None, "added_before": None}
            for when, tree in trees.items():
                new = when == "before" and "lora" in method  # which that revision may not know
                found = (None, None) if new else sizes(tree, method, Path(made) / when)
                row |= {f"live_{when}": found[0], f"added_{when}": found[1]}
            rows.append(row)
            sys.stderr.write(f"{row}\n")
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--before", default=BEFORE, help="the revision to compare with (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.quick:
        told = json.loads((RESULTS / "sizes.json").read_text())
        rows, houses = refined({"now": ROOT}, REPORTED), [told["house"][0], {"revision": "now", **house(ROOT)}]
        chosen.before = told["before"]
    else:
        with tempfile.TemporaryDirectory() as made, worktree(chosen.before, Path(made) / "tree") as other:
            trees = {"before": other, "now": ROOT}
            rows, houses = refined(trees, METHODS), [{"revision": x, **house(tree)} for x, tree in trees.items()]
    columns = {"method": "", **{f"{x}_{when}": ".2f" for x in ("live", "added") for when in ("before", "now")}}
    whole = {"revision": "", **dict.fromkeys(("lines", "files", "long_files", "cycles", "duplicates"), ",d")}
    result = {
        f"{row['method']}_{x}": row[f"{x}_now"] for row in rows if row["method"] in REPORTED for x in ("live", "added")
    }
    result |= {"lines": houses[1]["lines"], "lines_before": houses[0]["lines"]}
    result |= {name: houses[1][name] for name in ("long_files", "cycles", "duplicates")}
    report = {
        "machine": machine(torch.device("cpu")),
        "quick": chosen.quick,
        "before": chosen.before,
        "rows": rows,
        "house": houses,
    }
    text = f"{table(rows, columns)}\n\n{table(houses, whole)}"
    publish(chosen.out / ("sizes_quick.json" if chosen.quick else "sizes.json"), report, text, result)
    if not chosen.quick:
        page = ROOT / "docs" / "architecture.md"
        embed(page, "sizes", markdown(rows, columns))
        embed(page, "house", markdown(houses, whole))


if __name__ == "__main__":
    main()
