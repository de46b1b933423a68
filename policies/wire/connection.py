"""One websocket to a policy server: what it announces, then one reply to each request.

openpi's protocol: on connecting the server sends one frame, its metadata; then frames of observations are answered by
frames of actions, strictly in turn. A *text* frame says that there are no actions, and why. Servers of openpi then
close; ours goes on, and begins the text with a word for the reason.

A request changes nothing in a stateless server, so ``ask`` sends one whose connection was lost once more on a new one,
and one that met a busy server again after a pause. A robot's controller calls ``exchange``, which tries once: by then
the observation is old.

A key may be shown in two ways. As openpi's client does, in the header ``Authorization: Api-Key ...``, which everybody
on the way can read; or not at all (``prove``): offered the subprotocol HMAC_SUBPROTOCOL, a server of ours sends a nonce
first, and both sides prove by HMAC-SHA256 over both nonces that they know the key. A ticket in the greeting announces
the proof, so that a server that is dialled by many knows which to hear first. Someone between the two still can read,
and take over, what is not encrypted: cross a network by TLS (wss://) or through SSH.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from socket import SHUT_RDWR, SO_SNDTIMEO, SOL_SOCKET
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import connect, unix_connect
from websockets.typing import Subprotocol

from ..core.errors import BurnishError, plain, reason
from .codec import LIMIT, pack, unpack

HMAC_SUBPROTOCOL = Subprotocol("burnish.hmac-sha256")
TICKET = "Burnish-Ticket"  # a header
NONCE = 32  # bytes
BUSY = "busy:"
QUOTED = 300  # characters of what a server says
PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class ServerRefused(BurnishError):
    """It answered, but with words. The connection is as good as before, unless the server closed it."""


class ServerBusy(ServerRefused):
    """It took newer requests instead."""


def proof(key: str, role: str, theirs: bytes, ours: bytes) -> bytes:
    """That ``role`` ("client" or "server") knows the key. Each side names the other's nonce first, and the role keeps
    anybody from sending a proof back to where it came from."""
    message = b"|".join((HMAC_SUBPROTOCOL.encode(), role.encode(), theirs.hex().encode(), ours.hex().encode()))
    return hmac.new(key.encode(), message, hashlib.sha256).digest()


def ticket(key: str) -> str:
    """For a header: a client that shows it is not taken for one of a crowd without the key."""
    nonce = secrets.token_bytes(NONCE)
    return f"{nonce.hex()}.{proof(key, 'ticket', nonce, b'').hex()}"


def is_ticket(key: str, shown: str) -> bool:
    """Whether ``shown`` is a ticket that a holder of ``key`` has made."""
    try:
        nonce, made = (bytes.fromhex(part) for part in shown.split("."))
    except ValueError:
        return False
    return len(nonce) == NONCE and hmac.compare_digest(made, proof(key, "ticket", nonce, b""))


class Connection:
    """To ``ws://host:port``, ``wss://...`` or ``unix:/path``. ``limit`` is of the bytes of a reply."""

    def __init__(
        self, url: str, *, timeout_s: float, api_key: str | None = None, prove: bool = False, limit: int = LIMIT
    ) -> None:
        self.url, self.timeout_s, self._limit = url, timeout_s, limit
        self._key, self._prove = api_key, prove and api_key is not None
        self._open = ExitStack()
        self.metadata = self._connect()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        until, pause = time.monotonic() + self.timeout_s, PAUSE_S
        while True:
            try:
                return self._asked(message)
            except ServerBusy:
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """One request and its reply; a lost connection is an error, after which ``reconnect`` may be called."""
        try:
            return self._exchange(pack(message))
        except (ConnectionClosed, OSError) as error:
            self.abort()
            raise BurnishError(f"the connection to {self.url} was lost ({reason(error, QUOTED)})") from error

    @contextmanager
    def patient(self, timeout_s: float) -> Iterator[None]:
        """Meanwhile an answer is waited for so long."""
        before, self.timeout_s = self.timeout_s, max(timeout_s, self.timeout_s)
        try:
            yield
        finally:
            self.timeout_s = before

    def reconnect(self) -> None:
        self.close()
        before, self.metadata = self.metadata, self._connect()
        if not same(self.metadata, before):
            raise BurnishError(
                f"the server at {self.url} came back as another one: it announces other things than before"
            )

    def close(self) -> None:
        self._open.close()

    def abort(self) -> None:
        """At once, without the goodbyes for which a silent server would be waited for."""
        with suppress(OSError):
            self._socket.socket.shutdown(SHUT_RDWR)
        self.close()

    def _asked(self, message: dict[str, Any]) -> dict[str, Any]:
        frame = pack(message)
        try:
            return self._exchange(frame)
        except (ConnectionClosed, ConnectionError):
            self.reconnect()
        try:
            return self._exchange(frame)
        except (ConnectionClosed, ConnectionError) as error:
            raise BurnishError(
                f"the policy server at {self.url} dropped the connection twice ({reason(error, QUOTED)}); see its own "
                "log"
            ) from error

    def _connect(self) -> dict[str, Any]:
        # openpi compresses nothing, and answers no pings while it computes. A robot's server is asked directly,
        # whatever proxy the environment names.
        shown = None
        if self._key is not None:
            shown = {TICKET: ticket(self._key)} if self._prove else {"Authorization": f"Api-Key {self._key}"}
        how: dict[str, Any] = {
            "compression": None,
            "max_size": self._limit,
            "ping_interval": None,
            "open_timeout": self.timeout_s,
            "close_timeout": 1,
            "additional_headers": shown,
            "subprotocols": [HMAC_SUBPROTOCOL] if self._prove else None,
        }
        try:
            path = self.url.removeprefix("unix:")
            socket = connect(self.url, proxy=None, **how) if path == self.url else unix_connect(path, **how)
            self._socket = self._open.enter_context(socket)
            # A server that stops reading must not hold us for ever: the kernel gives up sending after the same time.
            patience = struct.pack("@ll", int(self.timeout_s), int(self.timeout_s % 1 * 1e6))
            socket.socket.setsockopt(SOL_SOCKET, SO_SNDTIMEO, patience)
            if self._prove:
                self._prove_key()
            return self._receive()
        except InvalidStatus as error:
            status = error.response.status_code
            hint = ": it wants a key, from BURNISH_API_KEY and for an address that you name" if status == 401 else ""
            raise BurnishError(f"the server at {self.url} refuses, with status {status}{hint}") from error
        except BurnishError:
            self.close()
            raise
        except (OSError, WebSocketException) as error:
            self.close()
            raise BurnishError(
                f"no policy server answers at {self.url} ({reason(error, QUOTED)}); is it running?"
            ) from error

    def _prove_key(self) -> None:
        if self._socket.subprotocol != HMAC_SUBPROTOCOL or self._key is None:
            raise BurnishError(f"the server at {self.url} wants no proof of a key, so it cannot be told from others")
        nonce = secrets.token_bytes(NONCE)
        theirs = self._receive().get("nonce")
        if not isinstance(theirs, bytes) or len(theirs) != NONCE:
            raise BurnishError(f"the server at {self.url} speaks another protocol: it sent no nonce")
        self._socket.send(pack({"nonce": nonce, "proof": proof(self._key, "client", theirs, nonce)}))
        answer = self._receive().get("proof")
        expected = proof(self._key, "server", nonce, theirs)
        if not isinstance(answer, bytes) or not hmac.compare_digest(answer, expected):
            raise BurnishError(f"the server at {self.url} does not know the key, so it is not yours")

    def _exchange(self, frame: bytes) -> dict[str, Any]:
        self._socket.send(frame)
        try:
            return self._receive()
        except TimeoutError as error:
            self.abort()  # a late answer would be taken for that of the next request
            raise BurnishError(
                f"the policy server at {self.url} took longer than policy.timeout_s={self.timeout_s:g} to answer"
            ) from error

    def _receive(self) -> dict[str, Any]:
        frame = self._socket.recv(timeout=self.timeout_s)
        if isinstance(frame, str):
            lines = frame.strip().splitlines() or ["nothing more"]
            last = plain(lines[-1].strip(), QUOTED)
            if last.startswith(BUSY):
                raise ServerBusy(f"the policy server at {self.url} is {last}")
            raise ServerRefused(f"the policy server at {self.url} failed and says: {last}")
        answer = unpack(frame, self._limit)
        if not isinstance(answer, dict):
            raise BurnishError(f"the server at {self.url} speaks another protocol: it sent a {type(answer).__name__}")
        return answer


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Also of what holds arrays."""
    return pack(one) == pack(other)
