"""A LeRobot robot behind the seam, with a stand-in that has LeRobot's rules, its hole included."""

from __future__ import annotations

import math
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.real_robot.adapter import Command, JointSpec, Mode, Phase, StopKind
from burnish.real_robot.clock import VirtualClock
from burnish.real_robot.conformance import check
from burnish.real_robot.drivers.lerobot import BridgeConfig, LeRobotBridge, Motor, Unit
from burnish.real_robot.errors import DeviceFault, Refused, StaleState


def joint(name: str) -> JointSpec:
    return JointSpec(name, -1.5, 1.5, 3.0, 20.0)


MOTORS = (
    Motor("shoulder_pan", joint("pan"), sign=-1, zero_rad=0.25),
    Motor("elbow_flex", joint("elbow"), Unit.HUNDRED, ends_rad=(2.0, -1.6)),
    Motor("wrist_roll", joint("roll"), Unit.PERCENT, ends_rad=(-1.5, 1.5)),
)
CONFIG = BridgeConfig("so101", MOTORS, gripper="gripper", cameras=("front",), hang_s=0.2, connect_s=0.5)


class Stand:
    """What LeRobot's arms do: positions in normalised units, written as ticks of a servo."""

    def __init__(self) -> None:
        self.names = [*(motor.name for motor in MOTORS), "gripper"]
        keys = {f"{name}.pos": float for name in self.names}
        self.action_features, self.observation_features = dict(keys), {**keys, "front": (8, 6, 3)}
        self.is_connected, self.is_calibrated = False, True
        self.position = dict.fromkeys(keys, 10.0)
        self.ticks: list[dict[str, int]] = []
        self.hang = threading.Event()
        self.hang.set()
        self.error: Exception | None = None

    def connect(self, calibrate: bool = True) -> None:
        assert not calibrate, "nobody is there to move the arm through its range"
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False

    def get_observation(self) -> dict:
        self._wait()
        return {**self.position, "front": np.full((8, 6, 3), len(self.ticks), np.uint8)}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self._wait()
        # The rule of deploy.md 2.1, in our words: bound to the range, then scale to 0..4095. Every comparison with NaN
        # is false, so it ends at the lower bound.
        bound = {key: min(100.0, max(-100.0, x)) for key, x in action.items()}
        self.ticks.append({key: int((x + 100) / 200 * 4095) for key, x in bound.items()})
        self.position.update(bound)
        return bound

    def _wait(self) -> None:
        self.hang.wait(5)
        if self.error is not None:
            raise self.error


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def bridge(stand: Stand):
    found = LeRobotBridge(stand, CONFIG)
    yield found
    stand.hang.set()
    found.close()


def active(bridge: LeRobotBridge) -> np.ndarray:
    bridge.configure()
    return bridge.activate(Mode.JOINT_POSITION).q


def command(bridge: LeRobotBridge, seq: int, target, gripper: float | None = None) -> Command:
    now_ns = bridge.clock.now_ns()
    return Command(Mode.JOINT_POSITION, seq, now_ns, now_ns + 10**8, np.asarray(target, float), gripper=gripper)


def test_units():
    degrees, hundred, percent = MOTORS
    assert degrees.to_rad(90.0) == pytest.approx(0.25 - math.pi / 2)
    assert [hundred.to_rad(x) for x in (-100, 0, 100)] == pytest.approx([2.0, 0.2, -1.6])
    assert [percent.to_rad(x) for x in (0, 50, 100)] == pytest.approx([-1.5, 0.0, 1.5])
    for motor in MOTORS:
        for q in (-1.5, -0.3, 0.0, 1.2):
            assert motor.to_rad(motor.from_rad(q)) == pytest.approx(q, abs=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"unit": Unit.HUNDRED},
        {"unit": Unit.HUNDRED, "ends_rad": (1.0, 1.0)},
        {"unit": Unit.HUNDRED, "ends_rad": (-1.4, 1.5)},  # the joint's limits are wider than what was calibrated
        {"unit": Unit.PERCENT, "ends_rad": (-math.inf, 2.0)},
        {"ends_rad": (-2.0, 2.0)},
        {"sign": 2},
    ],
)
def test_a_table_that_cannot_be_right_is_refused(wrong):
    with pytest.raises(Refused):
        Motor("m", joint("j"), **wrong)


