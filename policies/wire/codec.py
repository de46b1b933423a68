"""The frames of openpi's websocket protocol: MessagePack with NumPy arrays in it, byte for byte as openpi packs them.

openpi is the server of pi0 (Black et al. 2024, arXiv 2410.24164); servers of other policies have adopted its protocol.

    array     {b"__ndarray__": true, b"data": bytes in C order, b"dtype": "<f4", b"shape": [2, 3]}
    scalar    {b"__npgeneric__": true, b"data": 1.5, b"dtype": "<f4"}

``np.float64`` and ``np.str_`` are Python's own float and str, and travel as such.

**Departures.** A frame that comes in is believed only after it was examined. openpi makes an array of whatever dtype
and shape a frame names, and a frame that names objects makes pointers of its bytes. Here dtypes are those of a list
(bool, integers, floats), sizes must be those of the data, and arrays are copies, writable and in the machine's byte
order.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from ..core.errors import BurnishError, reason

LIMIT = 64 * 2**20  # bytes of a frame; 400 pictures of 224 x 224 pixels
# Of one list or map: large things are arrays, and a list of nothing costs eight bytes for each of its entries.
ENTRIES = 2**16
RANK = 16

_CODES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
DTYPES = {dtype.str: dtype for code in _CODES for dtype in (np.dtype("<" + code), np.dtype(">" + code))}


def pack(value: Any, limit: int = LIMIT) -> bytes:
    """Dicts, lists, text, bytes, numbers, NumPy arrays and scalars."""
    try:
        frame: Any = msgpack.packb(value, default=_encoded)
    except (TypeError, OverflowError) as error:
        raise BurnishError(f"this cannot be sent as MessagePack: {error}") from error
    if len(frame) > limit:
        raise BurnishError(
            f"a frame of {len(frame)} bytes exceeds the limit of {limit}; send fewer rows or smaller pictures"
        )
    return frame


def unpack(frame: Any, limit: int = LIMIT) -> Any:
    """The object that a frame of at most ``limit`` bytes holds; a malformed one is a BurnishError."""
    if not isinstance(frame, bytes):
        raise BurnishError("a frame of bytes is needed, and this one is text")
    if len(frame) > limit:
        raise BurnishError(f"a frame of {len(frame)} bytes exceeds the limit of {limit}")
    sizes = {"max_array_len": ENTRIES, "max_map_len": ENTRIES, "max_ext_len": 0}
    try:
        return msgpack.unpackb(frame, object_hook=_decoded, **sizes)
    except BurnishError:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError, msgpack.UnpackException) as error:
        raise BurnishError(f"a frame is malformed: {reason(error)}") from error


def _encoded(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"a {type(value).__name__} has no form there")
    text = value.dtype.str
    if text not in DTYPES:
        raise TypeError(f"arrays of {value.dtype} have no form there")
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": text, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": text}


def _decoded(item: dict[Any, Any]) -> Any:
    if b"__ndarray__" in item:
        return _array(_dtype(item), item.get(b"data"), item.get(b"shape"))
    if b"__npgeneric__" in item:
        number = item.get(b"data")
        if not isinstance(number, (bool, int, float)):
            raise BurnishError(f"a frame holds a scalar that is no number but a {type(number).__name__}")
        return _dtype(item).type(number)
    return item


def _dtype(item: dict[Any, Any]) -> np.dtype[Any]:
    text = item.get(b"dtype")
    if not isinstance(text, str) or text not in DTYPES:
        raise BurnishError(
            f"a frame holds an array of dtype {str(text)[:40]!r}; only bool, integers and floats may come"
        )
    return DTYPES[text]


def _array(dtype: np.dtype[Any], data: Any, shape: Any) -> np.ndarray:
    counted = isinstance(shape, list) and len(shape) <= RANK and all(type(n) is int and 0 <= n <= LIMIT for n in shape)
    if not counted or not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        size = len(data) if isinstance(data, bytes) else 0
        raise BurnishError(f"a frame holds an array whose {size} bytes are not the shape {str(shape)[:60]} of {dtype}")
    if dtype == np.bool_:
        return np.ndarray(shape, np.uint8, data).astype(bool)  # a truth value of 2 would be neither true nor false
    return np.ndarray(shape, dtype, data).astype(dtype.newbyteorder("="))
