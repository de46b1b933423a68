"""The gateway of the policy server: which clients come in, how much each may say, and how long it may take.

Behind it untrusted bytes reach `Schema.read` alone. In front of it every connection is untrusted, also on this
machine: a web page can dial 127.0.0.1 (so requests that name an Origin are refused), and so can any user of the machine
(so there are sockets with mode 0600). An address beyond this machine needs a key; `policies/wire/connection.py` has the
two ways to show it. Neither hides what is said: TLS or SSH does.

    a place                   there are ``clients`` of them, for one that showed the key, or where there is none, has
                              asked something; one that asked nothing for SILENT_S goes to the next who wants one.
                              Where there is no key, so does the one that was held longest, after HELD_S, and the next
                              is the one that has waited longest of those that asked within HELD_S
    an unproven connection    handshake_s to show the key; UNPROVEN of them, and of more, the address that sends most
                              loses its eldest. `admission.py` stands before this where there is a key
    a frame                   schema bytes at most; receive_s from its first byte to its last, rate_hz of them
    a refusal                 comes late (REFUSAL_S), and after MISTAKES in a row it is the end
    between frames            idle_s
    our answer                receive_s to take it

Everything here runs in one event loop that only waits, reads and writes; inference has its own thread (`server.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import socket as sockets
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Opcode
from websockets.http11 import Request, Response

from ...policies.core.errors import BurnishError
from ...policies.wire.codec import pack, unpack
from ...policies.wire.connection import HMAC_SUBPROTOCOL, NONCE, proof
from ...policies.wire.schema import Code, Refusal
from .admission import Admission, UnprovenConnections, origin_of
from .listening import BACKLOG, ServerConfig

POLICY_VIOLATION = 1008
UNPROVEN = 64  # connections without a place
SILENT_S = 1.0  # so long a client that asks nothing keeps its place when others want one
HELD_S = 5.0  # so long a client that asks keeps it, when it has not proven a key and others want one
CHATTER = 64  # control frames and fragments between two messages
REFUSAL_S = 0.03  # every refusal takes so long, and costs us nothing: who is always wrong is not often wrong
CLOSE_S = 0.25  # for the other side to say goodbye too
MISTAKES = 16  # in a row, after which a connection ends
MESSAGES = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
END = b"\r\n\r\n"  # of a greeting
PROOF = 512  # bytes of the frame with a proof

# Failed handshakes of unproven connections are no event for the operator: the library would log a traceback for
# each.
_QUIET = logging.getLogger("burnish.gateway")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False
_QUIET.setLevel(logging.CRITICAL + 1)


class GatewayConnection(ServerConnection):
    """A connection whose peer must go on with what it began."""

    def __init__(self, gateway: Gateway, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.let_in = False  # has shown the key, where there is one
        self.answering = False  # it waits for us, so its time does not run
        self.heard_s = self.loop.time()
        self.placed_s = self.heard_s  # since when it has a place
        self.gave_up = False  # its place, to a client that waited
        self.waits_s = self.refused_s = -math.inf  # since when it wants a place; when it was last refused one
        self._gateway, self._chatter = gateway, 0
        self._greeting = b""  # its last bytes
        self._pending = 0  # bytes of a frame that is not complete
        self._fragments = False  # of a message that is not complete
        self._overdue: asyncio.TimerHandle | None = None
        self._unknown: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.origin = origin_of(transport.get_extra_info("peername"))
        self._unknown = self.loop.call_later(self._gateway.config.handshake_s, transport.abort)
        self._gateway.dialled(self)

    def recognised(self) -> None:
        """It has shown the key, and has the time of a client."""
        self.let_in = True
        if self._unknown is not None:
            self._unknown.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._overdue, self._unknown):
            if timer is not None:
                timer.cancel()
        self._gateway.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.request is None:
            self._greeting = self._greeting[-3:] + data
        heard_s, self._pending = self.heard_s, self._pending + len(data)
        super().data_received(data)
        if self.request is None:  # handshake_s holds
            return
        waits = self._pending > 0 or self._fragments
        if self._overdue is not None and (not waits or self.heard_s > heard_s):
            self._overdue.cancel()
            self._overdue = None
        if waits and self._overdue is None:
            self._overdue = self.loop.call_later(self._gateway.config.receive_s, self._cut)

    def process_event(self, event: Any) -> None:
        if isinstance(event, Request):
            self._pending = len(self._greeting) - self._greeting.find(END) - len(END)
            self._greeting = b""
        else:
            self._pending -= _size(len(event.data))
        if isinstance(event, Request) or (event.opcode in MESSAGES and event.fin):
            self._chatter, self._fragments, self.heard_s = 0, False, self.loop.time()
        else:
            self._chatter, self._fragments = self._chatter + 1, self._fragments or event.opcode in MESSAGES
            if self._chatter > CHATTER:
                self.transport.abort()
                return
        super().process_event(event)

    def _cut(self) -> None:
        if self.answering:  # we may have stopped reading ourselves
            self._overdue = self.loop.call_later(self._gateway.config.receive_s, self._cut)
        else:
            self.transport.abort()


def _size(payload: int) -> int:
    """Bytes of a client's frame: two, a longer length where it needs one, the mask, the payload."""
    return 6 + payload + (0 if payload < 126 else 2 if payload < 2**16 else 8)


