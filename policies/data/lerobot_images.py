"""Pictures as PNG inside parquet cells: ``struct<bytes, path>``, as LeRobot stores what has dtype "image".

**Departures.** The PNGs are written here and not by Pillow, which tries five filters on every row; one filter for
all rows (each is stored as its difference to the row above) and zlib at its fastest are three to four times quicker and
no larger on rendered pictures, so that encoding does not dominate collection. Any PNG or JPEG is read, of no more bytes
than its pixels need, and nothing that Pillow would hand to another program.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from ..core.errors import BurnishError

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # channels -> Pillow's mode
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # channels -> PNG's number
DEEP = ("I", "F")  # how the names of modes of 16 and 32 bits begin, of which 8 bits would show white
FORMATS = ("PNG", "JPEG")
HEAD = 1 << 16  # bytes that a file may have beside its pixels: times, colour profiles
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_UP = 2  # PNG's number of the filter


def encode(frames: np.ndarray) -> pa.StructArray:
    """(F, C, H, W) uint8 -> cells. Equal neighbours (goals, still cameras) are compressed once."""
    encoded: list[bytes] = []
    for number, frame in enumerate(frames):
        if number > 0 and np.array_equal(frame, frames[number - 1]):
            encoded.append(encoded[-1])
        else:
            encoded.append(_png(frame))
    paths = pa.nulls(len(encoded), pa.string())
    return pa.StructArray.from_arrays([pa.array(encoded, pa.binary()), paths], names=["bytes", "path"])


def decode(cells: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Cells -> (F, C, H, W) uint8; ``shape`` is (C, H, W)."""
    frames, largest = np.empty((len(cells), *shape), np.uint8), 2 * int(np.prod(shape)) + HEAD
    mode, size = MODES[shape[0]], (shape[2], shape[1])
    previous = None
    for row, cell in enumerate(cells):
        data = cell.get("bytes") if isinstance(cell, dict) else None
        if data is not None and data == previous:
            frames[row] = frames[row - 1]
            continue
        previous = data
        if data is not None and len(data) > largest:
            raise BurnishError(f"an image of {len(data)} bytes instead of {largest} at most in row {row}")
        try:
            with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
                image = Image.open(io.BytesIO(data or b""), formats=FORMATS)
            if image.size != size:  # before a pixel is unpacked
                raise BurnishError(f"{image.size} instead of {size} pixels in row {row}")
            if image.mode.startswith(DEEP):
                raise BurnishError(f"an image of more than 8 bits a channel, as of depths, in row {row}")
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        except BurnishError:
            raise
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BurnishError(f"no readable image in row {row}") from error
        frames[row] = pixels if shape[0] == 1 else pixels.transpose(2, 0, 1)
    return frames


def _png(frame: np.ndarray) -> bytes:
    channels, height, width = frame.shape
    pixels = frame.transpose(1, 2, 0).reshape(height, -1)
    rows = np.empty((height, 1 + width * channels), np.uint8)
    rows[:, 0] = _UP
    rows[0, 1:] = pixels[0]
    np.subtract(pixels[1:], pixels[:-1], out=rows[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    body = zlib.compress(rows.data, 1)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))
