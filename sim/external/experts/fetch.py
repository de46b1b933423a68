"""Experts of Gymnasium-Robotics' Fetch (Plappert et al. 2018, arXiv 1802.09464): proportional control of the hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP = 0.05  # m, that the target of the hand moves at an action of 1
STILL = np.array([0.0, 0.0, 0.0, np.nan])
OPEN, CLOSE = 1.0, -1.0
BIAS = {"Reach": 0.3, "Push": 0.12, "PickAndPlace": 0.1}  # of the clumsy level
BEHIND = 0.075  # m, from the middle of the object to the hand that is about to push it


def _act(error: NDArray, gripper: float, gain: float) -> NDArray[np.float32]:
    return np.clip([*(gain * error / STEP), gripper], -1.0, 1.0).astype(np.float32)


class FetchExpert:
    """The phase follows from the observation alone."""

    still = STILL

    def __init__(self, env: Any) -> None:
        name = type(env.unwrapped).__name__
        scripts = {"Reach": self.reach, "Push": self.push, "PickAndPlace": self.pick_and_place}
        found = [key for key in scripts if f"Fetch{key}Env" in name]
        if not found:
            raise LookupError(f"{name} has no expert here; FetchReach, FetchPush and FetchPickAndPlace have")
        self._script = scripts[found[0]]
        self.levels = {"clumsy": {"bias": BIAS[found[0]]}}

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        """Scripts keep nothing."""

    def act(self, obs: dict[str, NDArray], info: dict[str, Any]) -> NDArray[np.float32]:
        return self._script(obs["observation"], obs["desired_goal"])

    def reach(self, seen: NDArray, goal: NDArray) -> NDArray[np.float32]:
        return _act(goal - seen[:3], 0.0, 0.5)

    def push(self, seen: NDArray, goal: NDArray) -> NDArray[np.float32]:
        hand, cube = seen[:3], seen[3:6]
        way = goal[:2] - cube[:2]
        distance = np.hypot(*way)
        along = way / max(distance, 1e-6)
        aside = np.array([-along[1], along[0]])
        gap = hand[:2] - cube[:2]
        behind, beside = -gap @ along, gap @ aside
        low = cube[2] - 0.005
        if behind > 0.02 and abs(beside) < 0.015 and hand[2] < cube[2] + 0.03:
            # Push, back to the line while going along it, and the slower the nearer it is.
            spot = cube[:2] + along * min(distance, STEP) - along * 0.04
            error = np.array([*(spot - hand[:2] - 1.5 * beside * aside), low - hand[2]])
            return _act(error, CLOSE, 0.5) if distance > 0.01 else _act(np.zeros(3), CLOSE, 0.0)
        spot = cube[:2] - along * BEHIND
        away = np.hypot(*(spot - hand[:2]))
        clear = cube[2] + 0.08
        if away < 0.015:
            height = low
        else:
            height = clear
            if hand[2] < clear - 0.03 and np.hypot(*gap) < 0.1:
                spot = hand[:2]  # first up, beside the object
        return _act(np.array([*spot, height]) - hand, CLOSE, 0.5)

    def pick_and_place(self, seen: NDArray, goal: NDArray) -> NDArray[np.float32]:
        hand, cube, opening = seen[:3], seen[3:6], seen[9] + seen[10]
        gap = cube - hand
        around = np.hypot(*gap[:2]) < 0.02 and abs(gap[2]) < 0.015
        if around and opening < 0.06:
            # The fingers are as far apart as the object is wide: carry it.
            return _act(goal - cube, CLOSE, 0.5)
        if around:
            return _act(gap, CLOSE, 0.3)
        if np.hypot(*gap[:2]) > 0.015 and gap[2] > -0.04:
            return _act(np.array([0.0, 0.0, 0.08 + gap[2]]), OPEN, 0.5)  # up again, or the hand would shove the object
        above = 0.07 if np.hypot(*gap[:2]) > 0.015 else 0.0
        return _act(gap + np.array([0.0, 0.0, above]), OPEN, 0.5)


def make(env: Any, seed: int = 0) -> FetchExpert:
    """The expert of an environment of Fetch; its ``seed`` is not used."""
    return FetchExpert(env)
