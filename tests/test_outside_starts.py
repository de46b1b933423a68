"""An arm that is found a little outside its range: nothing moves until something is asked, and then it goes in within
all limits, from the first tick on, on every robot there is; too far outside, it is refused in words.

Set-points are those that the device got: from the bytes on the bus, from the controller's own log, or from what the
simulated device was told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from test_lerobot_bridge import Stand

from burnish.real_robot.adapter import Adapter, JointSpec, Phase
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.drivers.bus import ArmConfig
from burnish.real_robot.drivers.calibration import QUANTUM_RAD, Calibration, JointCalibration
from burnish.real_robot.drivers.feetech import FeetechArm
from burnish.real_robot.drivers.lerobot import BridgeConfig, LeRobotBridge, Motor, Unit
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.drivers.universal import UniversalConfig, UniversalRobot
from burnish.real_robot.emulators.line import Loopback
from burnish.real_robot.emulators.so101 import JOINTS, so101
from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.safe_robot import Rung, SafeRobot, Safety
from bus_lab import CALIBRATION, START, Rig
from hostile import mixed
from robot_lab import ARM, LIMITS, Puppet
from soak import Progress, often
from universal_emulator.emulator import UniversalEmulator
from universal_lab import PATIENT, fresh_address

Array = np.ndarray
STARTS = often(4, 200)
ALLOWED_RAD = Safety().outside_rad
FREE = ARM.replace('damping="1"', 'damping="1" limited="false"')  # no stop of the model pushes the arm back in
WAITS = 10  # ticks in which nothing is asked


@dataclass
class Found:
    """An arm at ``q``, and what its device has been told since it was taken hold of."""

    adapter: Adapter
    q: Array
    came: Callable[[], Array]  # (T, n) rad
    rate_hz: float = 100.0


def noted(adapter: Adapter, q: Array) -> Found:
    """Set-points as the driver is given them; one that a busy machine lets expire is among them, and is not sent."""
    came: list[Array] = []
    write = adapter.write

    def tapped(command: Any) -> Any:
        came.append(command.target.copy())
        try:
            return write(command)
        except Refused as error:
            assert "expired" in str(error)
            return command

    adapter.write = tapped  # type: ignore[method-assign]
    return Found(adapter, q, lambda: np.array(came))


def beside(rng: np.random.Generator, lower: Array, upper: Array, most: float = 0.97 * ALLOWED_RAD) -> Array:
    """A pose with at least one joint outside, by up to ``most``."""
    outside = rng.random(len(lower)) < 0.5
    outside[rng.integers(len(lower))] = True
    beyond = most * rng.random(len(lower))
    side = np.where(rng.random(len(lower)) < 0.5, lower - beyond, upper + beyond)
    return np.where(outside, side, rng.uniform(lower, upper))


def puppet(rng: np.random.Generator, stack: ExitStack) -> Found:
    robot = Puppet()
    robot.q = beside(rng, robot.spec.column("lower"), robot.spec.column("upper"))
    return noted(robot, robot.q.copy())


def twin(rng: np.random.Generator, stack: ExitStack) -> Found:
    robot = Twin(TwinConfig(FREE, **LIMITS), VirtualClock())
    q = beside(rng, robot.spec.column("lower"), robot.spec.column("upper"))
    robot.data.qpos[:] = q
    return noted(robot, q)


def on_the_bus(arm: Any, chain: Any, calibration: Calibration, ticks: Array, rate_hz: float = 100.0) -> Found:
    n = len(calibration.joints)
    told = lambda: calibration.radians(np.array([write.ticks[:n] for write in chain.log], np.float64))  # noqa: E731
    return Found(arm, calibration.radians(ticks[:n]), told, rate_hz)


def servos(family: str, rng: np.random.Generator, stack: ExitStack) -> Found:
    rig = Rig(family)
    low, high = np.array(CALIBRATION.ranges, np.float64).T
    # A whole turn is all that a servo counts, so no tick is below 0 or above 4095.
    ticks = np.rint(beside(rng, low, high, 0.97 * ALLOWED_RAD / QUANTUM_RAD))
    for i, tick in enumerate(ticks):
        rig.plant.jump(i, (tick - START[i]) * QUANTUM_RAD)
    return on_the_bus(rig.arm, rig.chain, CALIBRATION, ticks)


def so101_emulated(rng: np.random.Generator, stack: ExitStack) -> Found:
    """Gravity pulls at this one, and it was calibrated for less than its stops allow."""
    from burnish.sim.mirror import Mirror
    from burnish.sim.tasks.reach import ReachConfig

    body, clock = Mirror(ReachConfig()), VirtualClock()
    chain = so101(body.mjcf, body.begin(0).tolist())
    here, room = np.rint(chain.plant.motion()[0] / QUANTUM_RAD).astype(int), int(0.5 / QUANTUM_RAD)
    beyond = int(0.9 * ALLOWED_RAD * rng.random() / QUANTUM_RAD) + 1
    low = np.where(rng.random(len(here)) < 0.5, here + beyond, here - room)
    rows = tuple(JointCalibration(name, i + 1, int(low[i]), int(low[i]) + 2 * room) for i, name in enumerate(JOINTS))
    config = ArmConfig("emulated", Calibration(rows))
    return on_the_bus(
        FeetechArm(config, clock, lambda: Loopback(chain, clock)), chain, config.calibration, here.astype(float)
    )


def lerobot(rng: np.random.Generator, stack: ExitStack) -> Found:
    joint = [JointSpec(name, -1.4, 1.4, 3.0, 20.0) for name in ("pan", "elbow", "roll")]
    motors = (
        Motor("shoulder_pan", joint[0], sign=-1),
        Motor("elbow_flex", joint[1], Unit.HUNDRED, ends_rad=(2.0, -1.6)),
        Motor("wrist_roll", joint[2], Unit.PERCENT, ends_rad=(-1.6, 1.6)),
    )
    stand = Stand()
    q = beside(rng, np.full(3, -1.4), np.full(3, 1.4))
    for motor, x in zip(motors, q, strict=True):
        stand.position[motor.key] = motor.from_rad(x)
    bridge = LeRobotBridge(stand, BridgeConfig("so101", motors, gripper="gripper", rate_hz=100.0, hang_s=5.0))
    return noted(bridge, q)


def universal(rng: np.random.Generator, stack: ExitStack) -> Found:
    spec = UniversalRobot(UniversalConfig("127.0.0.1")).spec
    q = beside(rng, spec.column("lower"), spec.column("upper"))
    emulator = stack.enter_context(UniversalEmulator(fresh_address(), {"home": q.tolist()}))
    robot = UniversalRobot(UniversalConfig(emulator.address, **PATIENT))
    found = noted(robot, q)
    written = found.came

    def came() -> Array:
        """What was written, once it is seen that nothing else came over the wire."""
        sent = {row.tobytes() for row in written()}
        assert all(np.array(package.numbers).tobytes() in sent for package in emulator.set_points())
        return written()

    return replace(found, came=came, rate_hz=robot.config.rate_hz)


ROBOTS: dict[str, tuple[str, Callable[[np.random.Generator, ExitStack], Found]]] = {
    "puppet": ("numpy", puppet),
    "twin": ("mujoco", twin),
    "dynamixel": ("dynamixel_sdk", lambda rng, stack: servos("dynamixel", rng, stack)),
    "feetech": ("scservo_sdk", lambda rng, stack: servos("feetech", rng, stack)),
    "so101_emulated": ("scservo_sdk", so101_emulated),
    "lerobot": ("numpy", lerobot),
    "universal": ("rtde_control", universal),
}


def broken(spec: Any, rate_hz: float, found: Array, came: Array) -> list[str]:
    """Limits that these set-points broke, beginning at rest where the arm was found. What a device rounds may add three
    of its steps to a change of speed, as everywhere (`guard`)."""
    q = np.concatenate([found[None], came])
    quantum = spec.column("quantum")
    low, high = np.minimum(spec.column("lower"), q[:-1]), np.maximum(spec.column("upper"), q[:-1])
    v = np.diff(q, axis=0) * rate_hz
    a = np.diff(v, axis=0, prepend=np.zeros((1, len(found)))) * rate_hz
    rules = {
        "position": (q[1:] < low - 1e-12) | (q[1:] > high + 1e-12),
        "velocity": np.abs(v) > spec.column("velocity") * (1 + 1e-9),
        "acceleration": np.abs(a) > spec.column("acceleration") * (1 + 1e-6) + 3 * quantum * rate_hz**2 + 1e-9,
    }
    return [name for name, x in rules.items() if x.any()]


def requests(rng: np.random.Generator, limits: Any, found: Array) -> Iterator[Any]:
    """Nothing; then whatever anybody might ask; then the way in."""
    yield from [None] * WAITS
    yield found  # a first request from elsewhere would be refused
    manner, n = rng.integers(4), len(found)
    if manner == 0:
        yield from mixed(rng, limits, (n,), 60)
    elif manner == 1:
        yield from [found] * 30  # to stay, which is not allowed there
    elif manner == 2:
        yield from [found + np.sign(found) * 0.3] * 30  # farther out
    yield from [(limits.lower + limits.upper) / 2] * 60


def played(found: Found, rng: np.random.Generator, **safety: Any) -> tuple[Array, SafeRobot]:
    """All of a start, on the guard and the ladder of every deployment."""
    patient = {"stale_ramp_s": 5.0, "stale_hold_periods": 500.0, "following_rad": 9.0, "bad_in_a_row": 1000}
    # The model's stops, where they are nearer than the calibration, block a joint.
    patient |= {"frozen_rad": 9.0, "stall_rad": 9.0}
    slow = {"no_device_watchdog": True, "start_gap_rad": 0.5, "blend_s": 0.3}
    safe = SafeRobot(found.adapter, Safety(rate_hz=found.rate_hz, **{**patient, **slow, **safety}))
    try:
        state = safe.start()
        assert np.abs(state.q - found.q).max() <= 2 * QUANTUM_RAD, "taking hold of it moved the arm"
        for request in requests(rng, safe.limits, found.q):
            due_ns = safe.clock.now_ns() + ns(1 / found.rate_hz)
            assert safe.rung is not Rung.STOPPED, list(safe.events)[-3:]
            safe.step(request)
            safe.clock.sleep_until_ns(due_ns)
        came = found.came()
    finally:
        safe.close()
    return came, safe


@pytest.mark.slow
@pytest.mark.parametrize("robot", ROBOTS)
def test_starts_outside_the_range_break_no_limit(require, robot: str):
    module, make = ROBOTS[robot]
    require(module)
    rng = np.random.default_rng(16)
    for number in Progress(f"starts of {robot}", STARTS).along(range(STARTS)):
        with ExitStack() as stack:
            found = make(rng, stack)
            came, safe = played(found, rng)
        # The guard begins at what was measured last, up to a tick of noise away from what was found.
        first = came[0]
        assert np.abs(first - found.q).max() <= 2 * QUANTUM_RAD and (came[: WAITS - 1] == first).all(), number
        assert not broken(safe.spec, found.rate_hz, first, came), number
        lower, upper = safe.spec.column("lower"), safe.spec.column("upper")
        assert ((came[-1] >= lower - 1e-12) & (came[-1] <= upper + 1e-12)).all(), "it did not come in"


def test_a_limit_of_jerk_holds_from_outside_too():
    """Behind the fallback, whose paths go in as the guard's do; the guard alone breaks that limit (the control)."""
    jerks = {}
    for jerk in (0.0, 300.0):
        rng, worst = np.random.default_rng(3), 0.0
        for _ in range(often(6, 200)):
            found = twin(rng, ExitStack())
            came, safe = played(found, rng, jerk=jerk)
            assert not safe._protection.lost and not broken(safe.spec, found.rate_hz, came[0], came)
            a = np.diff(came, n=2, axis=0, prepend=np.array([came[0], came[0]])) * found.rate_hz**2
            worst = max(worst, float(np.abs(np.diff(a, axis=0)).max()) * found.rate_hz)
        jerks[jerk] = worst
    assert jerks[300.0] <= 300 * (1 + 1e-5) and jerks[0.0] > 600


