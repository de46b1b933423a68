"""Feetech servos from `Adapter` calls to bytes, through the unmodified SDK: its bugs, faults, limits, calibration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from servo_plants import ProfilePlant

from burnish.real_robot.adapter import Mode, Phase, StopKind
from burnish.real_robot.clock import ns
from burnish.real_robot.drivers.bus import ArmConfig, Gate
from burnish.real_robot.drivers.calibration import QUANTUM_RAD, Calibration, JointCalibration
from burnish.real_robot.drivers.feetech import FeetechArm, make
from burnish.real_robot.drivers.port import Port
from burnish.real_robot.emulators import feetech as device
from burnish.real_robot.emulators.faults import FaultInjector, Faults
from burnish.real_robot.emulators.feetech import FeetechChain
from burnish.real_robot.emulators.line import Loopback
from burnish.real_robot.emulators.pty import PtyServer
from burnish.real_robot.errors import DeviceFault, Refused, StaleState
from bus_lab import (
    CALIBRATION,
    IDS,
    KINDS,
    RATE_HZ,
    START,
    Rig,
    bounds,
    drive,
    hostile_run,
    met,
    outside,
    patiently,
)
from soak import often

GOAL, TORQUE, LOCK, POSITION, VOLTAGE = 42, 40, 55, 56, 62


@pytest.fixture(autouse=True)
def sdk(require):
    return require("scservo_sdk")


@pytest.fixture
def server() -> Iterator[PtyServer]:
    with PtyServer(FeetechChain(IDS, ProfilePlant(START))) as found:
        yield found


@pytest.fixture
def plain(sdk, server):
    """The vendor's own port and packet handler on the terminal."""
    port = sdk.PortHandler(server.path)
    assert port.openPort()
    yield port, sdk.PacketHandler(0)
    port.ser.close()


@pytest.fixture
def patient(monkeypatch) -> None:
    """The SDK waits for 402 ms instead of 34: where its haste is not the matter, a busy machine is none either."""
    monkeypatch.setattr("scservo_sdk.port_handler.LATENCY_TIMER", 200)


# ---- the emulator, seen by the SDK alone ----


def test_the_sdk_finds_reads_and_writes(plain, patient):
    port, packets = plain
    assert patiently(port, packets.ping, 1) == (777, 0, 0)
    assert patiently(port, packets.read2ByteTxRx, 2, POSITION) == (2000, 0, 0)
    assert patiently(port, packets.write2ByteTxRx, 2, GOAL, 2100) == (0, 0)
    assert patiently(port, packets.read2ByteTxRx, 2, GOAL) == (2100, 0, 0)


def test_the_device_keeps_its_rules():
    chain = FeetechChain(IDS, ProfilePlant(START))
    servo = chain.servos[0]
    servo.write(9, (1000).to_bytes(2, "little"))  # the least angle, with the lock on: until power is lost
    assert servo.get(9) == 1000
    servo.restart(0)
    assert servo.get(9) == 0
    servo.write(LOCK, b"\0")
    servo.write(9, (1000).to_bytes(2, "little"))
    servo.restart(0)
    assert servo.get(9) == 1000
    servo.write(TORQUE, b"\1")
    servo.write(GOAL, (200).to_bytes(2, "little"))
    chain.plant.drive(0, servo.drive())
    assert chain.motion(ns(5))[0][0] == 1000  # the servo itself keeps to its angles
    assert device.encoded(-5, 15) == 0x8005 and device.decoded(0x8005, 15) == -5
    servo.write(POSITION, b"\1\1")  # read-only
    assert servo.get(POSITION) != 0x0101


# ---- what the SDK does wrong, and the driver does not ----


def handler(rig: Rig, sdk, spares_input: bool):
    """The SDK's packet layer on a rig; with ``spares_input`` the port's drain is the SDK's, which drains nothing."""
    port = Port(Loopback(rig.chain, rig.clock), rig.clock, 1_000_000, 0.004, 0.002)
    if spares_input:
        port.clearPort = lambda: None
    return port, sdk.PacketHandler(0)


