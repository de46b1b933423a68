"""Specialists of two arms, refined from one base, and one policy distilled from both (the recipe of COMPASS).

    python benchmarks/cross_embodiment.py [--quick] [--tasks ...] [--seeds 0 1 2] [--jobs 1] [--report]

The base has imitated one arm, so101. The arm long has other links (`env.arm=long`), so that equal joint angles lead
elsewhere. For each task there are, beside the base and the base at noise 0,

* **specialist**: a residual, refined from the base on one arm alone, with the shipped experiment of the task as it is;
* **other**, the control: the specialist of the other arm;
* **generalist**: `burnish distill` of both, from `RECORDED` episodes of each on its arm, the successful ones alone;
* **imitation**, which is free of RL: the same network and updates, on `RECORDED` successes of the base on each arm,
  the same for all seeds. The files say how many episodes the base played for them (``base_played``).

All are last policies, and all play the same `EPISODES` fresh episodes on each arm, so that changes are paired. An
interval is over seeds and episodes together, of a single policy over its episodes alone. ``told`` is the share of fresh
episodes whose first observation tells the arm by a linear rule, learnt from as many others; one half is chance.

RESULT, for each task: the success of each policy on the arm where it is worse, mean over seeds, and ``told``; -1 where
there are no runs.

A seed of a task leaves one JSON file in `results/cross_embodiment/`, and what is there is not repeated. One that was
stopped goes on from what lies in `runs/cross_embodiment/`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RESULTS, embed, machine, markdown, play_apart, publish, results_of, run_options, table
from refine_bases import fingerprint_of

from burnish.finetune import evaluate, load
from burnish.policies.cli.cli import main as burnish
from burnish.policies.data.read import read_dataset
from burnish.policies.measure.evaluate import evaluation_seeds
from burnish.policies.measure.statistics import mean_interval, pooled_interval
from burnish.sim.build import make_env, world_from
from burnish.sim.desk import ArmKind

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "docs" / "methods" / "distill.md"
METHODS = {"insert": "residual_ppo", "push": "residual_td3"}  # task -> experiment, the best residual one there is
ARMS = ("so101", "long")
EPISODES, RECORDED, SEED = 256, 200, 2000
POLICIES = ("base", "base_greedy", "other", "specialist", "imitation", "generalist")
IMITATION = {"train.steps": 4000, "chunk.horizon": 8, "chunk.execute": 4}  # as the base was imitated
LESS = ["total=100", "worlds=10", "method.loop.decisions_per_update=10"]  # of PPO, which is tried


def base_of(task: str) -> Path:
    return HERE / "bases" / task / "policy"


def world(task: str, arm: str) -> Any:
    return replace(world_from(load(base_of(task)).origin["env"]), arm=ArmKind(arm))


def scores(policy: Any, task: str, quick: bool, greedy: bool = False) -> dict[str, list[int]]:
    """Arm -> success in each episode."""
    found = {}
    for arm in ARMS:
        played = evaluate(policy, world(task, arm), 20 if quick else EPISODES, seed=SEED, greedy=greedy)
        assert played.success is not None and played.repeatable, "pairs need both"
        found[arm] = [int(x) for x in played.success]
    return found


def do(*words: str) -> None:
    if burnish(list(words)):
        raise SystemExit(f"burnish {' '.join(words)} did not end well")


def folder(quick: bool, name: str) -> Path:
    return HERE.parent / "runs" / f"cross_embodiment{'_quick' * quick}" / name


def recordings(task: str, quick: bool) -> Path:
    """The first successes of the base, as many on each arm, as one set; how it played for them lies beside it."""
    root, count = folder(quick, f"{task}-base"), 3 if quick else RECORDED
    both, sets = root / "both", []
    if both.exists():
        return both
    for arm in ARMS:
        raw, won, kept = (root / f"{name}_{arm}" for name in ("played", "won", "kept"))
        acting = ["policy=checkpoint", f"policy.path={base_of(task)}", f"env={task}", f"env.arm={arm}"]
        played = list(read_dataset(raw)) if raw.exists() else []
        while sum(bool(x.success) for x in played) < count:
            do("collect", *acting, f"episodes={len(played) + 2 * count}", f"out={raw}", "resume=true")
            played = list(read_dataset(raw))
        for old in (won, kept):
            shutil.rmtree(old, ignore_errors=True)
        do("data", "convert", str(raw), "success=true", f"out={won}")
        do("data", "convert", str(won), f"episodes=0:{count}", f"out={kept}")
        sets.append(str(kept))
    do("data", "merge", *sets, f"out={both}")
    return both


def refined(task: str, seed: int, kept: Path, quick: bool) -> None:
    """The policies of one seed, in a process of its own, judged in ``kept``."""
    torch.set_num_threads(1)
    began, base = time.process_time(), base_of(task)
    root, both = folder(quick, f"{task}-{seed}"), recordings(task, quick)
    run = [f"seed={seed}", "threads=1", "eval.episodes=0"]
    imitation = IMITATION | ({"train.steps": 20} if quick else {})
    for arm in ARMS:
        words = [f"policy.path={base}", f"experiment={task}/{METHODS[task]}", f"env={task}", f"env.arm={arm}"]
        do("finetune", *words, *run, *(LESS if quick else []), f"out={root / arm}", "resume=true")
    student = ["policy=flow", *run, *(f"{name}={x}" for name, x in imitation.items()), "resume=true"]
    teachers = f"teachers=[{','.join(str(root / arm) for arm in ARMS)}]"
    do("distill", teachers, *student, f"episodes={40 if quick else RECORDED}", f"out={root / 'generalist'}")
    do("pretrain", *student, f"data={both}", f"out={root / 'imitation'}")
    found = {name: scores(load(root / name), task, quick) for name in (*ARMS, "generalist", "imitation")}
    row = {
        "task": task,
        "seed": seed,
        "method": METHODS[task],
        "fingerprint": fingerprint_of(base),
        "specialist": {arm: found[arm][arm] for arm in ARMS},
        "other": {arm: found[other][arm] for arm, other in zip(ARMS, ARMS[::-1], strict=True)},
        "generalist": found["generalist"],
        "imitation": found["imitation"],
        "distilled": len(read_dataset(root / "generalist" / "data")),
        "base_played": {arm: len(read_dataset(both.parent / f"played_{arm}")) for arm in ARMS},
        "core_s": time.process_time() - began,
    }
    write(kept, row)


def based(task: str, kept: Path, quick: bool) -> None:
    """The base alone, and whether the arms can be told apart."""
    torch.set_num_threads(1)
    base = load(base_of(task))
    greedy = scores(base, task, quick, greedy=True)
    row = {"task": task, "base": scores(base, task, quick), "base_greedy": greedy, "told": told(task)}
    write(kept, row | {"fingerprint": fingerprint_of(base_of(task))})


def told(task: str) -> float:
    """The share of first observations whose arm is known by least squares."""
    seeds = evaluation_seeds(2 * EPISODES, base=SEED)
    seen = [make_env(world(task, arm), len(seeds)).reset(seeds=seeds)["state"].double() for arm in ARMS]
    x = torch.stack([torch.cat([state, torch.ones(len(state), 1).double()], dim=1) for state in seen])
    sides = torch.tensor([-1.0, 1.0]).double()[:, None].expand(2, EPISODES)
    rule = torch.linalg.lstsq(x[:, EPISODES:].flatten(0, 1), sides.flatten()[:, None], driver="gelsd").solution[:, 0]
    return float(((x[:, :EPISODES] @ rule) * sides > 0).double().mean())


def write(kept: Path, row: dict[str, Any]) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row) + "\n", encoding="utf-8")
    means = {name: {arm: statistics.mean(row[name][arm]) for arm in ARMS} for name in POLICIES if name in row}
    sys.stderr.write(f"{kept.stem}: {means}\n")


def rows_of(task: str, results: Path) -> Iterator[dict[str, Any]]:
    """One for each arm and policy of a task. Files of another base do not count."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"{task}-*.json"))]
    found = [run for run in found if run["fingerprint"] == fingerprint_of(base_of(task))]
    for arm in ARMS:
        before = next((np.asarray(run["base"][arm]) for run in found if "base" in run), None)
        for policy in POLICIES:
            played = np.asarray([run[policy][arm] for run in found if policy in run])
            if not len(played):
                continue
            row = {"task": task, "arm": arm, "policy": policy, "seeds": len(played), "success": float(played.mean())}
            row |= {"worst": float(played.mean(1).min()), "change": None, "low": None, "high": None}
            if before is not None and policy != "base":
                change = played - before
                low, high = pooled_interval(change)[1:] if len(change) > 1 else mean_interval(change[0])
                row |= {"change": float(change.mean()), "low": low, "high": high}
            yield row


