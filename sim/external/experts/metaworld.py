"""Experts of Meta-World (Yu et al. 2019, arXiv 1910.10897): the fifty scripts that its package brings.

They read the observation, so the goal must be visible in it: ``Meta-World/MT1`` shows it.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

STILL = np.array([0.0, 0.0, 0.0, np.nan])  # a motion of the hand, and the effort of the gripper
BIAS = {"push-v3": 0.06, "pick-place-v3": 0.09, "door-open-v3": 1.0, "button-press-v3": 1.0}  # gains differ that much


def task_of(env: Any) -> str:
    """The name of the task, such as "push-v3", also of the variants that hide or show the goal."""
    names = {kind: name for name, kind in import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS.items()}
    for kind in type(env.unwrapped).__mro__:
        if kind in names:
            return names[kind]
    raise LookupError(f"{type(env.unwrapped).__name__} is no task of Meta-World version 3")


class MetaWorldExpert:
    """The script of a Meta-World task, as the package brings it."""

    still = STILL

    def __init__(self, env: Any) -> None:
        self._script = import_module("metaworld.policies").ENV_POLICY_MAP[task_of(env)]()
        self.levels = {"clumsy": {"bias": BIAS[task_of(env)]}} if task_of(env) in BIAS else {}

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        """Scripts keep nothing."""

    def act(self, obs: NDArray, info: dict[str, Any]) -> NDArray[np.float32]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that gains are large: what exceeds the limits is cut off here
            return np.clip(self._script.get_action(obs), -1.0, 1.0).astype(np.float32)


def make(env: Any, seed: int = 0) -> MetaWorldExpert:
    """The expert of an environment of Meta-World; its ``seed`` is not used."""
    return MetaWorldExpert(env)