def test_a_set_point_that_jumps_to_the_limit_is_found():
    """The control: the way in of before, where the first set-point was the limit itself."""
    rng, robot = np.random.default_rng(1), Puppet()
    lower, upper = robot.spec.column("lower"), robot.spec.column("upper")
    found = beside(rng, lower, upper)
    jump = np.repeat(np.clip(found, lower, upper)[None], 5, axis=0)
    assert broken(robot.spec, 100.0, found, jump) == ["velocity", "acceleration"]
    assert broken(robot.spec, 100.0, found, np.array([found, found + 1e-6 * np.sign(found)])) == ["position"]


@pytest.mark.parametrize("family", ["dynamixel", "feetech"])
def test_servos_that_take_no_goals_there_are_refused(require, family: str):
    """Servos have ranges of their own, and clip or refuse what is outside: then a person has to move the arm."""
    require({"dynamixel": "dynamixel_sdk", "feetech": "scservo_sdk"}[family])
    low, high = CALIBRATION.ranges[1]
    least, most = {"dynamixel": (52, 48), "feetech": (9, 11)}[family]
    own = {2: {least: low, most: high}}
    for beyond, refused in ((2, False), (30, True)):
        rig = Rig(family, overrides=own)
        rig.plant.jump(1, (high + beyond - START[1]) * QUANTUM_RAD)
        rig.arm.configure()
        safe = SafeRobot(rig.arm, Safety(rate_hz=100.0, no_device_watchdog=True))
        if refused:
            with pytest.raises(Refused, match=r"'joint_2' is 0.046 rad outside .* takes no goals there; move it back"):
                safe.start()
            assert rig.arm.phase is Phase.INACTIVE and not any(rig.plant.motion()[1])
        else:
            assert np.abs(safe.start().q[1] - rig.arm.calibration.radians(np.full(5, high))[1]) < 3 * QUANTUM_RAD
            for _ in range(5):
                safe.step(None)
            assert {write.ticks[1] for write in rig.chain.log} == {high}, "a step or two is what rounding may cost"
        rig.arm.close()


