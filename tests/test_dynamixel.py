"""Dynamixel servos from `Adapter` calls to bytes, through the unmodified SDK: its bugs, every fault, limits, kills."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

import dynamixel_emulator as device
from burnish.real_robot.adapter import Mode, Phase, StopKind
from burnish.real_robot.clock import MonotonicClock, ns
from burnish.real_robot.drivers.bus import UNGUARDED, ArmConfig
from burnish.real_robot.drivers.calibration import QUANTUM_RAD
from burnish.real_robot.drivers.dynamixel import DynamixelArm, DynamixelServos, make
from burnish.real_robot.drivers.port import Lost, Port
from burnish.real_robot.emulators.faults import Faults
from burnish.real_robot.emulators.line import Loopback
from burnish.real_robot.emulators.pty import PtyProcess, PtyServer
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
    kill,
    met,
    often,
    outside,
    patiently,
    start_swing,
)
from kill_lab import Kill, dynamixel_chain, in_motion, judged

GOAL, TORQUE, WATCHDOG, POSITION = 116, 64, 98, 132


@pytest.fixture(autouse=True)
def sdk(require):
    return require("dynamixel_sdk")


@pytest.fixture
def server() -> Iterator[PtyServer]:
    with PtyServer(dynamixel_chain()) as found:
        yield found


@pytest.fixture
def plain(sdk, server):
    """The vendor's own port and packet handler on the terminal."""
    port = sdk.PortHandler(server.path)
    assert port.openPort()
    yield port, sdk.PacketHandler(2.0)
    port.ser.close()


@pytest.fixture
def patient(monkeypatch) -> None:
    """The SDK waits for 402 ms instead of 34: where its haste is not the matter, a busy machine is none either."""
    monkeypatch.setattr("dynamixel_sdk.port_handler.LATENCY_TIMER", 200)


# ---- the emulator, seen by the SDK alone ----


def test_the_sdk_finds_reads_and_writes(plain, patient):
    port, packets = plain
    ask = partial(patiently, port)
    assert ask(packets.ping, 1)[:2] == (1200, 0)
    found, result = packets.broadcastPing(port)
    assert result == 0 and set(found) <= set(IDS)
    assert ask(packets.read4ByteTxRx, 2, POSITION) == (2000, 0, 0)
    assert ask(packets.write4ByteTxRx, 2, GOAL, 2100) == (0, 0)
    assert ask(packets.read4ByteTxRx, 2, GOAL) == (2100, 0, 0)


def test_the_device_refuses_what_silicon_refuses(plain, patient):
    port, packets = plain
    ask = partial(patiently, port)
    assert ask(packets.write4ByteTxRx, 1, GOAL, 5000) == (0, device.ERR_LIMIT)
    assert ask(packets.write2ByteTxRx, 1, 38, 9999) == (0, device.ERR_RANGE)
    assert ask(packets.write1ByteTxRx, 1, 132, 0) == (0, device.ERR_ACCESS)
    assert ask(packets.write1ByteTxRx, 1, 9, 0) == (0, 0)
    ask(packets.write1ByteTxRx, 1, TORQUE, 1)
    assert ask(packets.write1ByteTxRx, 1, 9, 10) == (0, device.ERR_ACCESS)  # EEPROM is locked under torque


def test_a_watchdog_that_ran_out_keeps_goals_read_only_until_it_is_cleared(plain, patient):
    port, packets = plain
    ask = partial(patiently, port)
    ask(packets.write1ByteTxRx, 1, WATCHDOG, 2)
    ask(packets.write1ByteTxRx, 1, TORQUE, 1)
    time.sleep(0.15)
    assert ask(packets.read1ByteTxRx, 1, WATCHDOG) == (255, 0, 0)
    assert ask(packets.write4ByteTxRx, 1, GOAL, 2200) == (0, device.ERR_RANGE)
    assert ask(packets.write1ByteTxRx, 1, WATCHDOG, 0) == (0, 0)
    assert ask(packets.write4ByteTxRx, 1, GOAL, 2200) == (0, 0)


def test_the_crc_is_that_of_the_protocol(sdk):
    message = device.packet(7, device.WRITE, bytes(range(20)))
    assert sdk.PacketHandler(2.0).updateCRC(0, message, len(message) - 2) == int.from_bytes(message[-2:], "little")
    assert device.crc16(b"123456789") == 0xFEE8


