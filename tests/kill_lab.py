"""What the tests of processes that die have in common: emulated servos that remember their motion, and who judges it.

A device is a process of its own and keeps where the arm was at every millisecond of its own clock, so nobody's
scheduling decides what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from servo_plants import ProfilePlant, Recorded

from burnish.real_robot.clock import SECOND, ns
from burnish.real_robot.emulators.feetech import FeetechChain
from burnish.real_robot.emulators.pty import PtyProcess
from bus_lab import CALIBRATION, IDS, START
from dynamixel_emulator import DynamixelChain

RATE_HZ = 100.0
LOW, HIGH = np.array([joint.limits_rad for joint in CALIBRATION.joints]).T


def dynamixel_chain() -> DynamixelChain:
    return DynamixelChain(IDS, Recorded(ProfilePlant(START)))


def feetech_chain() -> FeetechChain:
    return FeetechChain(IDS, Recorded(ProfilePlant(START)))


def settings(path: str, **others: Any) -> dict[str, Any]:
    """Of either driver, as plain data."""
    rows = {joint.name: {k: x for k, x in asdict(joint).items() if k != "name"} for joint in CALIBRATION.joints}
    return {"port": path, "calibration": {"joints": rows}, **others}


@dataclass
class Kill:
    speed: float  # of the fastest joint when it happened, rad/s
    rest_s: float  # from then on
    late_s: float  # of which a process of ours waited for its turn
    drift_rad: float  # after it came to rest
    watched_s: float  # for so long
    why: str  # what the watchdog had to say


def judged(device: PtyProcess, at_ns: int, why: str = "") -> Kill:
    t_ns, q = device.history()
    speeds = np.abs(np.diff(q, axis=0)).max(axis=1) / np.diff(t_ns) * SECOND
    before = int(np.searchsorted(t_ns, at_ns)) - 1
    last = int(np.flatnonzero(speeds > 0).max(initial=0)) + 1  # the first row at rest
    goals_ns = np.array([write.t_ns for write in device.log() if at_ns - ns(0.05) < write.t_ns < t_ns[last]])
    gaps_s = np.diff(goals_ns) / SECOND - 2 / RATE_HZ
    return Kill(
        speed=float(speeds[before - 1]),
        rest_s=float(t_ns[last] - at_ns) / SECOND,
        late_s=float(gaps_s[gaps_s > 0].sum()),
        drift_rad=float(np.abs(q[last:] - q[last]).max()),
        watched_s=float(t_ns[-1] - t_ns[last]) / SECOND,
        why=why,
    )


class NotStarted(Exception):
    """The program that moves the arm has ended before it said that it does, so nobody was killed."""


def in_motion(kill: Callable[[], Kill], speed: float) -> Kill:
    """Where a busy machine paused a process before anybody was killed, the arm had stopped already, or did not even
    start, since a start waits for nothing without a limit: once more. After the kill nothing is done twice."""
    for _ in range(10):
        with suppress(NotStarted):
            found = kill()
            if found.speed > speed:
                return found
    raise AssertionError("ten times the arm was not started, or stood still before anybody was killed")
