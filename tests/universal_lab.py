"""What the tests of Universal Robots arms share: free loopback addresses, and a process that drives and is killed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from burnish.real_robot.adapter import Command, Mode, RobotState
from burnish.real_robot.clock import MonotonicClock, ns
from burnish.real_robot.drivers.universal import UniversalConfig, UniversalRobot
from burnish.real_robot.errors import StaleState

_COUNT = itertools.count(1)
ELBOW = 2  # the joint with the shortest range

# Beside trainings and other tests, a process may wait a tenth of a second for its turn: only tests of the watchdog
# itself have one that is as quick as the default.
PATIENT = {"watchdog_hz": 2.0, "silence_s": 0.6, "stop_s": 1.5}


def fresh_address() -> str:
    """ur-rtde's ports are fixed, so whoever runs at the same time needs an address of his own, out of 127.0.0.0/8."""
    pid = os.getpid()
    return f"127.{(pid >> 8) % 254 + 1}.{pid & 255}.{next(_COUNT)}"


def active(robot: UniversalRobot) -> np.ndarray:
    """Where it is, having taken hold of it."""
    robot.configure()
    return robot.activate(Mode.JOINT_POSITION).q


def command(seq: int, target: np.ndarray, robot: UniversalRobot) -> Command:
    now_ns = robot.clock.now_ns()
    return Command(Mode.JOINT_POSITION, seq, now_ns, now_ns + ns(0.1), target)


def drive(
    robot: UniversalRobot,
    target: Callable[[float], np.ndarray],
    count: int,
    each: Callable[[RobotState, np.ndarray], None] = lambda state, q: None,
) -> None:
    """So many targets, as a function of their own time, at the robot's rate and never closer together than a period."""
    period_ns = ns(1 / robot.config.rate_hz)
    due_ns = robot.clock.now_ns()
    for seq in range(count):
        due_ns = max(due_ns, robot.clock.now_ns()) + period_ns
        robot.write(command(seq, q := target(seq / robot.config.rate_hz), robot))
        robot.clock.sleep_until_ns(due_ns)
        with suppress(StaleState):  # a busy machine is late with states; the next ones will come
            each(robot.read(0.1), q)


def swing(q0: np.ndarray, peak_speed: float = 0.5) -> Callable[[float], np.ndarray]:
    """From rest, all joints together; ``peak_speed`` in rad/s."""
    return lambda t: q0 + peak_speed / 2 * (1 - np.cos(2 * t))


def start_driver(address: str, watchdog_hz: str) -> subprocess.Popen:
    """This module as a process, in a group of its own: whoever kills the group kills ur-rtde's process too."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, __file__, address, watchdog_hz], stdout=pipe, text=True, start_new_session=True
    )


def main(address: str, watchdog_hz: str) -> None:
    watched = {"watchdog_hz": float(watchdog_hz)} if float(watchdog_hz) else {"watchdog_hz": None}
    robot = UniversalRobot(UniversalConfig(address, why_no_watchdog="a control", **watched), MonotonicClock())
    robot.configure()
    state = robot.activate(Mode.JOINT_POSITION)
    link = robot._link
    assert link is not None
    sys.stdout.write(f"{link.pid}\n")
    sys.stdout.flush()
    # Towards the middle of the ranges: arms that are killed again and again would arrive at their ends.
    drive(robot, swing(state.q, -0.6 if state.q[ELBOW] > 0 else 0.6), 10_000)


if __name__ == "__main__":
    main(*sys.argv[1:])
