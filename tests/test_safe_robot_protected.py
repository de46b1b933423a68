"""What `safety` adds to the guard, through `SafeRobot` and up to `burnish deploy`: what reaches the device keeps the
limit of jerk, the box, the floor and the distances of the arm to itself, after the device's rounding too; a critic may
slow it down. Each is counted, and has its control: without the setting the same requests break it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from guard_lab import Excess

from burnish.policies.cli.cli import main
from burnish.real_robot.adapter import Command, JointSpec, sent_as
from burnish.real_robot.clock import ns
from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.control.process import Job
from burnish.real_robot.drivers.twin import Twin
from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.reflex import write_critic
from burnish.real_robot.safety.safe_robot import Rung, SafeRobot, Safety
from collision_lab import BOX, CAPSULES, MARGIN, START, Oracle
from hostile import mixed
from robot_lab import ARM, Puppet, spec

pytestmark = pytest.mark.sim
WALLS: dict[str, Any] = {
    "workspace": [list(BOX["tool_lower_m"]), list(BOX["tool_upper_m"])],
    "floor_m": 0.0,
    "apart": True,
    "margin_m": MARGIN,
}
SAFETY = Safety(rate_hz=50.0, blend_s=0.0, start_gap_rad=9.0, following_rad=9.0, bad_in_a_row=1000)
NAMES = ("pan", "lift", "elbow", "wrist")


class Rounding(Puppet):
    """Ideal motors behind a device that rounds, as far as a servo with twelve bits per turn does."""

    quantum = 2 * np.pi / 4096

    def _write(self, command: Command) -> Command:
        super()._write(command)
        self.q = np.round(command.target / self.quantum) * self.quantum
        return sent_as(command, self.q.copy())


def capsules(kind: type[Puppet] = Puppet, **changes: Any) -> Puppet:
    quantum = kind.quantum if kind is Rounding else 0.0
    joints = tuple(JointSpec(name, -2.8, 2.8, 2.0, 8.0, quantum=quantum) for name in NAMES)
    robot = kind(robot=spec(joints=joints, **{"mjcf": CAPSULES, "tool_site": "tool", **changes}))
    robot.q = START.copy()
    return robot


def played(robot: Puppet, safety: Safety, requests: Any, **more: Any) -> tuple[SafeRobot, np.ndarray]:
    """(ticks, n) set-points as the device had them."""
    safe, path = SafeRobot(robot, safety, **more), [robot.q.copy()]
    safe.start()
    for request in requests:
        safe.clock.sleep_until_ns(safe.clock.now_ns() + ns(1 / safety.rate_hz))
        safe.step(request)
        path.append(robot.q.copy())
    return safe, np.array(path)


def into_things(ticks: int = 150) -> list[Any]:
    """Requests that aim into the post, the floor, the arm itself and out of the box, between hostile ones."""
    rng, robot = np.random.default_rng(1), SafeRobot(capsules(), SAFETY)
    hostile = list(mixed(rng, robot.limits, (4,), ticks))
    for tick in range(0, ticks, 30):
        hostile[tick : tick + 20] = [rng.uniform(-2.8, 2.8, 4)] * 20
    return hostile


@pytest.mark.parametrize("jerk", [0.0, 80.0])
@pytest.mark.parametrize("kind", [Puppet, Rounding])
def test_what_the_device_gets_keeps_every_limit(kind: type[Puppet], jerk: float):
    robot, oracle = capsules(kind), Oracle(box=True)
    safe, path = played(robot, replace(SAFETY, jerk=jerk, **WALLS), into_things())
    excess, limits = Excess(safe.limits, START), safe.limits
    for command in robot.written:
        excess.add(command.target)
    assert excess.holds(), vars(excess)
    nearest = min(oracle(a + share * (b - a)) for a, b in pairwise(path) for share in (0.25, 0.5, 1.0))
    assert MARGIN <= nearest < MARGIN + 0.03, nearest
    assert {"workspace", "apart"} & set(safe.counts) and {"workspace", "apart"} & {event.kind for event in safe.events}
    assert np.abs(np.diff(path, axis=0)).sum() > 2, "it hardly moved"
    if jerk:
        targets = np.array([START, START, START, *(command.target for command in robot.written)])
        jerks = np.abs(np.diff(targets, n=3, axis=0)).max() / limits.period_s**3
        assert jerks <= jerk * (1 + 1e-6) and safe.counts["jerk"] > 0


def test_without_the_settings_the_same_requests_break_them():
    robot, oracle = capsules(), Oracle(box=True)
    safe, path = played(robot, SAFETY, into_things())
    assert min(oracle(q) for q in path) < -0.05, "the arm did not run into anything"
    targets = np.array([START, START, START, *(command.target for command in robot.written)])
    assert np.abs(np.diff(targets, n=3, axis=0)).max() * 50**3 > 2 * 80
    assert not {"workspace", "apart", "floor", "jerk"} & set(safe.counts)


def test_a_stop_keeps_the_limit_of_jerk():
    robot = capsules()
    safe, _ = played(robot, replace(SAFETY, jerk=30.0), [[0.0, 0.0, 0.0, 0.0]] * 30)
    safe.stop()
    targets = np.array([START, START, START, *(command.target for command in robot.written)])
    assert np.abs(np.diff(targets, n=3, axis=0)).max() * 50**3 <= 30 * (1 + 1e-6)
    assert safe.rung is Rung.STOPPED and robot.calls[-2:] == ["stop hold", "deactivate"]
    assert np.array_equal(targets[-1], targets[-2]), "it had not come to rest"


def test_it_does_not_start_where_something_is_too_near():
    inside = capsules()
    inside.q = np.array([0.32, 0.2, 0.0, 0.0])
    with pytest.raises(Refused, match=r"does not hold.*\(apart\)"):
        SafeRobot(inside, replace(SAFETY, apart=True)).start()
    assert "activate" not in inside.calls, "it got power"

    class Sags(Puppet):
        """Drops into the post when it is activated."""

        def _activate(self, mode: Any) -> Any:
            self.q = np.array([0.32, 0.2, 0.0, 0.0])
            return super()._activate(mode)

    sags = capsules(Sags)
    safe = SafeRobot(sags, replace(SAFETY, **WALLS))
    with pytest.raises(Refused, match="does not hold"):
        safe.start()
    assert safe.rung is Rung.STOPPED and sags.calls[-2:] == ["stop hold", "deactivate"] and not sags.written


def test_a_protection_that_is_broken_ramps_down():
    robot = capsules()
    safe, _ = played(robot, replace(SAFETY, jerk=80.0), [[0.0] * 4] * 20)
    safe._protection._fallback = None  # not a mistake that can be made from outside
    safe._protection.lost = "it broke"
    infos = [safe.step([0.0] * 4) for _ in range(40) if safe.rung is not Rung.STOPPED]
    assert infos[-1].rung is Rung.STOPPED and any(event.text == "it broke" for event in safe.events)


WRONG = [
    ({"workspace": [[0, 0, 0]]}, "two corners"),
    ({"workspace": [[0, 0], [1, 1]]}, "two corners"),
    ({"workspace": [[0, 0, 1], [1, 1, 1]]}, "two corners"),
    ({"workspace": [[0, 0, float("nan")], [1, 1, 1]]}, "two corners"),
    ({"floor_m": float("inf")}, "floor_m=inf must be a finite number"),
    ({"may_touch": [["base"]], "apart": True}, "pairs"),
    ({"model": "robot.xml"}, "nothing is checked on"),
    ({"jerk": -1.0}, "safety.jerk=-1.0"),
    ({"jerk": float("nan")}, "safety.jerk"),
    ({"blend_s": float("nan")}, "safety.blend_s"),
    ({"blend_s": 1e300}, "safety.blend_s"),
    ({"outside_rad": float("nan")}, "safety.outside_rad"),
    ({"margin_m": float("inf")}, "safety.margin_m"),
    ({"reflex_slow": 0.0}, "0 < slow <= brake"),
    ({"reflex_slow": 0.6}, "0 < slow <= brake"),
    ({"reflex_budget_s": 0.0}, "reflex_budget_s"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG, ids=str)
def test_settings_are_checked(change: dict[str, Any], sentence: str):
    with pytest.raises(Refused, match=sentence):
        replace(SAFETY, **change)


def test_settings_must_fit_the_robot(tmp_path):
    for robot, change, sentence in [
        (Puppet(), WALLS, "brings no model of itself"),
        (capsules(tool_site=None), WALLS, "brings no model of itself"),
        (capsules(), {**WALLS, "tool": "nothing"}, "does not have what it should"),
        (capsules(), {**WALLS, "model": "no/such/file.xml"}, "does not have what it should"),
        (capsules(), {**WALLS, "model_joints": ["pan"]}, "names 1 joints, and puppet has 4"),
        (capsules(), {**WALLS, "margin_m": 0.5}, "margin_m"),
        (capsules(), {"jerk": 0.5}, "a stop could take .* s, and 3 s are allowed"),
        (Puppet(), {"reflex": str(tmp_path / "none.safetensors")}, "cannot be read"),
    ]:
        with pytest.raises(Refused, match=sentence):
            SafeRobot(robot, replace(SAFETY, **change))


def test_a_model_from_a_file_with_joints_of_other_names(tmp_path):
    """The same arm, whose driver knows neither a model nor these names."""
    path = tmp_path / "arm.xml"
    path.write_text(CAPSULES)
    joints = tuple(JointSpec(f"servo_{i}", -2.8, 2.8, 2.0, 8.0) for i in range(4))
    robot = Puppet(robot=spec(joints=joints))
    robot.q = START.copy()
    change = {**WALLS, "model": str(path), "model_joints": list(NAMES), "tool": "tool", "may_touch": [["base", "hand"]]}
    safe, targets = played(robot, replace(SAFETY, **change), [[1.8, 2.7, 0.0, 0.0]] * 60)
    assert safe.counts["workspace"] + safe.counts["floor"] > 0 and np.abs(targets[-1] - START).max() > 0.05


def test_the_robot_s_own_limit_of_jerk_counts_where_it_is_less():
    joints = (JointSpec("a", -1, 1, 2.0, 10.0, jerk=50.0), JointSpec("b", -1, 1, 2.0, 10.0))
    safe = SafeRobot(Puppet(robot=spec(joints=joints)), replace(SAFETY, jerk=100.0))
    assert safe._protection._fallback.jerk.tolist() == [50.0, 100.0]


def critic(path: Path, joints: int, risk: float) -> str:
    """The same risk whatever is asked."""
    write_critic(path, [np.zeros((3 * joints, 1))], [np.array([np.log(risk / (1 - risk))])])
    return str(path)


@pytest.mark.parametrize(("risk", "share"), [(0.1, 1.0), (0.3, 0.3), (0.9, 0.0)])
@pytest.mark.parametrize("jerk", [0.0, 200.0])
def test_a_critic_from_a_file_may_slow_the_robot(tmp_path, risk, share, jerk):
    path = critic(tmp_path / "critic.safetensors", 2, risk)
    robot = Puppet()
    safe, targets = played(robot, replace(SAFETY, reflex=path, jerk=jerk), [[0.9, 0.9]] * 60)
    fastest = np.abs(np.diff(targets, axis=0)).max() * 50
    assert fastest <= share * 2.0 + 1e-9 and fastest >= 0.9 * share * 2.0
    assert safe.counts["advised"] == (60 if share < 1 else 0) and safe.rung is Rung.RUN
    told = [event.text for event in safe.events if event.kind == "advised"]
    assert len(told) == (2 if share < 1 else 0), "in words once a second, in 1.2 s"
    with pytest.raises(Refused, match="a critic of 2 joints, and puppet has 4"):
        SafeRobot(capsules(), replace(SAFETY, reflex=path))


def test_the_guard_is_only_ever_given_a_share_of_the_speed():
    """A number in [0, 1], whatever advisors, settings and missed deadlines come together."""
    rng, seen = np.random.default_rng(0), []
    answers = [float("nan"), -1.0, 2.0, 0.0, 1e-300, 0.5, 1.0, float("inf"), "0.5", None, np.float32(0.7), [1.0]]
    for blend_s in (0.0, 1e-12, 0.003, 0.5, 9e8):
        safe = SafeRobot(
            Puppet(), replace(SAFETY, blend_s=blend_s), advisor=lambda state, request: answers[rng.integers(12)]
        )
        real = safe._protection
        looked: Any = lambda request, speed, real=real: (seen.append(speed), real(request, speed))[1]  # noqa: E731
        looked.__dict__.update(lost="", resting=False, reset=real.reset, longest=real.longest, state=real.state)
        safe._protection = looked
        safe.start()
        for _ in range(60):
            safe.clock.sleep_until_ns(safe.clock.now_ns() + ns(0.02))
            safe.step([0.1, 0.1], late=bool(rng.random() < 0.5))
    assert len(seen) == 300 and all(type(speed) is float and 0 <= speed <= 1 for speed in seen)
    assert len(set(seen)) > 5


def test_settings_travel_to_the_control_process_as_json():
    safety = replace(SAFETY, jerk=100.0, may_touch=[["a", "b"]], tool="tcp", reflex="critic.safetensors", **WALLS)
    job = Job("twin", {}, safety, Path("folder"))
    assert Job.from_json(job.to_json()) == job and json.loads(job.to_json())["safety"]["floor_m"] == 0.0


def test_in_the_control_process_without_torch(tmp_path):
    """The box and a critic, in a process of its own. The tool starts at x = 0.4 m; it is asked to leave the box."""
    path = critic(tmp_path / "critic.safetensors", 2, 0.3)
    safety = Safety(blend_s=0.0, start_gap_rad=3.0, workspace=[[0.33, -1, 0], [0.5, 1, 1]], reflex=path)
    with RobotLink("twin", {"mjcf": ARM, "velocity": 2.0, "acceleration": 10.0}, safety) as link:
        link.start()
        link.plan(np.full((1, 2), 1.4), 1.0)
        link.wait_until_ns(link.clock.now_ns() + ns(0.8))
        sent = link.state().sent
        assert "libtorch" not in Path(f"/proc/{link.pid}/maps").read_text()
        left = link.close()
    assert left["counts"]["workspace"] > 0 and left["counts"]["advised"] > 0
    x = 0.2 * np.cos(sent[0]) + 0.2 * np.cos(sent[0] + sent[1])
    assert 0.34 <= x < 0.39, "0.01 m of margin; and it moved"


def test_mujoco_is_imported_only_for_a_model():
    code = """
