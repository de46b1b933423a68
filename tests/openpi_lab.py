"""A server that behaves as openpi's does, written from the description of its protocol and not from our code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import SHUT_RDWR
from typing import Any

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve


def frame(value: Any) -> Any:
    def encoded(x: Any) -> Any:
        return {b"__ndarray__": True, b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": x.shape}

    return msgpack.packb(value, default=encoded)


def content(data: bytes) -> Any:
    def decoded(x: dict) -> Any:
        if b"__ndarray__" not in x:
            return x
        return np.frombuffer(x[b"data"], np.dtype(x[b"dtype"])).reshape(x[b"shape"])

    return msgpack.unpackb(data, object_hook=decoded)


class Drop(Exception):
    """The connection breaks."""


class Fail(Exception):
    """The server says so, in a text frame, and closes."""


class Openpi:
    """``answer(message)`` -> actions, or a whole reply; ``requests`` are the messages that came."""

    def __init__(self, answer: Callable[[dict], Any], metadata: dict | None = None, greeting: Any = None) -> None:
        self.answer, self.metadata, self.greeting = answer, metadata or {}, greeting
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self._server = serve(self._converse, "127.0.0.1", 0, compression=None, max_size=None)
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _converse(self, socket: Any) -> None:
        self.headers.append(dict(socket.request.headers))
        try:
            socket.send(frame(self.metadata) if self.greeting is None else self.greeting)
            for data in socket:
                self.requests.append(content(data))
                reply = self.answer(self.requests[-1])
                socket.send(
                    reply
                    if isinstance(reply, bytes)
                    else frame(reply if isinstance(reply, dict) else {"actions": reply})
                )
        except Fail as failure:
            socket.send(str(failure))
            socket.close(1011)
        except Drop:
            socket.socket.shutdown(SHUT_RDWR)
        except ConnectionClosed:
            return


@contextmanager
def openpi(answer: Callable[[dict], Any], metadata: dict | None = None, greeting: Any = None) -> Iterator[Openpi]:
    server = Openpi(answer, metadata, greeting)
    try:
        yield server
    finally:
        server.stop()
