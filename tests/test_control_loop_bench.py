"""What `benchmarks/control_loop.py` counts, on ticks made by hand, and the device that it measures with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.real_robot.clock import VirtualClock
from burnish.real_robot.conformance import check
from burnish.real_robot.control.loop import ControlLoop, Order
from burnish.real_robot.control.shared_memory import Board, blank, order_dtype, plan_dtype, state_dtype
from burnish.real_robot.safety.safe_robot import SafeRobot
from burnish.real_robot.safety.settings import Safety

PARTS = Path(__file__).resolve().parents[1] / "benchmarks" / "control_parts.py"
MS = 1_000_000
SAFETY = Safety(rate_hz=200.0, blend_s=0.0, no_device_watchdog=True)


@pytest.fixture(scope="module")
def parts() -> Any:
    spec = importlib.util.spec_from_file_location("control_parts", PARTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_deadline_that_was_skipped_is_as_late_as_the_next_tick(parts):
    """By hand, at 5 ms: the tick of 10 begins at 26, so the deadlines 10, 15, 20, 25 are 16, 11, 6 and 1 ms late."""
    ticks = np.array([[0, 0, 0], [5, 1, 0], [10, 16, 0], [30, 2, 0]]) * MS
    assert parts.lateness(ticks, 5 * MS).tolist() == [0, 1 * MS, 16 * MS, 11 * MS, 6 * MS, 1 * MS, 2 * MS]
    punctual = np.array([[5 * i, 0, 0] for i in range(9)]) * MS
    assert not parts.lateness(punctual, 5 * MS).any() and len(parts.lateness(punctual, 5 * MS)) == 9


def test_a_loop_that_stalls_is_counted_as_late(parts, tmp_path, monkeypatch):
    """From the loop itself: 23 ms in one tick at 200 Hz are four deadlines that nobody served in time, and the share of
    deadlines is of all that there were, not of the ticks."""
    robot = SafeRobot(parts.StillAdapter(), SAFETY)
    clock = robot._adapter.clock = robot.clock = VirtualClock()
    kinds = (plan_dtype(7), order_dtype(), state_dtype(7))
    boards = [Board.create(tmp_path / str(i), kind) for i, kind in enumerate(kinds)]
    loop = ControlLoop(robot, *boards)
    boards[1].write(blank(order_dtype(), seq=1, what=list(Order).index(Order.START)))
    loop.run_until_ns(clock.now_ns() + 50 * MS)
    read = robot._adapter._read

    def slow(timeout_s: float) -> Any:
        clock.advance_ns(23 * MS)
        monkeypatch.setattr(robot._adapter, "_read", read)
        return read(timeout_s)

    monkeypatch.setattr(robot._adapter, "_read", slow)
    loop.run_until_ns(clock.now_ns() + 105 * MS)
    late = parts.lateness(loop.timing.kept(), 5 * MS)
    assert len(late) == 32 and loop.timing.ticks == 28
    assert sorted(late[late > 0].tolist()) == [5 * MS, 10 * MS, 15 * MS, 20 * MS]


def test_the_device_knows_which_plan_a_command_comes_from(parts, tmp_path):
    device = parts.StillAdapter(str(tmp_path / "log.npy"))
    robot = SafeRobot(device, SAFETY)
    robot.start()
    for code in (1, 1, 2, 5, 5):
        target = np.zeros(parts.JOINTS)
        target[-1] = code * parts.CODE_RAD
        robot.step(target)
    log = np.load(tmp_path / "log.npy")
    assert log[log[:, 0] > 0, 0].tolist() == [1, 2, 5] and (np.diff(log[:3, 1]) > 0).all()


def test_the_device_keeps_the_rules_of_devices(parts):
    report = check(parts.StillAdapter)
    assert report.passed, str(report)
