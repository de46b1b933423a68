"""Folders such as `burnish compare` and `burnish finetune` leave, with numbers made up to look like theirs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from burnish.finetune.__main__ import FinetuneConfig
from burnish.finetune.table import ONLINE
from burnish.policies.build import CheckpointConfig
from burnish.policies.cli.cli import main
from burnish.policies.core.config import to_data
from burnish.policies.measure.evaluate import Evaluation, compare, evaluation_seeds
from burnish.policies.measure.statistics import wilson
from burnish.policies.measure.video import Mp4Writer
from burnish.sim.build import ENVS

EPISODES, EXAM, BUDGET = 200, 64, 100_000
# Label -> method, success in the end, how soon (smaller is sooner), minutes.
METHODS = {
    "dsrl": ("dsrl", 0.995, 0.12, 5.2),
    "residual_sac": ("residual_td3", 0.98, 0.2, 5.9),
    "reinflow": ("reinflow", 0.96, 0.35, 2.1),
    "residual_ppo": ("residual_ppo", 0.97, 0.3, 1.8),
    "dppo": ("dppo", 0.79, 0.5, 3.4),
}
NAMES = ["tcp.x", "tcp.y", "tcp.z", "peg.x", "peg.y", "hole.x", "hole.y", "clearance"]


def comparison(folder: Path, *, seeds: int = 3, success: bool = True, films: int = 2, fail: bool = True) -> Path:
    """One base, five methods; the last run fails if asked to."""
    dice = random.Random(7)
    listed = evaluation_seeds(EPISODES)
    starts = {str(seed): _start(dice) for seed in listed}
    easy = [starts[str(seed)][5] + 0.5 * starts[str(seed)][4] for seed in listed]
    base = _evaluation(listed, easy, 0.43, success, dice)
    base.save(folder / "evaluations/base.json")
    runs = []
    for label, (method, level, pace, minutes) in METHODS.items():
        for seed in range(seeds):
            failed = fail and label == "dppo" and seed == seeds - 1
            runs.append(_run(folder, label, method, seed, level - 0.02 * seed, pace, minutes, failed, success, dice))
            if not failed:
                result = _evaluation(listed, easy, level - 0.02 * seed, success, dice)
                result.save(folder / f"evaluations/{label}-{seed}.json")
                runs[-1] |= _final(result, base, success)
    rows = [_row(label, [run for run in runs if run["method"] == label]) for label in METHODS]
    best = max((run for run in runs if run["final"] is not None), key=lambda run: run["final"])
    found = {
        "base": {"path": "runs/bc", "success": base.summary().get("success_rate")},
        "world": {"name": "insert" if success else "hopper", "config": {}},
        "budget": BUDGET,
        "goal": 0.9,
        "command": f"burnish compare base=runs/bc methods={','.join(METHODS)} seeds={seeds} budget={BUDGET}",
        "burnish": "0.1.0",
        "machine": {"processor": "AMD EPYC", "cores": 2, "torch": "2.13.0+cpu"},
        "criterion": "success" if success else "return",
        "runs": runs,
        "methods": rows,
        "best": {**{key: best[key] for key in ("method", "seed", "final", "low", "high")}, "selected_by": 1.0},
        "written_by_a_later_version": {"unknown": [1, 2, 3]},
    }
    write(folder / "compare.json", found)
    write(folder / "starts.json", {"names": NAMES, "values": starts})
    for k, seed in enumerate(listed[:films]):
        for label in ("base", *METHODS):
            outcome = "failure" if label == "base" and k == 0 else "success"
            film(folder / f"videos/{label}/seed_{seed}_{outcome}.mp4", shade=40 * len(label), seconds=2)
    return folder


def page(folder: Path, kind: str = "compare", *words: str) -> str:
    assert main(["report", f"{kind}={folder}", f"out={folder}/page.html", *words]) == 0
    return (folder / "page.html").read_text()


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def write_mp4(path: Path | str, frames: np.ndarray | Iterable[np.ndarray], fps: float) -> Path:
    """``frames`` is (T, H, W, 3) uint8, or anything that yields (H, W, 3) uint8."""
    writer = Mp4Writer(path, fps)
    try:
        for frame in frames:
            writer.add(frame)
    except BaseException:
        writer.discard()
        raise
    return writer.save()


def film(path: Path, *, shade: int = 90, seconds: float = 1.0, size: int = 128) -> Path:
    frames = np.full((int(20 * seconds), size, size, 3), 225, np.uint8)
    for t, frame in enumerate(frames):
        frame[size - 24 :] = 190
        frame[50:90, (3 * t) % size : (3 * t) % size + 24] = (shade % 256, 90, 160)
    return write_mp4(path, frames, 20)


def run_folder(folder: Path, method: str, seed: int, rows: list[dict[str, float]], **settings: Any) -> Path:
    config = replace(
        FinetuneConfig(policy=CheckpointConfig("runs/bc"), method=ONLINE[method](), seed=seed, out=str(folder)),
        **settings,
    )
    identity = {"method": method, "env": {"name": "insert", "config": to_data(ENVS["insert"].config())}}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_data(config) | {"identity": identity}, sort_keys=False))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _start(dice: random.Random) -> list[float]:
    hole = dice.uniform(-0.08, 0.08), dice.uniform(-0.05, 0.05)
    tcp = dice.gauss(0.3, 0.01), dice.gauss(0.0, 0.02), dice.gauss(0.18, 0.005)
    return [round(x, 5) for x in (*tcp, tcp[0] + 0.002, tcp[1], 0.3 + hole[0], hole[1], 0.0005)]


def _evaluation(seeds: list[int], easy: list[float], rate: float, success: bool, dice: random.Random) -> Evaluation:
    """Those that lie furthest out fail first."""
    noisy = [x + dice.gauss(0, 0.012) for x in easy]
    limit = sorted(noisy)[min(len(noisy) - 1, round(rate * len(noisy)))] if rate < 1 else math.inf
    went_well = [x < limit for x in noisy]
    returns = [float(x) if success else 900 + 2400 * rate + dice.gauss(0, 250) for x in went_well]
    lengths = [22 if x else 60 for x in went_well]
    ends = [not x for x in went_well]
    extra = (went_well, went_well) if success else (None, None)
    return Evaluation(seeds, returns, lengths, went_well, ends, *extra)


def _run(
    folder: Path,
    label: str,
    method: str,
    seed: int,
    level: float,
    pace: float,
    minutes: float,
    failed: bool,
    success: bool,
    dice: random.Random,
) -> dict[str, Any]:
    curve, rows = [], []
    for k in range(11):
        share = k / 10
        rate = 0.43 + (level - 0.43) * (1 - math.exp(-share / pace)) / (1 - math.exp(-1 / pace))
        rate = min(1.0, max(0.0, round((rate + (dice.gauss(0, 0.03) if 0 < k < 10 else 0)) * EXAM) / EXAM))
        low, high = wilson(round(rate * EXAM), EXAM)
        numbers = (rate, low, high) if success else tuple(900 + 2400 * x for x in (rate, low, high))
        curve.append([share * BUDGET, 60 * minutes * share + 3, *numbers])
        if k:
            rows.append({"step": k, **_metrics(method, share, rate, dice), "time/elapsed_s": curve[-1][1]})
        else:
            rows.append({"step": 0, "eval/episodes": EXAM, "time/elapsed_s": 3.0})
        names = (
            ("success_rate", "success_low", "success_high") if success else ("return_mean", "return_low", "return_high")
        )
        rows[-1] |= {f"eval/{name}": x for name, x in zip(names, numbers, strict=True)}
    if failed:
        curve = curve[:4]
    path = f"runs/{label}-{seed}"
    run_folder(folder / path, method, seed, rows, total=BUDGET, worlds=50 if "ppo" in label else 8)
    known = dict.fromkeys(("final", "low", "high", "difference", "difference_low", "difference_high", "p_value"))
    at_goal = next((row[1] for row in curve if success and row[2] >= 0.9), None)
    return {
        "method": label,
        "seed": seed,
        "status": "failed" if failed else "finished",
        "error": "the loss is not finite at step 3; lower the learning rate" if failed else None,
        "folder": path,
        "curve": curve,
        **known,
        "area": None if failed else sum(row[2] for row in curve) / len(curve),
        "time_to_goal_s": None if failed else at_goal,
        "steps_to_goal": None,
        "dip": None if failed else min(row[2] for row in curve) - curve[0][2],
        "minutes": None if failed else minutes + 0.2 * seed,
        "timing": None if failed else {"simulation_s": 20 * minutes, "update_s": 32 * minutes, "trials_s": 6 * minutes},
    }


def _metrics(method: str, share: float, rate: float, dice: random.Random) -> dict[str, float]:
    found = {"control_steps": share * BUDGET, "episode/success": rate, "episode/length": 60 - 35 * rate}
    if "ppo" in method or method == "reinflow":
        clipped = 0.82 if method == "dppo" else 0.15
        found |= {"kl": 0.01 + 0.004 * dice.random(), "clip/fraction": clipped + 0.02 * dice.random()}
        return found | {"explained_variance": 0.1 + 0.5 * share, "base_distance": 0.02 + 0.2 * share}
    found |= {"q/mean": -20 + 15 * share, "q/return": -19 + 14 * share, "q/overestimate": -1 + share}
    return found | {"entropy": 4 - 3 * share, "alpha": 0.1 - 0.09 * share, "saturation": 0.1 + 0.2 * share}


def _final(result: Evaluation, base: Evaluation, success: bool) -> dict[str, Any]:
    facts, against = result.summary(), compare(result, base)
    names = ("success_rate", "success_low", "success_high") if success else ("return_mean", "return_low", "return_high")
    found = dict(zip(("final", "low", "high"), (facts[name] for name in names), strict=True))
    found |= {name: getattr(against, name) for name in ("difference", "difference_low", "difference_high")}
    return found | {"p_value": getattr(against, "p_value", None)}


def _row(label: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    ended = [run for run in runs if run["final"] is not None]
    names = (
        "low",
        "high",
        "difference",
        "difference_low",
        "difference_high",
        "area",
        "dip",
        "minutes",
        "time_to_goal_s",
    )
    means = {name: _mean([run[name] for run in ended]) for name in names}
    iqm = _mean([run["final"] for run in ended])
    known = {"method": label, "runs": len(ended), "failed": len(runs) - len(ended), "mean": iqm, **means}
    return known | {"iqm": iqm, "iqm_low": means["low"], "iqm_high": means["high"]}


def _mean(values: list[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None
