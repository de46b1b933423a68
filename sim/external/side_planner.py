"""Joint paths of mplib for ManiSkill's motion planner, which runs elsewhere: mplib crashes beside NumPy 2.

It runs in the Python of `burnish worlds add maniskill-planner`, and imports nothing of ours. A line of JSON is a
request, and a line is the answer:

    {"robot": {...}}                                    -> the limits of its joints' speeds and accelerations
    {"robot": {...}, "call": "plan_screw", "base": ...} -> the path, or the reason why there is none
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import numpy as np

CALLS = ("plan_screw", "plan_qpos_to_pose")
LIMITS = ("joint_vel_limits", "joint_acc_limits")


@functools.lru_cache
def planner(robot: str) -> Any:
    """The planner of a robot, which is the arguments of mplib's as JSON."""
    import mplib

    return mplib.Planner(**json.loads(robot))  # pyright: ignore[reportPrivateImportUsage]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request; each says all that it depends on."""
    made = planner(json.dumps(request["robot"], sort_keys=True))
    if "call" not in request:
        return {name: np.ones(len(made.move_group_joint_indices)).tolist() for name in LIMITS}
    if request["call"] not in CALLS:
        raise ValueError(f"there is no request {request['call']}")
    for name in LIMITS:
        setattr(made, name, np.array(request[name]))
    made.set_base_pose(np.array(request["base"]))
    if request["points"] is not None:
        made.update_point_cloud(np.array(request["points"]))
    pose, joints = (np.array(request[name]) for name in ("pose", "joints"))
    found = getattr(made, request["call"])(pose, joints, **request["settings"])
    return {key: x.tolist() if isinstance(x, np.ndarray) else x for key, x in found.items()}


def main() -> None:
    """Answers on the standard output, until the standard input ends; what packages print goes elsewhere."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # is told, and the service goes on
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # its files are no packages of theirs
    main()
    os._exit(0)  # without it mplib aborts at exit and prints `terminate called`
