"""The schema of a request, fixed before a byte of it is read: names, dtypes and exact shapes.

`wire.unpack` builds whatever lists and maps a frame holds and examines the arrays in them. Untrusted
frames are read with a `Schema` instead: it walks the frame once, looks at the kind of each item before the item is
built, and stops at the first that is not right. Nothing nested is ever made, and the work grows with the number of
names, which is limited, and with the bytes of arrays, not with what a frame claims.

The result is good: arrays of the dtype and shape that the policy takes, writable, their own memory, finite.

A frame holds one row (arrays of exactly the shapes), or with ``batch`` = B so many rows of everything. A ``prompt`` is
a text, or with ``batch`` a list of B; it is needed where the policy reads instructions, and means nothing elsewhere.
Robots that were set up for a server of openpi send all that they observe: of other names than the schema's, arrays,
numbers and text may be there and mean nothing here, UNUSED of them and UNUSED_BYTES. A word of the protocol that this
server does not take (`noise`) is refused, because a client that sends it relies on it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np

from ..core.errors import BurnishError
from .codec import DTYPES, RANK

SLACK = 4096  # bytes of a frame besides the data of its arrays: names, headers, a prompt
PROMPT = 1024  # characters
UNUSED, UNUSED_BYTES = 32, 4 * 2**20  # names, and their data: four pictures of 640 x 480 pixels
NUMBERS = ("batch", "obs_seq")
RELIED_ON = ("noise", "seed")
LARGEST = 2**53  # beyond it other languages round whole numbers


class Code(StrEnum):
    """Why a request has no actions. The text frame of an answer begins with one of these words."""

    MALFORMED = "malformed"  # no MessagePack, or not of the form that openpi packs
    SCHEMA = "schema"  # other names, dtypes or shapes than announced
    VALUE = "value"  # not finite, or out of range
    BUSY = "busy"  # newer requests took its place: ask again
    FAILED = "failed"  # the policy could not answer
    UNAUTHORIZED = "unauthorized"
    CLOSING = "closing"


class Refusal(BurnishError):
    """Sent to the client as ``code: sentence``."""

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code

    def reply(self) -> str:
        return f"{self.code.value}: {self}"


@dataclass(frozen=True)
class Field:
    """One array of a request, without the axis of rows."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # as NumPy writes them, little-endian: those that may come
    becomes: str  # the one that comes out
    required: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * max(DTYPES[name].itemsize for name in self.dtypes)


