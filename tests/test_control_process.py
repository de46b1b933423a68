"""The control process and its watchdog: a death is noticed, a stop has its time, a log is read by nobody, signals come.

Drivers of a test's own are a package beside the others, as anybody's are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.finetune.processes.actor_process import signals_blocked
from burnish.policies.core.errors import BurnishError
from burnish.real_robot.adapter import Phase
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.control.link import LocalLink, RobotLink, watch_time
from burnish.real_robot.control.loop import PHASES
from burnish.real_robot.control.process import LOG, LOG_BYTES
from burnish.real_robot.control.shared_memory import Board, blank, state_dtype
from burnish.real_robot.control.watchdog import WATCH_KIND, Watch, Watchdog
from burnish.real_robot.deployment import at_rest
from burnish.real_robot.drivers.universal import UniversalConfig
from burnish.real_robot.drivers.universal import spec_of as universal
from burnish.real_robot.env import RobotEnv, each_anew
from burnish.real_robot.errors import Refused, RobotError
from burnish.real_robot.robots import _go
from burnish.real_robot.safety.safe_robot import Rung, Safety
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.reach import ReachConfig
from robot_lab import ARM, LIMITS, Puppet

pytestmark = pytest.mark.real_time

TWIN = {"mjcf": ARM, **LIMITS, "watchdog_s": 20.0}
# On a busy machine nothing is as punctual as on a robot's.
PATIENT: dict[str, Any] = {"stale_ramp_s": 20.0, "silent_ramp_s": 60.0, "ramp_after": 10_000}
DRIVERS = """
import sys, time
from dataclasses import replace
from burnish.real_robot.drivers.twin import Twin, TwinConfig


class Noisy(Twin):
    def _write(self, command):
        sys.stderr.write(64 * ("." * 1023 + "\\n"))
        return super()._write(command)


class Slow(Twin):
    def _deactivate(self):
        time.sleep(2.0)
        super()._deactivate()


def noisy(config):
    return Noisy(TwinConfig(**config))


def slow(config):
    made = Slow(TwinConfig(**config))
    made.spec = replace(made.spec, stop_s=10.0)
    return made