# ---- what the SDK does wrong, and the driver does not ----


def test_after_a_failed_read_the_sdk_says_zero_and_the_driver_says_nothing(sdk, plain, server):
    port, packets = plain
    group = sdk.GroupSyncRead(port, packets, POSITION, 4)
    for i in IDS:
        group.addParam(i)
    server.chain.line.replies.faults = Faults(mute=True)
    assert group.txRxPacket() != 0
    assert group.getData(1, POSITION, 4) == 0  # half a turn from where it is
    rig = Rig("dynamixel")
    rig.started()
    rig.faults(replies=Faults(mute=True))
    with pytest.raises(StaleState):
        rig.arm.read(0.02)
    assert rig.arm.phase is Phase.ACTIVE


@pytest.mark.parametrize("value", [-131073, -3 * 65536 - 1])
def test_stuffing_reaches_the_wire(sdk, value: int):
    """-131073 is FF FF FD FF: the SDK sends it as it is, and a strict servo sees a header in the middle."""
    data = list(value.to_bytes(4, "little", signed=True))
    arrived = {}
    for who in ("sdk", "driver"):
        rig = Rig("dynamixel", overrides={1: {11: 4}})
        servos, port = DynamixelServos(rig.clock), Port(Loopback(rig.chain, rig.clock), rig.clock, 10**6, 0.004, 0.002)
        servos.connect(port, IDS)
        handler = sdk.PacketHandler(2.0) if who == "sdk" else servos._handler
        with port.exchange(rig.clock.now_ns() + ns(0.05)):
            handler.writeTxRx(port, 1, GOAL, 4, data)
        arrived[who] = rig.chain.servos[0].get(GOAL)
    bug = b"\xff\xff\xfd" in bytes(data)
    assert arrived == {"sdk": 0 if bug else value, "driver": value}


def test_a_lost_reply_costs_the_sdk_34_ms_of_work_and_the_driver_a_short_sleep(plain, server):
    port, packets = plain
    server.chain.line.replies.faults = Faults(mute=True)
    began, worked = time.perf_counter(), time.thread_time()
    assert packets.read4ByteTxRx(port, 1, POSITION)[1] != 0
    assert time.perf_counter() - began >= 0.034
    spun = time.thread_time() - worked
    clock = MonotonicClock()
    port.ser.close()
    server.chain.line.replies.faults = Faults()
    arm = DynamixelArm(ArmConfig(server.path, CALIBRATION), clock)
    arm.configure()
    server.chain.line.replies.faults = Faults(mute=True)
    worked = time.thread_time()
    with pytest.raises(StaleState):
        arm.read(0.03)
    arm.close()
    assert time.thread_time() - worked < max(0.01, spun)
    # On a virtual clock there is no scheduler to blame: two tries and the pause between them.
    rig = Rig("dynamixel")
    rig.started()
    rig.faults(replies=Faults(mute=True))
    began_ns = rig.clock.now_ns()
    with pytest.raises(StaleState):
        rig.arm.read(1.0)
    lasted_s = (rig.clock.now_ns() - began_ns) * 1e-9
    delays_s = len(IDS) * 0.0005  # the factory's return delay
    assert lasted_s <= 2 * (0.004 + delays_s + 0.002) + 0.002


def test_the_wall_clock_decides_for_the_sdk_and_not_for_the_driver(plain, server, monkeypatch):
    port, packets = plain
    now = iter(range(0, 10**9, 3600))
    server.chain.line.replies.faults = Faults(delay=1.0, delay_s=0.3)
    monkeypatch.setattr("dynamixel_sdk.port_handler.time.time", lambda: next(now))
    assert packets.read4ByteTxRx(port, 1, POSITION)[1] != 0  # an "hour" passed
    port.ser.close()
    server.chain.line.replies.faults = Faults()
    time.sleep(0.4)  # until that answer has come
    arm = DynamixelArm(ArmConfig(server.path, CALIBRATION, latency_s=0.2))
    arm.configure()
    assert np.isfinite(arm.read(0.5).q).all()
    arm.close()


def test_an_unplugged_cable_leaves_the_sdk_busy_and_the_driver_recovers(plain, server):
    port, packets = plain
    server.unplug()
    with pytest.raises(Exception, match=""):
        packets.ping(port, 1)
    assert port.is_using and packets.ping(port, 1)[1] == -1000  # "port is in use", for good
    server.plug()
    arm = DynamixelArm(ArmConfig(server.path, CALIBRATION))
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


