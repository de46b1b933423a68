"""Feetech STS3215 servos, as in the SO-100 and SO-101 arms, through the vendor's SDK, ``feetech-servo-sdk`` 1.0.0.

Weaknesses of the protocol and the SDK, and their remedies here (tests/test_feetech.py shows both):

* a packet is protected by the sum of its bytes only. So a state is one block of many fields, and each has to be
  possible: reserved bits, status, voltage, temperature, speed; what is left goes through the gate of `bus`. Bits that
  cancel out in the sum can still bend a position, by no more than the gate allows;
* the SDK never drains its input, and answers carry neither number nor address: a late position was taken for a voltage.
  `port` drains, an answer with a whole packet too much around it is not used, and a state is asked for with another
  length each time. So a late answer is told by its length, unless it is exactly sixteen questions late;
* ``GroupSyncRead.isAvailable`` says yes after a read that failed, and ``getData`` then gives the value before. Here
  nothing is kept between reads.

**There is no watchdog**: when this program dies, an STS servo keeps its last goal. ``spec.device_watchdog_s`` says so.
EPROM is only read, and its lock is closed before anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..adapter import Adapter
from ..clock import Clock, MonotonicClock, ns
from ..errors import DeviceFault, Refused
from .bus import ArmConfig, ServoArm, prepared
from .calibration import QUANTUM_RAD, TICKS
from .port import LinkLost, Lost, Port, Wire
from .servos import ANSWER_S, CALM_S, SEND_S, Reading, Register, Servos, agreed, insist

MODEL_NUMBER = 777
STALL_NM = 1.9  # at 7.4 V, of the data sheet: what a load of 1 means
ACCELERATION_UNIT = 100 * QUANTUM_RAD  # rad/s^2

RETURN_DELAY, MIN_ANGLE, MAX_ANGLE, HOMING_OFFSET, MODE = (7, 1), (9, 2), (11, 2), (31, 2), (33, 1)
TORQUE, ACCELERATION, GOAL_POSITION, GOAL_SPEED, LOCK = (40, 1), (41, 1), (42, 2), (46, 2), (55, 1)
FREEZE, BRAKING = (41, 3), 254  # acceleration and goal together; the highest acceleration that is a number
BLOCK, BLOCK_SIZE = 56, 11  # position, speed, load, voltage, temperature, a flag, status, moving
LENGTHS = 16  # of the question for a state, in turn: the bytes before the block come along
OVERHEAD = 6  # bytes of a packet around its data
VOLTS, DEGREES = range(40, 141), range(0, 91)  # 0.1 V, degrees Celsius
FROZEN_NS = ns(0.2)
POWER_NS = ns(0.5)  # so often the servos are asked whether they still give torque
FOLLOWS_TICKS = 40  # so near its goal a servo may stand still
ERRORS = {1: "voltage", 2: "angle sensor", 4: "overheat", 8: "current", 32: "overload"}


class FeetechServos(Servos):
    """The Feetech servos of one bus, by the vendor's SDK."""

    fastest_rad_s = 5.5

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._goals: list[int] = []
        self._complaint: tuple[int, int] | None = None  # of the last read: (id, error)
        self._unchanged: dict[int, tuple[int, bytes]] = {}

    @property
    def stall_nm(self) -> list[float]:
        return [STALL_NM] * len(self._ids)

    def load(self) -> Any:
        try:
            from scservo_sdk.protocol_packet_handler import protocol_packet_handler
        except ImportError as error:
            raise Refused("Feetech servos need the vendor's SDK: pip install 'burnish[robots]'") from error
        return protocol_packet_handler

    def connect(self, port: Port, ids: Sequence[int]) -> None:
        self._port, self._handler, self._ids = port, self.load()(), list(ids)
        self._goals, self._complaint, self._unchanged = [], None, {}
        self._turn = 0
        self._powered_ns: int | None = None  # when they were last known to be, while they should

    def identify(self, offsets: Sequence[int], ranges: Sequence[tuple[int, int]]) -> int:
        delay_ns, self.own = 0, []
        for i, offset, (low, high) in zip(self._ids, offsets, ranges, strict=True):
            model = self._get(i, (3, 2))
            if model != MODEL_NUMBER:
                raise DeviceFault(f"servo {i} is of model {model}, and this driver knows STS3215 ({MODEL_NUMBER})")
            self._put(i, LOCK, 1)
            if self._get(i, MODE):
                raise DeviceFault(f"servo {i} is in mode {self._get(i, MODE)}; set register 33 to 0, position")
            found = _decoded(self._get(i, HOMING_OFFSET), 11)
            if found != offset:
                raise DeviceFault(f"servo {i} has homing offset {found}, and was calibrated with {offset}")
            least, most = self._get(i, MIN_ANGLE), self._get(i, MAX_ANGLE)
            if (least or most) and (least > low or most < high):
                raise DeviceFault(f"servo {i} itself allows less than its calibrated range of {low} to {high} ticks")
            self.own.append((least, most) if least or most else (0, TICKS - 1))
            delay_ns += 2000 * self._get(i, RETURN_DELAY)
        return delay_ns

    def revive(self) -> None:
        """Nothing: what makes them forget an overload is torque, which is not given here, or their supply."""

    def read(self, deadline_ns: int) -> Reading:
        self._turn = (self._turn + 1) % LENGTHS
        answers = self._blocks((BLOCK - self._turn, BLOCK_SIZE + self._turn), deadline_ns)
        blocks = [answer[self._turn :] for answer in answers]
        # The byte before the position is the lock, which is closed: noise that runs into the position is seen there.
        if self._turn and any(answer[self._turn - 1] != 1 for answer in answers):
            raise Lost("the lock of a servo cannot be open")
        now_ns = self._clock.now_ns()
        rows = [self._understood(i, block) for i, block in zip(self._ids, blocks, strict=True)]
        # First, because a servo without torque is not on its way to its goal.
        if self._powered_ns is not None and now_ns - self._powered_ns > POWER_NS:
            self._expect_power(deadline_ns)
        for k, (i, block) in enumerate(zip(self._ids, blocks, strict=True)):
            self._expect_alive(i, block, abs(self._goals[k] - rows[k][0]) if self._goals else 0, now_ns)
        position, speed, load = np.array(rows, np.float64).T
        return Reading(position, speed * QUANTUM_RAD, load / 1000 * STALL_NM)

    def send(self, ticks: Sequence[int], deadline_ns: int) -> None:
        self._send_all(GOAL_POSITION, ticks, deadline_ns)
        self._goals = list(ticks)

    def prepare(self, ticks: Sequence[int], velocity: Sequence[float], acceleration: float) -> None:
        for i, tick, speed in zip(self._ids, ticks, velocity, strict=True):
            self._put(i, ACCELERATION, min(max(1, round(acceleration / ACCELERATION_UNIT)), 254))
            self._put(i, GOAL_SPEED, max(1, round(speed / QUANTUM_RAD)))
            self._put(i, GOAL_POSITION, tick)
        self._goals = list(ticks)

    def arm(self, watchdog_s: float) -> None:
        raise Refused("STS servos have no watchdog")

    def disarm(self) -> None:
        """There is nothing to disarm."""

    def enable(self) -> None:
        for i in self._ids:
            self._put(i, TORQUE, 1)
        self._powered_ns = self._clock.now_ns()

    def release(self) -> None:
        self._goals, self._powered_ns = [], None
        self._tell(TORQUE, 0)

    def freeze(self, measured: Callable[[], Reading]) -> None:
        """Goals where they are found, and the hardest braking that they have: in one packet, whose registers are read
        back, because nobody answers to it."""
        address, size = FREEZE
        values = [BRAKING | int(tick) << 8 for tick in measured().ticks]

        def once() -> None:
            self._send_all(FREEZE, values, self._clock.now_ns() + ns(SEND_S))
            found = self._blocks(FREEZE, self._clock.now_ns() + ns(ANSWER_S))
            if [int.from_bytes(block, "little") for block in found] != values:
                raise Lost(f"not every servo has taken its values into the {size} registers from {address} on")

        insist(once)

    def _get(self, i: int, register: Register) -> int:
        address, size = register

        def once() -> int:
            with self._port.exchange(self._clock.now_ns() + ns(CALM_S), patient=True):
                data, result, error = self._handler.readTxRx(self._port, i, address, size)
                self._checked(i, data, size, result, error)
                if self._port.heard != size + OVERHEAD:
                    raise Lost(f"servo {i} said more than its answer")
                return int.from_bytes(bytes(data), "little")

        return insist(lambda: agreed(i, once))

    def _blocks(self, register: Register, deadline_ns: int) -> list[bytes]:
        blocks, (address, size) = [], register
        with self._port.exchange(deadline_ns):
            result = self._handler.syncReadTx(self._port, address, size, self._ids, len(self._ids))
            if result:
                raise LinkLost(f"a question could not be sent: {self._handler.getTxRxResult(result)}")
            for i in self._ids:
                data, result, error = self._handler.readRx(self._port, i, size)
                blocks.append(bytes(self._checked(i, data, size, result, error)))
            surplus = self._port.heard - len(self._ids) * (size + OVERHEAD)
            if not 0 <= surplus < OVERHEAD:
                raise Lost(f"{surplus} bytes too many came with the answers, so one of them may be an old one")
        self._complaint = None
        return blocks

    def _checked(self, i: int, data: list[int], size: int, result: int, error: int) -> list[int]:
        if result:
            raise Lost(f"servo {i} does not answer: {self._handler.getTxRxResult(result)}")
        if len(data) != size:
            raise Lost(f"servo {i} answered {len(data)} bytes where {size} were asked for")
        if error:
            # Once it may be noise that the sum has let pass.
            if self._complaint == (i, error):
                causes = ", ".join(text for bit, text in ERRORS.items() if error & bit) or "unknown"
                raise DeviceFault(
                    f"servo {i} reports error {error} ({causes}); look at it, switch its power, then call recover()"
                )
            self._complaint = i, error
            raise Lost(f"servo {i} reports error {error}")
        return data

    def _understood(self, i: int, block: bytes) -> tuple[int, int, int]:
        position, speed, load = (int.from_bytes(block[k : k + 2], "little") for k in (0, 2, 4))
        volts, degrees, _, status, moving = block[6:11]
        speed, load = _decoded(speed, 15), load if load < 1 << 11 else -1
        possible = (
            position < 1 << 12
            and abs(speed) * QUANTUM_RAD < 1.5 * self.fastest_rad_s
            and load >= 0
            and abs(_decoded(load, 10)) <= 1000
            and volts in VOLTS
            and degrees in DEGREES
            and not status
            and moving in (0, 1)
        )
        if not possible:
            raise Lost(f"servo {i} cannot be in the state {block.hex(' ')}")
        return position, speed, _decoded(load, 10)

    def _expect_power(self, deadline_ns: int) -> None:
        """A servo whose supply broke down for a moment is back without torque, and its state does not say so."""
        off = [i for i, (on,) in zip(self._ids, self._blocks(TORQUE, deadline_ns), strict=True) if on != 1]
        if off and self._get(off[0], TORQUE) != 1:
            raise DeviceFault(f"servo {off[0]} gives no torque any more; look at its supply, then call recover()")
        self._powered_ns = self._clock.now_ns()

    def _expect_alive(self, i: int, block: bytes, gap_ticks: float, now_ns: int) -> None:
        """A servo that is to move and says bit for bit the same, load and all, is a sensor that hangs."""
        since_ns, before = self._unchanged.get(i, (now_ns, block))
        if block != before or gap_ticks <= FOLLOWS_TICKS:
            since_ns = now_ns
        self._unchanged[i] = since_ns, block
        if now_ns - since_ns > FROZEN_NS:
            raise Lost(f"servo {i} has said the same for {(now_ns - since_ns) / 1e9:.2f} s on its way to a goal")


def _decoded(value: int, sign_bit: int) -> int:
    return -(value & ~(1 << sign_bit)) if value & 1 << sign_bit else value


class FeetechArm(ServoArm):
    """An arm of Feetech servos, as an adapter; they have no watchdog."""

    def __init__(self, config: ArmConfig, clock: Clock | None = None, wire: Callable[[], Wire] | None = None) -> None:
        clock = clock or MonotonicClock()
        super().__init__(config, FeetechServos(clock), None, clock, wire)


def make(config: Mapping[str, Any]) -> Adapter:
    """The adapter of an arm of Feetech servos, from plain settings."""
    return FeetechArm(ArmConfig.of(config))


def second_channel(config: Mapping[str, Any]) -> Callable[[], None]:
    """The call that stops this arm from another process, prepared in advance."""
    return prepared(FeetechArm(ArmConfig.of(config)))
