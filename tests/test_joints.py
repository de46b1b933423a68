"""`env=joints`: the numbers are LeRobot's own, of a calibration of LeRobot's; other units are refused; a gripper that
is a channel of its own is one of the numbers; a person's keys move what was sent last."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec, check_compatible
from burnish.real_robot.adapter import GripperSpec, JointSpec, Mode, RobotSpec
from burnish.real_robot.clock import ns
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.drivers.calibration import Calibration
from burnish.real_robot.env import RobotEnv
from burnish.real_robot.errors import Refused, RobotError
from burnish.real_robot.gripper_channel import GripperChannel, with_gripper_channel
from burnish.real_robot.joints import Joints, JointsConfig, Units
from burnish.real_robot.robots import TwinRobot, _in_person, stage_for
from burnish.real_robot.robots import spec_of as spec_of_robot
from burnish.real_robot.safety.safe_robot import Rung, Safety
from burnish.real_robot.supervisor import Word
from burnish.sim.build import make_env
from burnish.sim.desk import ActionMode
from burnish.sim.mirror import EmptyDesk, Mirror
from burnish.sim.tasks.insert import InsertConfig
from burnish.sim.tasks.reach import ReachConfig
from robot_lab import Puppet

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
    action = Joints(JointsConfig(units=Units.deg), robot, degrees).spec.action
    assert (np.array(action.low) <= degrees.action.low).all() and (np.array(action.high) >= degrees.action.high).all()
    check_compatible(radians, Joints(JointsConfig(), robot, radians).spec)  # recordings that do not say what is meant
    with pytest.raises(BurnishError, match=r"the gripper go from 2 to 98.*env.units=rad.*other units"):
        Joints(JointsConfig(), robot, degrees)
    with pytest.raises(BurnishError, match=r"less than 5%.*env.units=deg"):
        Joints(JointsConfig(units=Units.deg), robot, radians)


def test_settings_are_checked():
    robot = spec_of(Calibration.of(LEROBOTS))
    with pytest.raises(BurnishError, match="did you mean 'elbow_flex'"):
        Joints(JointsConfig(percent=["elbow"]), robot)
    with pytest.raises(BurnishError, match=r"3: shoulder_pan, elbow_flex, the gripper"):
        Joints(JointsConfig(start=[0.0, 0.1]), robot)
    with pytest.raises(BurnishError, match="wider open"):
        Joints(JointsConfig(start=[0.0, 0.1, 1.5]), robot)
    for wrong in ({"max_steps": 0}, {"start": [0.0, math.nan, 0.5]}):
        with pytest.raises(BurnishError, match=r"env\.max_steps"):
            JointsConfig(**wrong)
    for hz in (0.0, -1.0, math.nan, 1e9):
        told = replace(policy_of([-1.4, -1, 0], [1.3, 1.2, 1]), control_hz=hz)
        for config, policy in ((JointsConfig(control_hz=hz), None), (JointsConfig(), told)):
            with pytest.raises(BurnishError, match="control_hz"):
                Joints(config, robot, policy)


def test_a_joint_that_turns_twice_around_needs_little_of_it():
    joints = tuple(JointSpec(name, -2 * math.pi, 2 * math.pi, 2.0, 8.0) for name in ("a", "b"))
    robot = RobotSpec("arm", joints, frozenset({Mode.JOINT_POSITION}), (5.0, 100.0, 500.0))
    assert Joints(JointsConfig(), robot, policy_of([-0.3, -0.3], [0.3, 0.3])).spec.action.dim == 2


def test_a_range_without_zero():
    """Before anybody has measured it, the arm is assumed where it can be."""
    robot = RobotSpec("arm", (JointSpec("a", 0.3, 2.0, 2.0, 8.0),), frozenset({Mode.JOINT_POSITION}), (5.0, 9.0, 99.0))
    assert Joints(JointsConfig(), robot).start.tolist() == [0.3]


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


class OnTheWay(LocalLink):
    """Something happens at a time of the way to an episode's start, which takes two seconds."""

    def __init__(self, at_s: float, happens) -> None:
        super().__init__(Puppet(), Safety(start_gap_rad=2.0))
        self.at_ns, self.happens, self.late_ns, self.ended = self.clock.now_ns() + ns(at_s), happens, 0, None

    def wait_until_ns(self, deadline_ns: int) -> None:
        super().wait_until_ns(deadline_ns)
        if self.clock.now_ns() >= self.at_ns:
            self.happens(self)

    def close(self):
        if self.ended is None:
            self.ended, self.late_ns = self.state(), self.clock.now_ns() - self.at_ns
        return super().close()


class Alert:
    """Has pressed the space key from a moment on."""

    stop = False

    def poll(self, obs):
        return Word(stop=self.stop)

    def ready(self, what: str) -> None: ...


def came_to_rest(link: OnTheWay, person: Alert, said: str) -> None:
    body = Joints(JointsConfig(start=[0.9, 0.9]), link.loop.robot.spec)
    with pytest.raises(RobotError, match=said):
        _in_person(lambda: link, person)(body, 0)
    assert link.ended is not None and link.ended.rung is not Rung.RUN and link.late_ns < ns(0.5)


@pytest.mark.parametrize("at_s", [0.5, 2.3], ids=["moving", "settling"])
def test_the_space_key_stops_the_arm_on_its_way_to_the_start(at_s):
    person = Alert()
    link = OnTheWay(at_s, lambda link: setattr(person, "stop", True))
    came_to_rest(link, person, "the person stopped the robot on its way")
    assert link.ended.rung is Rung.STOPPED and (at_s > 1 or link.ended.q.max() < 0.5)


