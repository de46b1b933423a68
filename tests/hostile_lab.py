"""Strangers at the door of the policy server: seeded frames that know its schema, and connections that misbehave.

It imports nothing of ours and speaks through bare sockets, because a client library refuses to say most of this. As a
program (``python hostile_lab.py URL SEED CROWD``) it reads a count from each line of its input, misbehaves as often,
and answers with one line of JSON: how often each kind was tried, what came back, and the longest wait for an end.
"""

from __future__ import annotations

import base64
import collections
import json
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgpack
import numpy as np

BINARY, TEXT, CONTINUED, CLOSE, PING = 2, 1, 0, 8, 9
ROWS, COLUMNS = 2, 3  # of "state", the one observation of the server under attack
PATIENCE_S = 5.0


def array(value: np.ndarray | None = None, **changes: Any) -> dict[bytes, Any]:
    value = np.zeros((ROWS, COLUMNS), np.float32) if value is None else value
    item = {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": list(value.shape)}
    return item | {key.encode(): x for key, x in changes.items()}


def packed(value: Any) -> bytes:
    frame: Any = msgpack.packb(value)
    return frame


def good() -> bytes:
    return packed({"state": array(), "prompt": "go on"})


# ---- frames: (opcode, payload) from a generator of numbers ----

Made = tuple[int, bytes]


def noise(source: np.random.Generator) -> Made:
    return BINARY, source.bytes(int(source.integers(0, 200)))


def truncated(source: np.random.Generator) -> Made:
    return BINARY, good()[: int(source.integers(0, len(good())))]


def damaged(source: np.random.Generator) -> Made:
    data = bytearray(good())
    for place in source.integers(len(data), size=int(source.integers(1, 6))):
        data[place] = source.integers(256)
    return BINARY, bytes(data)


def of(values: list[Any]) -> Callable[[np.random.Generator], Made]:
    frames = [value if isinstance(value, bytes) else packed(value) for value in values]
    return lambda source: (BINARY, frames[source.integers(len(frames))])


DTYPES = [
    "|O",
    "O",
    "<c8",
    "|V4",
    "<U2",
    "|S4",
    "<M8[s]",
    "f4,f4",
    ",".join(["f4"] * 200),
    "",
    "nonsense",
    ">f4",
    "<i4",
]
SHAPES = [
    [10**12, 0], [0], [2**62, 4], [-1, 3], [-2, -3], [2**40, 2**40], [3, 2], [6], [1] * 17, [], [True, 3], [2.0, 3.0],
    "23", None, {b"a": 1}, [[2], 3], [2**64 - 1, 2], [2, 3, 1],
]  # fmt: skip
WRONG = ["x", -1, array(), None]
TOO_MUCH = [np.nan, np.inf, -np.inf, 1e300]


def deep(source: np.random.Generator) -> Made:
    opener = (b"\x91", b"\x81\xa1x", b"\x81\xc4\x01x", b"\x81\x91")[source.integers(4)]
    prefix = (b"", b"\x81\xa5state", b"\x81\xa5state\x84\xc4\x05shape")[source.integers(3)]
    return BINARY, prefix + opener * int(source.integers(100, 900)) + b"\x00"


def claims(source: np.random.Generator) -> Made:
    """Four thousand millions of something, and then nothing."""
    head = (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")[source.integers(5)]
    return BINARY, (b"", b"\x81\xa5state")[source.integers(2)] + head + b"\xff\xff\xff\xff" + source.bytes(8)


def not_finite(source: np.random.Generator) -> Made:
    value = np.zeros((ROWS, COLUMNS))
    value[source.integers(ROWS), source.integers(COLUMNS)] = TOO_MUCH[source.integers(len(TOO_MUCH))]
    return BINARY, packed({"state": array(value)})


def oversize(source: np.random.Generator) -> Made:
    return BINARY, packed({"state": array(), "junk": bytes(int(source.integers(20_000, 300_000)))})


def text(source: np.random.Generator) -> Made:
    return TEXT, (b'{"state": 1}', b"hello", b"", b"\xff\xfe", b"\xed\xa0\x80")[source.integers(5)]


def wrong_names(source: np.random.Generator) -> Made:
    names = [{}, {"State": array()}, {"state": array(), "x": 1}, {f"k{i}": i for i in range(40)}, {1: 2}, {b"state": 1}]
    twice = b"\x82" + 2 * (b"\xa5state" + packed(array()))
    values = [twice, *map(packed, names), packed({"state": array(), "prompt": "x" * 3000})]
    return BINARY, values[source.integers(len(values))]


FRAMES: dict[str, Callable[[np.random.Generator], Made]] = {
    "noise": noise,
    "truncated": truncated,
    "damaged": damaged,
    "dtypes": of([{"state": array(dtype=dtype)} for dtype in [*DTYPES, 3, None, b"<f4"]]),
    "shapes": of([{"state": array(shape=shape)} for shape in SHAPES]),
    "empty of 1e12": of([{"state": array(shape=shape, data=b"")} for shape in ([10**12, 0], [0, 10**12], [0])]),
    "data": of([{"state": array(data=data)} for data in (b"", b"\0" * 23, "text", None, [0] * 8, 7, 1.5)]),
    "types": of([{"state": x} for x in (3, "x", None, [0.0] * 6, {}, {b"__ndarray__": True}, True, 1.5, b"123")]),
    "top": of([3, None, [1, 2], "x", b"x", 1.5, True, [{"state": array()}]]),
    "deep": deep,
    "claims": claims,
    "not finite": not_finite,
    "oversize": oversize,
    "text": text,
    "names": wrong_names,
    "batch": of([{"state": array(), "batch": x} for x in (0, -1, 65, 2**63, True, 1.0, "1", None, 5)]),
    "extensions": of([{"state": array(), k: x} for k in ("noise", "seed", "obs_seq", "reset") for x in WRONG]),
    "extension type": of([{"state": msgpack.ExtType(5, b"code")}, msgpack.ExtType(1, b"x" * 100)]),
}  # fmt: skip


# ---- connections ----


def framed(opcode: int, payload: bytes, *, final: bool = True, masked: bool = True, reserved: int = 0) -> bytes:
    size, mask = len(payload), 0x80 if masked else 0
    length = bytes([mask | size]) if size < 126 else bytes([mask | (126 if size < 2**16 else 127)])
    length += b"" if size < 126 else struct.pack(">H", size) if size < 2**16 else struct.pack(">Q", size)
    # A mask of zeroes is a mask, and leaves the payload as it is.
    return bytes([(0x80 if final else 0) | reserved | opcode]) + length + (b"\0" * 4 if masked else b"") + payload


class Stranger:
    """``hang_s`` is the longest wait for an end that had to come at once."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        self.address = (parts.hostname, parts.port)
        self.source = np.random.default_rng(seed)
        self.tried: collections.Counter[str] = collections.Counter()
        self.came: collections.Counter[str] = collections.Counter()
        self.hang_s, self.slowest = 0.0, ""
        self._line: socket.socket | None = None
        self._kept: collections.deque[socket.socket] = collections.deque()

    def misbehave_often(self, count: int) -> None:
        self.hang_s = 0.0
        for _ in range(count):
            self.misbehave()

    def misbehave(self) -> None:
        names = [*FRAMES, *CONNECTIONS]
        name = names[self.source.integers(len(names))]
        self.tried[name] += 1
        begun = time.monotonic()
        try:
            came = self.frame(*FRAMES[name](self.source)) if name in FRAMES else CONNECTIONS[name](self)
        except TimeoutError:
            came = "nothing"
        except OSError:
            came = "cut off"
        self.came[came] += 1
        if time.monotonic() - begun > self.hang_s:
            self.hang_s, self.slowest = time.monotonic() - begun, name

    def frame(self, opcode: int, payload: bytes) -> str:
        """On the line of the frame before, as long as it holds."""
        if self._line is None:
            self._line = self.inside()
        try:
            self._line.sendall(framed(opcode, payload))
            return self.outcome(self._line)
        except OSError:
            self.hang_up()
            raise

    def hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def dial(self) -> socket.socket:
        return socket.create_connection(self.address, PATIENCE_S)

    def inside(self) -> socket.socket:
        """A line on which the server has greeted."""
        line = self.dial()
        line.sendall(HELLO)
        head = b""
        while b"schema_sha256" not in head:  # somewhere in the last part of the greeting
            more = line.recv(65536)
            if not more:
                line.close()
                raise ConnectionError("refused")
            head += more
        return line

    def outcome(self, line: socket.socket) -> str:
        """What came: a refusal (its code), actions, or the end."""
        data = b""
        while more := line.recv(65536):
            data += more
            for mark in CODES:
                if mark in data:
                    return "a traceback" if b"Traceback" in data else mark.decode().strip(": ")
            if b"infer_ms" in data:
                return "actions"
        if line is self._line:
            self.hang_up()
        return "closed"

    def keep(self, line: socket.socket) -> str:
        """Left open, a few at a time: what a server must bear without end."""
        self._kept.append(line)
        if len(self._kept) > 2:
            self._kept.popleft().close()
        return "left open"

    def close(self) -> None:
        self.hang_up()
        while self._kept:
            self._kept.popleft().close()


CODES = [f"{code}: ".encode() for code in ("malformed", "schema", "value", "failed", "busy", "unauthorized")]
HELLO = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: " + base64.b64encode(b"0123456789abcdef") + b"\r\n\r\n"
)
GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 1000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,  # a TLS greeting
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"\x00" * 500,
    HELLO.replace(b"websocket", b"websocket, \xff\xfe"),
    HELLO.replace(b"Version: 13", b"Version: 99999999999999"),
    HELLO.replace(b"Host: x", b"Host: x\r\nOrigin: http://evil.example"),
    HELLO.replace(b"Host: x", b"Host: x\r\nAuthorization: \xff\xfe\r\nAuthorization: Basic eA=="),
]


def garbage(stranger: Stranger) -> str:
    with stranger.dial() as line:
        line.sendall(GARBAGE[stranger.source.integers(len(GARBAGE))])
        with suppress(OSError):
            line.shutdown(socket.SHUT_WR)
        return stranger.outcome(line)


def half_open(stranger: Stranger) -> str:
    """Connects and says nothing, or half a greeting: the slow loris."""
    line = stranger.dial()
    line.sendall(HELLO[: int(stranger.source.integers(0, len(HELLO) - 4))])
    return stranger.keep(line)


def half_frame(stranger: Stranger) -> str:
    """Begins a frame, and never ends it."""
    line = stranger.dial()
    line.sendall(HELLO)
    line.recv(65536)
    line.sendall(framed(BINARY, good())[: int(stranger.source.integers(1, len(good())))])
    return stranger.keep(line)


def gone(stranger: Stranger) -> str:
    """Asks for something right, and hangs up without waiting; with a reset instead of an end."""
    with stranger.inside() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.sendall(framed(BINARY, good()))
    return "hung up"


def protocol(stranger: Stranger) -> str:
    """What the library must refuse: no mask, reserved bits and codes, a size beyond everything, a bad close."""
    bad = [
        framed(BINARY, good(), masked=False),
        framed(BINARY, good(), reserved=0x40),
        framed(3, b"x"),
        framed(PING, b"x" * 200),
        framed(PING, b"x", final=False),
        framed(CONTINUED, b"x"),
        framed(CLOSE, b"\x00"),
        framed(CLOSE, struct.pack(">H", 1005)),
        b"\x82\xff" + b"\xff" * 8 + b"\0" * 4,
        b"\x82\xff" + struct.pack(">Q", 2**40) + b"\0" * 4 + b"x" * 100,
    ]
    with stranger.inside() as line:
        line.sendall(bad[stranger.source.integers(len(bad))])
        return stranger.outcome(line)


def chatter(stranger: Stranger) -> str:
    """Pings, or fragments of nothing, and never a message."""
    part = framed(PING, b"") if stranger.source.integers(2) else framed(CONTINUED, b"", final=False)
    with stranger.inside() as line:
        line.sendall(framed(BINARY, b"", final=False) + part * 200)
        return stranger.outcome(line)


CONNECTIONS: dict[str, Callable[[Stranger], str]] = {
    "garbage": garbage,
    "half open": half_open,
    "half a frame": half_frame,
    "gone": gone,
    "protocol": protocol,
    "chatter": chatter,
}


def main(url: str, seed: str, crowd: str) -> None:
    strangers = [Stranger(url, 1000 * int(seed) + i) for i in range(int(crowd))]
    for line in sys.stdin:
        count = -(-int(line) // len(strangers))
        with ThreadPoolExecutor(len(strangers)) as pool:
            list(pool.map(Stranger.misbehave_often, strangers, [count] * len(strangers)))
        report = {
            "tried": sum((x.tried for x in strangers), collections.Counter()),
            "came": sum((x.came for x in strangers), collections.Counter()),
            "hang_s": max((x.hang_s, x.slowest) for x in strangers),
        }
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    for stranger in strangers:
        stranger.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
