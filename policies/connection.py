"""One websocket to a policy server: what it announces, then one reply to each request.

openpi's protocol: on connecting the server sends one frame, its metadata; then frames of observations are answered by
frames of actions, strictly in turn. A *text* frame says that the server failed, and is the end of the connection.

A request changes nothing in a stateless server, so one whose connection was lost is sent once more on a new one.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import connect

from .core.errors import BurnishError
from .wire import LIMIT, pack, unpack


class Connection:
    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._open = ExitStack()
        self.metadata = self._connect()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        frame = pack(message)
        try:
            return self._exchange(frame)
        except (ConnectionClosed, ConnectionError):
            self._reconnect()
        try:
            return self._exchange(frame)
        except (ConnectionClosed, ConnectionError) as error:
            raise BurnishError(
                f"the policy server at {self.url} dropped the connection twice ({_reason(error)}); see its own log"
            ) from error

    def close(self) -> None:
        self._open.close()

    def _connect(self) -> dict[str, Any]:
        try:
            # openpi compresses nothing, and answers no pings while it computes. A robot's server is asked directly,
            # whatever proxy the environment names.
            socket = connect(
                self.url,
                compression=None,
                max_size=LIMIT,
                proxy=None,
                ping_interval=None,
                open_timeout=self.timeout_s,
                close_timeout=1,
                additional_headers=self._headers,
            )
            self._socket = self._open.enter_context(socket)
            return self._receive()
        except InvalidStatus as error:
            status = error.response.status_code
            hint = ": it wants a key, from BURNISH_API_KEY and for an address that you name" if status == 401 else ""
            raise BurnishError(f"the server at {self.url} refuses, with status {status}{hint}") from error
        except (OSError, WebSocketException) as error:
            raise BurnishError(f"no policy server answers at {self.url} ({_reason(error)}); is it running?") from error

    def _reconnect(self) -> None:
        self.close()
        before, self.metadata = self.metadata, self._connect()
        if self.metadata != before:
            raise BurnishError(
                f"the server at {self.url} came back as another one: it announces other things than before"
            )

    def _exchange(self, frame: bytes) -> dict[str, Any]:
        self._socket.send(frame)
        try:
            return self._receive()
        except TimeoutError as error:
            self.close()  # a late answer would be taken for that of the next request
            raise BurnishError(
                f"the policy server at {self.url} took longer than policy.timeout_s={self.timeout_s:g} to answer"
            ) from error

    def _receive(self) -> dict[str, Any]:
        frame = self._socket.recv(timeout=self.timeout_s)
        if isinstance(frame, str):
            self.close()
            lines = frame.strip().splitlines() or ["nothing more"]
            raise BurnishError(f"the policy server at {self.url} failed and says: {lines[-1].strip()[:300]}")
        answer = unpack(frame)
        if not isinstance(answer, dict):
            raise BurnishError(f"the server at {self.url} speaks another protocol: it sent a {type(answer).__name__}")
        return answer


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
