"""A chain of Feetech STS3215 servos: memory table, EPROM lock, sign bits, angle limits, overload, motion.

Written after the public memory table of the SMS/STS series and its protocol manual. Negative numbers are a magnitude
with a sign bit (15 for positions and speeds, 11 for the offset, 10 for the load). The only protection of a packet is
the inverted sum of its bytes, so some bent packets pass: that is the device, and what a driver has to live with.

**Departures.** The step, speed and PWM modes are left out, and instructions other than ping, read, write, registered
write, action, sync read and sync write stay unanswered, as does everything a servo does not understand.
"""

from __future__ import annotations

from dataclasses import dataclass

from .line import BROADCAST, Chain, GoalWrite, Heard, Receiver
from .servo import QUANTUM_RAD, TICKS, Drive

FASTEST = 5.2  # rad/s without load, at 12 V
UNLIMITED = 150.0  # rad/s^2: an acceleration of 0 asks for all that the motor has
ACCELERATION_UNIT = 100 * QUANTUM_RAD  # rad/s^2

PING, READ, WRITE, REG_WRITE, ACTION, SYNC_READ, SYNC_WRITE = 1, 2, 3, 4, 5, 0x82, 0x83
OVERLOAD = 0x20  # of the error byte and of the status register


@dataclass(frozen=True, slots=True)
class Register:
    """An entry of the memory table: its address, its size in bytes, and its sign bit."""

    address: int
    size: int
    initial: int = 0
    writable: bool = True
    sign_bit: int | None = None


# fmt: off
REGISTERS = {r.address: r for r in (
    Register(0, 1, 3, False), Register(1, 1, 10, False), Register(3, 2, 777, False), Register(5, 1, 1),
    Register(6, 1, 0), Register(7, 1, 0), Register(8, 1, 1), Register(9, 2, 0), Register(11, 2, 4095),
    Register(13, 1, 70), Register(14, 1, 140), Register(15, 1, 40), Register(16, 2, 1000), Register(18, 1, 12),
    Register(19, 1, 44), Register(20, 1, 47), Register(21, 1, 32), Register(22, 1, 32), Register(23, 1, 0),
    Register(24, 2, 16), Register(26, 1, 1), Register(27, 1, 1), Register(28, 2, 310), Register(30, 1, 1),
    Register(31, 2, 0, True, 11), Register(33, 1, 0), Register(34, 1, 20), Register(35, 1, 200),
    Register(36, 1, 80), Register(40, 1, 0), Register(41, 1, 0), Register(42, 2, 0, True, 15), Register(44, 2, 0),
    Register(46, 2, 0, True, 15), Register(48, 2, 1000), Register(55, 1, 1), Register(56, 2, 0, False, 15),
    Register(58, 2, 0, False, 15), Register(60, 2, 0, False, 10), Register(62, 1, 121, False),
    Register(63, 1, 29, False), Register(64, 1, 0, False), Register(65, 1, 0, False), Register(66, 1, 0, False),
    Register(69, 2, 0, False, 15),
)}
# fmt: on
SIZE, EPROM_END = 71, 40
MODEL, ID, RETURN_DELAY, RETURN_LEVEL, MIN_ANGLE, MAX_ANGLE, OFFSET, MODE, PROTECTED = 3, 5, 7, 8, 9, 11, 31, 33, 34
TORQUE, ACCELERATION, GOAL, SPEED, LOCK = 40, 41, 42, 46, 55
POSITION, PRESENT_SPEED, LOAD, STATUS, MOVING = 56, 58, 60, 65, 66


def encoded(value: int, sign_bit: int) -> int:
    """A number as the servo writes it: its size, with bit ``sign_bit`` set where it is negative."""
    return (-value | 1 << sign_bit) if value < 0 else value


def decoded(value: int, sign_bit: int) -> int:
    """The number that the servo writes as ``value``, with its sign in bit ``sign_bit``."""
    return -(value & ~(1 << sign_bit)) if value & 1 << sign_bit else value