def test_activation_moves_nothing_and_arms_the_watchdog_before_torque():
    rig = Rig("dynamixel")
    for servo in rig.chain.servos:
        servo.set(GOAL, 700)  # left over from another program
    order: list[int] = []
    original = rig.chain._write

    def noted(i, servo, address, data, now_ns):
        order.append(address)
        return original(i, servo, address, data, now_ns)

    rig.chain._write = noted
    state = rig.started()
    assert rig.chain.motion(rig.clock.now_ns())[0] == START
    assert np.allclose(CALIBRATION.ticks(state.q), START[:5]) and state.gripper == 0
    assert [servo.get(GOAL) for servo in rig.chain.servos] == START
    assert {WATCHDOG, GOAL} <= set(order[: order.index(TORQUE)])
    assert [servo.get(WATCHDOG) for servo in rig.chain.servos] == [5] * 6
    # The control: with the goal that was left over, torque alone moves the arm.
    other = Rig("dynamixel")
    servo = other.chain.servos[0]
    servo.set(GOAL, 700)
    servo.set(TORQUE, 1)
    other.plant.drive(0, servo.drive())
    assert other.chain.motion(ns(2))[0][0] != START[0]


def test_write_returns_the_ticks_that_were_sent():
    rig = Rig("dynamixel")
    state = rig.started()
    sent = rig.write(state.q + 0.0042, gripper=0.25)
    ticks = CALIBRATION.ticks(sent.target)
    assert np.allclose(ticks, np.rint(ticks)) and (np.abs(sent.target - state.q - 0.0042) < QUANTUM_RAD).all()
    assert rig.chain.log[-1].ticks == (*np.rint(ticks).astype(int).tolist(), 1750) and sent.gripper == 0.25
    with pytest.raises(Refused, match="range"):
        rig.write(state.q + 10)


def test_without_a_watchdog_it_refuses_unless_told_in_words(monkeypatch):
    monkeypatch.delitem(device.REGISTERS, WATCHDOG)
    rig = Rig("dynamixel")
    rig.arm.configure()
    with pytest.raises(Refused, match="without_watchdog"):
        rig.arm.activate(Mode.JOINT_POSITION)
    assert rig.arm.phase is Phase.INACTIVE and not any(servo.get(TORQUE) for servo in rig.chain.servos)
    with pytest.raises(Refused, match="words"):
        ArmConfig("x", CALIBRATION, without_watchdog="yes")
    rig = Rig("dynamixel", config={"without_watchdog": UNGUARDED})
    rig.started()
    assert rig.arm.spec.device_watchdog_s is None


def test_a_watchdog_that_ran_out_is_a_fault_and_recovery_does_not_jump():
    rig = Rig("dynamixel")
    rig.started()
    drive(rig, 30)
    rig.wait(0.2)
    with pytest.raises(DeviceFault, match="watchdog"):
        rig.arm.read(0.05)
    stopped = rig.chain.motion(rig.clock.now_ns())[0]
    rig.arm.recover()
    rig.arm.activate(Mode.JOINT_POSITION)
    assert np.abs(np.subtract(rig.chain.motion(rig.clock.now_ns())[0], stopped)).max() <= 1
    assert drive(rig, 20).states == 20


def test_stops_freeze_the_last_goal_or_let_go_where_that_is_safe():
    rig = Rig("dynamixel")
    state = rig.started()
    rig.write(state.q + 0.01)
    rig.arm.stop(StopKind.HOLD)
    assert rig.chain.log[-1].ticks == rig.chain.log[-2].ticks
    rig.arm.stop(StopKind.RELEASE)  # an arm that falls is not let go
    assert all(s.get(TORQUE) for s in rig.chain.servos)
    rig.arm.deactivate()
    assert not any(servo.get(WATCHDOG) for servo in rig.chain.servos)
    light = Rig("dynamixel", config={"safe_when_unpowered": True})
    light.started()
    light.arm.stop(StopKind.RELEASE)
    assert not any(servo.get(TORQUE) for servo in light.chain.servos)


