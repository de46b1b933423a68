"""`env=joints`: the numbers are LeRobot's own, of a calibration of LeRobot's; other units are refused; a gripper that
is a channel of its own is one of the numbers; a person's keys move what was sent last."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.real_robot.adapter import GripperSpec, JointSpec, Mode, RobotSpec
from burnish.real_robot.drivers.calibration import Calibration
from burnish.real_robot.errors import Refused
from burnish.real_robot.grasp import Grasp, grasped
from burnish.real_robot.joints import Joints, JointsConfig, Units
from burnish.real_robot.supervisor import ByHand, Word
from burnish.sim.build import make_env
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.insert import InsertConfig

LEROBOTS = {
    "shoulder_pan": {"id": 1, "drive_mode": 0, "homing_offset": -1470, "range_min": 758, "range_max": 3292},
    "elbow_flex": {"id": 2, "drive_mode": 0, "homing_offset": 12, "range_min": 891, "range_max": 3100},
    "gripper": {"id": 6, "drive_mode": 0, "homing_offset": 1407, "range_min": 1980, "range_max": 3440},
}


def lerobots(row: dict[str, int], tick: float, units: Units) -> float:
    """What LeRobot says of that tick (``MotorsBus._normalize``), written down once more."""
    low, high = row["range_min"], row["range_max"]
    if units is Units.deg:
        return (tick - (low + high) / 2) * 360 / 4095
    return (tick - low) / (high - low) * 200 - 100


def spec_of(calibration: Calibration) -> RobotSpec:
    joints = tuple(JointSpec(j.name, *j.limits_rad, 4.0, 40.0) for j in calibration.joints)
    grip = None if calibration.gripper is None else GripperSpec(calibration.gripper.width_m, 0.1)
    return RobotSpec("arm", joints, frozenset({Mode.JOINT_POSITION}), (5.0, 100.0, 500.0), gripper=grip)


@pytest.mark.parametrize("units", [Units.deg, Units.range])
def test_the_numbers_are_lerobots(units: Units):
    """To 0.1: half a tick of the zero is 0.04 degrees, 4095 ticks to a turn are 0.04 at the ends."""
    calibration = Calibration.of(LEROBOTS)
    body = Joints(JointsConfig(units=units), spec_of(calibration))
    rows = [LEROBOTS["shoulder_pan"], LEROBOTS["elbow_flex"]]
    for share in (0.0, 0.2, 0.7, 1.0):
        ticks = np.array([row["range_min"] + share * (row["range_max"] - row["range_min"]) for row in rows])
        body.see(np.append(calibration.radians(ticks), share), np.zeros(3))
        theirs = [*(lerobots(row, tick, units) for row, tick in zip(rows, ticks, strict=True)), 100 * share]
        (said,) = body.observe()["state"]
        assert np.abs(said - theirs).max() < 0.1, (said, theirs)
        targets = body.targets(np.array(theirs))
        assert np.abs(calibration.ticks(targets[:-1]) - ticks).max() < 1.5 and targets[-1] == pytest.approx(share)


def test_a_calibration_of_lerobots_from_its_file(tmp_path):
    (tmp_path / "arm.json").write_text(json.dumps(LEROBOTS))
    found = Calibration.load(tmp_path / "arm.json")
    assert [j.name for j in found.joints] == ["shoulder_pan", "elbow_flex"] and found.offsets == [-1470, 12, 1407]
    assert found.gripper is not None and (found.gripper.closed_tick, found.gripper.open_tick) == (1980, 3440)
    for change, words in [
        ({"drive_mode": 1}, "drive_mode=1"),
        ({"range_min": 1.5}, "whole numbers"),
        ({"range_min": 3500}, "min_tick < max_tick"),
        ({"id": 300}, "0 to 252"),
    ]:
        with pytest.raises(Refused, match=words):
            Calibration.of({**LEROBOTS, "elbow_flex": LEROBOTS["elbow_flex"] | change})


def policy_of(low: list[float], high: list[float]) -> PolicySpec:
    return PolicySpec(ObsSpec({"state": (len(low),)}), ActionSpec(tuple(low), tuple(high)), 8, 4, action_mode="unknown")


def test_other_units_are_refused_before_anything_moves():
    robot = spec_of(Calibration.of(LEROBOTS))
    degrees, radians = policy_of([-80.0, -60, 2], [75.0, 70, 98]), policy_of([-1.4, -1, 0], [1.3, 1.2, 1])
    assert Joints(JointsConfig(units=Units.deg), robot, degrees).spec.action == degrees.action
    assert Joints(JointsConfig(), robot, radians).spec.action_mode == "unknown"
    with pytest.raises(BurnishError, match=r"elbow_flex go from -60 to 70.*env.units=rad.*other units"):
        Joints(JointsConfig(), robot, degrees)
    with pytest.raises(BurnishError, match=r"less than 5%.*env.units=deg"):
        Joints(JointsConfig(units=Units.deg), robot, radians)


def test_settings_are_checked():
    robot = spec_of(Calibration.of(LEROBOTS))
    with pytest.raises(BurnishError, match="did you mean 'elbow_flex'"):
        Joints(JointsConfig(percent=["elbow"]), robot)
    with pytest.raises(BurnishError, match=r"3: shoulder_pan, elbow_flex, the gripper"):
        Joints(JointsConfig(start=[0.0, 0.1]), robot)
    for wrong in ({"max_steps": 0}, {"control_hz": 0.0}, {"control_hz": math.nan}):
        with pytest.raises(BurnishError, match="control_hz"):
            JointsConfig(**wrong)


def test_a_joint_in_percent():
    robot = replace(spec_of(Calibration.of(LEROBOTS)), gripper=None)
    body = Joints(JointsConfig(units=Units.deg, percent=["elbow_flex"]), robot)
    lower, upper = body.ranges[1]
    body.see(np.array([0.5, lower + 0.25 * (upper - lower)]), np.zeros(2))
    assert body.observe()["state"][0] == pytest.approx([math.degrees(0.5), 25.0])
    assert body.targets(np.array([90.0, 100.0])) == pytest.approx([math.pi / 2, upper])


def test_where_an_episode_begins():
    robot = spec_of(Calibration.of(LEROBOTS))
    here = np.array([0.3, -0.2, 0.6])
    body = Joints(JointsConfig(), robot)
    body.begin(0)
    body.see(here, np.zeros(3))
    assert body.where.tolist() == here.tolist(), "where it is"
    body = Joints(JointsConfig(units=Units.deg, start=[10.0, 20.0, 50.0]), robot)
    body.see(here, np.zeros(3))
    assert body.where == pytest.approx([math.radians(10), math.radians(20), 0.5]) and body.start.shape == (2,)


class Pressed:
    """A person who presses what a test says."""

    def __init__(self) -> None:
        self.word = Word()

    def poll(self, obs):
        return self.word


def test_keys_move_what_was_sent_last_and_not_to_the_middle():
    robot = spec_of(Calibration.of(LEROBOTS))
    body, person = Joints(JointsConfig(control_hz=20.0), robot), Pressed()
    hand = ByHand(person, body, rate=0.1)  # type: ignore[arg-type]
    body.begin(0)
    here = np.array([0.9, -0.5, 0.25])
    body.see(here, np.zeros(3))
    assert hand.poll({}).action is None, "nobody has the robot"
    person.word = Word(action=np.zeros(3))
    low, high = np.array(body.spec.action.low), np.array(body.spec.action.high)

    def asked() -> np.ndarray:
        action = hand.poll({}).action
        assert action is not None
        return body.targets((low + high) / 2 + (high - low) / 2 * action)

    assert asked() == pytest.approx(here), "a key that is let go keeps the arm where it is"
    middle = (low + high) / 2
    assert np.abs(middle - here).max() > 0.4, "the control: the middle of the ranges is elsewhere"
    person.word = Word(action=np.array([1.0, 0.0, -1.0]))
    for k in range(1, 4):
        body.see(np.zeros(3), np.zeros(3))  # wherever it has come to meanwhile
        assert asked() - here == pytest.approx(k * 0.1 / 20 * (high - low) * [1, 0, -1])
    person.word = Word(success=True)
    assert hand.poll({}).success


def test_displacements_stay_displacements_and_the_gripper_keeps_its_angle():
    """Of a task's arm with steps of the tool, where the gripper alone is an angle."""
    body, person = Mirror(make_env("insert", 1).task.config), Pressed()  # type: ignore[attr-defined]
    body.begin(3)
    held, displaces = body.holding()
    assert displaces.all() and not held.any()
    hand = ByHand(person, body)  # type: ignore[arg-type]
    person.word = Word(action=np.full(len(held), 0.5))
    assert hand.poll({}).action.tolist() == [0.5] * len(held)  # type: ignore[union-attr]
    task = make_env("pick_place", 1).task  # type: ignore[attr-defined]
    held, displaces = task.hand.holding()
    assert displaces.tolist() == [True] * (len(held) - 1) + [False]


