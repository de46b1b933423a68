"""Messages between two processes: each end has a thread that reads, so nobody waits until the other listens.

A message is a kind, one byte, and a body of tensors and plain data, written in the way of a checkpoint
(`policies/runs/state_codec.py`): JSON, then safetensors. Nothing is pickled. Messages arrive once, whole and in the
order in which they were sent; what was sent before a process died is still read after its death.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import safetensors.torch

from ...policies.runs.state_codec import decode, encode, separate


class Message(NamedTuple):
    """A message between two processes: its kind in one byte, and its content, packed."""

    kind: bytes
    body: bytes

    def read(self) -> dict[str, Any]:
        return unpack(self.body)


class Line(Protocol):
    """A way to another process: a ``Connection`` of multiprocessing, or what stands for it on a cluster."""

    def send_bytes(self, data: Any, /) -> None: ...

    def recv_bytes(self) -> bytes: ...

    def close(self) -> None: ...


class Mailbox:
    """One end of a line. The reading thread calls ``arrived`` for each message and at the end, and ``lost`` once
    nothing more can arrive."""

    def __init__(
        self,
        connection: Line,
        lost: Callable[[], object] = lambda: None,
        arrived: Callable[[], object] = lambda: None,
    ) -> None:
        self._connection, self._lost, self._arrived = connection, lost, arrived
        self._messages: deque[Message] = deque()
        self._news, self._writing = threading.Condition(), threading.Lock()
        self.closed = False  # no message will come but those that are waiting
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def waiting(self, kind: bytes | None = None) -> int:
        """The number of messages that have come and were not taken, of one kind or in all."""
        with self._news:
            return len(self._messages) if kind is None else sum(message.kind == kind for message in self._messages)

    def send(self, kind: bytes, content: dict[str, Any] | None = None) -> None:
        """To a process that is gone nothing is sent; ``closed`` tells."""
        self.post(packed(kind, content))

    def stop(self) -> None:
        """The last word: the other end reads no further, and hangs up."""
        self.post(b"")

    def take(self, *, wait: bool) -> Message | None:
        """The oldest message; nothing where none has come yet, or, having waited, where none will come any more."""
        with self._news:
            if wait:
                self._news.wait_for(lambda: self._messages or self.closed)
            return self._messages.popleft() if self._messages else None

    def post(self, data: Any) -> None:
        """A message that is ``packed`` already."""
        try:
            with self._writing:
                self._connection.send_bytes(data)
        except OSError:
            pass  # the reading thread sees the same end, and says so

    def _read(self) -> None:
        try:
            while data := self._connection.recv_bytes():
                with self._news:
                    self._messages.append(Message(data[:1], data[1:]))
                    self._news.notify_all()
                self._arrived()
        except (EOFError, OSError):
            pass  # hung up, or killed
        with self._writing:
            self._connection.close()
        with self._news:
            self.closed = True
            self._news.notify_all()
        self._arrived()
        self._lost()


def packed(kind: bytes, content: dict[str, Any] | None = None) -> bytes:
    """A message as it travels."""
    return kind + (b"" if content is None else pack(content))


def pack(content: dict[str, Any]) -> bytes:
    """Nested state as bytes: the length of a JSON structure, the structure, and its tensors as safetensors."""
    structure, tensors = encode(content)
    head = json.dumps(structure).encode()
    return len(head).to_bytes(8, "little") + head + safetensors.torch.save(separate(tensors))


def unpack(body: bytes) -> dict[str, Any]:
    """The nested state that ``pack`` made these bytes of."""
    start = 8 + int.from_bytes(body[:8], "little")
    return decode(json.loads(body[8:start]), safetensors.torch.load(body[start:]))
