"""A chain of servos, and the half-duplex line between a computer and them: timing at the baud rate, and faults.

While a servo answers, nobody hears what the computer says: such a request is lost, as on a real bus. An answer that a
fault delays is held up behind the line, in the adapter of the computer, and disturbs nobody.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..clock import SECOND, Clock, ns
from .faults import NONE, Encoders, FaultInjector, Faults
from .servo import QUANTUM_RAD, Plant

BROADCAST = 0xFE
PARTIAL_NS = ns(0.005)  # after so long a pause the rest of a packet does not come any more

Heard = tuple[int, int, bytes]  # device, instruction, parameters


@dataclass(frozen=True, slots=True)
class GoalWrite:
    """Goals as they stood in one packet."""

    t_ns: int
    ids: tuple[int, ...]
    ticks: tuple[int, ...]


class Line:
    """The half-duplex line, with its timing at the baud rate and its faults in either direction."""

    def __init__(
        self, baudrate: int = 1_000_000, requests: Faults = NONE, replies: Faults = NONE, seed: int = 0
    ) -> None:
        self.byte_ns = 10 * SECOND // baudrate  # eight bits, a start and a stop
        self.requests, self.replies = FaultInjector(requests, 2 * seed), FaultInjector(replies, 2 * seed + 1)
        self._busy_until_ns = 0
        self._queue: list[tuple[int, int, bytes]] = []
        self._order = count()

    def receive(self, data: bytes, now_ns: int) -> list[bytes]:
        """The part of the computer's message that reaches the chain."""
        if now_ns < self._busy_until_ns:
            return []
        return [message for _, message in self.requests(data)]

    def answer(self, message: bytes, ready_ns: int, device: int) -> None:
        """One servo's packet, sent when it is ready and those before it have been sent."""
        sent_ns = max(ready_ns, self._busy_until_ns) + len(message) * self.byte_ns
        if not (self.replies.faults.mute and self.replies.faults.concerns(device)):
            self._busy_until_ns = sent_ns
        for late_ns, arriving in self.replies(message, device):
            heapq.heappush(self._queue, (sent_ns + late_ns, next(self._order), arriving))

    def take(self, now_ns: int) -> bytes:
        taken = bytearray()
        while self._queue and self._queue[0][0] <= now_ns:
            taken += heapq.heappop(self._queue)[2]
        return bytes(taken)

    def next_ns(self) -> int | None:
        return self._queue[0][0] if self._queue else None


