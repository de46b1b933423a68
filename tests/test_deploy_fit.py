"""What is said before a robot is opened, and before a person is asked for anything: an arm that is not the policy's
body, and settings that cannot be meant. Each is one sentence and exit status 2; nothing was opened, because the ports
and addresses of these tests lead nowhere."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import demand

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.real_robot import discovery
from burnish.real_robot.adapter import GripperSpec
from burnish.real_robot.compatibility import SAME_RAD, narrower, require_same_joints
from burnish.real_robot.deployment import Allowed
from burnish.real_robot.drivers.bus import ArmConfig
from burnish.real_robot.drivers.calibration import QUANTUM_RAD, Calibration
from burnish.real_robot.drivers.twin import TwinConfig
from burnish.real_robot.drivers.universal import UniversalConfig, make, spec_of
from burnish.real_robot.emulators.so101 import calibration
from burnish.real_robot.errors import Refused
from burnish.real_robot.robots import Hardware, inspected
from burnish.real_robot.safety.safe_robot import Safety
from burnish.real_robot.settings import settings
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.insert import InsertConfig
from person_lab import refused
from robot_lab import spec

pytestmark = pytest.mark.sim
BASE = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"
UNWATCHED = Safety(no_device_watchdog=True)  # Feetech servos have none


@pytest.fixture(scope="module")
def body() -> Mirror:
    for sdk in ("scservo_sdk", "dynamixel_sdk"):
        demand(sdk)
    return Mirror(InsertConfig())


def changed(known: Calibration, what: str) -> Calibration:
    joints = known.joints
    return Calibration(
        {
            "right": joints,
            "five": joints[:5],
            "names": (replace(joints[0], name="base"), *joints[1:]),
            "order": (joints[1], joints[0], *joints[2:]),
            "narrow": (replace(joints[0], min_tick=joints[0].zero_tick - 900), *joints[1:]),
            "far": (replace(joints[0], min_tick=100, max_tick=500), *joints[1:]),
        }[what]
    )


def looked_at(body: Mirror, what: str, safety: Safety = UNWATCHED, **more):
    device = {"port": "/dev/null", "calibration": changed(calibration(body.mjcf), what)}
    return inspected(Hardware("feetech", device, **more), body, safety, True, [0, 1, 2], moves=True)


def test_the_right_arm_passes_and_others_do_not(body):
    assert [joint.name for joint in looked_at(body, "right").joints] == list(body.joints)
    assert narrower(looked_at(body, "right"), body.ranges) == ""
    for what, sentence in {"five": "5 joint", "order": "in the order", "names": "which joint each of base is"}.items():
        with pytest.raises(Refused, match=sentence):
            looked_at(body, what)


def test_a_person_may_say_which_joint_is_which(body):
    assert looked_at(body, "names", joints={"base": "shoulder_pan"}).joints[0].name == "base"
    for called, sentence in (
        ({"base": "elbow_flex"}, "which joint each of base, elbow_flex is"),  # two that are one
        ({"bass": "shoulder_pan"}, "robot.joints says that 'bass' is 'shoulder_pan'"),
        ({"base": "pan"}, "robot.joints says that 'base' is 'pan'"),
    ):
        with pytest.raises(Refused, match=sentence):
            looked_at(body, "names", joints=called)
    swapped = {"shoulder_lift": "shoulder_pan", "shoulder_pan": "shoulder_lift"}
    assert looked_at(body, "order", joints=swapped), "these are two other names in the right order"
    with pytest.raises(Refused, match="in the order shoulder_lift, shoulder_pan"):
        looked_at(body, "right", joints=swapped)
    with pytest.raises(Refused, match="5 joint"):
        looked_at(body, "five", joints={"base": "shoulder_pan"})


def test_room_that_is_missing_is_said_or_refused(body):
    note = narrower(looked_at(body, "narrow"), body.ranges)
    assert f"shoulder_pan from {-900 * QUANTUM_RAD:.2f}" in note and len(note.splitlines()) == 1
    with pytest.raises(Refused, match="begins with shoulder_pan"):
        looked_at(body, "far")
    two = spec(2)
    assert narrower(two, np.array([[-1 - 0.9 * SAME_RAD, 1], [-1, 1]])) == "", "calibrations differ so much"
    assert "j1 from" in narrower(two, np.array([[-1, 1], [-1, 1.01 + SAME_RAD]]))


def test_a_gripper_of_its_own_is_pointed_out():
    arm = spec(5, gripper=GripperSpec(0.07, 0.1))
    with pytest.raises(Refused, match="gripper is a channel of its own"):
        require_same_joints(arm, [f"j{i}" for i in range(6)], {})
    assert require_same_joints(spec(5), [f"j{i}" for i in range(5)], {}) is None


WAYS = {
    "deploy": ["deploy", f"policy.path={BASE}", "supervisor=keyboard"],
    "dry_run": ["deploy", f"policy.path={BASE}", "dry_run=true"],
    "shadow": ["deploy", f"policy.path={BASE}", "shadow=true"],
    "record": ["record", "env=insert", "supervisor=keyboard"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["universal", "five"])
def test_no_verb_takes_another_arm(way, what, body, tmp_path, capfd):
    changed(calibration(body.mjcf), "five").save(tmp_path / "arm.json")
    verb, *words = WAYS[way]
    robot, sentence = {
        "universal": (
            ["robot=universal", "robot.device.address=192.0.2.1"],
            "each of elbow, wrist_1, wrist_2, wrist_3",
        ),
        "five": (
            ["robot=dynamixel", "robot.device.port=/dev/null", f"robot.device.calibration={tmp_path / 'arm.json'}"],
            "5 joint",
        ),
    }[what]
    out = [f"out={tmp_path / 'set'}"] if verb == "record" else []
    assert sentence in refused(capfd, *words, *robot, *out, verb=verb)
    assert not (tmp_path / "set").exists()


ATTENDED = ["supervisor=keyboard"]
FEETECH = ["robot=feetech", *ATTENDED]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (FEETECH, "needs port and calibration; give robot.device.port=..."),
        ([*FEETECH, "robot.device.port=/dev/null"], "needs calibration"),
        ([*FEETECH, "robot.device.port=/dev/null", "robot.device.calibration=/nowhere.json"], "cannot be read"),
        (
            ["robot=dynamixel", *ATTENDED, "robot.device.port=/dev/nowhere", "robot.device.calibration={arm}"],
            "plug the",
        ),
        ([*FEETECH, "robot.device.port=/dev/null", "robot.device.calibration={arm}"], "no_device_watchdog=true"),
        (["robot=plugin", *ATTENDED], "robot=plugin needs robot.name"),
        (["robot=plugin", "robot.name=nobodys", *ATTENDED], "there is no robot 'nobodys'"),
        (["robot=universal", *ATTENDED], "needs address"),
        (["robot=universal", "robot.device.address=5", "dry_run=true"], "address=5"),
        (["robot=universal", "robot.device.address=x", "robot.device.model=ur9", "dry_run=true"], "choices: ur3e"),
        (
            [*FEETECH, "robot.device.port=/dev/null", "robot.device.calibration={arm}", "robot.watch_s=0.01"],
            "give at least 0.030",
        ),
        (["robot=feetech", "robot.priority=100"], "priority=100 must lie in [0, 99]"),
    ],
    ids=str,
)
def test_a_mistake_on_hardware_costs_nobody_a_layout(words, sentence, body, tmp_path, capfd):
    calibration(body.mjcf).save(tmp_path / "arm.json")
    given = [word.format(arm=tmp_path / "arm.json") for word in words]
    assert sentence in refused(capfd, f"policy.path={BASE}", *given)


SO101, TWIN = "robot=so101_emulated", "robot=twin"


@pytest.mark.parametrize("more", [[], ["shadow=true"], ["dry_run=true"]], ids=["deploy", "shadow", "dry_run"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([SO101, "robot.device.nope=2"], "so101_emulated has no setting 'nope'; choices: acceleration"),
        ([SO101, "robot.device.velocity=abc"], "velocity='abc' of so101_emulated must be a finite number"),
        ([SO101, "robot.device.port=x"], "so101_emulated has no setting 'port'"),
        ([SO101, "robot.device.rate_hz=[1,2]"], "must be three numbers"),
        ([SO101, "robot.seed=-1"], "robot.seed=-1 must be at least 0"),
        ([SO101, "robot.loss=1.5"], "robot.loss=1.5 must lie in [0, 1)"),
        ([TWIN, "robot.device.seed=-1"], "seed=-1 of a twin must be at least 0"),
        ([TWIN, "robot.device.seed=1.5"], "must be a whole number"),
        ([TWIN, "robot.device.velocitty=1"], "did you mean 'velocity'?"),
        ([TWIN, "robot.device.velocity=nan"], "must be a finite number"),
        ([TWIN, "robot.device.velocity=true"], "must be a finite number"),
        ([TWIN, "robot.device.joints=pan"], "must be a list"),
        ([TWIN, "robot.device.joints=[shoulder_pan]"], "1 joint"),
        ([TWIN, "robot.device.mjcf=/nowhere.xml"], "has to be the text of a MuJoCo model, no path"),
        ([TWIN, "safety.apart=true", "safety.may_touch=[[a,b]]"], "no body of the model; choices: world"),
    ],
    ids=str,
)
def test_a_setting_of_a_device_that_cannot_be_meant(words, sentence, more, capfd):
    assert sentence in refused(capfd, f"policy.path={BASE}", "realtime=false", *words, *more)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["threads=0"], "threads=0 must be at least 1"),
        (["gamepad=/dev/input/js3"], "give supervisor=gamepad"),
        (["safety.workspace=[[a,b,c],[1,1,1]]"], "two corners of numbers"),
        (["safety.workspace=[1,2]"], "two corners of numbers"),
        (["safety.apart=true", "safety.may_touch=[a,b]"], "pairs of names of bodies"),
        (["safety.apart=true", "safety.may_touch=[[1,2]]"], "pairs of names of bodies"),
    ],
    ids=str,
)
def test_settings_that_do_nothing_or_are_nothing(words, sentence, capfd):
    assert sentence in refused(capfd, f"policy.path={BASE}", "realtime=false", *words)
    if "threads=0" not in words:
        return
    keyboard = ["env=reach", "realtime=false", "level=noisy"]
    assert "level=noisy is of the expert" in refused(capfd, *keyboard, verb="record")


def test_whole_numbers_are_numbers(capfd):
    """And an arm that stands in the box passes; beside it, it is refused (the control)."""
    assert Allowed(workspace=[[0, 0, 0], [1, 1, 1]]).workspace == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    words = ["deploy", f"policy.path={BASE}", "realtime=false", "dry_run=true", "robot.device.velocity=2"]
    assert main([*words, "safety.workspace=[[-1,-1,-1],[1,1,1]]"]) == 0
    with pytest.raises(BurnishError, match="low < high"):
        Allowed(workspace=[[0, 0, 0], [0, 1, 1]])


def test_settings_are_checked_against_the_dataclass():
    arm = Calibration.of({"joints": {"a": {"id": 1, "min_tick": 0, "max_tick": 9}}})
    made = settings(ArmConfig, {"velocity": 3, "rate_hz": [10, 50, 100]}, "it", port="p", calibration=arm)
    assert made == ArmConfig("p", arm, velocity=3.0, rate_hz=[10.0, 50.0, 100.0]) and isinstance(made.velocity, float)
    assert settings(TwinConfig, {"mjcf": "x", "tool_site": None}, "it").tool_site is None
    found = settings(UniversalConfig, {"address": "a", "model": "ur10e", "watchdog_hz": 5}, "it")
    assert spec_of(found).name == "ur10e" and found == make({"address": "a", "model": "ur10e", "watchdog_hz": 5}).config
    for wrong in ({"velocity": 10**400}, {"velocity": -float("inf")}, {"velocity": None}, {"mjcf": 3}, {"seed": True}):
        with pytest.raises(Refused, match=f"{next(iter(wrong))}="):
            settings(TwinConfig, {"mjcf": "x", **wrong}, "it")


def test_a_package_that_trips_over_its_settings_is_a_sentence(monkeypatch):
    monkeypatch.setattr(discovery, "_maker", lambda name: lambda config: config["port"])
    with pytest.raises(Refused, match=r"robot 'mine' does not take .*KeyError"):
        discovery.make_adapter("mine", {"prot": 1})


def test_a_missing_sdk_costs_nobody_a_layout(body, monkeypatch):
    monkeypatch.setitem(sys.modules, "scservo_sdk.protocol_packet_handler", None)
    with pytest.raises(Refused, match="pip install"):
        looked_at(body, "right")