def test_a_gripper_of_its_own_is_the_bodys_last_joint():
    body = Mirror(InsertConfig())
    five = tuple(JointSpec(name, -3.0, 3.0, 4.0, 40.0) for name in body.joints[:-1])
    robot = RobotSpec("arm", five, frozenset({Mode.JOINT_POSITION}), (5.0, 100.0, 500.0), gripper=GripperSpec(0.07, 1))
    assert grasped(body, replace(robot, gripper=None)) is body
    grasp = grasped(body, robot)
    assert isinstance(grasp, Grasp) and grasp.joints == body.joints[:-1]
    body.begin(5)
    low, high = body.ranges[-1]
    share = (body.start[-1] - low) / (high - low)
    assert grasp.where == pytest.approx([*body.start[:-1], share]) and 0 < share < 1
    q = np.array([0.1, -0.2, 0.3, 0.2, 0.1, 0.4])
    grasp.see(q, np.zeros(6))
    by_channel = grasp.observe()["state"]
    body.see(np.array([*q[:-1], low + 0.4 * (high - low)]), np.zeros(6))
    assert np.array_equal(by_channel, body.observe()["state"])
    action = np.zeros(body.spec.action.dim)
    targets = grasp.targets(action)
    assert targets[-1] == pytest.approx(share) and targets[:-1] == pytest.approx(body.targets(action)[:-1])
