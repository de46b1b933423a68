"""Settings of worlds of other packages, and which modules they may import.

A configuration that was read from a file imports no more than `policies/runs/stored_world.py` lets it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import entry_points
from typing import Any

from ...policies.cli.environments import MODULES
from ...policies.cli.verb_process import registering_module
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.runs.stored_world import modules_of_prefix

GUESSES = ("gymnasium_robotics", "ogbench")  # tried for an id that is not registered and has no prefix
OURS = {"id": "env.id", "max_episode_steps": "env.max_steps"}  # what `gymnasium.make` takes beside the arguments
COMPATIBILITY = ("GymV21Environment", "GymV26Environment")  # they take the name of a module among their arguments


class Reward(Enum):
    """The rewards of a world of another package: its own, or -1 per step until success."""

    given = "given"  # as the world pays
    until_success = "until_success"  # -1 in every step until the first success


@dataclass
class GymConfig:
    """Settings of env=gym: an environment of Gymnasium, how it is made, read and run."""

    id: str = "Pendulum-v1"  # name registered with Gymnasium, module:callable, or an entry point of burnish.worlds
    kwargs: Any = None  # plain data for its constructor; on the command line 'env.kwargs={render_mode: rgb_array}'
    max_steps: int | None = None  # steps until an episode is truncated; by default the limit it is registered with
    # steps per second; by default control_hz, control_freq, 1 / dt or render_fps, where the environment has one
    control_hz: float | None = None
    action_mode: str | None = None  # meaning of the actions' numbers; by default gym:<id>, which says nothing
    # package that is imported first; by default the prefix of the id
    package: str | None = field(default=None, metadata=LATER)
    success: str | None = field(default=None, metadata=LATER)  # key of info, or terminated; by default the usual keys
    success_reward: float | None = field(default=None, metadata=LATER)  # a step that pays at least this is a success
    end_at_success: bool = field(default=False, metadata=LATER)  # the first success terminates the episode
    reward: Reward = field(default=Reward.given, metadata=LATER)  # given, or -1 until success
    # processes that step the worlds; 0: this one; by default one a core
    processes: int | None = field(default=None, metadata=LATER)
    # an episode that an error of its environment ends is truncated; a worker that dies is replaced, its episodes too
    restart: bool = field(default=False, metadata=LATER)
    patience_s: float = field(default=600.0, metadata=LATER)  # a worker that is silent for so long counts as dead
    # the worlds of a process are one environment of gymnasium.vector, made with num_envs
    vector: bool = field(default=False, metadata=LATER)

    def __post_init__(self) -> None:
        if self.id.startswith(COMPATIBILITY):
            raise BurnishError(
                f"env.id={self.id} would import a module by its arguments; give env.id=module:callable, which returns "
                "the environment"
            )
        if self.kwargs is not None and not (isinstance(self.kwargs, Mapping) and _is_plain(self.kwargs)):
            raise BurnishError(
                f"env.kwargs={self.kwargs!r} must be a mapping of plain data: names to numbers, strings, booleans, "
                "lists and mappings of these"
            )
        for name in set(self.kwargs or {}) & set(OURS) if ":" not in self.id else ():
            raise BurnishError(f"env.kwargs cannot set {name}, which has a place of its own; give {OURS[name]}")
        check_ranges(
            self, {"[1, inf)": "max_steps", "(0, inf)": "control_hz patience_s", "[0, inf)": "processes"}, "env."
        )
        check_ranges(self, {"(-inf, inf)": "success_reward"}, "env.")
        if self.success is not None and self.success_reward is not None:
            raise BurnishError("env.success and env.success_reward both say what a success is; give one of them")

    @property
    def said_success(self) -> str | None:
        """What a worker reads success from. Where rewards tell of it, no info is read."""
        return self.success if self.success_reward is None else "terminated"

    @property
    def label(self) -> str:
        """The world in a sentence, by the task that its maker is asked for: a maker's name says little."""
        asked = self.kwargs or {}
        task = asked.get("id", asked.get("task"))
        if not isinstance(task, str):
            return self.id
        return task if ":" in self.id else f"{self.id} {task}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def registered(name: str) -> Any:
    """The specification of an id in this process, if something registered it."""
    gymnasium = sys.modules.get("gymnasium")
    return None if gymnasium is None else gymnasium.registry.get(name)


def is_entry_point(name: str) -> bool:
    """Whether an installed package announces a world under that name."""
    return bool(entry_points(group="burnish.worlds", name=name))


def packages_of(config: GymConfig) -> list[str]:
    """The modules to import before the environment is made: the one that the user names; for ``module:callable`` none,
    since that is imported itself; else the package with the prefix of the id, or the module that registered it here."""
    if config.package is not None:
        return [config.package]
    if ":" in config.id or is_entry_point(config.id):
        return []
    if (spec := registered(config.id)) is not None:
        module = registering_module(spec.entry_point)
        return [module] if module else []
    return modules_of_prefix(config.id)[:1]


def environment(apart: bool = False, quiet: bool = False) -> dict[str, str]:
    """Of a worker: one thread each, because there is a worker a core. The Python of a recipe stands ``apart``: it was
    made without what leads ours to other modules, as ROS does. A ``quiet`` one shows no warnings, since its sibling
    shows the same ones; a user who sets PYTHONWARNINGS is obeyed."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")
    elsewhere = MODULES if apart else ()
    usual = dict.fromkeys(threads, "1") | ({"PYTHONWARNINGS": "ignore"} if quiet else {})
    return usual | {key: x for key, x in os.environ.items() if key not in elsewhere}


@dataclass
class RemoteConfig(GymConfig):
    """The same worlds in another Python, on this machine or on another one."""

    python: str | None = None  # interpreter that has them, such as /opt/libero/bin/python; by default this one
    name: str | None = None  # name of an environment made by `burnish worlds add NAME`, in place of python
    address: str | None = None  # HOST:PORT of `world_server.py --listen` on another machine, in place of both

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(x is not None for x in (self.python, self.name, self.address)) > 1:
            raise BurnishError("env.python, env.name and env.address each say where the worlds live; give one of them")
        theirs = [name for name in ("kwargs", "package", "vector") if getattr(self, name)]
        if self.address is not None and theirs:
            raise BurnishError(
                f"env.{theirs[0]} is said to the server of env.address={self.address} itself: "
                f"`python world_server.py --listen ... --{theirs[0]} ...`"
            )
