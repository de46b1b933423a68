"""What a link must survive and leave behind: a thread that ends, a program that is killed, a plan that is no plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.real_robot.adapter import JointSpec, Phase
from burnish.real_robot.clock import ns
from burnish.real_robot.control import link as link_module
from burnish.real_robot.control.link import LocalLink, RobotLink
from burnish.real_robot.control.shared_memory import PREFIX, Board, hold, order_dtype, release, shared_folder
from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.safe_robot import Rung, Safety
from robot_lab import ARM, LIMITS, Puppet, spec

pytestmark = pytest.mark.real_time

TWIN = {"mjcf": ARM, **LIMITS, "watchdog_s": 2.0}
PATIENT = Safety(rate_hz=50.0, stale_ramp_s=5.0, silent_ramp_s=60.0, ramp_after=1000)


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Made there, and the thread has ended."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(call()))
    thread.start()
    thread.join()
    return made[0]


def test_a_link_made_in_a_thread_that_ends_goes_on():
    """Linux's parent-death signal comes when the thread ends; the process is what counts."""
    with in_a_thread(lambda: RobotLink("twin", TWIN, PATIENT, watch_s=1.0)) as link:
        time.sleep(0.3)  # the signal would have come long ago
        assert link.alive and link._watchdog.poll() is None
        link.start()
        link.plan(np.full((30, 2), 0.2), 0.1)
        deadline = time.monotonic() + 20
        while np.abs(link.state().sent - 0.2).max() > 1e-6 and time.monotonic() < deadline:
            time.sleep(0.02)
        now = link.state()
        assert now.phase is Phase.ACTIVE and now.rung is Rung.RUN and np.abs(now.sent - 0.2).max() < 1e-6


HOLDER = """
import sys, time
from burnish.real_robot.control.shared_memory import PREFIX, Board, order_dtype, shared_folder
folder = shared_folder()
Board.create(folder / "orders", order_dtype())
print(folder, flush=True)
time.sleep(60)
"""


def holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_run_left_in_memory_is_swept_by_the_next():
    dies, left = holder()
    lives, kept = holder()
    try:
        dies.send_signal(signal.SIGKILL)
        dies.wait()
        assert left.exists() and kept.exists() and left.name.startswith(PREFIX)
        mine = shared_folder()
        other = shared_folder()
        assert not left.exists(), "nobody holds it any more"
        assert kept.exists() and mine.exists() and other.exists(), "somebody lives in each of these"
        for folder in (mine, other):
            release(folder)
            assert not folder.exists() and not hold(folder)
    finally:
        lives.kill()
        lives.wait()
    release(shared_folder())
    assert not kept.exists()


def test_a_control_process_holds_its_folder_when_the_program_is_gone():
    """It still has to bring the robot to rest, and to say what it did."""
    link = LocalLink(Puppet(), Safety())
    folder = link.folder
    other = subprocess.Popen(
        [sys.executable, "-c", "from pathlib import Path\nfrom burnish.real_robot.control.shared_memory import hold\n"
         "import time\n"
         f"print(hold(Path({str(folder)!r})), flush=True)\ntime.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdout is not None and other.stdout.readline() == "True\n"
    from burnish.real_robot.control import shared_memory as shared

    os.close(shared._held.pop(folder))  # as if this process were gone
    release(shared_folder())
    assert folder.exists()
    other.kill()
    other.wait()
    release(shared_folder())
    assert not folder.exists()
    link.close()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_left_alone():
    mine = shared_folder()
    theirs = mine.parent / f"{PREFIX}of-nobody"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    (link := mine.parent / f"{PREFIX}link").symlink_to(mine)
    try:
        release(shared_folder())
        assert theirs.exists() and mine.exists() and link.is_symlink()
    finally:
        theirs.rmdir()
        link.unlink()
        release(mine)


def test_a_folder_of_a_link_is_gone_when_it_is_closed_or_could_not_begin(monkeypatch):
    made: list[Path] = []  # by this test alone: other processes make and remove folders of their own meanwhile
    monkeypatch.setattr(link_module, "shared_folder", lambda: made.append(shared_folder()) or made[-1])
    link = LocalLink(Puppet(), Safety())
    Board.open(link.folder / "orders", order_dtype()).close()
    link.close()
    with pytest.raises(Refused, match="no robot"):
        RobotLink("no such robot", {}, Safety())
    assert len(made) == 2 and not any(folder.exists() for folder in made)


def test_a_stop_is_waited_for_as_long_as_the_robot_brakes():
    """From 0.75 rad/s with 0.3 rad/s^2 that is 2.5 s, 250 periods."""
    weak = spec(joints=tuple(JointSpec(f"j{i}", -3.0, 3.0, 2.0, 0.3) for i in range(2)))
    with LocalLink(Puppet(robot=weak), Safety(blend_s=0.0, start_gap_rad=4.0)) as link:
        link.start()
        link.plan(np.full((1, 2), 2.9), 3.0)
        link.wait_until_ns(link.clock.now_ns() + ns(2.5))
        began_ns = link.clock.now_ns()
        assert link.stop().rung is Rung.STOPPED
        assert ns(2.4) < link.clock.now_ns() - began_ns < ns(2.6)


class Raises:
    def __float__(self) -> float:
        raise ZeroDivisionError

    def __array__(self, *given: Any, **named: Any) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize("bad", [10**400, "up", Raises(), [[0.0, Raises()]], [[1j, 0.0]], None], ids=range(6))
def test_a_plan_that_is_no_numbers_is_refused_in_a_sentence(bad: Any):
    link = LocalLink(Puppet(), Safety())
    with pytest.raises(Refused, match="a plan is"):
        link.plan(bad, 0.1)
    with pytest.raises(Refused, match="gripper"):
        link.plan(np.zeros((2, 2)), 0.1, gripper=bad if bad is not None else [0.0])
    for dt_s in (10**400, float("nan"), float("inf"), -1.0, 0.0, 1e300):
        with pytest.raises(Refused, match="dt_s"):
            link.plan(np.zeros((2, 2)), dt_s)
    link.plan([[0.1, 0.0]], 0.1, gripper=[0.5])
    link.wait_until_ns(link.clock.now_ns() + ns(0.05))
    link.close()