def test_a_life(stand: Stand, bridge: LeRobotBridge):
    q = active(bridge)
    np.testing.assert_allclose(q, [motor.to_rad(10.0) for motor in MOTORS])
    assert stand.ticks == []
    target = q + 0.1
    sent = bridge.write(command(bridge, 1, target, gripper=0.5))
    np.testing.assert_allclose(sent.target, target, atol=1e-12)
    assert stand.position["gripper.pos"] == 50.0
    first, second = bridge.read(0.2), bridge.read(0.2)
    assert second.seq > first.seq and second.t_ns > first.t_ns and second.gripper == 0.5
    np.testing.assert_allclose(first.q, target, atol=1e-12)
    camera = bridge.camera("front")
    assert camera.read(0).image[0, 0, 0] == 1
    with pytest.raises(StaleState):
        camera.read(0)
    bridge.stop(StopKind.RELEASE)  # which is not offered: the last set-point is sent once more
    assert bridge.phase is Phase.STOPPING and stand.ticks[-1] == stand.ticks[-2] and stand.is_connected
    bridge.deactivate()
    bridge.close()
    assert not stand.is_connected


@pytest.mark.slow
def test_it_keeps_the_word_of_an_adapter():
    found = check(lambda: LeRobotBridge(Stand(), CONFIG))
    assert found.passed and len(found.checks) > 100, str(found)


def test_the_page_says_how(stand: Stand):
    page = (Path(__file__).parents[1] / "docs" / "robots_own.md").read_text(encoding="utf-8")
    section = page.partition("## A robot of LeRobot's\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    said: dict[str, Any] = {"robot": stand}
    exec(compile(program, "robots_own.md", "exec"), said)
    assert said["picture"].image.shape == (8, 6, 3) and said["bridge"].phase is Phase.INACTIVE
    np.testing.assert_allclose(said["info"].sent, said["state"].q, atol=1e-9)
    assert len(stand.ticks) >= 1
    said["safe"].close()
    assert not stand.is_connected


def test_velocity_is_the_difference_of_positions(stand: Stand):
    clock = VirtualClock()
    bridge = LeRobotBridge(stand, CONFIG, clock)
    active(bridge)
    stand.position["shoulder_pan.pos"] += 9.0
    clock.advance_ns(100_000_000)
    np.testing.assert_allclose(bridge.read(0.5).qd, [-math.pi / 2, 0, 0], atol=1e-9)
    bridge.close()


def test_what_was_really_sent_comes_back(stand: Stand):
    wide = Motor("shoulder_pan", JointSpec("pan", -3.0, 3.0, 3.0, 20.0))
    bridge = LeRobotBridge(stand, BridgeConfig("x", (wide, *MOTORS[1:]), gripper="gripper"))
    q = active(bridge)
    q[0] = 2.5  # 143 degrees, where the stand stops at 100
    assert bridge.write(command(bridge, 1, q)).target[0] == pytest.approx(math.radians(100))
    bridge.close()


def test_nan_reaches_nothing(stand: Stand, bridge: LeRobotBridge):
    q = active(bridge)
    for seq, wrong in enumerate([q * np.nan, q + np.inf, q[:2], np.full(3, 1.6)], start=1):
        with pytest.raises(Refused):
            bridge.write(command(bridge, seq, wrong))
    assert stand.ticks == [] and bridge.phase is Phase.ACTIVE
    # The control: without the bridge, one number that is none sends the joint to the end of its range.
    stand.send_action({"elbow_flex.pos": math.nan})
    assert stand.ticks == [{"elbow_flex.pos": 0}]


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "x"])
@pytest.mark.parametrize("key", ["elbow_flex.pos", "gripper.pos"])
def test_a_measurement_that_is_none_is_a_fault(stand: Stand, bridge: LeRobotBridge, key: str, value):
    active(bridge)
    stand.position[key] = value
    with pytest.raises(DeviceFault):
        bridge.read(0.2)
    assert bridge.phase is Phase.FAULT
    stand.position[key] = 0.0
    bridge.recover()
    assert bridge.phase is Phase.INACTIVE and bridge.read(0.2).q[1] is not None