def test_a_late_answer_is_not_taken_for_another_register():
    """The answer to a ping came when the operating mode was asked for, and the mode was 176. One that never comes is
    another matter (`Lost`), and so is one that arrives in time."""
    for seed in range(40):
        rig = Rig("dynamixel", seed)
        rig.faults(replies=Faults(delay=0.15, delay_s=0.103))
        with suppress(Lost):
            rig.arm.configure()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({0: 9999}, "model"),
        ({10: 4}, "drive mode 4"),
        ({11: 1}, "operating mode 1"),
        ({20: -1024}, "was calibrated with 0"),
        ({20: 1025}, "mode 3 ignores"),
        ({48: 3000}, "allows"),
        ({70: 4}, "shut itself down"),
    ],
)
def test_another_arm_is_not_configured(overrides: dict[int, int], says: str):
    rig = Rig("dynamixel", overrides={3: overrides})
    with pytest.raises(DeviceFault, match=says):
        rig.arm.configure()
    assert rig.arm.phase is Phase.FAULT


def test_settings_come_as_plain_data(tmp_path):
    CALIBRATION.save(tmp_path / "arm.json")
    arm = make({"port": "nowhere", "calibration": str(tmp_path / "arm.json"), "velocity": 1.5})
    assert isinstance(arm, DynamixelArm) and arm.spec.device_watchdog_s == 0.1
    with pytest.raises(Refused, match="speed"):
        make({"port": "nowhere", "calibration": str(tmp_path / "arm.json"), "speed": 1.5})


# ---- faults, limits, kills ----


@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_is_unhandled_and_no_wrong_value_accepted(kind: str):
    tally, (least, most) = met("dynamixel", kind, often(40, 5000)), bounds(kind)
    assert (tally.unhandled, tally.wrong) == ([], 0)
    assert least <= tally.share <= most


def test_a_frozen_servo_is_not_believed():
    """The same packet again and again, with a good CRC: only its counter tells."""
    rig = Rig("dynamixel")
    rig.started()
    drive(rig, 15)
    rig.faults(replies=Faults(frozen=True, only=frozenset({2})))
    tally = drive(rig, 40)
    assert tally.states <= 1 and tally.wrong == 0


def test_a_seed_replays_a_run():
    rigs = [Rig("dynamixel", seed=5), Rig("dynamixel", seed=5)]
    runs = [list(hostile_run(rig, 60)) for rig in rigs]
    assert runs[0] == runs[1] and rigs[0].clock.now_ns() == rigs[1].clock.now_ns()


@pytest.mark.parametrize("writes", [400, pytest.param(often(10_000, 1_000_000), marks=pytest.mark.slow)])
def test_limits_hold_in_the_bytes_on_the_wire(writes: int):
    rig = Rig("dynamixel", seed=1)
    steps = 0
    for seen in hostile_run(rig, writes):
        broken, largest = outside(rig, seen)
        assert broken == 0
        steps = max(steps, largest)
    assert steps == int(rig.arm.config.velocity / RATE_HZ / QUANTUM_RAD)  # so the run went to the limit


@pytest.mark.parametrize("other", [{"guarded": False}, {"hasty": 2.0}], ids=["no_guard", "twice_the_acceleration"])
def test_of_another_guard_it_is_noticed(other):
    rig = Rig("dynamixel", seed=1)
    assert sum(outside(rig, seen)[0] for seen in hostile_run(rig, 400, **other)) > 10


def swing_killed(device: PtyProcess, rng: np.random.Generator) -> Kill:
    process = start_swing(device.path)
    until = time.monotonic() + 20
    while max(np.abs(device.motion()[2])) < 0.5:
        time.sleep(0.005)
        assert time.monotonic() < until and process.poll() is None, "the program did not move the arm"
    time.sleep(rng.uniform(0.02, 0.15))
    killed_ns = kill(process)
    time.sleep(0.5)
    return judged(device, killed_ns)


@pytest.mark.parametrize("kills", [2, pytest.param(often(20, 200), marks=pytest.mark.slow)])
def test_a_killed_program_leaves_an_arm_that_stands_still(kills: int):
    """In the middle of a turn that would go on for a second. The watchdog has 100 ms; a servo brakes in three."""
    rng = np.random.default_rng(kills)
    with PtyProcess(dynamixel_chain) as device:
        found = [in_motion(partial(swing_killed, device, rng), 0.3) for _ in range(kills)]
    assert all(it.rest_s <= 0.12 + it.late_s and it.drift_rad == 0 and it.watched_s > 0.3 for it in found), found
    # It was the watchdog that ended most of them, not the end of the turn.
    assert np.median([it.rest_s for it in found]) > 0.05