"""
POINTS = "[burnish.robots]\nnoisy_twin = twins_of_a_test:noisy\nslow_twin = twins_of_a_test:slow\n"


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "twins_of_a_test-1.dist-info"
    about.mkdir()
    (tmp_path / "twins_of_a_test.py").write_text(DRIVERS)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: twins-of-a-test\nVersion: 1\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))


def awaited(what: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


# ---- death ----


def test_an_episode_ends_where_its_control_process_does():
    """No tick is played on what was measured last; the command ends in a sentence that says what the watchdog did."""
    mirror = Mirror(ReachConfig(max_steps=1000))
    more = {"priority": 0, "watch_s": 5.0}

    def connect(start: np.ndarray) -> RobotLink:
        config = {"mjcf": mirror.mjcf, "joints": list(mirror.joints), "start": start.tolist()}
        return RobotLink("twin", config, Safety(rate_hz=50.0, **PATIENT), **more)

    env = RobotEnv(mirror, each_anew(connect))
    said = r"ended before it could stop the robot \(exit status -9\).*; its watchdog says: it died in motion"
    with pytest.raises(BurnishError, match=said), at_rest(env):
        env.reset(None, [3])
        middle = torch.tensor([env.spec.action.low, env.spec.action.high]).mean(dim=0, keepdim=True)
        assert bool(env.step(middle).info["held"])
        link = env.link
        assert isinstance(link, RobotLink)
        os.kill(link.pid, signal.SIGKILL)
        assert awaited(lambda: not link.alive)
        env.step(middle)
        raise AssertionError("a tick was played on a robot that nobody drives")


class Mortal(LocalLink):
    """Its loop ends at a time."""

    ends_ns = 2**62

    @property
    def alive(self) -> bool:
        return self.clock.now_ns() < self.ends_ns

    def wait_until_ns(self, deadline_ns: int) -> None:
        super().wait_until_ns(min(deadline_ns, self.ends_ns))
        self.clock.sleep_until_ns(deadline_ns)

    def _require_alive(self, what: str) -> None:
        if not self.alive:
            raise RobotError(f"it ended before it could {what} the robot")


def test_a_robot_that_dies_on_its_way_to_an_episode_is_waited_for_no_longer():
    with Mortal(Puppet(), Safety(start_gap_rad=2.0)) as link:
        link.start()
        began_ns = link.clock.now_ns()
        link.ends_ns = began_ns + ns(0.3)
        with pytest.raises(RobotError, match="ended before it could stop"):
            _go(link, np.zeros(2), np.array([0.9, 0.9]), None, lambda: False)
        assert link.clock.now_ns() - began_ns < ns(0.4), "the whole way takes two seconds"


def test_who_stopped_the_robot_before_it_ended_has_told_the_truth():
    """After a Ctrl-C the control process does so by itself; its last report is true for ever."""
    with Mortal(Puppet(), Safety()) as link:
        link.start()
        link.stop()
        link.ends_ns = link.clock.now_ns()
        assert not link.alive and link.state().rung is Rung.STOPPED
        with pytest.raises(RobotError, match="ended before it could start"):
            link.start()


# ---- the watchdog's patience ----


class Watched:
    """A process that only sleeps, whose board a test writes."""

    def __init__(self, folder: Path, **watch: float) -> None:
        self.clock = VirtualClock()
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.board = Board.create(folder / "states", state_dtype(2))
        own = Board.create(folder / "watch", WATCH_KIND)
        self.watchdog = Watchdog(
            Watch(folder, self.process.pid, 2, "twin", {}, **watch), self.board, own, self.clock, None
        )

    def after(self, seconds: float, phase: Phase) -> str | None:
        now_ns = self.clock.now_ns()
        self.board.write(blank(state_dtype(2), heartbeat_ns=now_ns, phase=PHASES.index(phase)))
        self.clock.advance_ns(ns(seconds))
        return self.watchdog.look()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def test_a_stop_has_the_time_that_its_driver_declares_and_no_more(tmp_path):
    with Watched(tmp_path, limit_s=0.1, stop_s=0.5) as case:
        assert case.after(0.09, Phase.ACTIVE) is None
        assert case.after(0.59, Phase.STOPPING) is None
        assert "silent for 0.610 s, and was killed" in str(case.after(0.61, Phase.STOPPING))
        assert case.process.wait(20) == -signal.SIGKILL


def test_who_moves_has_none_of_it(tmp_path):
    with Watched(tmp_path, limit_s=0.1, stop_s=0.5) as case:
        assert "silent for 0.110 s, and was killed" in str(case.after(0.11, Phase.ACTIVE))


def test_drivers_declare_how_long_their_stop_takes():
    arm = UniversalConfig("10.0.0.1", stop_s=0.4)
    assert universal(arm).stop_s == pytest.approx(1.4) and Puppet().spec.stop_s == 0.5


def test_a_stop_that_takes_its_time_is_finished_and_reported(drivers):
    with RobotLink("slow_twin", TWIN, Safety(**PATIENT), watch_s=1.0) as link:
        link.start()
        found = link.stop()
        assert found.rung is Rung.STOPPED and found.phase is Phase.INACTIVE
        assert link.alive and link.start().phase is Phase.ACTIVE
        report = link.close()
    assert report["counts"]["stopped"] == 2 and report["why"] == "it ended"


def test_a_slow_loop_is_watched_for_three_of_its_periods():
    assert watch_time(None, 100.0) == 0.1 and watch_time(None, 8.0) == 0.375
    assert watch_time(0.05, 100.0) == 0.05 and watch_time(0.0, 8.0) == 0.0
    with pytest.raises(Refused, match=r"less than 3 periods of a control loop at 8 Hz.*give at least 0\.375"):
        RobotLink("twin", TWIN, Safety(rate_hz=8.0), watch_s=0.1)


def test_a_slow_loop_lives():
    with RobotLink("twin", TWIN, Safety(rate_hz=5.0, **PATIENT)) as link:
        begun = link.start().ticks
        assert awaited(lambda: not link.alive or link.state().ticks > begun + 4) and link.alive


# ---- what it writes, and what it hears ----


def test_a_driver_that_logs_for_days_neither_waits_for_a_reader_nor_fills_a_disk(drivers):
    with RobotLink("noisy_twin", TWIN, Safety(**PATIENT), watch_s=5.0) as link:
        begun = link.start().ticks
        log, sizes = link.folder / LOG, [0]

        def cut_off() -> bool:
            sizes.append(log.stat().st_size)
            return sizes[-1] < sizes[-2]

        assert awaited(lambda: cut_off() or not link.alive), "it is never cut off"
        assert link.alive and max(sizes) > LOG_BYTES
        assert awaited(lambda: link.state().ticks > begun + 50) and link.state().phase is Phase.ACTIVE


def test_the_last_words_of_a_process_that_fails_are_told():
    with pytest.raises(Refused, match="no setting 'speed'"):
        RobotLink("twin", {"mjcf": ARM, "speed": 1}, Safety())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_it_hears_signals_that_were_blocked_where_it_was_begun():
    """So an acting process is begun, and what begins there would inherit it: neither heard of the program's death."""
    with signals_blocked():
        link = RobotLink("twin", TWIN, Safety(**PATIENT), watch_s=5.0)
    with link:
        link.start()
        assert link._watchdog is not None
        for pid in (link.pid, link._watchdog.pid):
            status = Path(f"/proc/{pid}/status").read_text()
            blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
            assert not blocked >> (signal.SIGTERM - 1) & 1
        os.kill(link.pid, signal.SIGTERM)
        assert awaited(lambda: not link.alive)
        assert link.close()["counts"]["stopped"] == 1