def test_a_late_answer_is_taken_for_another_register_by_the_sdk(sdk):
    rig = Rig("feetech")
    port, packets = handler(rig, sdk, spares_input=True)
    rig.faults(replies=Faults(delay=1.0, delay_s=0.01))
    with port.exchange(rig.clock.now_ns() + ns(1)):
        assert packets.read2ByteTxRx(port, 1, POSITION)[1] != 0
    rig.faults(replies=Faults())
    rig.wait(0.02)
    with port.exchange(rig.clock.now_ns() + ns(1)):
        data, result, error = packets.readTxRx(port, 1, VOLTAGE, 2)
    assert (result, error) == (0, 0) and int.from_bytes(bytes(data), "little") == START[0]  # 2100 is no voltage
    rig = Rig("feetech")
    port, packets = handler(rig, sdk, spares_input=False)
    rig.faults(replies=Faults(delay=1.0, delay_s=0.01))
    with pytest.raises(DeviceFault), port.exchange(rig.clock.now_ns() + ns(1)):
        assert packets.read2ByteTxRx(port, 1, POSITION)[1] != 0
        raise DeviceFault("lost")
    rig.faults(replies=Faults())
    # The late one is still under way, and is waited for: nothing else is asked until the line is quiet.
    rig.wait(0.0055)
    with port.exchange(rig.clock.now_ns() + ns(1)):
        data, result, _ = packets.readTxRx(port, 1, VOLTAGE, 2)
    assert result == 0 and bytes(data) == bytes([121, 29])


def test_the_sdk_hands_out_what_it_read_before(sdk):
    rig = Rig("feetech")
    port, packets = handler(rig, sdk, spares_input=False)
    group = sdk.GroupSyncRead(port, packets, POSITION, 2)
    for i in IDS:
        group.addParam(i)
    with port.exchange(rig.clock.now_ns() + ns(1)):
        assert group.txRxPacket() == 0
    rig.plant.jump(0, 0.5)
    rig.faults(replies=Faults(mute=True))
    with port.exchange(rig.clock.now_ns() + ns(1)):
        assert group.txRxPacket() != 0
    # All but the first servo keep their old answers, and the SDK calls them available.
    assert group.isAvailable(2, POSITION, 2) and group.getData(2, POSITION, 2) == START[1]
    rig = Rig("feetech")
    rig.started()
    rig.faults(replies=Faults(mute=True))
    with pytest.raises(StaleState):
        rig.arm.read(0.02)


def test_noise_passes_the_sum_and_not_the_driver(sdk):
    """Bursts on half of the answers, of which the sum lets one in 256 pass."""
    rig = Rig("feetech", seed=3)
    port, packets = handler(rig, sdk, spares_input=False)
    rig.faults(replies=Faults(burst=0.5))
    wrong = accepted = 0
    for _ in range(1500):
        with port.exchange(rig.clock.now_ns() + ns(1)):
            try:
                data, result, _ = packets.readTxRx(port, 1, POSITION, 2)
            except IndexError:  # the SDK stumbles over a length that noise has made
                continue
        accepted += result == 0
        wrong += result == 0 and int.from_bytes(bytes(data), "little") != START[0]
        rig.wait(0.001)
    assert wrong > 0


