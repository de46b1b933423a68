"""The half-duplex line between a computer and a chain of servos: timing at the baud rate, and faults.

While a servo answers, nobody hears what the computer says: such a request is lost, as on a real bus. An answer that a
fault delays is held up behind the line, in the adapter of the computer, and disturbs nobody.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from ..clock import SECOND, Clock
from .faults import NONE, FaultInjector, Faults
from .servo import Plant


@dataclass(frozen=True, slots=True)
class GoalWrite:
    """Goals as they stood in one packet."""

    t_ns: int
    ids: tuple[int, ...]
    ticks: tuple[int, ...]


class Chain(Protocol):
    """An emulated bus, without any input or output of its own."""

    line: Line
    plant: Plant

    def feed(self, data: bytes, now_ns: int) -> None: ...
    def take(self, now_ns: int) -> bytes: ...
    def next_ns(self) -> int | None:
        """When ``take`` will have something; None: not until it is fed."""
        ...

    def motion(self, now_ns: int) -> tuple[Sequence[int], Sequence[float]]:
        """Positions in ticks and velocities in rad/s, as they are, whatever the registers say."""
        ...


class Line:
    def __init__(
        self, baudrate: int = 1_000_000, requests: Faults = NONE, replies: Faults = NONE, seed: int = 0
    ) -> None:
        self.byte_ns = 10 * SECOND // baudrate  # eight bits, a start and a stop
        self.requests, self.replies = FaultInjector(requests, 2 * seed), FaultInjector(replies, 2 * seed + 1)
        self._busy_until_ns = 0
        self._queue: list[tuple[int, int, bytes]] = []
        self._order = count()

    def hear(self, data: bytes, now_ns: int) -> list[bytes]:
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
