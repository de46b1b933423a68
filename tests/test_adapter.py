"""The table of phases and calls, cell by cell, and what the base class lets through to a driver and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from burnish.real_robot.adapter import API_VERSION, CALLS, TRANSITIONS, Command, JointSpec, Mode, Phase, StopKind
from burnish.real_robot.errors import DeviceFault, IllegalTransition, Refused, RobotError, StaleState
from robot_lab import Puppet, spec

# What the drawing in adapter.py says, written once more: phase, call, phase after it. All else is illegal.
LEGAL = {
    ("unconfigured", "configure"): "inactive",
    ("inactive", "activate"): "active",
    ("inactive", "read"): "inactive",
    ("inactive", "recover"): "inactive",
    ("active", "read"): "active",
    ("active", "write"): "active",
    ("active", "stop"): "stopping",
    ("stopping", "read"): "stopping",
    ("stopping", "deactivate"): "inactive",
    ("fault", "read"): "fault",
    ("fault", "recover"): "inactive",
    **{(phase.value, "close"): "closed" for phase in Phase},
    **{(phase.value, "stop"): phase.value for phase in Phase if phase is not Phase.ACTIVE},
}


def command(robot: Puppet, seq: int = 1, **changes) -> Command:
    now = robot.clock.now_ns()
    made = Command(Mode.JOINT_POSITION, seq, now, now + 10_000_000, np.zeros(len(robot.spec.joints)))
    return replace(made, **changes)


def brought_to(phase: Phase) -> Puppet:
    robot = Puppet()
    if phase is Phase.UNCONFIGURED:
        return robot
    robot.configure()
    if phase in (Phase.ACTIVE, Phase.STOPPING):
        robot.activate(Mode.JOINT_POSITION)
    if phase is Phase.STOPPING:
        robot.stop(StopKind.HOLD)
    if phase is Phase.FAULT:
        robot.script.fails["read"] = OSError("the cable is out")
        with pytest.raises(DeviceFault, match="the cable is out"):
            robot.read(0.1)
        robot.script.fails.clear()
    if phase is Phase.CLOSED:
        robot.close()
    assert robot.phase is phase
    return robot


def call(robot: Puppet, name: str) -> None:
    arguments = {
        "activate": (Mode.JOINT_POSITION,),
        "read": (0.1,),
        "write": (command(robot),),
        "stop": (StopKind.HOLD,),
    }
    getattr(robot, name)(*arguments.get(name, ()))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("phase", Phase)
def test_every_cell_of_the_table(phase: Phase, name: str):
    robot = brought_to(phase)
    calls = len(robot.calls)
    expected = LEGAL.get((phase.value, name))
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{name}.*allowed: "):
            call(robot, name)
        assert robot.phase is phase and len(robot.calls) == calls, "an illegal call reached the driver"
    else:
        call(robot, name)
        assert robot.phase.value == expected


def test_the_table_has_a_row_for_every_phase_and_no_other_calls():
    assert set(TRANSITIONS) == set(Phase) and len(Phase) * len(CALLS) == 48
    assert all(set(row) <= set(CALLS) for row in TRANSITIONS.values())


@pytest.mark.parametrize("name", ["configure", "activate", "read", "write", "deactivate", "recover"])
def test_what_a_driver_raises_becomes_a_fault(name: str):
    phase = {"configure": Phase.UNCONFIGURED, "activate": Phase.INACTIVE, "deactivate": Phase.STOPPING}
    robot = brought_to({**phase, "recover": Phase.FAULT}.get(name, Phase.ACTIVE))
    robot.script.fails[name] = ZeroDivisionError("inside the SDK")
    with pytest.raises(DeviceFault, match="inside the SDK"):
        call(robot, name)
    assert robot.phase is Phase.FAULT and "inside the SDK" in robot.fault.text
    robot.script.fails.clear()
    robot.recover()
    assert robot.phase is Phase.INACTIVE and robot.fault is None


def test_a_refusal_and_silence_change_no_phase():
    robot = brought_to(Phase.ACTIVE)
    for name, error in (("write", Refused("no")), ("read", StaleState("no"))):
        robot.script.fails[name] = error
        with pytest.raises(type(error)):
            call(robot, name)
        assert robot.phase is Phase.ACTIVE


def test_stop_raises_nothing_and_a_failed_one_is_a_fault():
    robot = brought_to(Phase.ACTIVE)
    robot.script.fails["stop hold"] = RuntimeError("gone")
    robot.stop(StopKind.HOLD)
    assert robot.phase is Phase.FAULT
    robot.stop(StopKind.RAMP)  # again, in another phase


def test_an_arm_that_falls_is_not_released():
    robot = brought_to(Phase.ACTIVE)
    robot.stop(StopKind.RELEASE)
    assert robot.calls[-1] == "stop hold"
    safe = Puppet(robot=spec(safe_when_unpowered=True))
    safe.configure()
    safe.stop(StopKind.RELEASE)
    assert safe.calls[-1] == "stop release"


def test_close_stops_what_is_active_and_survives_a_device_that_is_gone():
    robot = brought_to(Phase.ACTIVE)
    robot.script.fails["close"] = OSError("gone")
    robot.close()
    robot.close()
    assert robot.phase is Phase.CLOSED and "stop hold" in robot.calls
    assert Puppet().calls == [], "what was never opened is not closed at the device"


BAD_COMMANDS = {
    "seq": {"seq": 0},
    "mode": {"mode": Mode.JOINT_VELOCITY},
    "shape": {"target": np.zeros(3)},
    "nan": {"target": np.array([0.0, np.nan])},
    "inf": {"target": np.array([0.0, np.inf])},
    "expired": {"valid_until_ns": 0},
    "gripper": {"gripper": 1.5},
    "gripper nan": {"gripper": float("nan")},
}


@pytest.mark.parametrize("changes", BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_commands_that_never_reach_a_driver(changes):
    robot = brought_to(Phase.ACTIVE)
    robot.write(command(robot, seq=1))
    with pytest.raises(Refused):
        robot.write(command(robot, **{"seq": 2, **changes}))
    assert len(robot.written) == 1 and robot.phase is Phase.ACTIVE
    robot.write(command(robot, seq=2))  # the good one goes through
    assert len(robot.written) == 2


def test_states_that_never_reach_a_program():
    robot = brought_to(Phase.ACTIVE)
    robot.read(0.1)
    robot.script.repeat = True
    with pytest.raises(StaleState, match="not newer"):
        robot.read(0.1)
    robot.script.repeat = False
    for bad in ([0.0, np.nan], [0.0, 0.0, 0.0]):
        robot.script.q = bad
        with pytest.raises(DeviceFault):
            robot.read(0.1)
        robot.script.q = None
        robot.recover()


def test_modes_that_a_robot_does_not_have():
    robot = brought_to(Phase.INACTIVE)
    with pytest.raises(Refused, match="no mode 'joint_torque'; choices: joint_position"):
        robot.activate(Mode.JOINT_TORQUE)
    assert robot.phase is Phase.INACTIVE and "activate" not in robot.calls


def test_a_spec_that_cannot_be_true():
    good = JointSpec("j", -1.0, 1.0, 1.0, 1.0)
    for wrong in ({"lower": 2.0}, {"velocity": 0.0}, {"acceleration": float("nan")}, {"quantum": -1.0}, {"jerk": 0.0}):
        with pytest.raises(RobotError):
            replace(good, **wrong)
    for wrong in (
        {"api_version": API_VERSION + 1},
        {"joints": (good, good)},
        {"joints": ()},
        {"rate_hz": (10.0, 5.0, 20.0)},
        {"modes": frozenset()},
    ):
        with pytest.raises(RobotError):
            spec(**wrong)