def test_a_gripper_beyond_closed_is_not_moved_by_the_start(require):
    require("scservo_sdk")
    rig = Rig("feetech")
    rig.plant.jump(5, (1470 - START[5]) * QUANTUM_RAD)
    safe = SafeRobot(rig.arm, Safety(rate_hz=100.0, no_device_watchdog=True))
    assert safe.start().gripper == 0.0
    for gripper in (None, 0.0, 0.1):
        for _ in range(10):
            safe.step(None if gripper is None else safe._sent, gripper)
            rig.wait(0.01)
        assert (rig.chain.log[-1].ticks[5] == 1470) == (gripper != 0.1)


def test_a_lerobot_motor_outside_its_calibration_is_refused():
    """There LeRobot itself sends it to the end of its range, whatever was asked."""
    stand, joint = Stand(), JointSpec("roll", -1.45, 1.45, 3.0, 20.0)
    names = ("shoulder_pan", "elbow_flex", "wrist_roll")
    motors = tuple(Motor(name, replace(joint, name=name), Unit.PERCENT, ends_rad=(-1.5, 1.5)) for name in names)
    bridge = LeRobotBridge(stand, BridgeConfig("so101", motors, gripper="gripper", hang_s=5.0))
    stand.position["wrist_roll.pos"] = 100.5
    with pytest.raises(Refused, match=r"wrist_roll is 0.015 rad outside .* calibrated in"):
        SafeRobot(bridge, Safety(rate_hz=30.0, no_device_watchdog=True)).start()
    bridge.close()


def test_farther_outside_is_refused_with_how_far():
    robot = Puppet()
    robot.q = np.array([0.0, -1.25])
    with pytest.raises(Refused, match=r"j1 of puppet is 0.250 rad outside its limits, and 0.1 are allowed; move it"):
        SafeRobot(robot, Safety()).start()
    assert "activate" not in robot.calls

    class Falls(Puppet):
        """Between the first look and the one with power."""

        def _activate(self, mode: Any) -> Any:
            self.q = np.array([0.0, -1.25])
            return super()._activate(mode)

    falling = Falls()
    with pytest.raises(Refused, match=r"0\.250 rad outside"):
        SafeRobot(falling, Safety()).start()
    assert falling.calls[-2:] == ["stop hold", "deactivate"]
