"""A sensor that hangs and a joint that is stuck bring a robot to rest, on every emulator; everyday motion does not.

The issue's case: set-points swung 0.34 rad over a constant measurement for 30 s, and nothing noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from burnish.real_robot.adapter import JointSpec, RobotState
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.drivers.bus import ArmConfig
from burnish.real_robot.drivers.calibration import QUANTUM_RAD
from burnish.real_robot.drivers.feetech import FeetechArm
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.emulators.faults import Faults
from burnish.real_robot.emulators.line import Loopback
from burnish.real_robot.emulators.so101 import calibration, so101
from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.monitors import Monitors
from burnish.real_robot.safety.safe_robot import Rung, SafeRobot, Safety
from bus_lab import Rig
from robot_lab import ARM, LIMITS, Puppet, spec
from soak import often

SAFETY = Safety(rate_hz=100.0, no_device_watchdog=True, blend_s=0.0)
SWING_RAD = 0.17  # either way: so far that nothing else notices (`following_rad`)
SDKS = {"dynamixel": "dynamixel_sdk", "feetech": "scservo_sdk"}
Wish = Callable[[float, np.ndarray], np.ndarray]  # of the time and the start


def swing(t: float, start: np.ndarray) -> np.ndarray:
    return start + SWING_RAD * np.sin(2 * t)


def stand(t: float, start: np.ndarray) -> np.ndarray:
    return start


def push(t: float, start: np.ndarray) -> np.ndarray:
    """After a second one way, by less than `frozen_rad` and `following_rad`: only the effort tells."""
    return start - np.clip(0.2 * (t - 1), 0, 0.12)


def played(safe: SafeRobot, wish: Wish, seconds: float, strike: Callable[[], None] = lambda: None) -> float | None:
    """When it was brought to rest, in seconds since ``strike``, which comes in motion, after a second."""
    start = safe.start().q.copy()
    period_ns, began_ns, struck = ns(1 / safe.safety.rate_hz), safe.clock.now_ns(), False
    while (since_s := (safe.clock.now_ns() - began_ns) / 1e9) < 1 + seconds:
        if since_s >= 1 and not struck:
            strike()
            struck = True
        due_ns = safe.clock.now_ns() + period_ns
        safe.step(wish(since_s, start))
        if safe.rung in (Rung.RAMP, Rung.STOPPED):
            return since_s - 1
        safe.clock.sleep_until_ns(due_ns)
    return None


def words(safe: SafeRobot) -> str:
    return " ".join(event.text for event in safe.events)


# ---- faults ----


@pytest.mark.parametrize("family", SDKS)
def test_a_frozen_encoder_is_noticed(require, family: str):
    """Its servo goes on moving, and says where it was: all else that it says is alive."""
    require(SDKS[family])
    for seed in range(often(2, 40)):
        rig = Rig(family, seed)
        safe = SafeRobot(rig.arm, SAFETY)
        joint = seed % 5 + 1

        def strike(rig: Rig = rig, joint: int = joint) -> None:
            rig.faults(replies=Faults(encoder=True, only=frozenset({joint})))

        took_s = played(safe, swing, 30.0, strike)
        # Half a period of the swing until set-points have moved enough, and then `frozen_s`.
        assert took_s is not None and took_s < np.pi / 2 + SAFETY.frozen_s + 0.1
        assert f"joint_{joint} has been measured at one place" in words(safe)


@pytest.mark.parametrize("family", SDKS)
def test_without_the_monitor_a_frozen_encoder_is_not_noticed(require, family: str):
    """The control, and how it was."""
    require(SDKS[family])
    rig = Rig(family)
    safe = SafeRobot(rig.arm, replace(SAFETY, frozen_rad=9.0, stall_s=1e6))
    strike = lambda: rig.faults(replies=Faults(encoder=True, only=frozenset({2})))  # noqa: E731
    assert played(safe, swing, often(8, 30), strike) is None


@pytest.mark.parametrize("family", SDKS)
def test_a_stalled_joint_is_noticed_by_its_effort(require, family: str):
    require(SDKS[family])
    for seed in range(often(2, 40)):
        rig = Rig(family, seed)
        safe = SafeRobot(rig.arm, SAFETY)
        joint = seed % 5
        took_s = played(safe, push, 10.0, lambda rig=rig, joint=joint: rig.plant.block(joint))
        # `stall_rad` is behind after half a second.
        assert took_s is not None and took_s < 1 + SAFETY.stall_s
        # A Feetech servo whose whole state stays as it is, is none to believe: its driver is quicker.
        said = words(safe)
        assert f"joint_{joint + 1} has been stuck for" in said or (family == "feetech" and "newest state is" in said)


def test_a_stalled_joint_without_effort_is_left_to_the_following_error():
    robot = Puppet()
    safe = SafeRobot(robot, SAFETY)
    assert played(safe, push, 5.0, lambda: setattr(robot.script, "stuck", True)) is None
    safe.stop()


class Blocked(Twin):
    """One joint held by something strong, in spite of its actuator."""

    def block(self) -> None:
        self.model.dof_damping[self._v] = 1e9


def test_a_blocked_twin_is_noticed():
    strong = ARM.replace('kp="300" kv="3"', 'kp="300" kv="3" forcerange="-10 10"')
    for wish, said in ((swing, "measured at one place|stuck"), (push, "stuck")):
        arm = Blocked(TwinConfig(strong, quantum=QUANTUM_RAD, **LIMITS), VirtualClock())
        assert arm.strongest().tolist() == [10, 10]
        safe = SafeRobot(arm, SAFETY)
        took_s = played(safe, wish, 10.0, arm.block)
        assert took_s is not None and took_s < 3.0
        assert any(word in words(safe) for word in said.split("|"))


# ---- no false alarms ----


@pytest.mark.parametrize("wish", [stand, swing], ids=["stands", "swings"])
@pytest.mark.parametrize("robot", ["twin", "noisy", "quantized", "late", "dynamixel", "feetech", "lossy", "so101"])
def test_everyday_motion_is_no_alarm(require, robot: str, wish: Wish):
    """Half a minute with gravity, noise, rounding, latency and lost packets; at rest and in slow motion."""

    def strike() -> None: ...

    kinds: dict[str, dict[str, Any]] = {
        "twin": {},
        "noisy": {"noise_rad": 0.002, "noise_rad_s": 0.01},
        "quantized": {"quantum": QUANTUM_RAD},
        "late": {"command_latency_s": 0.05, "state_latency_s": 0.05, "jitter_s": 0.02, "quantum": QUANTUM_RAD},
    }
    if robot in kinds:
        arm: Any = Twin(TwinConfig(ARM, **LIMITS, **kinds[robot]), VirtualClock())
    elif robot == "so101":
        require("scservo_sdk")
        from burnish.sim.mirror import Mirror
        from burnish.sim.tasks.reach import ReachConfig

        body, clock = Mirror(ReachConfig()), VirtualClock()
        chain = so101(body.mjcf, body.begin(0).tolist())
        arm = FeetechArm(ArmConfig("emulated", calibration(body.mjcf)), clock, lambda: Loopback(chain, clock))
    else:
        family = "feetech" if robot == "feetech" else "dynamixel"
        require(SDKS[family])
        rig = Rig(family)
        arm = rig.arm
        if robot == "lossy":
            strike = lambda: rig.faults(Faults(drop=0.02), Faults(drop=0.02))  # noqa: E731
    safe = SafeRobot(arm, SAFETY)
    assert played(safe, wish, often(6, 60), strike) is None, words(safe)


def test_fast_motion_and_steps_are_no_alarm():
    """Set-points that leap as far as they may, with much effort and much behind: no joint stands still meanwhile."""
    strong = ARM.replace('kp="300" kv="3"', 'kp="300" kv="3" forcerange="-6 6"')
    arm = Twin(TwinConfig(strong, **LIMITS, command_latency_s=0.03, state_latency_s=0.03), VirtualClock())
    safe = SafeRobot(arm, replace(SAFETY, start_gap_rad=3.0, following_rad=1.0))
    assert played(safe, lambda t, q: np.full(2, 0.7 if t % 2 < 1 else -0.7), 20.0) is None, words(safe)


# ---- the rules themselves ----


def monitor(quantum: float = 0.0, effort: float | None = 2.0, **settings: Any) -> Callable[..., str]:
    """``see(q, sent, seconds, effort)`` of one joint, the others still."""
    joints = tuple(JointSpec(f"j{i}", -1, 1, 2, 10, effort=effort, quantum=quantum) for i in range(3))
    robot = spec(joints=joints)
    one, zero = Monitors(robot, replace(SAFETY, **settings)), np.zeros(3)
    one.begin(RobotState(0, 0, zero, zero), zero, robot.column("effort"), 0)

    def see(q: float, sent: float, t_s: float, force: Any = None) -> str:
        row = np.array([0.0, 1.0, 0.0])
        measured = None if force is None else force if not isinstance(force, float) else force * row
        return one.see(RobotState(1, 0, q * row, zero, effort=measured), sent * row, ns(t_s))

    return see


def test_frozen_is_a_place_and_set_points_that_move():
    see = monitor()
    assert not see(0.0, 0.149, 9.0), "not far enough, however long"
    assert not see(0.0, -0.01, 9.1) and not see(0.0, 0.0, 9.5), "far enough in both directions, not long enough"
    assert "j1 has been measured at one place for 0.51 s, though its set-points moved by 0.16" in see(0.0, 0.0, 9.51)
    assert not see(1e-12, 0.0, 9.7), "it moves again, and all begins anew"
    assert not see(1e-12, 0.14, 99.0)


@pytest.mark.parametrize("steps", [0.5, 1.0, 1.01, 2.0])
def test_a_step_of_the_encoder_is_no_motion(steps: float):
    see, alarms = monitor(quantum=0.001), []
    for k in range(400):
        q = steps * 0.001 * (k % 2)
        alarms.append(see(q, 0.17 * np.sin(k / 50), 0.01 * k))
    assert any(alarms) == (steps <= 1.0)


def test_stalled_is_effort_and_distance_and_time():
    for q, force, stuck in [(0.0, 1.61, True), (0.0, -1.61, True), (0.0, 1.6, False), (0.051, 1.9, False)]:
        see, found = monitor(), ""
        for k in range(110):
            found = found or see(q if k else 0.0, 0.1, 0.01 * k, force)
        assert bool(found) == stuck, (q, force)
        assert not stuck or "j1 has been stuck for 1.01 s, 0.10 rad from its set-point, with 1.61 Nm" in found
    see = monitor()
    for k in range(500):  # it comes nearer by more than `stall_rad` a second, or lets go now and then
        assert not see(0.0006 * k, 0.6, 0.01 * k, 1.9), k
    see = monitor()
    for k in range(500):
        assert not see(0.0, 0.1, 0.01 * k, 1.9 if k % 90 else 0.5)


@pytest.mark.parametrize("effort", [None, np.full(3, np.nan), np.full(2, 9.0), "much", np.array(["a", "b", "c"])])
def test_an_effort_that_is_none_is_not_judged(effort: Any):
    see = monitor()
    assert not any(see(0.0, 0.1, 0.01 * k, effort) for k in range(300))
    see = monitor(effort=None)  # nobody knows the greatest one
    assert not any(see(0.0, 0.1, 0.01 * k, 1e6) for k in range(300))


def test_thresholds_are_settings():
    see = monitor(frozen_rad=0.05, frozen_s=0.1)
    assert not see(0.0, 0.06, 0.0) and see(0.0, 0.06, 0.11)
    for name in ("frozen_rad", "frozen_s", "stall_rad", "stall_share", "stall_s"):
        with pytest.raises(Refused, match=name):
            Safety(**{name: 0.0})
