"""Demonstrators for the environments of other packages: one expert beside one Gymnasium environment, in its own units.

An expert looks at the environment itself, as a person at the desk does, but never steps, resets or changes it. Errors
are added by `sim/experts/hosted.py`; an expert's ``levels``, if it has them, say how large they are on each level. This
room needs NumPy and the package that a file serves, nothing else of ours, so that it also runs in the process or in the
Python that holds the environment.
"""

from __future__ import annotations

import importlib
import os
import runpy
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Expert(Protocol):
    """The same state of the environment and the same seed give the same action."""

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        """After ``env.reset()``."""
        ...

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.floating]:
        """The action for the present observation, before ``env.step``."""
        ...


# Module that an environment comes from -> the file of this room that has an expert for it.
FILES = {
    "metaworld": "metaworld",
    "ogbench": "ogbench",
    "gymnasium_robotics": "fetch",
    "robosuite": "robosuite",
    "gym_pusht": "pusht",
    "mani_skill": "maniskill",
}


def package_of(env: Any) -> str:
    """The package whose environment this is, beneath its wrappers, of which ours holds ManiSkill's ``simulation``."""
    world = getattr(env.unwrapped, "simulation", env.unwrapped)
    return type(world).__module__.partition(".")[0]


def make(env: Any, seed: int = 0) -> Expert:
    """The expert for ``env``, chosen by the package that it comes from. LookupError where there is none."""
    package = package_of(env)
    if package not in FILES:
        raise LookupError(f"no expert for environments of {package}; there are experts for {', '.join(FILES)}")
    if __package__:
        return importlib.import_module(f".{FILES[package]}", __package__).make(env, seed)
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), FILES[package] + ".py")  # run by its path
    return runpy.run_path(beside)["make"](env, seed)
