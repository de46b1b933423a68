"""Experts of OGBench's cubes (Park et al. 2024, arXiv 2410.20092): its oracles, driven in worlds that have a task.

The package brings oracles that move one cube to one place, for the mode in which it collected its data. Here the next
cube and its place are read from the task: a cube whose place is free and on which none lies; of these the one that
goes lowest. Where cubes stand on each other's places, one is set aside first.
"""

from __future__ import annotations

import zlib
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 0.04  # m, of a cube
STILL = np.zeros(5)  # all five are changes of the pose and of the opening
ASIDE = np.array([[0.35, 0.25], [0.35, -0.25], [0.50, 0.25], [0.50, -0.25], [0.425, 0.0]])  # m, where to set a cube


def _over(high: NDArray, low: NDArray) -> bool:
    """Whether a cube at ``high`` would lie on one at ``low``."""
    return bool(np.hypot(*(high - low)[:2]) < SIDE and high[2] > low[2] + SIDE / 2)


class CubeExpert:
    """``markov`` is a feedback law of the present state; ``plan`` follows a path in time, which it draws per cube."""

    still = STILL

    def __init__(self, env: Any, seed: int = 0, oracle: str = "markov", noise: float = 0.0) -> None:
        if not hasattr(env.unwrapped, "_num_cubes"):
            raise LookupError(f"{type(env.unwrapped).__name__} of OGBench has no expert here; the cubes have")
        self._world, self._seed = env.unwrapped, seed
        if oracle == "markov":
            self._oracle = import_module("ogbench.manipspace.oracles.markov.cube_markov").CubeMarkovOracle(env=env)
        else:
            plan = import_module("ogbench.manipspace.oracles.plan.cube_plan")
            self._oracle = plan.CubePlanOracle(env=env, noise=noise)
        self._job: tuple[int, NDArray] | None = None
        self.levels = {"clumsy": {"bias": 0.45 if self._world._num_cubes == 1 else 0.38, "scale": 3.0}}

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        self._job = None

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.float64]:
        cubes = np.array([info[f"privileged/block_{i}_pos"] for i in range(self._world._num_cubes)])
        places = self._world._data.mocap_pos[self._world._cube_target_mocap_ids]
        if self._job is None or self._oracle._done or self._is_over(cubes, info):
            self._job = self._next(cubes, places)
            self._begin(self._seen(info))
        return np.clip(self._oracle.select_action(obs, self._seen(info)), -1.0, 1.0)

    def _is_over(self, cubes: NDArray, info: dict[str, Any]) -> bool:
        """The cube lies in its place, the fingers are open and the hand is above."""
        assert self._job is not None
        cube, place = self._job
        free = info["proprio/gripper_contact"][0] < 0.1 and info["proprio/effector_pos"][2] > place[2] + 0.1
        return bool(np.linalg.norm(cubes[cube] - place) < 0.02 and free)

    def _next(self, cubes: NDArray, places: NDArray) -> tuple[int, NDArray]:
        """The cube to move now, and where to."""
        others = [[j for j in range(len(cubes)) if j != i] for i in range(len(cubes))]
        missing = [i for i in range(len(cubes)) if np.linalg.norm(cubes[i] - places[i]) > 0.02]
        if not missing:
            return 0, places[0].copy()
        loose = [i for i in range(len(cubes)) if not any(_over(cubes[j], cubes[i]) for j in others[i])]

        def may_go(i: int) -> bool:
            """No other cube is in the way, and those beneath its place are there."""
            for j in others[i]:
                level = abs(cubes[j][2] - places[i][2]) < SIDE / 2
                if level and np.hypot(*(cubes[j] - places[i])[:2]) < 1.5 * SIDE and j in missing:
                    return False
                if _over(places[i], places[j]) and j in missing:
                    return False
            return True

        ready = [i for i in missing if i in loose and may_go(i)]
        if ready:
            best = min(ready, key=lambda i: (places[i][2], i))
            return best, places[best].copy()
        blocking = [i for i in loose if i in missing] or loose
        taken = np.concatenate([cubes, places])[:, :2]
        room = [np.hypot(*(taken - spot).T).min() for spot in ASIDE]
        return blocking[-1], np.array([*ASIDE[int(np.argmax(room))], SIDE / 2])

    def _seen(self, info: dict[str, Any]) -> dict[str, Any]:
        """What the oracles expect of the mode that collects data."""
        assert self._job is not None
        target = {
            "privileged/target_block": self._job[0],
            "privileged/target_block_pos": self._job[1],
            "privileged/target_block_yaw": np.zeros(1),
        }
        return {**info, **target}

    def _begin(self, info: dict[str, Any]) -> None:
        """Oracles draw from ``numpy.random``: here from the seed and the state, and without a trace elsewhere."""
        before = np.random.get_state()
        np.random.seed(zlib.crc32(info["qpos"].tobytes(), self._seed % 2**32))
        try:
            self._oracle.reset(None, info)
        finally:
            np.random.set_state(before)


def make(env: Any, seed: int = 0, oracle: str = "markov", noise: float = 0.0) -> CubeExpert:
    """The expert of an environment of OGBench, with the kind and noise of its oracle."""
    return CubeExpert(env, seed, oracle, noise)