def packet(device: int, instruction: int, parameters: bytes) -> bytes:
    """The bytes of one packet, checksum included."""
    body = bytes([device, len(parameters) + 2, instruction]) + parameters
    return b"\xff\xff" + body + bytes([~sum(body) & 0xFF])


class Packets(Receiver):
    """The receiver of Feetech's protocol: bytes of the line cut into packets."""

    def _cut(self, buffer: bytearray) -> list[Heard]:
        found = []
        while True:
            start = buffer.find(b"\xff\xff")
            if start < 0:
                del buffer[: max(len(buffer) - 1, 0)]
                return found
            del buffer[:start]
            if len(buffer) < 4:
                return found
            length = buffer[3]
            if buffer[2] > BROADCAST or length < 2:
                del buffer[:1]
            elif len(buffer) < length + 4:
                return found
            else:
                whole = bytes(buffer[: length + 4])
                if ~sum(whole[2:-1]) & 0xFF == whole[-1]:
                    found.append((whole[2], whole[4], whole[5:-1]))
                    del buffer[: length + 4]
                else:
                    del buffer[:2]  # a packet may begin inside what looked like one


class Servo:
    """One memory table, and what of it survives without power."""

    def __init__(self, number: int, overrides: dict[int, int]) -> None:
        self.table = bytearray(SIZE)
        for address, register in REGISTERS.items():
            self.set(address, register.initial)
        for address, value in {ID: number, **overrides}.items():
            self.set(address, value)
        self.stored = bytes(self.table[:EPROM_END])
        self.registered: bytes | None = None
        self.overloaded = False

    @property
    def number(self) -> int:
        return self.table[ID]

    def restart(self, now_ns: int) -> None:
        for address, register in REGISTERS.items():
            self.set(address, register.initial)
        self.table[:EPROM_END] = self.stored
        self.registered, self.overloaded = None, False

    def get(self, address: int) -> int:
        register = REGISTERS[address]
        value = int.from_bytes(self.table[address : address + register.size], "little")
        return value if register.sign_bit is None else decoded(value, register.sign_bit)

    def set(self, address: int, value: int) -> None:
        register = REGISTERS[address]
        value = value if register.sign_bit is None else encoded(value, register.sign_bit)
        self.table[address : address + register.size] = value.to_bytes(register.size, "little")

    def write(self, address: int, data: bytes) -> list[int]:
        """The addresses written; what is read-only or beyond the table keeps its value, and nobody is told."""
        for k, byte in enumerate(data):
            where = address + k
            owner = max((a for a in REGISTERS if a <= where), default=None)
            if owner is None or where >= owner + REGISTERS[owner].size or not REGISTERS[owner].writable:
                continue
            self.table[where] = byte
            # With the lock on, a setting holds until power is lost.
            if where < EPROM_END and not self.table[LOCK]:
                self.stored = self.stored[:where] + bytes([byte]) + self.stored[where + 1 :]
        return [a for a in REGISTERS if address <= a < address + len(data)]

    def drive(self) -> Drive:
        low, high = self.get(MIN_ANGLE), self.get(MAX_ANGLE)
        goal = min(max(self.get(GOAL), low), high) if low or high else self.get(GOAL)
        speed = abs(self.get(SPEED)) * QUANTUM_RAD or FASTEST
        acceleration = self.get(ACCELERATION) * ACCELERATION_UNIT or UNLIMITED
        powered = self.get(TORQUE) == 1 and not self.overloaded
        return Drive((goal + self.get(OFFSET)) * QUANTUM_RAD, powered, min(speed, FASTEST), acceleration)