import sys
import burnish.real_robot.control.process
from burnish.real_robot.adapter import *
from burnish.real_robot.safety.guard import Limits
from burnish.real_robot.safety.protection import Protection
from burnish.real_robot.safety.settings import Safety
spec = RobotSpec("r", (JointSpec("j", -1, 1, 2, 10),), frozenset({Mode.JOINT_POSITION}), (1, 100, 1000))
Protection.of(spec, Limits.of(spec, 100), Safety(jerk=200)).reset([0.0])
sys.exit("mujoco" in sys.modules or "torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BASE = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [True, False])
def test_burnish_deploy_takes_a_workspace(tmp_path, monkeypatch, bounded):
    """A box that ends above where the peg is inserted: the tool goes lower only without it (the control). It begins at
    6 cm, and 1 cm is the margin."""
    written: list[tuple[Any, np.ndarray]] = []
    real = Twin._write
    monkeypatch.setattr(Twin, "_write", lambda twin, c: (written.append((twin.model, c.target)), real(twin, c))[1])
    words = ["safety.workspace=[[0.0,-0.3,0.045],[0.5,0.3,0.5]]", "safety.jerk=2000"] if bounded else []
    words += [f"policy.path={BASE}", "realtime=false", "episodes=2", "compare=false", f"out={tmp_path}"]
    assert main(["deploy", *words]) == 0
    lowest = np.inf
    for model, target in written:
        data = mujoco.MjData(model)
        data.qpos[:6] = target
        mujoco.mj_kinematics(model, data)
        lowest = min(lowest, float(data.site("tcp").xpos[2]))
    counts = json.loads((tmp_path / "deploy.json").read_text())["reports"][0]["counts"]
    assert (lowest >= 0.055) == bounded and ("workspace" in counts) == bounded and ("jerk" in counts) == bounded
