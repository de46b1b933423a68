"""The part of mplib that ManiSkill's motion planner uses, played by a process that has it: `side_planner.py`.

mplib crashes beside NumPy 2, and `burnish worlds add maniskill-planner` makes a Python for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import side_planner
from .recipes import WORLDS
from .settings import environment

RECIPE = "maniskill-planner"


@functools.cache
def service() -> subprocess.Popen[str]:
    """The process that plans for all worlds of this one; it ends with it."""
    words = [WORLDS.python(RECIPE), side_planner.__file__]
    apart = environment(apart=True)
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=apart)


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of `side_planner.py`."""
    process = service()
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        service.cache_clear()
        raise RuntimeError(f"the process that plans ended with status {process.wait()}")
    reply = json.loads(line)
    if "error" in reply:
        raise RuntimeError(f"mplib failed: {reply['error']}")
    return reply


class Planner:
    """The part of ``mplib.Planner`` that ManiSkill uses."""

    def __init__(self, **robot: Any) -> None:
        self._robot, self._base, self._points = robot, [0.0] * 3 + [1.0] + [0.0] * 3, None
        limits = ask({"robot": robot})
        self.joint_vel_limits, self.joint_acc_limits = (np.array(limits[name]) for name in side_planner.LIMITS)

    def set_base_pose(self, pose: NDArray) -> None:
        self._base = np.asarray(pose).tolist()

    def update_point_cloud(self, points: NDArray) -> None:
        self._points = np.asarray(points).tolist()

    def plan_screw(self, pose: NDArray, joints: NDArray, **settings: Any) -> dict[str, Any]:
        return self._plan("plan_screw", pose, joints, settings)

    def plan_qpos_to_pose(self, pose: NDArray, joints: NDArray, **settings: Any) -> dict[str, Any]:
        return self._plan("plan_qpos_to_pose", pose, joints, settings)

    def _plan(self, call: str, pose: NDArray, joints: NDArray, settings: dict[str, Any]) -> dict[str, Any]:
        places = {"pose": np.asarray(pose).tolist(), "joints": np.asarray(joints).tolist(), "base": self._base}
        limits = {name: np.asarray(getattr(self, name)).tolist() for name in side_planner.LIMITS}
        request = {"robot": self._robot, "call": call, "points": self._points, "settings": settings}
        found = ask({**request, **places, **limits})
        return {key: np.array(x) if isinstance(x, list) else x for key, x in found.items()}