class FeetechChain(Chain):
    """An emulated chain of Feetech servos, and the errors that a test can cause in it."""

    servo, receiver, turn, offset = Servo, Packets, -1, OFFSET

    def overload(self, number: int) -> None:
        """The servo protects itself: it gives no torque, and says so, until torque is enabled again."""
        for i, servo in self._numbered(number):
            servo.overloaded = True
            self.plant.drive(i, servo.drive())

    def _note(self, instruction: int, parameters: bytes, now_ns: int) -> None:
        if instruction != SYNC_WRITE or len(parameters) < 3 or not parameters[0] <= GOAL < sum(parameters[:2]):
            return
        at, size = 1 + GOAL - parameters[0], 1 + parameters[1]
        rows = [parameters[i : i + size] for i in range(2, len(parameters), size)]
        ticks = tuple(decoded(int.from_bytes(row[at : at + 2], "little"), 15) for row in rows)
        self.log.append(GoalWrite(now_ns, tuple(row[0] for row in rows), ticks))

    def _obey(self, device: int, instruction: int, parameters: bytes, now_ns: int) -> None:
        own = {servo.number: i for i, servo in enumerate(self.servos)}
        if instruction == SYNC_READ and device == BROADCAST and len(parameters) > 2:
            for number in parameters[2:]:
                if number in own:
                    self._answer(own[number], self._read(own[number], parameters[0], parameters[1]), now_ns)
        elif instruction == SYNC_WRITE and device == BROADCAST and len(parameters) > 2:
            size = 1 + parameters[1]
            for k in range(2, len(parameters) - size + 1, size):
                if parameters[k] in own:
                    self._write(own[parameters[k]], parameters[0], parameters[k + 1 : k + size], now_ns)
        else:
            for number, i in own.items():
                if device in (number, BROADCAST):
                    self._do(i, instruction, parameters, now_ns, answers=device != BROADCAST or instruction == PING)

    def _do(self, i: int, instruction: int, parameters: bytes, now_ns: int, answers: bool) -> None:
        servo = self.servos[i]
        data = b""
        if instruction == READ and len(parameters) == 2:
            data = self._read(i, *parameters)
        elif instruction == WRITE and len(parameters) > 1:
            self._write(i, parameters[0], parameters[1:], now_ns)
        elif instruction == REG_WRITE and len(parameters) > 1:
            servo.registered = parameters
        elif instruction == ACTION and servo.registered:
            self._write(i, servo.registered[0], servo.registered[1:], now_ns)
            servo.registered = None
        elif instruction not in (PING, ACTION):
            return
        if answers and (servo.get(RETURN_LEVEL) or instruction in (PING, READ)):
            self._answer(i, data, now_ns)

    def _read(self, i: int, address: int, size: int) -> bytes:
        servo = self.servos[i]
        _, v, load = self.plant.motion()
        servo.set(POSITION, self._position(i))
        servo.set(PRESENT_SPEED, round(v[i] / QUANTUM_RAD))
        servo.set(LOAD, round(1000 * load[i]))
        servo.set(MOVING, int(v[i] != 0))
        servo.set(STATUS, OVERLOAD if servo.overloaded else 0)
        return self._table(i)[address : address + size].ljust(size, b"\0")

    def _write(self, i: int, address: int, data: bytes, now_ns: int) -> None:
        servo = self.servos[i]
        written = servo.write(address, data)
        if TORQUE in written:
            servo.overloaded = False
        if TORQUE in written and servo.get(TORQUE) == 128:  # "here is the middle"
            servo.set(OFFSET, round(float(self.plant.motion()[0][i]) / QUANTUM_RAD) - TICKS // 2)
            servo.set(TORQUE, 0)
        if GOAL in written:
            self.taken.append(GoalWrite(now_ns, (servo.number,), (servo.get(GOAL),)))
        if written:
            self.plant.drive(i, servo.drive())

    def _answer(self, i: int, data: bytes, now_ns: int) -> None:
        servo = self.servos[i]
        message = packet(servo.number, OVERLOAD if servo.overloaded else 0, data)
        self.line.answer(message, now_ns + 2000 * servo.table[RETURN_DELAY], servo.number)
