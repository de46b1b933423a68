"""The emulated controller by hand: its frames, and what it does with commands, step by step and without a clock."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import pytest

from universal_emulator import rtde
from universal_emulator.polyscope import FINISHED, READY, STEP_S, ArmSettings, Controller, Do


def told(controller: Controller, what: int, *numbers: float) -> None:
    doubles = {f"input_double_register_{i}": x for i, x in enumerate(numbers)}
    controller.receive({"input_int_register_0": int(what), **doubles})


def stepped(controller: Controller, seconds: float) -> None:
    for _ in range(round(seconds / STEP_S)):
        controller.step()


@pytest.fixture
def controller() -> Controller:
    events: list[str] = []
    found = Controller(ArmSettings(unlock_after_s=5.0), events.append)
    found.start_program()
    return found


def finished(controller: Controller, what: int, *numbers: float, within_s: float = 5.0) -> int:
    """Steps until the program says so; then it is made ready again, as ur-rtde does."""
    told(controller, what, *numbers)
    for steps in itertools.count(1):
        controller.step()
        if controller.output_int[0] == FINISHED:
            told(controller, Do.NOTHING)
            controller.step()
            assert controller.output_int[0] == READY
            return steps
        assert steps * STEP_S < within_s, "it never finished"
    raise AssertionError


def test_frames_arrive_however_they_are_cut():
    frames = [rtde.frame(rtde.Kind.DATA, bytes(range(k))) for k in (0, 1, 7, 200)]
    stream, rng = b"".join(frames), np.random.default_rng(0)
    for _ in range(50):
        cuts = sorted(rng.integers(0, len(stream), 6).tolist())
        parser, found = rtde.Frames(), []
        for a, b in itertools.pairwise([0, *cuts, len(stream)]):
            found += list(parser.feed(stream[a:b]))
        assert found == [(ord("U"), bytes(range(k))) for k in (0, 1, 7, 200)]


@pytest.mark.parametrize("header", [b"\x00\x00U", b"\x00\x02U", b"\xff\xffU"])
def test_a_length_that_cannot_be_is_no_frame(header: bytes):
    with pytest.raises(rtde.BadFrame):
        list(rtde.Frames().feed(header))


def test_a_package_has_the_bytes_of_its_recipe():
    """Big-endian, in the recipe's order, behind its number: written out here by hand."""
    recipe = rtde.Recipe(3, ("input_int_register_0", "external_force_torque"), ("INT32", "VECTOR6D"))
    values = {"input_int_register_0": -2, "external_force_torque": [0.5, -1.0, 2.0, 0.0, math.pi, 1e9]}
    data = recipe.pack(values)
    assert data == b"\x03\xff\xff\xff\xfe" + b"".join(struct.pack(">d", x) for x in values["external_force_torque"])
    assert recipe.unpack(data) == values
    for wrong in (data[:-1], data + b"\x00", b""):
        with pytest.raises(rtde.BadFrame):
            recipe.unpack(wrong)
    assert rtde.names_of(b"timestamp,actual_q,") == ("timestamp", "actual_q")


def test_set_points_are_followed_within_the_limits(controller: Controller):
    goal = controller.q + np.array([1.0, -0.5, 0.2, 0, 0, 0])
    speeds = []
    for _ in range(1000):
        told(controller, Do.SERVOJ, *goal, 0, 0, 0.008, 0.03, 300)
        controller.step()
        assert controller.output_int[0] == READY
        speeds.append(controller.qd.copy())
    np.testing.assert_allclose(controller.q, goal, atol=1e-6)
    assert np.abs(speeds).max() <= math.pi + 1e-9
    assert np.abs(np.diff(speeds, axis=0)).max() <= 40 * STEP_S + 1e-9


def test_movej_arrives(controller: Controller):
    goal = controller.q + 0.3
    steps = finished(controller, Do.MOVEJ, *goal, 1.0, 2.0)
    stepped(controller, 0.01)
    np.testing.assert_allclose(controller.q, goal, atol=1e-5)
    # Speeding up and braking with 2 rad/s^2 over 0.3 rad: 2 sqrt(0.3 / 2) s, without reaching 1 rad/s.
    assert steps * STEP_S == pytest.approx(2 * math.sqrt(0.15), rel=0.1)


def test_the_watchdog_stops_a_silent_program(controller: Controller):
    finished(controller, Do.SET_WATCHDOG, 10.0)
    for _ in range(500):
        told(controller, Do.SPEEDJ, *[0.5] * 6, 5.0, 0.1)
        controller.step()
    assert controller.running and controller.qd.max() == pytest.approx(0.5)
    stepped(controller, 0.1 + STEP_S)
    assert not controller.running
    stepped(controller, 0.5 / 40 + 4 * STEP_S)  # braking, and the delay
    assert np.abs(controller.qd).max() == 0


def test_without_a_watchdog_it_moves_for_ever(controller: Controller):
    """The control: the register keeps its command, and the program repeats it."""
    told(controller, Do.SPEEDJ, *[0.1] * 6, 5.0, 0.1)
    stepped(controller, 5.0)
    assert controller.running and controller.qd.max() == pytest.approx(0.1)


def test_stopping_is_finished_when_the_arm_rests(controller: Controller):
    told(controller, Do.SPEEDJ, *[0.5] * 6, 5.0, 1.0)
    stepped(controller, 1.0)
    steps = finished(controller, Do.SERVO_STOP, 10.0)
    assert steps * STEP_S == pytest.approx(0.5 / 10, abs=2 * STEP_S) and np.abs(controller.target_qd).max() == 0


def test_a_protective_stop_is_not_unlocked_at_once(controller: Controller):
    told(controller, Do.SERVOJ, *[math.nan] * 6, 0, 0, 0.008, 0.03, 300)
    controller.step()
    assert controller.ask("safetystatus") == "Safetystatus: PROTECTIVE_STOP" and not controller.running
    controller.start_program()
    assert not controller.running
    assert "Cannot unlock" in controller.ask("unlock protective stop")
    stepped(controller, 5.0)
    assert "releasing" in controller.ask("unlock protective stop")
    controller.start_program()
    assert controller.running


def test_after_an_emergency_stop_power_comes_back_by_hand(controller: Controller):
    controller.emergency_stop()
    assert controller.ask("robotmode") == "Robotmode: POWER_OFF"
    controller.ask("power on")
    assert controller.ask("robotmode") == "Robotmode: POWER_OFF"
    controller.release_emergency_stop()
    controller.ask("power on")
    assert controller.ask("robotmode") == "Robotmode: IDLE"
    controller.ask("brake release")
    assert controller.ask("robotmode") == "Robotmode: RUNNING"
    assert controller.ask("make coffee").startswith("could not understand")
