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

    rate_hz: float = 100.0  # of the control loop
    share: float = 1.0  # of the robot's velocities and accelerations
    outside_rad: float = 0.1  # so far outside its limits a robot may be found at the start
    start_gap_rad: float = 0.5  # so far from the robot may the first request be
    blend_s: float = 1.0  # until all of the speed may be used
    stale_hold_periods: float = 3.0  # age of the newest state
    stale_ramp_s: float = 0.1  # age of the newest state at which the robot brakes, in seconds
    silent_ramp_s: float = 1.0  # without a request, once there was one
    bad_in_a_row: int = 5  # requests that are no numbers
    slow_after: int = 3  # missed deadlines in a row
    ramp_after: int = 10  # missed deadlines in a row after which it brakes
    following_rad: float = 0.35  # between set-point and measurement
    following_s: float = 0.3  # for so long
    frozen_rad: float = 0.15  # so far may set-points move while the measurement of a joint stands still (`monitors`)
    frozen_s: float = 0.5  # for so long
    stall_rad: float = 0.05  # from its set-point, and so far a joint that is stuck may creep
    stall_share: float = 0.8  # of the greatest effort of a joint
    stall_s: float = 1.0  # for so long
    no_device_watchdog: bool = False  # said aloud: if this program dies, the robot keeps its last set-point

    jerk: float = 0.0  # rad/s^3, of every joint, or less where the robot's own limit is less; 0: no limit
    workspace: list[list[float]] = field(default_factory=list)  # of the tool: [[x, y, z], [x, y, z]] in m, low and high
    floor_m: float | None = None  # nothing that moves comes lower than this height of the model
    apart: bool = False  # the arm keeps off itself, and off what stands around it in the model
    may_touch: list[list[str]] = field(default_factory=list)  # pairs of bodies that need not keep apart
    margin_m: float = 0.01  # so far from all of these
    model: str = ""  # path of the robot's MuJoCo model, or its text; by default the driver's, or that of the body
    model_joints: list[str] = field(default_factory=list)  # their names there, in order; by default the robot's
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