def main() -> None:
    parser = run_options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=METHODS, default=list(METHODS), help="default: %(default)s")
    chosen = parser.parse_args()
    results = results_of("cross_embodiment", chosen)
    if chosen.quick:
        chosen.tasks, chosen.seeds = ["insert"], [0]
        shutil.rmtree(folder(True, ""), ignore_errors=True)
    if not chosen.report:
        bases = [(task, results / f"{task}-base.json", chosen.quick) for task in chosen.tasks]
        play_apart(based, [case for case in bases if not case[1].exists()], chosen.jobs)
        runs = [(t, s, results / f"{t}-{s}.json", chosen.quick) for t in chosen.tasks for s in chosen.seeds]
        left = [case for case in runs if not case[2].exists()]
        play_apart(recordings, [(task, chosen.quick) for task in {case[0] for case in left}], 1)  # for all seeds
        play_apart(refined, left, chosen.jobs)
    rows, result = [row for task in METHODS for row in rows_of(task, results)], {}
    for task in METHODS:
        for policy in POLICIES:
            found = [row["success"] for row in rows if (row["task"], row["policy"]) == (task, policy)]
            result[f"{task}_{policy}"] = min(found, default=-1.0)
        kept = results / f"{task}-base.json"
        result[f"{task}_told"] = json.loads(kept.read_text(encoding="utf-8"))["told"] if kept.exists() else -1.0
    columns = {"task": "", "arm": "", "policy": "", "seeds": "", "success": ".3f", "worst": ".3f"}
    columns |= {"change": "+.3f", "low": "+.3f", "high": "+.3f"}
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, columns), result)
    if chosen.out == RESULTS and not chosen.quick:
        embed(DOCUMENT, "cross_embodiment", markdown(rows, columns))


if __name__ == "__main__":
    main()