def test_an_arm_that_comes_to_rest_on_its_way_to_the_start_is_noticed():
    link = OnTheWay(0.5, lambda link: setattr(link.loop.robot._adapter.script, "estop", True))
    came_to_rest(link, Alert(), "on its way to the start: the emergency stop is pressed; look at it")


class Pressed:
    """A person who presses what a test says: tick -> what is moved, from then on; None gives the robot back."""

    moves = True

    def __init__(self, presses: dict[int, list[float] | None]) -> None:
        self._presses, self._tick, self._now = presses, 0, None

    def poll(self, obs):
        self._now = self._presses.get(self._tick, self._now)
        self._tick += 1
        return Word(action=None if self._now is None else np.array(self._now, float))

    def ready(self, what: str) -> None: ...


FAR = 1.2  # rad: where the policy wants the first joint
ALONE = EmptyDesk()
STILL = [0.0] * 6


def played(presses: dict[int, list[float] | None], ticks: int, body: Joints | Mirror, want: np.ndarray) -> np.ndarray:
    """(T, 6) where the joints of a twin are after each tick of a policy that always wants the same."""
    env = RobotEnv(
        body, stage_for(TwinRobot(), body, Safety(start_gap_rad=3.0), False, None), supervisor=Pressed(presses)
    )
    env.reset(None, [0])
    found = []
    for _ in range(ticks):
        env.step(torch.from_numpy(want[None]).float())
        found.append(env.link.state().q)
    env.close()
    return np.array(found)


def arm_alone(policy: PolicySpec | None = None) -> Joints:
    robot = spec_of_robot(TwinRobot(), ALONE, False)
    return Joints(JointsConfig(control_hz=20.0, max_steps=1000), robot, policy, ALONE)


def a_task() -> Mirror:
    return Mirror(ReachConfig(action=ActionMode.joint_target))


@pytest.mark.parametrize("make", [arm_alone, a_task], ids=["joints", "task"])
def test_whoever_takes_over_finds_the_arm_standing_still(make):
    """From 4 rad/s braking takes 0.2 rad with 40 rad/s^2."""
    body = make()
    body.begin(0)
    begins = body.start
    want = begins + np.array([FAR if begins[0] < 0 else -FAR, 0, 0, 0, 0, 0])
    alone = np.abs(played({}, 40, body, want)[:, 0] - begins[0])
    at = int((alone > 0.3).argmax()) + 1
    taken = np.abs(played({at: STILL}, 40, body, want)[:, 0] - begins[0])
    assert alone[-1] > FAR - 0.05, "the control: nobody stops it"
    assert taken[-1] < alone[at] + 0.2 and taken[-1] < FAR - 0.3
    assert np.abs(taken[at + 10 :] - taken[-1]).max() < 5e-3, "and it stays"
    assert (np.diff(taken) > -0.02).all(), "it does not swing back"


def test_who_gives_it_back_sees_it_begin_slowly():
    """As at the start, all of the speed comes back in blend_s = 1 s."""
    body, want = arm_alone(), np.array([FAR, 0, 0, 0, 0, 0])
    q = played({2: [-1.0, 0, 0, 0, 0, 0], 40: None}, 80, body, want)[:, 0]
    speed = np.diff(q) * 20
    assert speed[40:43].max() < 0.3 * speed[40:].max() and q[-1] > FAR - 0.05


def test_keys_move_what_was_sent_last_and_not_to_the_middle():
    """A tenth of the range per second, wherever the policy's recordings have been."""
    robot = spec_of_robot(TwinRobot(), ALONE, False)
    policy = replace(policy_of([0.2] * 6, [0.8] * 6), control_hz=20.0)
    body = arm_alone(policy)
    low, high = (np.array(x) for x in (body.spec.action.low, body.spec.action.high))
    assert np.abs(low - np.minimum(robot.column("lower"), 0.2)).max() < 1e-6 and (high >= 0.8).all()
    body = arm_alone(policy)
    still = played({0: STILL}, 20, body, np.full(6, 0.5))
    assert np.abs(still).max() < 0.05, "from outside of what was recorded it is not moved into it"
    moved = played({0: STILL, 5: [1.0, 0, 0, 0, 0, 0], 25: STILL}, 45, arm_alone(policy), np.full(6, 0.5))
    assert moved[-1, 0] == pytest.approx(20 * 0.1 / 20 * (high - low)[0], abs=0.02)
    assert np.abs(moved[:, 1:5]).max() < 0.05


def test_displacements_stay_displacements_and_the_gripper_keeps_its_angle():
    """Of a task's arm with steps of the tool, where the gripper alone is an angle."""
    body = Mirror(ReachConfig())
    body.begin(3)
    held, displaces = body.holding()
    assert displaces[:-1].all() and not held[displaces].any()
    task = make_env("pick_place", 1).task  # type: ignore[attr-defined]
    held, displaces = task.hand.holding()
    assert displaces.tolist() == [True] * (len(held) - 1) + [False]


def test_a_gripper_of_its_own_is_the_bodys_last_joint():
    body = Mirror(InsertConfig())
    five = tuple(JointSpec(name, -3.0, 3.0, 4.0, 40.0) for name in body.joints[:-1])
    robot = RobotSpec("arm", five, frozenset({Mode.JOINT_POSITION}), (5.0, 100.0, 500.0), gripper=GripperSpec(0.07, 1))
    assert with_gripper_channel(body, replace(robot, gripper=None)) is body
    grasp = with_gripper_channel(body, robot)
    assert isinstance(grasp, GripperChannel) and grasp.joints == body.joints[:-1]
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