class Receiver:
    """Cuts a stream into packets, as a servo does."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._last_ns = 0

    def __call__(self, data: bytes, now_ns: int) -> list[Heard]:
        if now_ns - self._last_ns > PARTIAL_NS:
            self._buffer.clear()
        self._last_ns = now_ns
        self._buffer += data
        return self._cut(self._buffer)

    @abstractmethod
    def _cut(self, buffer: bytearray) -> list[Heard]:
        """The whole packets in ``buffer``, which keeps only what may be the beginning of another one."""


class Chain:
    """An emulated bus, without any input or output of its own. A family adds its packets, its registers, and what its
    servos do when they are asked.

    ``overrides`` set registers at the factory, {id: {address: value}}."""

    servo: type[Any]
    receiver: type[Receiver]
    turn: int  # +1 where an offset is added to the angle, -1 where it is taken off
    offset: int  # the register that holds it

    def __init__(
        self,
        ids: Sequence[int],
        plant: Plant,
        *,
        requests: Faults = NONE,
        replies: Faults = NONE,
        seed: int = 0,
        overrides: dict[int, dict[int, int]] | None = None,
    ) -> None:
        self.line = Line(requests=requests, replies=replies, seed=seed)
        self.plant = plant
        self.servos = [self.servo(i, (overrides or {}).get(i, {})) for i in ids]
        self.log: list[GoalWrite] = []  # of goals in whole packets of the computer, whether a servo got them or not
        self.taken: list[GoalWrite] = []  # of goals that servos have made theirs
        self._tap, self._ears = self.receiver(), self.receiver()
        self._encoders = Encoders()
        self._frozen: dict[int, bytes] = {}  # what a servo whose sensor hangs goes on saying

    def feed(self, data: bytes, now_ns: int) -> None:
        now_ns += len(data) * self.line.byte_ns
        for _, instruction, parameters in self._tap(data, now_ns):
            self._note(instruction, parameters, now_ns)
        for heard in self.line.receive(data, now_ns):
            for device, instruction, parameters in self._ears(heard, now_ns):
                self._advance(now_ns)
                self._obey(device, instruction, parameters, now_ns)

    def take(self, now_ns: int) -> bytes:
        return self.line.take(now_ns)

    def next_ns(self) -> int | None:
        """When ``take`` will have something; None: not until it is fed."""
        return self.line.next_ns()

    def motion(self, now_ns: int) -> tuple[list[int], list[float]]:
        """Positions in ticks and velocities in rad/s, as they are, whatever the registers say."""
        self._advance(now_ns)
        q, v, _ = self.plant.motion()
        return [self._ticks(servo, q[i]) for i, servo in enumerate(self.servos)], [float(x) for x in v]

    def restart(self, number: int, now_ns: int) -> None:
        """Its supply broke down for a moment: what is kept only until then is as it came from the factory, and there is
        no torque."""
        self._advance(now_ns)
        for i, servo in self._numbered(number):
            servo.restart(now_ns)
            self.plant.drive(i, servo.drive())

    @abstractmethod
    def _note(self, instruction: int, parameters: bytes, now_ns: int) -> None:
        """Log the goals of a packet, if it holds some."""

    @abstractmethod
    def _obey(self, device: int, instruction: int, parameters: bytes, now_ns: int) -> None: ...

    def _advance(self, now_ns: int) -> None:
        self.plant.advance(now_ns)

    def _numbered(self, number: int) -> Iterator[tuple[int, Any]]:
        return ((i, servo) for i, servo in enumerate(self.servos) if servo.number == number)

    def _ticks(self, servo: Any, angle_rad: float) -> int:
        return round(float(angle_rad) / QUANTUM_RAD) + self.turn * servo.get(self.offset)

    def _position(self, i: int) -> int:
        """The reading of the sensor, in ticks."""
        servo = self.servos[i]
        ticks = self._ticks(servo, self.plant.motion()[0][i])
        return self._encoders(self.line.replies.faults, servo.number, ticks)

    def _table(self, i: int) -> bytes:
        """The control table, as the servo reports it."""
        servo, faults = self.servos[i], self.line.replies.faults
        if not faults.frozen:
            self._frozen.clear()
        elif faults.concerns(servo.number):
            return self._frozen.setdefault(i, bytes(servo.table))
        return bytes(servo.table)


class Loopback:
    """A chain as the wire of a driver, on any clock: no terminal, no thread. Time passes where the driver waits."""

    def __init__(self, chain: Chain, clock: Clock) -> None:
        self.chain, self._clock = chain, clock
        self._arrived = bytearray()

    def read(self, size: int) -> bytes:
        self._check()
        self._arrived += self.chain.take(self._clock.now_ns())
        taken = bytes(self._arrived[:size])
        del self._arrived[:size]
        return taken

    def write(self, data: bytes) -> int:
        self._check()
        self.chain.feed(bytes(data), self._clock.now_ns())
        return len(data)

    def wait(self, deadline_ns: int) -> None:
        if not self._arrived:
            coming_ns = self.chain.next_ns()
            self._clock.sleep_until_ns(deadline_ns if coming_ns is None else min(deadline_ns, coming_ns))

    def close(self) -> None:
        self._arrived.clear()

    def _check(self) -> None:
        if self.chain.line.replies.faults.unplugged:
            raise OSError(5, "the adapter is gone")
