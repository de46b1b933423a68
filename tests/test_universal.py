"""A Universal Robots arm, from `Adapter` calls through the unmodified ur-rtde to bytes at an emulated controller."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from burnish.real_robot.adapter import Mode, Phase, StopKind
from burnish.real_robot.drivers.universal import Model, UniversalConfig, UniversalRobot, make, quaternion
from burnish.real_robot.emulators.universal import UniversalEmulator
from burnish.real_robot.errors import DeviceFault, Refused
from burnish.real_robot.guard import JointGuard, Limits
from soak import often
from universal_lab import PATIENT, active, command, drive, fresh_address, swing


@pytest.fixture(autouse=True)
def sdk(require) -> None:
    require("rtde_control", "ur-rtde is not installed")


@pytest.fixture
def emulator() -> Iterator[UniversalEmulator]:
    with UniversalEmulator(fresh_address(), {"unlock_after_s": 0.05}) as found:
        yield found


@pytest.fixture
def robot(emulator: UniversalEmulator) -> Iterator[UniversalRobot]:
    found = UniversalRobot(UniversalConfig(emulator.address, **PATIENT))
    yield found
    found.close()


# ---- life ----


def test_a_life(emulator: UniversalEmulator, robot: UniversalRobot):
    assert robot.spec.safe_when_unpowered and robot.spec.device_watchdog_s == 0.5
    robot.configure()
    first, second = robot.read(0.2), robot.read(0.2)
    assert second.seq > first.seq and second.t_ns > first.t_ns
    assert second.t_device_s is not None and first.t_device_s is not None and second.t_device_s > first.t_device_s
    assert not emulator.set_points() and emulator.events() == []  # nothing was asked of the controller so far
    for kind in (StopKind.RAMP, StopKind.HOLD):
        q = robot.activate(Mode.JOINT_POSITION).q
        drive(robot, swing(q), 40)
        began = time.monotonic()
        robot.stop(kind)
        assert time.monotonic() - began < 2.0 and robot.phase is Phase.STOPPING  # stop_s, and a bit
        speeds = [np.abs(robot.read(0.5).qd).max() for _ in range(10)]
        assert speeds[-1] < 1e-9  # the first ones may have been on their way while the arm was still braking
        robot.deactivate()
        assert robot.phase is Phase.INACTIVE
    assert [what for *_, what in emulator.events()] == ["program started", "program stopped: dashboard"] * 2
    robot.activate(Mode.JOINT_POSITION)
    robot.stop(StopKind.RELEASE)
    robot.stop(StopKind.RELEASE)
    assert emulator.order("dashboard", line="robotmode") == "Robotmode: POWER_OFF"
    robot.deactivate()
    assert robot.read(0.5).fault is None
    robot.activate(Mode.JOINT_POSITION)  # which powers on what we have powered off
    began = time.monotonic()
    robot.close()
    robot.close()
    assert robot.phase is Phase.CLOSED and time.monotonic() - began < 5.0  # two stops and the end of a process


def test_the_first_set_point_holds_the_arm_where_it_is(emulator: UniversalEmulator, robot: UniversalRobot):
    q = active(robot)
    drive(robot, lambda t: q, 25)
    assert (np.array([p.numbers for p in emulator.set_points()]) == q).all()
    assert np.ptp(emulator.motion().q, axis=0).max() == 0


@pytest.mark.parametrize(
    ("settings", "config", "word"),
    [
        ({"remote_control": False}, {}, "remote control"),
        ({}, {"model": "ur10e"}, "ur10e"),
        ({}, {"serial": "20990000000"}, "serial"),
    ],
)
def test_another_robot_is_refused(settings, config, word):
    with UniversalEmulator(fresh_address(), settings) as emulator:
        model = Model(config.pop("model", "ur5e"))
        robot = UniversalRobot(UniversalConfig(emulator.address, model, **config))
        with pytest.raises(Refused, match=word):
            robot.configure()
        assert robot.phase is Phase.UNCONFIGURED


def test_a_robot_that_is_off_or_absent(emulator: UniversalEmulator, robot: UniversalRobot):
    emulator.order("dashboard", line="power off")
    with pytest.raises(Refused, match="power it on"):
        robot.configure()
    absent = UniversalRobot(UniversalConfig(fresh_address()))
    with pytest.raises(DeviceFault, match="network cable"):
        absent.configure()


@pytest.mark.parametrize(
    "wrong",
    [
        {"watchdog_hz": None},
        {"watchdog_hz": 100.0},
        {"rate_hz": 10.0},
        {"gain": 5.0},
        {"lookahead_s": 1.0},
        {"stop_s": 0},
    ],
)
def test_a_configuration_is_checked(wrong):
    with pytest.raises(Refused):
        UniversalConfig("127.0.0.1", **wrong)


def test_a_robot_is_made_of_plain_settings():
    robot = make({"address": "127.0.0.1", "model": "ur10e", "watchdog_hz": 20.0})
    assert robot.spec.joints[0].velocity == 2 * np.pi / 3 and robot.spec.device_watchdog_s == 0.05
    for wrong in ({}, {"address": "x", "model": "ur99"}, {"address": "x", "adress": "y"}):
        with pytest.raises(Refused):
            make(wrong)


def test_a_rotation_vector_becomes_a_quaternion():
    half = np.sqrt(0.5)
    np.testing.assert_allclose(quaternion(np.array([0, np.pi / 2, 0])), [half, 0, half, 0], atol=1e-15)
    np.testing.assert_array_equal(quaternion(np.zeros(3)), [1, 0, 0, 0])


# ---- motion ----


def test_a_smooth_path_is_followed(emulator: UniversalEmulator, robot: UniversalRobot):
    q, speed = active(robot), 0.5
    guard = JointGuard(Limits.of(robot.spec, robot.config.rate_hz))
    guard.reset(q)
    asked = []

    def guarded(t: float) -> np.ndarray:
        asked.append(swing(q, speed)(t))
        return guard(asked[-1]).q

    drive(robot, guarded, 200)
    packages, motion = emulator.set_points(), emulator.motion()
    came = np.array([p.numbers for p in packages])
    # The set-point that the controller had at each of its steps, so that a late process of ours counts for nothing.
    steps = np.array([p.step for p in packages])
    rows = motion.step > steps[0]
    had = came[np.searchsorted(steps, motion.step[rows], side="left") - 1]
    # Look-ahead and two steps of delay explain 0.034 s of lag, a period 0.008 s; those that queued up jump by more.
    jump = np.abs(np.diff(came, axis=0)).max()
    assert np.abs(motion.q[rows] - had).max() < speed * 0.042 + jump
    assert np.ptp(came[:, 0]) > 0.3
    known = {row.tobytes() for row in np.array(asked)}
    assert all(row.tobytes() in known for row in came)  # the guard changed nothing, and the wire rounds nothing


HOSTILE = (
    lambda rng, q: rng.uniform(-10, 10, 6),
    lambda rng, q: rng.normal(0, 1e3, 6),
    lambda rng, q: np.where(rng.random(6) < 0.5, np.nan, q),
    lambda rng, q: np.full(6, np.inf * rng.choice([-1, 1])),
    lambda rng, q: 6.3 * rng.choice([-1, 1], 6),
    lambda rng, q: np.nextafter(q, np.inf),
    lambda rng, q: q[:5],
    lambda rng, q: "home",
    lambda rng, q: None,
    lambda rng, q: np.full(6, 5e-324),
)


def hostile_writes(emulator: UniversalEmulator, count: int) -> None:
    """The limits, checked once more with what came over the wire."""
    robot = UniversalRobot(UniversalConfig(emulator.address, rate_hz=500.0, acceleration=20.0, **PATIENT))
    q, rng = active(robot), np.random.default_rng(5)
    limits = Limits.of(robot.spec, robot.config.rate_hz)
    guard = JointGuard(limits)
    guard.reset(q)
    sent, sent_ns = [], []

    def target(t: float) -> np.ndarray:
        k = len(sent)
        kind = HOSTILE[int(rng.integers(len(HOSTILE)))]
        # In turn: 200 of all kinds, and 600 from one end to the other, which reaches all limits.
        request = kind(rng, guard.q) if k % 800 < 200 else 6.3 * np.sign(np.sin(k / 150)) * np.ones(6)
        sent.append(guard(request).q)
        sent_ns.append(robot.clock.now_ns())
        return sent[-1]

    drive(robot, target, count)
    robot.stop(StopKind.HOLD)
    robot.close()
    packages = emulator.set_points()
    came, came_ns = np.array([p.numbers for p in packages]), np.array([p.t_ns for p in packages])
    # Which write each one is: in order, bit for bit. Of those that queued up, only the last is passed on.
    index, at = [], 0
    for row in came:
        while sent[at].tobytes() != row.tobytes():
            at += 1
        index.append(at)
        at += 1
    index = np.array(index)
    assert len(came) > 0.5 * count
    assert ((came >= limits.lower) & (came <= limits.upper)).all()
    moved = np.abs(np.diff(came, axis=0))
    fastest = limits.velocity * (1 + 1e-9)
    assert (moved <= np.diff(index)[:, None] * limits.period_s * fastest + 1e-15).all()
    # By the clock at the other end: a way of longer or shorter delay is all that may be added.
    delay_s = (came_ns - np.array(sent_ns)[index]) / 1e9
    assert (moved <= (np.diff(came_ns)[:, None] / 1e9 + np.ptp(delay_s)) * fastest).all()
    assert moved.max() > 0.3 * limits.period_s * limits.velocity.max(), "it did not move, so nothing was tried"


def test_hostile_requests_stay_within_the_limits_on_the_wire(emulator: UniversalEmulator):
    hostile_writes(emulator, 800)


@pytest.mark.slow
def test_ten_thousand_hostile_requests(emulator: UniversalEmulator):
    hostile_writes(emulator, often(10_000, 1_000_000))


def test_what_the_sdk_lets_pass_is_refused(emulator: UniversalEmulator, robot: UniversalRobot):
    q = active(robot)
    for seq, wrong in enumerate([q * np.nan, q + np.inf, q * 1e9, q[:5], q + 0.5, np.full(6, 6.4)], start=1):
        with pytest.raises(Refused):
            robot.write(command(seq, wrong, robot))
    assert robot.phase is Phase.ACTIVE and not emulator.set_points()
    robot.close()
    # The control: ur-rtde says yes to numbers that are none, and they are on the wire.
    code = (
        "import rtde_control, os, time\n"
        f"c = rtde_control.RTDEControlInterface('{emulator.address}')\n"
        "nan = c.servoJ([float('nan')] * 6, 0, 0, 0.008, 0.03, 300)\n"
        "time.sleep(0.2)\n"  # what a closing connection has not delivered yet is lost
        "os._exit(0 if nan else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True).returncode == 0
    deadline = time.monotonic() + 5
    while not emulator.set_points() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert np.isnan(emulator.set_points()[-1].numbers).all()
