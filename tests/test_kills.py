"""`kill -9` of the policy's, the control and the watchdog's process while a Dynamixel arm moves: it comes to rest.

All of it is real but the device: the processes of `RobotLink`, the vendor's SDK, a terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.real_robot.clock import SECOND
from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.emulators.pty import PtyProcess
from burnish.real_robot.safety.safe_robot import Safety
from kill_lab import HIGH, LOW, RATE_HZ, Kill, NotStarted, dynamixel_chain, in_motion, judged, settings
from soak import often

pytestmark = pytest.mark.real_time

VELOCITY, ACCELERATION = 1.0, 30.0
WATCHDOG_S, WATCH_S = 0.1, 0.05
# The figure, for all three. Of the control process's death the device's watchdog makes the most of it. For the
# others the loop brakes: WATCH_S and two periods until it knows, VELOCITY / ACCELERATION = 33 ms, and the servo's own
# profile, which has one and a half times the acceleration, is 11 ms behind.
REST_S = 0.12
RESTS_S = 0.4  # so long it is watched afterwards


def policy(path: str) -> None:
    """Sends the arm from one end of its range to the other, until somebody ends this process."""
    config = settings(path, velocity=VELOCITY, acceleration=ACCELERATION, watchdog_s=WATCHDOG_S)
    link = RobotLink("dynamixel", config, Safety(rate_hz=RATE_HZ, blend_s=0.0, start_gap_rad=10.0), watch_s=WATCH_S)
    link.start()
    assert link._watchdog is not None
    names = {"policy": os.getpid(), "control": link.pid, "watchdog": link._watchdog.pid, "folder": str(link.folder)}
    sys.stdout.write(json.dumps(names) + "\n")
    sys.stdout.flush()
    turn_s = 0.8 * (HIGH - LOW).min() / VELOCITY
    while True:
        link.plan(np.tile(HIGH if time.monotonic() % (2 * turn_s) < turn_s else LOW, (20, 1)), 0.05)
        time.sleep(0.05)


def killed(device: PtyProcess, who: str, rng: np.random.Generator) -> Kill:
    command = [sys.executable, __file__, device.path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
    try:
        if not found:
            raise NotStarted
        time.sleep(0.3 + rng.uniform(0, 0.2))
        at_ns = time.monotonic_ns()
        os.kill(found[who], signal.SIGKILL)
        gone_ns = at_ns
        if who == "policy":  # the kernel tells its children once its memory is gone, for which it needs its turn
            process.wait()
            gone_ns = time.monotonic_ns()
        time.sleep(REST_S + RESTS_S + 0.1)
        kill = judged(device, at_ns, _said(found))
        kill.late_s += (gone_ns - at_ns) / SECOND
        return kill
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if found:
            shutil.rmtree(found["folder"], ignore_errors=True)


def _said(found: dict[str, Any]) -> str:
    path = Path(found["folder"]) / "watched.json"
    return json.loads(path.read_text(encoding="utf-8"))["why"] if path.exists() else ""


@pytest.mark.parametrize("who", ["policy", "control", "watchdog"])
def test_whoever_is_killed_the_arm_comes_to_rest(require, who: str, record_property):
    require("dynamixel_sdk", "the SDK of Dynamixel servos is not installed")
    rng, found = np.random.default_rng(1), []
    with PtyProcess(dynamixel_chain) as device:
        for _ in range(often(2, 20)):
            found.append(in_motion(partial(killed, device, who, rng), 0.5 * VELOCITY))
    rest_ms = [1000 * kill.rest_s for kill in found]
    figures = f"{who}: rest after {min(rest_ms):.0f} to {max(rest_ms):.0f} ms, median {np.median(rest_ms):.0f}"
    record_property("figures", figures)
    for kill in found:
        assert kill.rest_s <= REST_S + kill.late_s, found
        assert kill.drift_rad == 0 and kill.watched_s > 0.9 * RESTS_S, found
    if who == "control":
        # Where the machine is busy, its silence may be noticed before its death.
        ways = ("it died in motion; stopped by its second channel", "and was killed; stopped by its second channel")
        assert all(any(way in kill.why for way in ways) for kill in found), found


def test_only_before_the_kill_is_anything_tried_again():
    late = Kill(speed=1.0, rest_s=99.0, late_s=0.0, drift_rad=1.0, watched_s=1.0, why="")
    happens = iter([NotStarted(), replace(late, speed=0.1), late])

    def kill() -> Kill:
        if isinstance(what := next(happens), NotStarted):
            raise what
        return what

    assert in_motion(kill, 0.5) is late  # however bad it is
    happens = iter([NotStarted()] * 10)
    with pytest.raises(AssertionError, match="ten times"):
        in_motion(kill, 0.5)


if __name__ == "__main__":
    policy(sys.argv[1])
