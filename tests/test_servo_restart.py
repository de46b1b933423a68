"""A servo whose supply breaks down for a moment: no torque, and nothing left of what it had been told.

Whatever the phase, `recover` and then `start` bring the arm back, nothing moves by it, and no servo gets torque before.
Without it a robot at rest had no way back but pulling the cable, which the controls show.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

import dynamixel_emulator as dynamixel
from burnish.real_robot.adapter import TRANSITIONS, Mode, Phase, StopKind
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.drivers.calibration import QUANTUM_RAD
from burnish.real_robot.emulators import feetech
from burnish.real_robot.emulators.faults import Faults
from burnish.real_robot.errors import DeviceFault, IllegalTransition, RobotError
from burnish.real_robot.safety.safe_robot import Rung, SafeRobot, Safety
from bus_lab import Rig

SDKS = {"dynamixel": "dynamixel_sdk", "feetech": "scservo_sdk"}
MODULES = {"dynamixel": dynamixel, "feetech": feetech}
# What a driver writes before it enables torque: lost with the supply, and not to be done without.
TOLD = {"dynamixel": (64, 98, 108, 112), "feetech": (40, 41, 46, 55)}
SAG_RAD = -0.3  # so far a joint falls that nothing holds
ONE = 3  # the servo that restarts
SAFETY = Safety(rate_hz=50.0, no_device_watchdog=True)


@pytest.fixture(params=SDKS)
def rig(request, require) -> Rig:
    require(SDKS[request.param])
    return Rig(request.param)


def torques(rig: Rig) -> list[int]:
    return [servo.get(MODULES[rig.family].TORQUE) for servo in rig.chain.servos]


def told(rig: Rig) -> list[list[int]]:
    return [[servo.get(address) for address in TOLD[rig.family]] for servo in rig.chain.servos]


def ticks(rig: Rig) -> list[int]:
    return rig.chain.motion(rig.clock.now_ns())[0]


def dip(rig: Rig) -> None:
    """Of one servo's supply; what it held sinks."""
    rig.chain.restart(ONE, rig.clock.now_ns())
    rig.plant.jump(ONE - 1, SAG_RAD)
    rig.wait(1.0)


def held(rig: Rig) -> SafeRobot:
    safe = SafeRobot(rig.arm, SAFETY)
    state = safe.start()
    for _ in range(10):
        safe.step(state.q)
    return safe


def refused(safe: SafeRobot) -> str:
    with pytest.raises(RobotError) as caught:
        safe.start()
    return str(caught.value)


def comes_back(rig: Rig, safe: SafeRobot, before: list[list[int]]) -> None:
    """By one order of a person, and another one to start; between them nothing has torque that had none."""
    place, torque, goals = ticks(rig), torques(rig), len(rig.chain.taken)
    safe.recover()
    assert safe.phase is Phase.INACTIVE
    rig.wait(1.0)
    assert ticks(rig) == place and torques(rig) == torque and len(rig.chain.taken) == goals
    state = safe.start()
    rig.wait(0.05)
    assert np.abs(np.subtract(ticks(rig), place)).max() <= 1, "without a bump"
    assert told(rig) == before, "all that a servo has to be told, it is told again"
    for _ in range(60):
        info = safe.step(state.q + 0.1)
    assert info.rung is Rung.RUN
    assert np.abs(rig.arm.calibration.radians(np.array(ticks(rig)[:5])) - state.q - 0.1).max() <= QUANTUM_RAD


def test_at_rest(rig):
    safe = held(rig)
    before = told(rig)
    safe.stop()
    dip(rig)
    assert torques(rig) == [1, 1, 0, 1, 1, 1]
    assert "then call recover()" in refused(safe)
    comes_back(rig, safe, before)


def test_at_work(rig):
    safe = held(rig)
    before, here = told(rig), safe.step(None).sent
    rig.chain.restart(ONE, rig.clock.now_ns())
    rig.plant.jump(ONE - 1, SAG_RAD)
    for _ in range(100):
        try:
            if safe.step(here).rung is Rung.STOPPED:
                break
        except DeviceFault:
            break
    assert safe.rung is Rung.STOPPED and torques(rig)[ONE - 1] == 0
    rig.wait(1.0)
    refused(safe)
    comes_back(rig, safe, before)


def test_before_it_was_active_when_the_lock_comes_back_open(require):
    """It is in RAM, and closed by whoever configures; a state of a servo whose lock is open is not believed."""
    require("scservo_sdk")
    usual, rig = Rig("feetech"), Rig("feetech")
    held(usual)
    safe = SafeRobot(rig.arm, SAFETY)
    rig.arm.configure()
    dip(rig)
    rig.chain.servos[ONE - 1].set(feetech.LOCK, 0)
    assert "lock" in refused(safe) and safe.phase is Phase.INACTIVE
    comes_back(rig, safe, told(usual))


