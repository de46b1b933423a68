"""Dynamixel X servos (protocol 2.0) through the vendor's SDK, ``dynamixel-sdk`` 4.1.0.

Errors of the SDK, and their remedies here (tests/test_dynamixel.py shows both):

* it computes the stuffing of FF FF FD and then sends the packet without: the list is bound anew inside ``addStuffing``.
  Here the list is changed in place;
* ``GroupSyncRead.getData`` says 0 after a read that failed, which is half a turn away. Here no value exists that was
  not in a packet of its servo, of the right length, with its error byte looked at;
* neither packets nor answers carry a number, so a late answer can pass for a new one. Here every read includes the
  servo's own millisecond counter, which must have advanced by the time that passed;
* the port's waiting: see `port`.

The state of a servo is one block of 16 bytes: counter, moving, PWM, current, velocity, position. EEPROM is only read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..adapter import Adapter
from ..clock import Clock, MonotonicClock, ns
from ..errors import DeviceFault, Refused
from .bus import ArmConfig, ServoArm, prepared
from .port import LinkLost, Lost, Port, Wire
from .servos import ANSWER_S, CALM_S, Reading, Register, Servos, agreed, insist

RPM = 0.229 * 2 * math.pi / 60  # rad/s
RPM2 = 214.577 * 2 * math.pi / 3600  # rad/s^2

RETURN_DELAY, DRIVE_MODE, MODE, HOMING_OFFSET = (9, 1), (10, 1), (11, 1), (20, 4)
MAX_POSITION, MIN_POSITION = (48, 4), (52, 4)
TORQUE, HARDWARE_ERROR, WATCHDOG = (64, 1), (70, 1), (98, 1)
PROFILE_ACCELERATION, PROFILE_VELOCITY, GOAL_POSITION = (108, 4), (112, 4), (116, 4)
BLOCK, BLOCK_SIZE = 120, 16
POSITION_MODE = 3
MOST_OFFSET = 1024  # ticks, either way; ROBOTIS's manual: in position mode a larger one is ignored
WATCHDOG_UNIT_S = 0.02
TICK_PERIOD_MS = 32768
BOOT_S = 0.5  # until a servo that reboots surely listens
FRESH_MS = 3.0  # of doubt: the counter's resolution, and rounding
ALERT = 0x80
ERRORS = {1: "failed", 2: "unknown instruction", 3: "bad CRC", 4: "value out of range", 5: "wrong length"}
ERRORS |= {6: "value beyond the configured limit", 7: "no access, as to EEPROM while torque is on"}


@dataclass(frozen=True)
class Model:
    """A model of servo: its stall torque in Nm, and its greatest speed in rad/s."""

    name: str
    stall_nm: float  # of the data sheet, as is
    stall_units: float  # of present current (or load) then
    fastest_rad_s: float  # without load, at the highest voltage


MODELS = {
    1190: Model("XL330-M077", 0.215, 1470, 40.1),
    1200: Model("XL330-M288", 0.52, 1470, 10.9),
    1060: Model("XL430-W250", 1.5, 1000, 6.4),
    1030: Model("XM430-W210", 3.0, 2300 / 2.69, 8.1),
    1020: Model("XM430-W350", 4.1, 2300 / 2.69, 4.8),
}


class DynamixelServos(Servos):
    """The Dynamixel servos of one bus, by the vendor's SDK."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.fastest_rad_s = max(model.fastest_rad_s for model in MODELS.values() if model.fastest_rad_s < 20)
        self._models: list[Model] = []
        self._counted: tuple[int, int, list[int]] | None = None  # asked and answered at, and each servo's counter
        self._device_ms = 0
        self._watchdog = 0  # in units, while armed
        self._suspect_ns = 0

    @property
    def stall_nm(self) -> list[float]:
        return [model.stall_nm for model in self._models]

    def load(self) -> Any:
        try:
            from dynamixel_sdk.protocol2_packet_handler import Protocol2PacketHandler
        except ImportError as error:
            raise Refused("Dynamixel servos need the vendor's SDK: pip install 'burnish[robots]'") from error
        return Protocol2PacketHandler

    def connect(self, port: Port, ids: Sequence[int]) -> None:
        class Handler(self.load()):
            def addStuffing(self, packet: list[int]) -> list[int]:
                packet[:] = super().addStuffing(packet)
                return packet

        self._port, self._handler, self._ids = port, Handler(), list(ids)
        self._counted, self._watchdog = None, 0

    def identify(self, offsets: Sequence[int], ranges: Sequence[tuple[int, int]]) -> int:
        self._models, self.own, delay_ns = [], [], 0
        for i, offset, (low, high) in zip(self._ids, offsets, ranges, strict=True):
            (number,) = insist(lambda i=i: self._answer(i, self._handler.ping))
            if number not in MODELS:
                known = ", ".join(f"{model.name} ({n})" for n, model in MODELS.items())
                raise DeviceFault(f"servo {i} is of model {number}, and this driver knows {known}")
            self._models.append(MODELS[number])
            mode, found = self._get(i, MODE), self._get(i, HOMING_OFFSET)
            if mode != POSITION_MODE:
                raise DeviceFault(
                    f"servo {i} is in operating mode {mode}; set register 11 to {POSITION_MODE}, position"
                )
            if drive_mode := self._get(i, DRIVE_MODE):
                raise DeviceFault(
                    f"servo {i} has drive mode {drive_mode}, and other directions or profiles than this driver means; "
                    "set register 10 to 0, and calibrate it anew"
                )
            if abs(found) > MOST_OFFSET:
                raise DeviceFault(
                    f"servo {i} has homing offset {found}, which operating mode {POSITION_MODE} ignores beyond "
                    f"+-{MOST_OFFSET}, so its zero would be wrong; set register 20 to 0, and calibrate it in that mode"
                )
            if found != offset:
                raise DeviceFault(f"servo {i} has homing offset {found}, and was calibrated with {offset}")
            least, most = self._get(i, MIN_POSITION), self._get(i, MAX_POSITION)
            self.own.append((least, most))
            if least > low or most < high:
                raise DeviceFault(f"servo {i} itself allows less than its calibrated range of {low} to {high} ticks")
            delay_ns += 2000 * self._get(i, RETURN_DELAY)
        self.fastest_rad_s = max(model.fastest_rad_s for model in self._models)
        return delay_ns

    def revive(self) -> None:
        """By a reboot: nothing else but their supply gives them torque again. One that complains and holds the arm all
        the same is not rebooted, because the arm would fall."""
        for i in self._ids:
            error = self._get(i, HARDWARE_ERROR, alerted=True)
            if error and self._get(i, TORQUE, alerted=True):
                raise DeviceFault(
                    f"servo {i} says {error} in register 70 and still holds the arm, so it is not rebooted; support "
                    "the arm, and switch its power"
                )
            if error:
                insist(lambda i=i: self._answer(i, self._handler.reboot))
                self._clock.sleep_until_ns(self._clock.now_ns() + ns(BOOT_S))

    def read(self, deadline_ns: int) -> Reading:
        blocks, asked_ns = self._blocks(BLOCK, BLOCK_SIZE, deadline_ns)
        self._expect_fresh(asked_ns, [_number(block, 0, 2, signed=False) for block in blocks])
        # All servos have just heard a packet. Before that one may have heard nothing for longer than its watchdog
        # allows; its goals are read-only then, and nothing in its state says so.
        if self._watchdog and asked_ns - self._suspect_ns > 0.7 * self._watchdog * ns(WATCHDOG_UNIT_S):
            self._expect_watched(deadline_ns)
        self._suspect_ns = asked_ns
        current = np.array([_number(block, 6, 2) for block in blocks], np.float64)
        return Reading(
            ticks=np.array([_number(block, 12, 4) for block in blocks], np.float64),
            speed_rad_s=np.array([_number(block, 8, 4) for block in blocks], np.float64) * RPM,
            effort_nm=current * [model.stall_nm / model.stall_units for model in self._models],
            t_device_s=self._device_ms / 1000,
        )

    def send(self, ticks: Sequence[int], deadline_ns: int) -> None:
        self._send_all(GOAL_POSITION, ticks, deadline_ns)

    def prepare(self, ticks: Sequence[int], velocity: Sequence[float], acceleration: float) -> None:
        with suppress(Refused):  # of an arm without a watchdog; one that `freeze` has let run out keeps goals read-only
            self.arm(0.0)
        for i, tick, speed in zip(self._ids, ticks, velocity, strict=True):
            self._put(i, PROFILE_ACCELERATION, max(1, round(acceleration / RPM2)))
            self._put(i, PROFILE_VELOCITY, max(1, round(speed / RPM)))
            self._put(i, GOAL_POSITION, tick)

    def arm(self, watchdog_s: float) -> None:
        units, self._watchdog = round(watchdog_s / WATCHDOG_UNIT_S), 0
        try:
            insist(lambda: self._set_all(WATCHDOG, units))
        except LinkLost:
            raise
        except DeviceFault as error:
            raise Refused(
                f"the bus watchdog cannot be armed ({error}), and without it nothing stops the arm when this program "
                "dies; see without_watchdog"
            ) from error
        self._watchdog, self._suspect_ns = units, self._clock.now_ns()

    def disarm(self) -> None:
        insist(lambda: self._set_all(WATCHDOG, 0))
        self._watchdog = 0

    def enable(self) -> None:
        insist(lambda: self._set_all(TORQUE, 1))

    def freeze(self, measured: Callable[[], Reading]) -> None:
        """By their own watchdog, made as short as it can be: nobody says anything after that, so each servo stops where
        it is. No answer is waited for, and a packet that is read, or written with goals, would feed the watchdog."""
        self._tell(WATCHDOG, 1)

    def _set_all(self, register: Register, value: int) -> None:
        """In one packet and one question, because a servo whose watchdog is armed wants to hear something soon."""
        deadline_ns = self._clock.now_ns() + ns(ANSWER_S)
        self._send_all(register, [value] * len(self._ids), deadline_ns)
        blocks, _ = self._blocks(*register, deadline_ns)
        if any(block != [value] for block in blocks):
            raise Lost(f"not every servo has taken {value} into register {register[0]}")

    def release(self) -> None:
        self._tell(TORQUE, 0)

    def _answer(self, i: int, call: Callable[[Port, int], tuple[int, ...]]) -> list[int]:
        """The answer of a servo to a ``call`` of the SDK's, without result and error."""
        with self._port.exchange(self._clock.now_ns() + ns(CALM_S), patient=True):
            *said, result, _ = call(self._port, i)
            if result:
                raise Lost(f"servo {i} does not answer: {self._handler.getTxRxResult(result)}")
        return said

    def _get(self, i: int, register: Register, alerted: bool = False) -> int:
        """``alerted``: of a servo that has shut itself down too."""
        address, size = register

        def once() -> int:
            with self._port.exchange(self._clock.now_ns() + ns(CALM_S), patient=True):
                data, result, error = self._handler.readTxRx(self._port, i, address, size)
                error &= ~ALERT if alerted else 0xFF
                return _number(self._checked(i, data, size, result, error), 0, size, signed=size > 1)

        return insist(lambda: agreed(i, once))

    def _blocks(self, address: int, size: int, deadline_ns: int) -> tuple[list[list[int]], int]:
        """Of all servos, and when they were asked."""
        blocks = []
        with self._port.exchange(deadline_ns):
            result = self._handler.syncReadTx(self._port, address, size, self._ids, len(self._ids), False)
            if result:
                raise LinkLost(f"a question could not be sent: {self._handler.getTxRxResult(result)}")
            asked_ns = self._clock.now_ns()
            for i in self._ids:
                data, result, error = self._handler.readRx(self._port, i, size)
                blocks.append(self._checked(i, data, size, result, error))
        return blocks, asked_ns

    def _checked(self, i: int, data: list[int], size: int, result: int, error: int) -> list[int]:
        if result:
            raise Lost(f"servo {i} does not answer: {self._handler.getTxRxResult(result)}")
        if error & ALERT:
            raise DeviceFault(
                f"servo {i} has shut itself down; read its register 70, look at it, then call recover() to reboot it"
            )
        if error:
            raise DeviceFault(f"servo {i} refuses: {ERRORS.get(error, 'error')} ({error})")
        if len(data) != size:
            raise Lost(f"servo {i} answered {len(data)} bytes where {size} were asked for")
        return data

    def _expect_fresh(self, asked_ns: int, ticks_ms: list[int]) -> None:
        """A counter was read after the question and before the answer, and runs with the servo's own oscillator."""
        now_ns = self._clock.now_ns()
        if self._counted is not None:
            before_asked_ns, before_ns, before_ms = self._counted
            least_ms, most_ms = (asked_ns - before_ns) / 1e6, (now_ns - before_asked_ns) / 1e6
            slack_ms = FRESH_MS + 0.02 * most_ms
            advanced = [(new - old) % TICK_PERIOD_MS for new, old in zip(ticks_ms, before_ms, strict=True)]
            for i, advanced_ms in zip(self._ids, advanced, strict=True):
                behind = advanced_ms - TICK_PERIOD_MS if advanced_ms > 3 * TICK_PERIOD_MS // 4 else advanced_ms
                known = most_ms < TICK_PERIOD_MS / 2  # after a longer pause the counter may have gone round
                if known and not least_ms - slack_ms <= behind <= most_ms + slack_ms:
                    raise Lost(f"the counter of servo {i} went on by {behind} ms in {least_ms:.0f} to {most_ms:.0f} ms")
            self._device_ms += advanced[0]
        self._counted = asked_ns, now_ns, ticks_ms

    def _expect_watched(self, deadline_ns: int) -> None:
        blocks, _ = self._blocks(*WATCHDOG, deadline_ns)
        for i, (units,) in zip(self._ids, blocks, strict=True):
            if units != self._watchdog:
                raise DeviceFault(
                    f"the bus watchdog of servo {i} has run out, as it heard nothing for {self._watchdog * 20} ms; it "
                    "stopped there. Call recover() and activate again"
                )


def _number(data: Sequence[int], at: int, size: int, signed: bool = True) -> int:
    return int.from_bytes(bytes(data[at : at + size]), "little", signed=signed)


class DynamixelArm(ServoArm):
    """An arm of Dynamixel servos, as an adapter."""

    def __init__(self, config: ArmConfig, clock: Clock | None = None, wire: Callable[[], Wire] | None = None) -> None:
        clock = clock or MonotonicClock()
        watchdog_s = None if config.without_watchdog else config.watchdog_s
        super().__init__(config, DynamixelServos(clock), watchdog_s, clock, wire)


def make(config: Mapping[str, Any]) -> Adapter:
    """The adapter of an arm of Dynamixel servos, from plain settings."""
    return DynamixelArm(ArmConfig.of(config))


def second_channel(config: Mapping[str, Any]) -> Callable[[], None]:
    """The call that stops this arm from another process, prepared in advance."""
    return prepared(DynamixelArm(ArmConfig.of(config)))