class Bursts(FaultInjector):
    """Bends an answer until its sum, its header and its length are right all the same, and counts how often it tried:
    what does not get past the SDK needs no driver to refuse it, and takes 255 of 256 parts of the time."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.victim, self.tried, self.passed = 0, 0, 0

    def __call__(self, message: bytes, device: int | None = None) -> list[tuple[int, bytes]]:
        if device != self.victim:
            return [(0, message)]
        rng, true, self.victim = self._rng, np.frombuffer(message, np.uint8), 0
        while True:
            start = rng.integers(len(true), size=(1000, 1))
            at, length = np.arange(len(true)), rng.integers(2, 7, size=(1000, 1))
            bent = np.where((at >= start) & (at < start + length), rng.integers(256, size=(1000, len(true))), true)
            passes = (bent[:, :5] == true[:5]).all(axis=1) & (~bent[:, 2:-1].sum(axis=1) & 0xFF == bent[:, -1])
            passes &= (bent != true).any(axis=1)
            first = int(passes.argmax()) if passes.any() else 999
            self.tried += first + 1
            if passes.any():
                self.passed += 1
                return [(0, bent[first].astype(np.uint8).tobytes())]


def wrong_of(bursts: int) -> tuple[int, int, int]:
    """Of so many answers bent by noise: how many were tried, got past the sum, and were believed."""
    rig = Rig("feetech", seed=4)
    rig.started()
    rig.chain.line.replies = noise = Bursts(seed=4)
    tally, victims = drive(rig, 15), np.random.default_rng(5)
    while noise.tried < bursts:
        noise.victim = int(victims.integers(1, 6))
        drive(rig, 1, tally)
        rig.chain.log.clear()
        rig.chain.taken.clear()
    assert not tally.unhandled and tally.states > 0.95 * (tally.states + tally.stale)
    return noise.tried, noise.passed, tally.wrong


@pytest.mark.parametrize("bursts", [100_000, pytest.param(often(1_000_000, 10_000_000), marks=pytest.mark.slow)])
def test_of_bent_answers_hardly_one_is_believed(bursts: int, record_property):
    """At most 1e-5 of them, with 95 % confidence (Poisson, exact: the mean under which so few are seen once in
    twenty times). Of 100,000 alone, one at most shows 4.8e-5."""
    tried, passed, wrong = wrong_of(bursts)
    least = {0: 3.00, 1: 4.75, 2: 6.30, 3: 7.76, 4: 9.16}
    bound = least.get(wrong, np.inf) / tried
    record_property("figures", f"{tried} bent answers, {passed} passed the sum, {wrong} believed: at most {bound:.1e}")
    assert passed > tried / 1000, "nothing got past the sum, so the driver was not tried"
    assert bound <= max(1e-5, 4.75 / tried)


def test_a_lost_reply_costs_the_sdk_34_ms_and_the_driver_less(plain, server):
    port, packets = plain
    server.chain.line.replies.faults = Faults(mute=True)
    began = time.perf_counter()
    assert packets.read2ByteTxRx(port, 1, POSITION)[1] != 0
    assert time.perf_counter() - began >= 0.034
    rig = Rig("feetech")
    rig.started()
    rig.faults(replies=Faults(mute=True))
    began_ns = rig.clock.now_ns()
    with pytest.raises(StaleState):
        rig.arm.read(1.0)
    # Two tries of 4 ms and up to 2 ms of bytes each, and 2 ms of quiet between them.
    assert (rig.clock.now_ns() - began_ns) * 1e-9 <= 2 * 0.006 + 0.0025


def test_an_unplugged_cable_leaves_the_sdk_busy_and_the_driver_recovers(plain, server):
    port, packets = plain
    server.unplug()
    with pytest.raises(Exception, match=""):
        packets.ping(port, 1)
    assert port.is_using and packets.ping(port, 1)[1] == -1  # "port is in use", for good
    server.plug()
    arm = FeetechArm(ArmConfig(server.path, CALIBRATION))
    arm.configure()
    server.unplug()
    with pytest.raises(DeviceFault, match="link"):
        arm.read(0.05)
    assert arm.phase is Phase.FAULT and arm.fault.code == "link"
    server.plug()
    arm.recover()
    assert arm.phase is Phase.INACTIVE
    arm.close()


# ---- the adapter ----


def test_it_says_that_it_has_no_watchdog_and_starts_without_a_bump():
    rig = Rig("feetech")
    for servo in rig.chain.servos:
        servo.set(GOAL, 900)  # left over from another program
        servo.set(LOCK, 0)
    assert rig.arm.spec.device_watchdog_s is None
    state = rig.started()
    assert rig.chain.motion(rig.clock.now_ns())[0] == START
    assert np.allclose(CALIBRATION.ticks(state.q), START[:5]) and state.effort is not None
    assert [servo.get(GOAL) for servo in rig.chain.servos] == START
    assert all(servo.get(TORQUE) == 1 and servo.get(LOCK) == 1 for servo in rig.chain.servos)


def test_stops_freeze_the_last_goal_or_let_go_where_that_is_safe():
    rig = Rig("feetech", config={"safe_when_unpowered": True})
    state = rig.started()
    rig.write(state.q + 0.01, gripper=0.5)
    rig.arm.stop(StopKind.HOLD)
    assert rig.chain.log[-1].ticks == rig.chain.log[-2].ticks and rig.chain.log[-1].ticks[-1] == 2000
    rig.arm.stop(StopKind.RELEASE)
    assert not any(servo.get(TORQUE) for servo in rig.chain.servos)
    rig.arm.deactivate()
    assert rig.arm.phase is Phase.INACTIVE


def test_an_arm_outside_its_range_is_not_activated():
    rig = Rig("feetech")
    rig.plant.jump(2, 2.0 + 0.9)
    rig.arm.configure()
    with pytest.raises(Refused, match="joint_3"):
        rig.arm.activate(Mode.JOINT_POSITION)
    assert rig.arm.phase is Phase.INACTIVE and not any(servo.get(TORQUE) for servo in rig.chain.servos)


@pytest.mark.parametrize(
    ("overrides", "says"), [({3: 1}, "model"), ({33: 1}, "mode"), ({31: -7}, "offset"), ({11: 3000}, "allows")]
)
def test_another_arm_is_not_configured(overrides: dict[int, int], says: str):
    rig = Rig("feetech", overrides={3: overrides})
    with pytest.raises(DeviceFault, match=says):
        rig.arm.configure()


# ---- faults and limits ----


@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_is_unhandled_and_no_wrong_value_accepted(kind: str):
    tally, (least, most) = met("feetech", kind, often(40, 5000)), bounds(kind)
    assert tally.unhandled == [] and tally.wrong <= 1e-5 * tally.states
    assert least <= tally.share <= most


def test_a_frozen_servo_is_believed_for_a_fifth_of_a_second_at_most():
    """Without a counter, only that it does not move towards its goal tells."""
    rig = Rig("feetech")
    state = rig.started()
    rig.write(np.clip(state.q + 0.5, -1, 1))
    rig.faults(replies=Faults(frozen=True))
    frozen_ns, believed_s = rig.clock.now_ns(), 0.0
    for _ in range(60):
        rig.wait(0.01)
        with suppress(StaleState):
            believed_s = (rig.arm.read(0.008).t_ns - frozen_ns) * 1e-9
    assert 0 < believed_s < 0.25


@pytest.mark.parametrize("writes", [400, pytest.param(often(10_000, 1_000_000), marks=pytest.mark.slow)])
def test_limits_hold_in_the_bytes_on_the_wire(writes: int):
    rig = Rig("feetech", seed=1)
    steps = 0
    for seen in hostile_run(rig, writes):
        broken, largest = outside(rig, seen)
        assert broken == 0
        steps = max(steps, largest)
    assert steps == int(rig.arm.config.velocity / RATE_HZ / QUANTUM_RAD)  # so the run went to the limit


@pytest.mark.parametrize("other", [{"guarded": False}, {"hasty": 2.0}], ids=["no_guard", "twice_the_acceleration"])
def test_of_another_guard_it_is_noticed(other):
    rig = Rig("feetech", seed=1)
    assert sum(outside(rig, seen)[0] for seen in hostile_run(rig, 400, **other)) > 10


# ---- calibration and gate ----


def test_a_calibration_survives_its_file(tmp_path):
    CALIBRATION.save(tmp_path / "arm.json")
    assert Calibration.load(tmp_path / "arm.json") == CALIBRATION
    assert isinstance(make({"port": "x", "calibration": str(tmp_path / "arm.json")}), FeetechArm)


@pytest.mark.parametrize(
    "row",
    [
        {"id": 1},
        {"id": 1, "min_tick": 5, "max_tick": 5},
        {"id": 1.5, "min_tick": 5, "max_tick": 9},
        {"id": 253, "min_tick": 5, "max_tick": 9},
        {"id": 1, "min_tick": 5, "max_tick": 9, "direction": 2},
        {"run": "x"},
        7,
    ],
)
def test_a_calibration_that_is_wrong_is_refused(row):
    with pytest.raises(Refused):
        Calibration.of({"joints": {"a": row}})


@pytest.mark.parametrize("direction", [1, -1])
def test_ticks_are_rounded_to_the_middle_and_never_farther_apart(direction: int):
    calibration = Calibration((JointCalibration("a", 1, 703, 3391, zero_tick=2050, direction=direction),))
    low, high = calibration.joints[0].limits_rad
    q = np.sort(np.random.default_rng(0).uniform(low, high, 5000))
    q[0], q[-1] = low, high
    ticks = np.array([calibration.goal_ticks(np.array([x]))[0] for x in q])
    assert ticks.min() == 703 and ticks.max() == 3391
    assert (np.abs(np.diff(ticks)) <= np.ceil(np.diff(q) / QUANTUM_RAD + 1e-6)).all()
    middle = (703 + 3391) / 2
    exact = calibration.ticks(q[:, None])[:, 0]
    assert (np.abs(ticks - middle) <= np.abs(exact - middle) + 1e-6).all()
    assert calibration.goal_ticks(calibration.radians(np.array([1234]))) == [1234]


def test_the_gate_knows_how_far_a_servo_can_come():
    gate, ms = Gate(5.0, 0.05), 1_000_000
    at = np.array([2000.0])
    assert not gate.passes(at, 0) and gate.passes(at, 5 * ms)  # two have to agree in the beginning
    reach = (5.0 * 0.01 + 0.05) / QUANTUM_RAD
    assert not gate.passes(at + reach + 1, 15 * ms)
    assert gate.passes(at + reach - 1, 15 * ms)
    assert not gate.passes(at + 2000, 25 * ms)
    assert not gate.passes(at + 2000, 400 * ms) and gate.passes(at + 2001, 405 * ms)  # after a pause, two again