def test_at_rest_only_what_does_not_answer_is_connected_anew(stand: Stand, bridge: LeRobotBridge):
    """`disconnect` lets go of the arm, so an arm that is held is not let go for nothing."""
    active(bridge)
    bridge.stop(StopKind.HOLD)
    bridge.deactivate()
    calls: list[str] = []
    disconnect = stand.disconnect

    def noted() -> None:
        calls.append("disconnect")
        disconnect()

    stand.disconnect = noted  # type: ignore[method-assign]
    bridge.recover()
    assert calls == [] and bridge.phase is Phase.INACTIVE
    observe = stand.get_observation

    def fails() -> dict:
        stand.get_observation = observe  # type: ignore[method-assign]
        raise ConnectionError("unplugged")

    stand.get_observation = fails  # type: ignore[method-assign]
    bridge.recover()
    assert calls == ["disconnect"] and bridge.phase is Phase.INACTIVE and len(bridge.read(0.2).q) == 3


@pytest.mark.parametrize("error", [ConnectionError("unplugged"), TimeoutError("bus"), KeyError("x"), OSError(5, "io")])
@pytest.mark.parametrize("call", ["read", "write"])
def test_exceptions_are_faults(stand: Stand, bridge: LeRobotBridge, call: str, error: Exception):
    q = active(bridge)
    stand.error = error
    with pytest.raises(DeviceFault):
        bridge.read(0.2) if call == "read" else bridge.write(command(bridge, 1, q))
    assert bridge.phase is Phase.FAULT


def test_a_robot_that_hangs(stand: Stand, bridge: LeRobotBridge):
    q = active(bridge)
    seq = bridge.read(0.2).seq
    stand.hang.clear()
    with pytest.raises(StaleState):
        bridge.read(0.02)
    stand.hang.set()
    assert bridge.read(0.2).seq == seq + 1  # the observation that was late, and not one more
    stand.hang.clear()
    began = time.monotonic()
    with pytest.raises(DeviceFault, match="did not return"):
        bridge.write(command(bridge, 1, q))
    bridge.stop(StopKind.HOLD)
    bridge.close()
    assert time.monotonic() - began < 3 * CONFIG.hang_s + 1.0 and bridge.phase is Phase.CLOSED


def test_reading_that_never_ends_is_a_fault(stand: Stand, bridge: LeRobotBridge):
    active(bridge)
    stand.hang.clear()
    deadline, stale = time.monotonic() + 5, 0
    with pytest.raises(DeviceFault, match="takes longer"):
        while time.monotonic() < deadline:
            try:
                bridge.read(0.03)
            except StaleState:
                stale += 1
    assert stale >= 2


def test_another_robot_is_refused(stand: Stand):
    stand.action_features["wrist_flex.pos"] = float
    with pytest.raises(Refused, match="wrist_flex"):
        LeRobotBridge(stand, CONFIG).configure()
    del stand.action_features["wrist_flex.pos"], stand.observation_features["front"]
    with pytest.raises(Refused, match="front"):
        LeRobotBridge(stand, CONFIG).configure()
    stand = Stand()
    stand.is_calibrated = False
    with pytest.raises(Refused, match="calibrate"):
        LeRobotBridge(stand, CONFIG).configure()
    assert not stand.is_connected
    with pytest.raises(Refused, match="choices"):
        LeRobotBridge(stand, CONFIG).camera("top")
