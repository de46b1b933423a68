"""The frozen bases of `refine_quality.py`, what they have imitated, and the settings of shipped experiments."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from bases import DEMONSTRATIONS_SEED, demonstrations, imitated, world
from refine_settings import TASKS
from runners import IMITATION, STAGES
from runners import recordings as runners_recordings

from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.policies.build import describe
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.data.episodes import Episodes
from burnish.policies.data.lerobot_writer import write_lerobot
from burnish.policies.runs.checkpoint import save
from burnish.sim.build import origin_of

HERE = Path(__file__).resolve().parent
BASES = HERE / "bases"
RUNS = HERE.parent / "runs" / "refine_quality"


@functools.cache
def configured(*words: str) -> FinetuneConfig:
    return to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], list(words)))


def base_folder(task: str, number: int) -> Path:
    return BASES / (task if number == 1 else f"{task}-{number}")


def recorded(task: str, config: Any) -> Episodes:
    """The episodes that the bases of a task have imitated."""
    if TASKS[task].unit is not None:
        return runners_recordings(config, STAGES[task], 100, DEMONSTRATIONS_SEED)
    return demonstrations(config, "clumsy", 100)


def recordings_of(task: str) -> Path:
    """As a dataset, made once, with the rewards that the experiments of the task refine by."""
    path = RUNS / "recordings" / task
    if not path.exists():
        config = configured(f"experiment={task}/residual_ppo").env or world(task)
        found = recorded(task, config)
        write_lerobot(Episodes(found.episodes, found.spec, {"env": origin_of(config)}), path)
    return path


def make_base(task: str, number: int) -> None:
    config = world(task)
    policy = imitated(recorded(task, config), IMITATION.get(task), seed=1 + number)
    target = base_folder(task, number) / "policy"
    save(target, config=describe(policy, {"env": origin_of(config)}), state=policy.state_dict())


@functools.cache
def fingerprint(task: str, number: int = 1) -> str | None:
    """Of the base's weights: results of another base are not compared with these. None where there is no such base."""
    folder = base_folder(task, number)
    return fingerprint_of(folder / "policy") if folder.exists() else None


def fingerprint_of(policy: Path) -> str:
    """Of the weights of a saved policy."""
    return hashlib.sha256((policy / "state.safetensors").read_bytes()).hexdigest()[:16]