@dataclass
class Request:
    """One request, decoded: observations of ``rows`` rows, and the facts of the protocol beside them."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # (rows, *shape)
    rows: int = 1
    single: bool = True  # the answer has no axis of rows
    obs_seq: int | None = None  # the asker's number, which comes back with the answer
    reset: bool = False
    prompts: list[str] = field(default_factory=list)  # one per row, where they are read


class Schema:
    """The fields that a server accepts, at most ``batch`` rows of them, and the check of a frame against them. With
    ``keys``, our name of a field: theirs, a field may come by either name. ``prompts``: instructions are read."""

    def __init__(
        self, fields: Mapping[str, Field], batch: int, keys: Mapping[str, str] | None = None, prompts: bool = False
    ) -> None:
        keys, self.prompts = keys or {}, prompts
        self.fields, self.batch, self._ours = dict(fields), batch, {theirs: ours for ours, theirs in keys.items()}
        taken = sorted({*self.fields, *self._ours} & {*NUMBERS, "reset", "prompt"})
        if taken:
            raise BurnishError(f"the names {taken} mean something to the protocol, so no observation can be called so")
        unknown = sorted(set(keys) - set(self.fields))
        if unknown:
            raise BurnishError(f"keys names {unknown}, but a request holds {sorted(self.fields)}")
        if len(self._ours) < len(keys) or set(self._ours) & set(self.fields):
            raise BurnishError(f"keys={dict(keys)} calls two observations by one name; each needs a name of its own")

    @property
    def limit(self) -> int:
        """Bytes of the largest frame that can be right."""
        text = 4 * PROMPT if self.prompts else 0  # a character has four bytes at most
        return self.batch * (text + sum(x.nbytes for x in self.fields.values())) + SLACK + UNUSED_BYTES

    @property
    def sha256(self) -> str:
        """Two servers of one schema take the same requests, but for the number of rows."""
        plain: dict[str, Any] = {name: [x.shape, x.dtypes, x.becomes, x.required] for name, x in self.fields.items()}
        plain |= self._ours | ({"prompt": "text"} if self.prompts else {})
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def read(self, frame: Any) -> Request:
        """The request in ``frame``, or a `Refusal`."""
        if not isinstance(frame, bytes):
            raise Refusal(Code.MALFORMED, "a frame of bytes is needed, and this one is text")
        if not 0 < len(frame) <= self.limit:
            raise Refusal(Code.MALFORMED, f"a frame of {len(frame)} bytes is none of 1 to {self.limit}")
        try:
            return self._request(_Walk(frame, self.batch))
        except (ValueError, TypeError, ArithmeticError, RecursionError, msgpack.UnpackException) as error:
            if isinstance(error, Refusal):
                raise
            raise Refusal(Code.MALFORMED, "the frame is no MessagePack, or is cut short") from error

    def _request(self, walk: _Walk) -> Request:
        """Names come in any order, so arrays are kept as they are until the number of rows is known."""
        request, raw, seen = Request(), {}, set()
        for _ in range(walk.map(len(self.fields) + len(NUMBERS) + 2 + UNUSED)):
            name: str = walk.take("str")
            name = self._ours.get(name, name)
            if name in seen:
                raise Refusal(Code.MALFORMED, f"the frame holds {name[:40]!r} twice")
            seen.add(name)
            if name in self.fields:
                raw[name] = walk.array()
            elif name == "prompt":
                request.prompts = walk.texts(self.batch) if self.prompts else [walk.take("str")]
            elif name == "reset":
                request.reset = walk.take("bool")
            elif name in NUMBERS:
                self._count(request, name, walk.take("int"))
            elif name in RELIED_ON or not walk.past():
                raise Refusal(Code.SCHEMA, f"{name[:40]!r} is not asked for; the names are {sorted(self.fields)}")
        walk.end()
        if request.reset and not raw:
            return request
        missing = sorted(name for name, x in self.fields.items() if x.required and name not in raw)
        if missing:
            raise Refusal(Code.SCHEMA, f"the request lacks {missing[0]!r}; it has {sorted(raw)}")
        request.arrays = {name: self._array(name, x, request) for name, x in raw.items()}
        if self.prompts:
            request.prompts = self._prompts_of(request)
        return request

    def _prompts_of(self, request: Request) -> list[str]:
        prompts = request.prompts * (request.rows if len(request.prompts) == 1 else 1)
        if len(prompts) != request.rows:
            raise Refusal(Code.SCHEMA, f"the policy reads a prompt for each of {request.rows} rows, not {len(prompts)}")
        if (longest := max(map(len, prompts))) > PROMPT:
            raise Refusal(Code.VALUE, f"a prompt of {longest} characters is longer than the {PROMPT} allowed")
        return prompts

    def _count(self, request: Request, name: str, number: int) -> None:
        if name == "obs_seq":
            if not 0 <= number < LARGEST:
                raise Refusal(Code.VALUE, "obs_seq must be at least 0 and below 2^53")
            request.obs_seq = number
        else:
            if not 1 <= number <= self.batch:
                raise Refusal(Code.VALUE, f"batch={number} must be at least 1, and at most {self.batch}")
            request.rows, request.single = number, False

    def _array(self, name: str, raw: _Raw, request: Request) -> np.ndarray:
        known = self.fields[name]
        if raw.dtype not in known.dtypes:
            raise Refusal(Code.SCHEMA, f"{name!r} is {raw.dtype[:20]!r}, but {' or '.join(known.dtypes)} is needed")
        needed = known.shape if request.single else (request.rows, *known.shape)
        dtype = DTYPES[raw.dtype]
        if raw.shape != needed:
            raise Refusal(Code.SCHEMA, f"{name!r} has shape {str(raw.shape)[:60]}, but {needed} is needed")
        if len(raw.data) != math.prod(needed) * dtype.itemsize:
            raise Refusal(Code.MALFORMED, f"{name!r} has {len(raw.data)} bytes, which is not its shape of {raw.dtype}")
        value = np.frombuffer(raw.data, dtype).reshape(request.rows, *known.shape)
        with np.errstate(over="ignore"):
            value = value.astype(known.becomes)  # a copy; what is too large for it becomes infinite
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise Refusal(Code.VALUE, f"{name!r} is not finite")
        return value


@dataclass(frozen=True)
class _Raw:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


# The first byte of an item of MessagePack says what it is.
_KINDS = ["?"] * 256
for _kind, _codes in {
    "int": (*range(0x00, 0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)),
    "map": (*range(0x80, 0x90), 0xDE, 0xDF),
    "list": (*range(0x90, 0xA0), 0xDC, 0xDD),
    "str": (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB),
    "bool": (0xC2, 0xC3),
    "bin": (0xC4, 0xC5, 0xC6),
    "float": (0xCA, 0xCB),
}.items():
    for _code in _codes:
        _KINDS[_code] = _kind


class _Walk:
    """Through a frame, item by item. ``take`` builds only what holds nothing else."""

    def __init__(self, frame: bytes, rows: int) -> None:
        self._frame, longest = frame, max(RANK, rows)
        self._items = msgpack.Unpacker(
            max_buffer_size=len(frame), max_str_len=PROMPT, max_array_len=longest, max_ext_len=0, strict_map_key=False
        )
        self._items.feed(frame)

    def kind(self) -> str:
        at = self._items.tell()
        if at >= len(self._frame):
            raise Refusal(Code.MALFORMED, "the frame is cut short")
        return _KINDS[self._frame[at]]

    def take(self, kind: str) -> Any:
        self._need(kind)
        return self._items.unpack()

    def map(self, most: int) -> int:
        self._need("map")
        count = self._items.read_map_header()
        if count > most:
            raise Refusal(Code.MALFORMED, f"a map of {count} names, where at most {most} can be")
        return count

    def array(self) -> _Raw:
        """An array or a scalar as openpi packs them, or a whole number, which is a scalar too."""
        if self.kind() == "int":
            return _Raw("<i8", (), np.asarray(self.take("int"), np.int64).tobytes())
        found: dict[bytes, Any] = {}
        for _ in range(self.map(4)):
            key = self.take("bin")
            if key in (b"__ndarray__", b"__npgeneric__"):
                self.take("bool")
                found[b"kind"] = key
            elif key == b"dtype":
                found[key] = self.take("str")
            elif key == b"shape":
                found[key] = self._shape()
            elif key == b"data":
                found[key] = self.take(kind if (kind := self.kind()) in ("int", "float") else "bin")
            else:
                raise Refusal(Code.MALFORMED, f"an array with an entry {key[:20]!r}")
        dtype, data, shape = found.get(b"dtype"), found.get(b"data"), found.get(b"shape")
        if dtype in DTYPES and found.get(b"kind") == b"__npgeneric__" and isinstance(data, (int, float)):
            return _Raw(dtype, (), np.asarray(data, DTYPES[dtype]).tobytes())
        if found.get(b"kind") != b"__ndarray__" or not isinstance(data, bytes) or dtype is None or shape is None:
            raise Refusal(Code.MALFORMED, "an array needs its data, its dtype and its shape")
        return _Raw(dtype, shape, data)

    def texts(self, most: int) -> list[str]:
        """A text, or a list of some."""
        if self.kind() != "list":
            return [self.take("str")]
        count = self._items.read_array_header()
        if count > most:
            raise Refusal(Code.MALFORMED, f"a list of {count} prompts, where at most {most} can be")
        return [self.take("str") for _ in range(count)]

    def past(self) -> bool:
        """An array, a number or a text that is not used. False where it is something else."""
        kind = self.kind()
        if kind != "map":
            return kind in ("int", "float", "bool", "str") and self.take(kind) is not None
        try:
            self.array()
        except Refusal:
            return False
        return True

    def _shape(self) -> tuple[int, ...]:
        self._need("list")
        rank = self._items.read_array_header()
        if rank > RANK:
            raise Refusal(Code.MALFORMED, f"an array of {rank} dimensions, where at most {RANK} can be")
        return tuple(self.take("int") for _ in range(rank))

    def end(self) -> None:
        if self._items.tell() != len(self._frame):
            raise Refusal(Code.MALFORMED, "the frame goes on after its end")

    def _need(self, kind: str) -> None:
        found = self.kind()
        if found != kind:
            raise Refusal(Code.MALFORMED, f"a {kind} is needed where the frame holds a {found}")
