"""What is refused changes nothing: a second start leaves the protection alone, and so does a command not sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_safe_robot import PERIOD_S, SAFETY, running, ticks

from burnish.real_robot.adapter import GripperSpec
from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.safe_robot import Rung
from robot_lab import Puppet, spec


def changes(puppet: Puppet, since: int = 0) -> np.ndarray:
    """(commands, n) rad/s^2 from one set-point that the device took to the next."""
    return np.diff([command.target for command in puppet.written[since:]], n=2, axis=0) / PERIOD_S**2


def test_a_robot_that_runs_is_not_started_again():
    """Its protection goes on from what was sent: at rest where it is measured it is not."""
    safe, puppet = running()
    ticks(safe, 30, [0.9, 0.9])
    calls = len(puppet.calls)
    with pytest.raises(Refused, match="started already"):
        safe.start()
    assert len(puppet.calls) == calls and safe.rung is Rung.RUN
    ticks(safe, 30, [0.9, 0.9])
    assert np.abs(changes(puppet)).max() <= 10 * (1 + 1e-6)


EXPIRED = Refused("command 7 expired 2 ns ago")


def test_a_command_that_is_refused_leaves_the_guard_where_the_device_is():
    robot = Puppet(robot=spec(gripper=GripperSpec(width_m=0.08, speed_m_s=0.08)))
    safe, puppet = running(robot=robot)
    ticks(safe, 15, [0.9, -0.9], gripper=1.0)
    for count in (1, 2):
        puppet.script.fails["write"] = EXPIRED
        refused = ticks(safe, count, [0.9, -0.9], gripper=1.0)
        assert np.array_equal(refused[-1].sent, puppet.written[-1].target) and refused[-1].changed
        del puppet.script.fails["write"]
        ticks(safe, 10, [0.9, -0.9], gripper=1.0)
    assert safe.rung is Rung.RUN and safe.counts["refused"] == 3
    assert [event.text for event in safe.events if event.kind == "refused"] == [str(EXPIRED)], "once a second"
    assert np.abs(changes(puppet)).max() <= 10 * (1 + 1e-6)
    assert np.diff([command.gripper for command in puppet.written]).max() <= PERIOD_S * (1 + 1e-9)


def test_and_every_other_protection_too():
    """The limit of jerk is of three set-points in a row that the device has."""
    safe, puppet = running(replace(SAFETY, jerk=100.0))
    for _ in range(6):
        ticks(safe, 7, [0.9, -0.9])
        puppet.script.fails["write"] = EXPIRED
        ticks(safe, 1, [0.9, -0.9])
        del puppet.script.fails["write"]
    safe.stop()
    path = np.array([[0.0, 0.0]] * 3 + [command.target for command in puppet.written])
    assert np.abs(np.diff(path, n=3, axis=0)).max() <= 100 * PERIOD_S**3 * (1 + 1e-6)
    assert safe.counts["refused"] == 6 and np.abs(path).max() > 0.1


def test_refusals_in_a_row_slow_it_down_and_stop_it():
    safe, puppet = running()
    ticks(safe, 30, [0.9, 0.9])
    puppet.script.fails["write"] = EXPIRED
    rungs = [info.rung for info in ticks(safe, 100, [0.9, 0.9])]
    assert rungs[: SAFETY.ramp_after] == [Rung.RUN] * 3 + [Rung.SLOW] * 7, "as for missed deadlines"
    assert rungs[SAFETY.ramp_after :] == [Rung.STOPPED], "what refuses to brake is stopped at once"
    assert puppet.calls[-2:] == ["stop hold", "deactivate"]
    assert any("10 commands in a row were refused" in event.text for event in safe.events)


def test_a_device_that_takes_every_second_command_brakes_within_its_limits():
    safe, puppet = running()
    ticks(safe, 30, [0.9, 0.9])
    real, turn = puppet._write, [0]

    def every_second(command):
        turn[0] += 1
        if turn[0] % 2:
            raise EXPIRED
        return real(command)

    puppet._write = every_second
    safe.stop()
    assert safe.rung is Rung.STOPPED and np.array_equal(puppet.written[-1].target, puppet.written[-2].target)
    assert np.abs(changes(puppet)).max() <= 10 * (1 + 1e-6)
