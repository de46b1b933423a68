"""A chain of Dynamixel X servos (protocol 2.0): control tables, EEPROM lock, range errors, profiles, the bus watchdog.

Written after the public e-manual of the X series (control table of XL330, XL430 and XM430; Protocol 2.0), and strict
where silicon is: a packet with a bad CRC is ignored, a header inside a payload that was not stuffed starts a new
packet, EEPROM is locked while torque is on, and a bus watchdog that has run out keeps goals read-only until cleared.

**Departures.** Time-based and reversed drive modes, indirect addresses, bulk and fast instructions are left out: their
registers refuse, their instructions are answered with an error. Homing offsets hold in every mode, also those that
silicon ignores in mode 3. A servo counts only packets that concern it as a sign of life of the computer; the e-manual
leaves that open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from burnish.real_robot.clock import ns
from burnish.real_robot.emulators.line import BROADCAST, Chain, GoalWrite, Heard, Receiver
from burnish.real_robot.emulators.servo import QUANTUM_RAD, Drive

HEADER = b"\xff\xff\xfd\x00"
LONGEST = 1024  # bytes of one packet that a servo can store

RPM = 0.229 * 2 * math.pi / 60  # rad/s, a unit of velocity
RPM2 = 214.577 * 2 * math.pi / 3600  # rad/s^2, a unit of acceleration
UNLIMITED = 1000.0  # rad/s^2: a profile of acceleration 0 asks for all that the motor has
WATCHDOG_UNIT_NS = ns(0.02)
BOOT_NS = ns(0.3)  # for so long a servo that restarts hears nothing; the e-manual names no time
WATCHDOG_ERROR = 0xFF  # -1

PING, READ, WRITE, REG_WRITE, ACTION, REBOOT, STATUS, SYNC_READ, SYNC_WRITE = 1, 2, 3, 4, 5, 8, 0x55, 0x82, 0x83
ERR_INSTRUCTION, ERR_RANGE, ERR_LENGTH, ERR_LIMIT, ERR_ACCESS, ALERT = 2, 4, 5, 6, 7, 0x80


@dataclass(frozen=True, slots=True)
class Register:
    """An entry of the control table: its address, its size in bytes, and the values that it takes."""

    address: int
    size: int
    initial: int = 0
    low: int | None = None  # None: read-only
    high: int = 0

    @property
    def eeprom(self) -> bool:
        return self.address < 64


# fmt: off
REGISTERS = {r.address: r for r in (
    Register(0, 2, 1200), Register(2, 4), Register(6, 1, 52), Register(7, 1, 1, 0, 252), Register(8, 1, 3, 0, 7),
    Register(9, 1, 250, 0, 254), Register(10, 1, 0, 0, 0), Register(11, 1, 3, 0, 16), Register(12, 1, 255, 0, 255),
    Register(13, 1, 2, 2, 2), Register(20, 4, 0, -1044479, 1044479), Register(24, 4, 10, 0, 1023),
    Register(31, 1, 70, 0, 100), Register(32, 2, 70, 31, 160), Register(34, 2, 35, 31, 160),
    Register(36, 2, 885, 0, 885), Register(38, 2, 1750, 0, 1750), Register(44, 4, 1620, 0, 2047),
    Register(48, 4, 4095, 0, 4095), Register(52, 4, 0, 0, 4095), Register(63, 1, 53, 0, 63),
    Register(64, 1, 0, 0, 1), Register(65, 1, 0, 0, 1), Register(68, 1, 2, 0, 2), Register(69, 1), Register(70, 1),
    Register(76, 2, 1000, 0, 16383), Register(78, 2, 100, 0, 16383), Register(80, 2, 0, 0, 16383),
    Register(82, 2, 0, 0, 16383), Register(84, 2, 700, 0, 16383), Register(88, 2, 0, 0, 16383),
    Register(90, 2, 0, 0, 16383), Register(98, 1, 0, 0, 127), Register(100, 2, 885, -885, 885),
    Register(102, 2, 1750, -1750, 1750), Register(104, 4, 0, -2047, 2047), Register(108, 4, 0, 0, 32767),
    Register(112, 4, 0, 0, 32767), Register(116, 4, 0, -1048575, 1048575), Register(120, 2), Register(122, 1),
    Register(123, 1), Register(124, 2), Register(126, 2), Register(128, 4), Register(132, 4), Register(136, 4),
    Register(140, 4), Register(144, 2, 50), Register(146, 1, 31),
)}
# fmt: on
SIZE = 147
GOALS = (100, 102, 104, 116)
MODEL, ID, RETURN_DELAY, MODE, OFFSET, VELOCITY_LIMIT, MAX_POSITION, MIN_POSITION = 0, 7, 9, 11, 20, 44, 48, 52
TORQUE, RETURN_LEVEL, HARDWARE_ERROR, WATCHDOG, ACCELERATION, VELOCITY, GOAL = 64, 68, 70, 98, 108, 112, 116
TICK, MOVING, PWM, CURRENT, SPEED, POSITION = 120, 122, 124, 126, 128, 132


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ (0x8005 if crc & 0x8000 else 0)
        table.append(crc & 0xFFFF)
    return table


CRC_TABLE = _crc_table()


def crc16(data: bytes) -> int:
    """Of polynomial x^16 + x^15 + x^2 + 1, most significant bit first, from 0."""
    crc = 0
    for byte in data:
        crc = (crc << 8 ^ CRC_TABLE[crc >> 8 ^ byte]) & 0xFFFF
    return crc


def packet(device: int, instruction: int, parameters: bytes) -> bytes:
    """With stuffing: after FF FF FD inside comes another FD, so that no reader takes it for a header."""
    body = (bytes([instruction]) + parameters).replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
    head = HEADER + bytes([device]) + (len(body) + 2).to_bytes(2, "little") + body
    return head + crc16(head).to_bytes(2, "little")


class Packets(Receiver):
    """The receiver of protocol 2.0: bytes of the line cut into packets."""

    def _cut(self, buffer: bytearray) -> list[Heard]:
        found = []
        while True:
            start = buffer.find(b"\xff\xff\xfd")
            if start < 0:
                del buffer[: max(len(buffer) - 2, 0)]
                return found
            del buffer[:start]
            if len(buffer) < 7:
                return found
            length = int.from_bytes(buffer[5:7], "little")
            # Stuffing sees to it that a header is only where a packet begins.
            inside = buffer.find(b"\xff\xff\xfd", 3, length + 5)
            while inside >= 0 and buffer[inside + 3 : inside + 4] == b"\xfd":
                inside = buffer.find(b"\xff\xff\xfd", inside + 4, length + 5)
            if buffer[3] or not 3 <= length <= LONGEST:
                del buffer[:3]
            elif inside >= 0 and inside + 3 < len(buffer):
                del buffer[:inside]
            elif len(buffer) < length + 7:
                return found
            else:
                whole = bytes(buffer[: length + 7])
                del buffer[: length + 7]
                if crc16(whole[:-2]) == int.from_bytes(whole[-2:], "little"):
                    body = whole[7:-2].replace(b"\xff\xff\xfd\xfd", b"\xff\xff\xfd")
                    found.append((whole[4], body[0], body[1:]))


class Servo:
    """One control table."""

    def __init__(self, number: int, overrides: dict[int, int]) -> None:
        self.table = bytearray(SIZE)
        self.heard_ns = self.started_ns = self.deaf_until_ns = 0
        self.registered: tuple[int, bytes] | None = None
        self.held_rad: float | None = None  # where the bus watchdog has stopped it
        factory = {ID: number, **overrides}
        for address, register in REGISTERS.items():
            self.set(address, factory.get(address, register.initial))

    def restart(self, now_ns: int) -> None:
        for address, register in REGISTERS.items():
            if not register.eeprom:
                self.set(address, register.initial)
        self.registered = self.held_rad = None
        self.started_ns = now_ns
        self.deaf_until_ns = now_ns + BOOT_NS

    @property
    def number(self) -> int:
        return self.table[ID]

    def get(self, address: int) -> int:
        size = REGISTERS[address].size
        return int.from_bytes(self.table[address : address + size], "little", signed=size > 1)

    def set(self, address: int, value: int) -> None:
        size = REGISTERS[address].size
        self.table[address : address + size] = (value % (1 << 8 * size)).to_bytes(size, "little")

    def write(self, address: int, data: bytes) -> tuple[int, list[int]]:
        """The error, and the addresses that were written: all or none."""
        new: dict[int, int] = {}
        while data:
            register = REGISTERS.get(address)
            if register is None or register.low is None or (register.eeprom and self.get(TORQUE)):
                return ERR_ACCESS, []
            if len(data) < register.size:
                return ERR_LENGTH, []
            value = int.from_bytes(data[: register.size], "little", signed=register.low < 0)
            if not register.low <= value <= register.high:
                return ERR_RANGE, []
            if address in GOALS and self.table[WATCHDOG] == WATCHDOG_ERROR:
                return ERR_RANGE, []
            single = self.get(MODE) in (3, 5)
            if address == GOAL and single and not self.get(MIN_POSITION) <= value <= self.get(MAX_POSITION):
                return ERR_LIMIT, []
            new[address] = value
            data, address = data[register.size :], address + register.size
        for where, value in new.items():
            self.set(where, value)
        return 0, list(new)

    def drive(self) -> Drive:
        velocity = self.get(VELOCITY) or self.get(VELOCITY_LIMIT)
        acceleration = self.get(ACCELERATION) * RPM2 or UNLIMITED
        if self.held_rad is not None:
            return Drive(self.held_rad, bool(self.get(TORQUE)), self.get(VELOCITY_LIMIT) * RPM, UNLIMITED)
        goal_rad = (self.get(GOAL) - self.get(OFFSET)) * QUANTUM_RAD
        return Drive(goal_rad, bool(self.get(TORQUE)), velocity * RPM, acceleration)


class DynamixelChain(Chain):
    """An emulated chain of Dynamixel servos, and the errors that a test can cause in it."""

    servo, receiver, turn, offset = Servo, Packets, 1, OFFSET
    now_ns = 0

    def shut_down(self, number: int, error: int = 0x20) -> None:
        """The servo protects itself, by default from overload: torque off, until it is rebooted."""
        for i, servo in self._numbered(number):
            servo.set(HARDWARE_ERROR, error)
            servo.set(TORQUE, 0)
            self.plant.drive(i, servo.drive())

    def _note(self, instruction: int, parameters: bytes, now_ns: int) -> None:
        address = int.from_bytes(parameters[:2], "little")
        if instruction == SYNC_WRITE and address == GOAL and len(parameters) >= 4:
            size = 1 + int.from_bytes(parameters[2:4], "little")
            rows = [parameters[i : i + size] for i in range(4, len(parameters), size)]
            ticks = tuple(int.from_bytes(row[1:5], "little", signed=True) for row in rows)
            self.log.append(GoalWrite(now_ns, tuple(row[0] for row in rows), ticks))

    def _advance(self, now_ns: int) -> None:
        late = []
        for i, servo in enumerate(self.servos):
            units = servo.table[WATCHDOG]
            if units and units != WATCHDOG_ERROR and servo.table[TORQUE]:
                late.append((servo.heard_ns + units * WATCHDOG_UNIT_NS, i))
        for due_ns, i in sorted(late):
            if due_ns < now_ns:
                self.plant.advance(due_ns)
                servo = self.servos[i]
                servo.set(WATCHDOG, -1)
                servo.held_rad = float(self.plant.motion()[0][i])
                self.plant.drive(i, servo.drive())
        self.plant.advance(now_ns)
        self.now_ns = max(self.now_ns, now_ns)

    def _obey(self, device: int, instruction: int, parameters: bytes, now_ns: int) -> None:
        if instruction in (SYNC_READ, SYNC_WRITE):
            self._sync(device, instruction, parameters, now_ns)
            return
        for i, servo in enumerate(self.servos):
            if device not in (servo.number, BROADCAST) or now_ns < servo.deaf_until_ns:
                continue
            servo.heard_ns = now_ns
            error, data = self._do(i, servo, instruction, parameters, now_ns)
            silent = instruction == ACTION or (device == BROADCAST and instruction != PING)
            level = servo.table[RETURN_LEVEL]
            if not silent and (instruction == PING or level == 2 or (level == 1 and instruction == READ)):
                self._answer(servo, error, data, now_ns)

    def _do(self, i: int, servo: Servo, instruction: int, parameters: bytes, now_ns: int) -> tuple[int, bytes]:
        address = int.from_bytes(parameters[:2], "little")
        if instruction == PING:
            return 0, bytes(servo.table[0:2]) + bytes(servo.table[6:7])
        if instruction == READ and len(parameters) == 4:
            return self._read(i, servo, address, int.from_bytes(parameters[2:], "little"))
        if instruction == WRITE and len(parameters) > 2:
            return self._write(i, servo, address, parameters[2:], now_ns), b""
        if instruction == REG_WRITE and len(parameters) > 2:
            servo.registered = address, parameters[2:]
            return 0, b""
        if instruction == ACTION:
            if servo.registered:
                self._write(i, servo, *servo.registered, now_ns)
            servo.registered = None
            return 0, b""
        if instruction == REBOOT:
            self.restart(servo.number, now_ns)
            return 0, b""
        return ERR_INSTRUCTION, b""

    def _sync(self, device: int, instruction: int, parameters: bytes, now_ns: int) -> None:
        if device != BROADCAST or len(parameters) < 5:
            return
        address, size = int.from_bytes(parameters[:2], "little"), int.from_bytes(parameters[2:4], "little")
        own = {servo.number: i for i, servo in enumerate(self.servos)}
        stride = 1 if instruction == SYNC_READ else 1 + size
        for k in range(4, len(parameters), stride):
            i = own.get(parameters[k])
            if i is None or len(parameters) < k + stride:
                continue
            servo = self.servos[i]
            if now_ns < servo.deaf_until_ns:
                continue
            servo.heard_ns = now_ns
            if instruction == SYNC_READ:
                self._answer(servo, *self._read(i, servo, address, size), now_ns)
            else:
                self._write(i, servo, address, parameters[k + 1 : k + stride], now_ns)

    def _read(self, i: int, servo: Servo, address: int, size: int) -> tuple[int, bytes]:
        if address + size > SIZE:
            return ERR_ACCESS, b""
        _, v, load = self.plant.motion()
        servo.set(TICK, (self.now_ns - servo.started_ns) // 1_000_000 % 32768)
        servo.set(MOVING, int(abs(v[i]) > servo.get(24) * RPM))
        servo.set(PWM, round(885 * load[i]))
        servo.set(CURRENT, round(servo.get(38) * load[i]))
        servo.set(SPEED, round(v[i] / RPM))
        servo.set(POSITION, self._position(i))
        return 0, self._table(i)[address : address + size]

    def _write(self, i: int, servo: Servo, address: int, data: bytes, now_ns: int) -> int:
        error, written = servo.write(address, data)
        if TORQUE in written:
            servo.held_rad = None
        if GOAL in written:
            servo.held_rad = None
            self.taken.append(GoalWrite(now_ns, (servo.number,), (servo.get(GOAL),)))
        if written:
            self.plant.drive(i, servo.drive())
        return error

    def _answer(self, servo: Servo, error: int, data: bytes, now_ns: int) -> None:
        error |= ALERT if servo.table[HARDWARE_ERROR] else 0
        message = packet(servo.number, STATUS, bytes([error]) + data)
        self.line.answer(message, now_ns + 2000 * servo.table[RETURN_DELAY], servo.number)
