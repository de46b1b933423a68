"""The tasks of `public_tasks.py`, and the recipes of their bases: imperfect demonstrations, imitated.

A base is made by two commands, `burnish collect` and `burnish pretrain`, with the words that stand here; the same
machine makes the same base of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from refine_bases import HERE, fingerprint_of
from refine_minutes import timed
from refine_settings import Task

from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.run import find_policy

RUNS = HERE.parent / "runs" / "public_tasks"
SEED = 1  # of recordings and imitation
GAMMA = 0.995  # of all tasks
WORLDS = 16  # that are stepped at once, whatever for: some packages take a second to make one


@dataclass(frozen=True)
class Recipe:
    """Of one base. Changing it makes another one, in folders of its own; runs of the old one no longer count."""

    errors: dict[str, float]  # of the demonstrator
    demonstrations: int = 100
    steps: int = 2000  # of imitation

    def collect(self, task: str) -> list[str]:
        """The words after `burnish collect`."""
        errors = [f"errors.{name}={x}" for name, x in self.errors.items()]
        return [f"env={task}", "expert=clumsy", *errors, f"episodes={self.demonstrations}", f"worlds={WORLDS}"]

    def pretrain(self, recordings: Path) -> list[str]:
        """The words after `burnish pretrain`."""
        words = [f"data={recordings}", "policy=flow", "experiment=desk", f"train.steps={self.steps}"]
        return [*words, "eval.episodes=0", "threads=1"]

    def said(self, task: str) -> dict[str, list[str]]:
        """As it stands beside the results."""
        return {"collect": self.collect(task), "pretrain": self.pretrain(Path(task))}

    def folder(self, task: str) -> str:
        return f"{task}-{hashlib.sha256(repr(self.said(task)).encode()).hexdigest()[:8]}"


def clumsy(bias: float, noise: float = 0.1, hesitation: float = 0.03, scale: float = 0.3) -> dict[str, float]:
    """Errors as the level clumsy has them. The bias is the same in the same situation, so imitation keeps it."""
    return {"noise": noise, "bias": bias, "hesitation": hesitation, "scale": scale}


RECIPES = {
    "metaworld_push": Recipe(clumsy(0.06)),
    "metaworld_pick_place": Recipe(clumsy(0.27)),
    "metaworld_door_open": Recipe(clumsy(0.9)),
    "metaworld_button_press": Recipe(clumsy(0.385, noise=0.0, hesitation=0.0), steps=5000),
    "maniskill_push_cube": Recipe(clumsy(0.2928)),
    "maniskill_pick_cube": Recipe(clumsy(0.16, noise=0.03, hesitation=0.0, scale=1.0), 200, steps=10_000),
    "maniskill_stack_cube": Recipe(clumsy(0.03, noise=0.12, hesitation=0.0, scale=1.0), 400, steps=40_000),
    # Where 3 mm are left around the peg, imitation errs enough without a bias.
    "maniskill_peg_insertion": Recipe(clumsy(0.0, noise=0.02, hesitation=0.0, scale=1.0), 800, steps=60_000),
    "robosuite_door": Recipe(clumsy(0.4, scale=0.5)),
    "ogbench_cube_single": Recipe(clumsy(0.36, scale=3.0)),
    "ogbench_cube_double": Recipe(clumsy(0.31, noise=0.0, hesitation=0.0, scale=3.0), steps=20_000),
    "pusht": Recipe(clumsy(0.008, noise=0.01, hesitation=0.0, scale=150.0), 500, steps=40_000),
}
TASKS = {task: Task(GAMMA) for task in RECIPES}


def make_base(task: str, recipe: Recipe, recordings: Path, base: Path) -> float:
    """Where they are missing, the recordings and the base; the minutes of processor time that this took."""
    spent = _verb(["collect", *recipe.collect(task)], recordings)
    return spent + _verb(["pretrain", *recipe.pretrain(recordings)], base)


def _verb(words: Sequence[str], out: Path) -> float:
    """Remakes the rest of one that was interrupted."""
    if out.exists():
        return 0.0
    begun = out.with_name(out.name + ".part")
    shutil.rmtree(begun, ignore_errors=True)
    begun.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_name(out.name + ".log")
    with log.open("w", encoding="utf-8") as file:
        status, spent = timed([*words, f"seed={SEED}", f"out={begun}"], file)
    if status:
        raise BurnishError(f"burnish {words[0]} for {out.name} ended with status {status}: {log.read_text()[-500:]}")
    begun.rename(out)
    return spent["cpu_s"] / 60


def note_base(task: str, recipe: Recipe, base: Path, minutes: float, kept: Path) -> None:
    """Which base the results of a task are of, beside them. Runs of another one are not mixed with its own; where there
    are none yet, what is known of the other one is forgotten."""
    found = {"fingerprint": fingerprint_of(find_policy(base).path), **recipe.said(task)}
    if kept.exists() and {**json.loads(kept.read_text()), "minutes": 0} == {**found, "minutes": 0}:
        return
    if any(kept.parent.glob("*-[0-9].json")):
        raise BurnishError(
            f"the runs in {kept.parent} are of another base: its recipe was another one, or another machine or version "
            "rounds differently; move those away to begin anew"
        )
    shutil.rmtree(kept.parent, ignore_errors=True)
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({**found, "minutes": round(minutes, 2)}) + "\n", encoding="utf-8")


def noted_base(kept: Path) -> str | None:
    """The fingerprint of the base that results are of."""
    return json.loads(kept.read_text())["fingerprint"] if kept.exists() else None
