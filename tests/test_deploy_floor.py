"""`safety.floor_m`, `workspace` and `apart` on robots whose driver has no model of the arm: that of the body is taken,
in the control process too. Heights are measured here, shape by shape, and not by what keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
from conftest import demand

from burnish.policies.cli.cli import main
from burnish.real_robot import robots
from burnish.real_robot.clock import ns
from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.drivers.bus import ServoArm
from burnish.real_robot.emulators.so101 import calibration
from burnish.real_robot.errors import Refused
from burnish.real_robot.robots import Hardware, So101Emulated, inspected, stage_for, with_model
from burnish.real_robot.safety.safe_robot import SafeRobot, Safety
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.insert import InsertConfig
from robot_lab import ARM, Puppet, spec

pytestmark = pytest.mark.sim
BASE = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"
FLOOR, MARGIN = 0.015, 0.01  # m; an episode begins with the peg's end at 3.3 cm or more, and ends below 2 cm


@pytest.fixture(scope="module")
def body() -> Mirror:
    demand("scservo_sdk")
    return Mirror(InsertConfig())


class Heights:
    """Of the lowest point of whatever moves in a model."""

    def __init__(self, mjcf: str) -> None:
        self.model = mujoco.MjModel.from_xml_string(mjcf)
        self.data = mujoco.MjData(self.model)
        bodies = self.model.geom_bodyid.tolist()
        self.moving = [i for i, body in enumerate(bodies) if self._is_behind_a_joint(body)]

    def _is_behind_a_joint(self, body: int) -> bool:
        while body and not self.model.body_jntnum[body]:
            body = int(self.model.body_parentid[body])
        return body != 0

    def __call__(self, q: np.ndarray) -> float:
        model, data, lowest = self.model, self.data, np.inf
        data.qpos[: len(q)] = q
        mujoco.mj_kinematics(model, data)
        for i in self.moving:
            up, size = np.abs(data.geom_xmat[i].reshape(3, 3)[2]), model.geom_size[i]
            box = model.geom_type[i] == mujoco.mjtGeom.mjGEOM_BOX
            assert box or model.geom_type[i] == mujoco.mjtGeom.mjGEOM_CAPSULE
            lowest = min(lowest, data.geom_xpos[i, 2] - (up @ size if box else up[2] * size[1] + size[0]))
        return float(lowest)


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [True, False])
def test_burnish_deploy_keeps_above_the_floor(body, bounded, tmp_path, monkeypatch):
    """A policy that lowers a peg into a hole: it goes below the floor only without the setting (the control)."""
    sent: list[np.ndarray] = []
    real = ServoArm._write

    def seen(arm: ServoArm, command: Any) -> Any:
        found = real(arm, command)
        sent.append(found.target)  # as the servos have rounded it
        return found

    monkeypatch.setattr(ServoArm, "_write", seen)
    words = [f"safety.floor_m={FLOOR}"] if bounded else []
    words += ["robot=so101_emulated", "realtime=false", "episodes=1", "compare=false", f"out={tmp_path}"]
    # Without the setting a joint is stuck on the floor in the end, and the robot is brought to rest.
    assert main(["deploy", f"policy.path={BASE}", *words]) == (0 if bounded else 1)
    height = Heights(body.mjcf)
    lowest, first = min(map(height, sent)), height(sent[0])
    counts = json.loads((tmp_path / "deploy.json").read_text())["reports"][0]["counts"]
    assert first > FLOOR + MARGIN + 0.005 and len(sent) > 50
    assert (lowest >= FLOOR + MARGIN) == bounded and ("floor" in counts) == bounded
    assert lowest < first - 0.003, "it stayed where it was"


def test_in_the_control_process_without_torch(body, monkeypatch):
    """In real time, with every process: the shoulder is asked to lay the arm down. The watchdog waits for a second,
    since beside other tests the report was missing twice in four runs, which is what he leaves behind."""
    monkeypatch.setattr(robots, "RobotLink", partial(RobotLink, watch_s=1.0))
    safety = Safety(floor_m=FLOOR, blend_s=0.0, start_gap_rad=3.0)
    link: Any = stage_for(So101Emulated(), body, safety, True, None)(body, 0)
    height = Heights(body.mjcf)
    try:
        down = link.state().q + np.array([0, 0.6, 0, 0, 0, 0])
        link.plan(down[None], 1.0)
        link.wait_until_ns(link.clock.now_ns() + ns(0.8))
        sent = link.state().sent
        assert "libtorch" not in Path(f"/proc/{link.pid}/maps").read_text()
    finally:
        left = link.close()
    assert "counts" in left, left
    assert left["counts"]["floor"] > 0 and FLOOR + MARGIN <= height(sent) < height(body.start) - 0.002
    assert height(down) < FLOOR, "nothing had to be kept"


def test_a_model_that_somebody_names_comes_first(body):
    arm, safety = spec(), Safety(floor_m=0.0)
    found = with_model(safety, arm, body)
    assert (found.model, found.model_joints, found.tool) == (body.mjcf, list(body.joints), "tcp")
    assert with_model(replace(safety, tool="block", model_joints=["a"]), arm, body).model_joints == ["a"]
    for named in (Safety(), Safety(jerk=100.0), replace(safety, model="arm.xml")):
        assert with_model(named, arm, body) == named
    assert with_model(safety, spec(mjcf=ARM), body) == safety, "what its driver has"


def test_on_servos_it_is_the_same_arm_whatever_its_joints_are_called(body):
    known = calibration(body.mjcf).joints
    joints = {
        f"servo_{joint.id}": {"id": joint.id, "min_tick": joint.min_tick, "max_tick": joint.max_tick} for joint in known
    }
    robot = Hardware("feetech", {"port": "/dev/null", "calibration": {"joints": joints}})
    robot.joints = dict(zip(joints, body.joints, strict=True))
    safety = Safety(no_device_watchdog=True, floor_m=0.0, apart=True, workspace=[[-1, -1, -1], [1, 1, 1]])

    def looked_at(safety: Safety) -> Any:
        return inspected(robot, body, safety, True, [0], moves=True)

    assert [joint.name for joint in looked_at(safety).joints] == list(joints)
    with pytest.raises(Refused, match="does not have what it should"):
        looked_at(replace(safety, model_joints=list(joints)))  # the body's joints are not called so
    with pytest.raises(Refused, match="no body of the model; choices: world, base, shoulder"):
        looked_at(replace(safety, may_touch=[["palm", "base"]]))


def test_without_any_model_it_is_still_one_sentence():
    unknown: Any = SimpleNamespace(mjcf="", joints=("j0", "j1"))
    robot, safety = Puppet(), Safety(floor_m=0.0)
    assert with_model(safety, robot.spec, unknown) == safety
    with pytest.raises(Refused, match=r"brings no model of itself with a site at its tool; say safety\.model="):
        SafeRobot(robot, with_model(safety, robot.spec, unknown))