def test_control_without_recover_at_rest_there_is_no_way_back(require, monkeypatch):
    """As it was: only out of FAULT, and a servo that reads as if its answers were old is no fault."""
    require("dynamixel_sdk")
    rig = Rig("dynamixel")
    safe = held(rig)
    safe.stop()
    dip(rig)
    row = {call: after for call, after in TRANSITIONS[Phase.INACTIVE].items() if call != "recover"}
    monkeypatch.setattr(
        "burnish.real_robot.adapter.TRANSITIONS", {**TRANSITIONS, Phase.INACTIVE: MappingProxyType(row)}
    )
    for _ in range(20):
        rig.wait(0.5)
        assert "the counter of servo 3" in refused(safe) and safe.phase is Phase.INACTIVE
        with pytest.raises(IllegalTransition, match="recover"):
            safe.recover()


def test_what_a_servo_knew_only_until_its_supply_broke_down_is_looked_at_again(require, monkeypatch):
    """An offset that was written with the lock closed is gone then, and with it the meaning of every angle. Nothing in
    a state says so. The control looks only when it configures, and takes hold of an arm that is elsewhere."""
    require("scservo_sdk")
    for careful in (True, False):
        rig = Rig("feetech", overrides={ONE: {feetech.OFFSET: 0}})
        servo = rig.chain.servos[ONE - 1]
        servo.stored = bytes(servo.stored[: feetech.OFFSET]) + b"\x64\0" + bytes(servo.stored[feetech.OFFSET + 2 :])
        rig.arm.configure()
        if not careful:
            monkeypatch.setattr(rig.arm, "_identify", lambda: None)
        dip(rig)
        if careful:
            with pytest.raises(DeviceFault, match="servo 3 has homing offset 100, and was calibrated with 0"):
                rig.arm.activate(Mode.JOINT_POSITION)
            assert rig.arm.phase is Phase.FAULT and not any(torques(rig))
        else:
            state = rig.arm.activate(Mode.JOINT_POSITION)
            shaft = rig.plant.motion()[0][ONE - 1] / QUANTUM_RAD
            assert abs(rig.arm.calibration.ticks(state.q)[ONE - 1] - shaft) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("at_rest", [True, False])
def test_a_dynamixel_that_has_shut_itself_down_is_rebooted(require, at_rest: bool):
    require("dynamixel_sdk")
    rig = Rig("dynamixel")
    safe = held(rig)
    before = told(rig)
    if at_rest:
        safe.stop()
    rig.chain.shut_down(ONE)
    rig.plant.jump(ONE - 1, SAG_RAD)
    if not at_rest:
        with pytest.raises(DeviceFault, match="servo 3 has shut itself down"):
            safe.step(None)
    assert "call recover() to reboot it" in refused(safe)
    comes_back(rig, safe, before)
    assert rig.chain.servos[ONE - 1].get(dynamixel.HARDWARE_ERROR) == 0


def test_one_that_complains_and_holds_the_arm_is_not(require):
    """Without torque the arm would fall."""
    require("dynamixel_sdk")
    rig = Rig("dynamixel")
    safe = held(rig)
    safe.stop()
    rig.chain.servos[ONE - 1].set(dynamixel.HARDWARE_ERROR, 1)
    refused(safe)
    with pytest.raises(DeviceFault, match="servo 3 says 1 in register 70 and still holds the arm"):
        safe.recover()
    assert safe.phase is Phase.FAULT and torques(rig) == [1] * 6


def test_on_a_bus_that_loses_packets(rig):
    """Two percent of either direction, and as many bent: what `insist` is for."""
    held(rig).stop()
    rig.faults(Faults(drop=0.02, corrupt=0.02), Faults(drop=0.02, corrupt=0.02))
    for _ in range(5):
        if rig.family == "dynamixel":
            rig.chain.shut_down(ONE)
        else:
            rig.chain.restart(ONE, rig.clock.now_ns())
        rig.arm.recover()
        assert torques(rig)[ONE - 1] == 0
        rig.arm.activate(Mode.JOINT_POSITION)
        assert torques(rig) == [1] * 6
        rig.arm.stop(StopKind.HOLD)
        rig.arm.deactivate()


def test_by_order_of_a_program(require):
    """An order that could not be followed is said to be so, though the phase is the one that was asked for."""
    require("dynamixel_sdk")
    rig = Rig("dynamixel")
    with LocalLink(rig.arm, SAFETY) as link:
        link.start()
        link.stop()
        dip(rig)
        with pytest.raises(RobotError, match=r"could not start.*the counter of servo 3.*call recover\(\)"):
            link.start()
        assert link.recover().phase is Phase.INACTIVE and link.start().phase is Phase.ACTIVE
        with pytest.raises(RobotError, match=r"could not recover.*recover\(\) in phase active"):
            link.recover()
        assert link.state().phase is Phase.ACTIVE
