"""The settings of `SafeRobot`: how much is allowed. Plain data, so that they can be sent to the control process.

Limits of positions, velocities and accelerations are the robot's own. ``jerk``, ``workspace``, ``floor_m`` and
``apart`` add what has no closed form (`fallback`, `collision`), ``reflex`` a critic that may slow the robot down
(`reflex`); each is off until it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...policies.core.ranges import check_ranges
from ..errors import Refused

ENOUGH = 1e9  # of whatever unit: what is greater cannot be meant, and overflows where it is counted in nanoseconds


@dataclass
class Safety:
    """Settings of `SafeRobot`: rates, limits, tolerances, and how long each may be exceeded."""

    rate_hz: float = 100.0  # rate of the control loop, in Hz
    share: float = 1.0  # share of the robot's velocities and accelerations that may be used
    outside_rad: float = 0.1  # largest distance outside its limits at which a joint may be found at the start, in rad
    start_gap_rad: float = 0.5  # largest distance of the first request from the robot, in rad
    blend_s: float = 1.0  # seconds after the start until all of the speed may be used
    stale_hold_periods: float = 3.0  # age of the newest state at which the robot holds, in control periods
    stale_ramp_s: float = 0.1  # age of the newest state at which the robot brakes, in seconds
    silent_ramp_s: float = 1.0  # seconds without a request, once there was one, after which the robot brakes
    bad_in_a_row: int = 5  # requests in a row that are no numbers, after which the robot brakes
    slow_after: int = 3  # missed deadlines in a row after which the robot slows down
    ramp_after: int = 10  # missed deadlines in a row after which it brakes
    following_rad: float = 0.35  # largest distance between set-point and measurement of a joint, in rad
    following_s: float = 0.3  # seconds beyond following_rad after which the robot brakes
    # motion of a joint's set-points, in rad, after which its measurement has to move too (`monitors`)
    frozen_rad: float = 0.15
    frozen_s: float = 0.5  # seconds beyond frozen_rad without such a motion, after which the robot brakes
    # distance from its set-point beyond which a joint may be stuck, and the most that it creeps then, in rad
    stall_rad: float = 0.05
    stall_share: float = 0.8  # share of a joint's greatest effort above which it may be stuck
    stall_s: float = 1.0  # seconds for which a joint is stuck, after which the robot brakes
    # consent to a device without a watchdog: if this program dies, the robot keeps its last set-point
    no_device_watchdog: bool = False

    # limit of the jerk of every joint, in rad/s^3, or less where the robot's own limit is less; 0: no limit
    jerk: float = 0.0
    # box for the tool: [[x, y, z], [x, y, z]] in m, low and high; empty: none
    workspace: list[list[float]] = field(default_factory=list)
    floor_m: float | None = None  # nothing that moves comes lower than this height of the model
    apart: bool = False  # the arm keeps off itself, and off what stands around it in the model
    may_touch: list[list[str]] = field(default_factory=list)  # pairs of bodies that need not keep apart
    margin_m: float = 0.01  # distance that is kept from the box, the floor and other bodies, in m
    model: str = ""  # path of the robot's MuJoCo model, or its text; by default the driver's, or that of the body
    # names of the joints in the model, in order; by default the robot's
    model_joints: list[str] = field(default_factory=list)
    tool: str = ""  # site of the model; by default the one that the driver names

    reflex: str = ""  # path of a critic (`reflex.write_critic`)
    reflex_slow: float = 0.2  # risk from which on it slows the robot down
    reflex_brake: float = 0.5  # risk from which on it brakes
    reflex_budget_s: float = 0.002  # a critic that takes longer brakes

    def __post_init__(self) -> None:
        times = "stale_hold_periods stale_ramp_s silent_ramp_s following_s reflex_budget_s"
        monitored = "frozen_rad frozen_s stall_rad stall_share stall_s"
        ranges = {
            f"(0, {ENOUGH:g})": f"rate_hz start_gap_rad following_rad {times} {monitored}",
            f"[0, {ENOUGH:g})": "outside_rad blend_s jerk margin_m",
            "(0, 1]": "share",
            "[1, inf)": "bad_in_a_row slow_after ramp_after",
            "(-inf, inf)": "floor_m",
        }
        check_ranges(self, ranges, "safety.", Refused)
        if self.slow_after > self.ramp_after:
            raise Refused(f"safety.slow_after={self.slow_after} must be at most ramp_after={self.ramp_after}")
        if self.workspace and not _is_box(self.workspace):
            raise Refused(
                f"safety.workspace={self.workspace} must be two corners with low < high, [[x, y, z], [x, y, z]] in m"
            )
        if any(len(pair) != 2 for pair in self.may_touch):
            raise Refused(f"safety.may_touch={self.may_touch} must be pairs of names of bodies")
        if not self.bounded and (self.model or self.tool or self.model_joints or self.may_touch):
            raise Refused(
                "safety.model, model_joints, tool and may_touch describe a model that nothing is checked on; give "
                "safety.workspace, safety.floor_m or safety.apart=true too"
            )
        if not 0 < self.reflex_slow <= self.reflex_brake < np.inf:
            raise Refused(
                f"safety.reflex_slow={self.reflex_slow} and reflex_brake={self.reflex_brake} need 0 < slow <= brake"
            )

    @property
    def bounded(self) -> bool:
        """Whether a model of the robot is needed."""
        return bool(self.workspace) or self.floor_m is not None or self.apart


def _is_box(corners: list[list[float]]) -> bool:
    if len(corners) != 2 or any(len(corner) != 3 for corner in corners):
        return False
    return all(-np.inf < low < high < np.inf for low, high in zip(*corners, strict=True))