Respond = Callable[[Any], Awaitable[bytes]]


class Gateway:
    """``answer`` makes the reply to a frame, or raises a `Refusal`; ``greeting`` is sent to all who come in."""

    def __init__(self, config: ServerConfig, key: str | None, greeting: bytes, limit: int, answer: Respond) -> None:
        self.config, self._key, self._greeting, self._limit = config, key, greeting, limit
        self._answer = answer
        self._unproven: UnprovenConnections[GatewayConnection] = UnprovenConnections(UNPROVEN)
        self._waiting: Admission | None = None
        self._inside: set[GatewayConnection] = set()

    async def open(self, socket: sockets.socket) -> Server:
        if self._key is not None:
            self._waiting = Admission(socket, self._key, self.config.handshake_s)
            socket = self._waiting.turnstile
        made: Any = partial(GatewayConnection, self)  # the library says "a class", and calls it
        server = await serve(
            self._converse,
            sock=socket,
            backlog=1,  # accepted in a turn of the event loop, so that those who are here get on
            create_connection=made,
            process_request=self._admit,
            select_subprotocol=self._subprotocol,
            origins=[None],  # browsers name where a page comes from
            compression=None,
            max_size=self._limit,
            max_queue=1,
            open_timeout=self.config.handshake_s,
            close_timeout=CLOSE_S,
            ping_interval=None,  # idle_s does
            server_header=None,
            logger=_QUIET,
        )
        socket.listen(BACKLOG)  # how many the kernel holds meanwhile; asyncio has one word for both
        return server

    async def close(self, server: Server, within_s: float) -> None:
        """Every client is informed; one that does not go is cut off."""
        if self._waiting is not None:
            self._waiting.close()
        server.close(reason="the server stops")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await server.wait_closed()
        for visitor in (*self._unproven.connections(), *self._inside):
            visitor.transport.abort()

    def dialled(self, visitor: GatewayConnection) -> None:
        eldest = self._unproven.add(visitor, visitor.origin)
        if eldest is not None:
            eldest.transport.abort()

    def left(self, visitor: GatewayConnection) -> None:
        self._inside.discard(visitor)
        self._unproven.remove(visitor, visitor.origin)

    async def _admit(self, visitor: Any, request: Request) -> Response | None:
        if request.path == "/healthz":
            return visitor.respond(HTTPStatus.OK, "OK\n")
        if not self._known(visitor, request):
            await asyncio.sleep(REFUSAL_S)
            return visitor.respond(HTTPStatus.UNAUTHORIZED, f"{Code.UNAUTHORIZED}: this server wants a key\n")
        return None

    def _known(self, visitor: GatewayConnection, request: Request) -> bool:
        """Has shown the key, or offers to prove it in its first frame."""
        shown = request.headers.get_all("Authorization")
        if self._key is None:
            visitor.recognised()
        elif len(shown) == 1:
            theirs = shown[0].encode("utf-8", "surrogateescape")
            if hmac.compare_digest(theirs, f"Api-Key {self._key}".encode()):
                visitor.recognised()
        offered = ",".join(request.headers.get_all("Sec-WebSocket-Protocol")).split(",")
        return visitor.let_in or (not shown and HMAC_SUBPROTOCOL in [name.strip() for name in offered])

    def _place(self, visitor: GatewayConnection) -> None:
        """For one that has shown the key, or where there is none, asks. When places are short, the client that was
        silent longest is cut off. Without a key, the client that has held a place longest gives it up: its connection
        stays, and asks for a place like any other."""
        if visitor in self._inside:
            return
        now_s, longest_s = visitor.loop.time(), min(SILENT_S, self.config.receive_s)
        free = self.config.clients - len(self._inside)
        silent = [x for x in self._inside if not x.answering and now_s - x.heard_s >= longest_s]
        held = [x for x in self._inside if x not in silent and self._key is None and now_s - x.placed_s >= HELD_S]
        if self._before(visitor, now_s) >= free + len(silent) + len(held):
            raise self._full(visitor)
        if free <= 0 and silent:
            quietest = min(silent, key=lambda x: x.heard_s)
            self.left(quietest)
            quietest.transport.abort()
        elif free <= 0:
            eldest = min(held, key=lambda x: x.placed_s)
            self._inside.remove(eldest)
            eldest.gave_up = True
            self.dialled(eldest)
        self.left(visitor)
        self._inside.add(visitor)
        visitor.placed_s, visitor.gave_up, visitor.refused_s = now_s, False, -math.inf

    def _before(self, visitor: GatewayConnection, now_s: float) -> int:
        """How many have waited longer for a place, and were refused one within HELD_S. Behind a key nobody waits: a
        client that finds no place is sent away."""
        if self._key is not None:
            return 0
        if now_s - visitor.refused_s > HELD_S:
            visitor.waits_s = now_s
        visitor.refused_s = now_s
        waiting = [x for x in self._unproven.connections() if now_s - x.refused_s <= HELD_S]
        return sum(x.waits_s < visitor.waits_s for x in waiting)

    def _full(self, visitor: GatewayConnection) -> Refusal:
        places = f"all {self.config.clients} places are taken by clients that ask"
        if self._key is not None:
            return Refusal(Code.BUSY, f"{places}; serve with a larger clients=...")
        if visitor.gave_up:
            places = f"the place of this client went to one that waited, and {places}"
        advice = f"ask again within {HELD_S:g} s, or serve with a larger clients=... or a key, which keeps a place"
        return Refusal(Code.BUSY, f"{places}; {advice}")

    def _subprotocol(self, visitor: Any, offered: Any) -> Any:
        return HMAC_SUBPROTOCOL if HMAC_SUBPROTOCOL in offered and not visitor.let_in else None

    async def _converse(self, visitor: Any) -> None:
        try:
            if not visitor.let_in:
                await self._challenge(visitor)
            if self._key is not None:
                self._place(visitor)
            await self._send(visitor, self._greeting)
            await self._requests(visitor)
        except Refusal as refusal:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                await self._send(visitor, refusal.reply())
                await visitor.close(POLICY_VIOLATION, refusal.code.value)
        except ConnectionClosed:
            return
        except TimeoutError:
            visitor.transport.abort()

    async def _requests(self, visitor: GatewayConnection) -> None:
        loop, begun, mistakes = asyncio.get_running_loop(), 0.0, 0
        while True:
            async with asyncio.timeout(self.config.idle_s):
                frame = await visitor.recv()
            visitor.answering = True
            # A client that asks faster than allowed is read more slowly: no request of a fast loop fails for its speed.
            begun = max(begun + 1 / self.config.rate_hz, loop.time() - 0.1)
            if begun > loop.time():
                await asyncio.sleep(begun - loop.time())
            try:
                self._place(visitor)
                answer: bytes | str = await self._answer(frame)
                mistakes = 0
            except Refusal as refusal:
                if refusal.code is not Code.BUSY:
                    mistakes += 1
                    await asyncio.sleep(REFUSAL_S)
                if mistakes >= MISTAKES:
                    raise
                answer = refusal.reply()
            await self._send(visitor, answer)
            visitor.answering, visitor.heard_s = False, loop.time()

    async def _send(self, visitor: GatewayConnection, frame: bytes | str) -> None:
        async with asyncio.timeout(self.config.receive_s):
            await visitor.send(frame)

    async def _challenge(self, visitor: GatewayConnection) -> None:
        """Both sides prove that they know the key; nobody sends it."""
        assert self._key is not None
        nonce = secrets.token_bytes(NONCE)
        await self._send(visitor, pack({"nonce": nonce}))
        frame = await visitor.recv()  # handshake_s holds
        wrong = Refusal(Code.UNAUTHORIZED, "the proof of the key is wrong")
        try:
            said = unpack(frame, PROOF)
        except BurnishError as error:
            raise wrong from error
        theirs, shown = (said.get(name) if isinstance(said, dict) else None for name in ("nonce", "proof"))
        if not (isinstance(theirs, bytes) and len(theirs) == NONCE and isinstance(shown, bytes)):
            raise wrong
        if not hmac.compare_digest(shown, proof(self._key, "client", nonce, theirs)):
            raise wrong
        visitor.recognised()
        await self._send(visitor, pack({"proof": proof(self._key, "server", theirs, nonce)}))
