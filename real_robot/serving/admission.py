"""Admission to the gateway of a server with a key: clients that show the key come first, however many others dial.

To accept a connection and to look at its first bytes costs a tenth of what a websocket costs. So that is all that every
connection gets at once: a greeting that holds the key, or a ticket that only the key makes (`connection.ticket`), goes
straight to the gateway. Others follow one by one, PACE_S apart, and of too many the eldest is sent away. A ticket is no
proof, because it can be heard and said again: it is worth a place in the queue, and the gateway asks for the proof.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket as sockets
from collections import deque
from contextlib import suppress
from typing import Any, Generic, TypeVar

from ...policies.wire.connection import TICKET, is_ticket
from .listening import BACKLOG

SILENT = 512  # connections that have said nothing yet
QUEUE = 32  # those that have, but no word of the key
PACE_S = 0.01
TURN = 16  # connections that are accepted before those that are here get on
GREETING = 4096  # bytes of a greeting that are looked at

_AUTHORIZATION = re.compile(rb"\r\nAuthorization: *([^\r\n]*)\r\n", re.IGNORECASE)
_TICKET = re.compile(rb"\r\n%s: *([^\r\n]*)\r\n" % TICKET.encode(), re.IGNORECASE)

T = TypeVar("T")


class UnprovenConnections(Generic[T]):
    """Unproven connections, ``most`` of them. Of more, the origin with most loses its eldest: no address crowds others
    out."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._of: dict[str, dict[T, None]] = {}

    def add(self, one: T, origin: str) -> T | None:
        """The connection that has to go for it."""
        self._of.setdefault(origin, {})[one] = None
        self._count += 1
        if self._count <= self._most:
            return None
        origin = max(self._of, key=lambda name: len(self._of[name]))
        eldest = next(iter(self._of[origin]))
        self.remove(eldest, origin)
        return eldest

    def remove(self, one: T, origin: str) -> None:
        others = self._of.get(origin, {})
        if one in others:
            del others[one]
            self._count -= 1
            if not others:
                del self._of[origin]

    def connections(self) -> list[T]:
        return [one for others in self._of.values() for one in others]


def origin_of(peer: Any) -> str:
    """The address that a connection comes from; of IPv6 the network, because a host has 2^64 addresses. All users of a
    Unix socket are one."""
    address = str(peer[0]).partition("%")[0] if isinstance(peer, tuple) else ""
    return str(ipaddress.ip_network(f"{address}/64", strict=False)) if ":" in address else address


class AcceptedSockets(sockets.socket):
    """A listening socket for asyncio, which accepts the connections that it is given."""

    def __init__(self) -> None:
        mine, self._bell = sockets.socketpair()
        super().__init__(mine.family, mine.type, mine.proto, fileno=mine.detach())
        self._given: deque[tuple[sockets.socket, Any]] = deque()

    def give(self, line: sockets.socket, peer: Any) -> None:
        self._given.append((line, peer))
        self._bell.send(b"!")

    def accept(self) -> tuple[sockets.socket, Any]:
        if not self._given:
            raise BlockingIOError
        self.recv(1)
        return self._given.popleft()

    def listen(self, backlog: int = 0, /) -> None:
        """It always does."""

    def close(self) -> None:
        for line, _ in self._given:
            line.close()
        self._given.clear()
        self._bell.close()
        super().close()


class Admission:
    """``turnstile`` lets those through who are next."""

    def __init__(self, listening: sockets.socket, key: str, handshake_s: float) -> None:
        self.turnstile = AcceptedSockets()
        self._listening, self._key, self._handshake_s = listening, key, handshake_s
        self._loop = asyncio.get_running_loop()
        self._silent: UnprovenConnections[sockets.socket] = UnprovenConnections(SILENT)
        self._peers: dict[sockets.socket, tuple[Any, asyncio.TimerHandle]] = {}
        self._queue: deque[tuple[sockets.socket, Any]] = deque()
        self._next: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._open()

    def close(self) -> None:
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for line in self._silent.connections():
            self._forget(line)
            line.close()
        while self._queue:
            self._queue.popleft()[0].close()

    def _open(self) -> None:
        if self._listening.fileno() >= 0:  # it was not closed meanwhile
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(TURN):
            try:
                line, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left; time brings some back
                self._loop.remove_reader(self._listening)
                self._loop.call_later(PACE_S, self._open)
                return
            line.setblocking(False)
            timer = self._loop.call_later(self._handshake_s, self._drop, line)
            self._peers[line] = peer, timer
            eldest = self._silent.add(line, origin_of(peer))
            self._loop.add_reader(line, self._read, line)
            if eldest is not None:
                self._drop(eldest)

    def _forget(self, line: sockets.socket) -> Any:
        peer, timer = self._peers.pop(line)
        timer.cancel()
        self._loop.remove_reader(line)
        self._silent.remove(line, origin_of(peer))
        return peer

    def _drop(self, line: sockets.socket) -> None:
        self._forget(line)
        line.close()

    def _read(self, line: sockets.socket) -> None:
        """It has said something, and the gateway will read it too."""
        peer, said = self._forget(line), b""
        with suppress(OSError):
            said = line.recv(GREETING, sockets.MSG_PEEK)
        if not said:
            line.close()
        elif self._knows(said):
            self.turnstile.give(line, peer)
        else:
            self._queue.append((line, peer))
            if len(self._queue) > QUEUE:
                self._queue.popleft()[0].close()
            if self._next is None:
                self._go_on()

    def _knows(self, said: bytes) -> bool:
        shown, ticket = _AUTHORIZATION.search(said), _TICKET.search(said)
        if shown is not None:
            return hmac.compare_digest(shown[1], f"Api-Key {self._key}".encode())
        return ticket is not None and is_ticket(self._key, ticket[1].decode("latin-1"))

    def _go_on(self) -> None:
        self._next = None
        if self._queue:
            self.turnstile.give(*self._queue.popleft())
            self._next = self._loop.call_later(PACE_S, self._go_on)
