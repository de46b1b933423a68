"""A body whose last joint is the gripper, on a robot whose gripper is a channel of its own.

The model of an SO-101 has six joints, and its driver may have five and a gripper, as a person has calibrated it. The
measured fraction of the channel's width is that share of the joint's range, and the other way round. So a
set-point of the gripper passes the gripper's own limit of speed, and no joint's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .adapter import RobotSpec, Vector


def with_gripper_channel(body: Any, robot: RobotSpec) -> Any:
    """``body`` for that robot: itself, where both have as many joints."""
    return GripperChannel(body) if robot.gripper is not None and len(body.joints) == len(robot.joints) + 1 else body


class GripperChannel:
    """All else is the body's own."""

    grips = True

    def __init__(self, body: Any) -> None:
        self.body = body
        self.joints = tuple(body.joints)[:-1]
        self.ranges, (self._low, self._high) = body.ranges[:-1], body.ranges[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.body, name)

    @property
    def start(self) -> Vector:
        return self.body.start[:-1]

    @property
    def where(self) -> Vector:
        """The start of an episode, the gripper's fraction behind the joints."""
        return self._with_fraction(self.body.start)

    def see(self, q: Vector, qd: Vector) -> None:
        self.body.see(self._with_angle(q), qd)

    def follow(self, q: Vector) -> None:
        self.body.follow(self._with_angle(q))

    def targets(self, action: Vector) -> Vector:
        return self._with_fraction(self.body.targets(action))

    def _with_angle(self, q: Vector) -> Vector:
        return np.append(q[:-1], self._low + q[-1] * (self._high - self._low))

    def _with_fraction(self, q: Vector) -> Vector:
        return np.append(q[:-1], np.clip((q[-1] - self._low) / (self._high - self._low), 0, 1))
