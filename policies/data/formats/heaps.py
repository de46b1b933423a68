"""A check of the heaps of an HDF5 file, in which texts and rows of any length lie.

The library (2.0.0, and those before it) reads a heap object by object. One of no size keeps it there for ever, deaf to
Ctrl-C, so heaps are looked through here first: wherever in the file their signature stands.
"""

from __future__ import annotations

import functools
import mmap
import struct
from pathlib import Path

from .bounds import refusal

SIGNATURE = b"GCOL\x01"
SIZES = {0: 14, 1: 14, 2: 10, 3: 10}  # version of the superblock -> where it says how many bytes a length has
HEAD, OBJECT = 16, struct.Struct("<HHIQ")  # of a heap; index, references, reserved, size
END = 1 << 64


def check_heaps(path: Path) -> None:
    """Refuse a file with a heap that cannot be read to its end."""
    about = path.stat()
    if not _are_sound(path, about.st_mtime_ns, about.st_size):
        raise refusal(path, "is damaged: it has a heap that cannot be read to its end")


@functools.lru_cache(16)
def _are_sound(path: Path, changed: int, size: int) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        version = content[8]
        if version not in SIZES or content[SIZES[version]] != 8:
            return False
        at = content.find(SIGNATURE)
        while at >= 0:
            if not _is_sound(content, at):
                return False
            at = content.find(SIGNATURE, at + 1)
    return True


def _is_sound(content: mmap.mmap, at: int) -> bool:
    place = at + HEAD
    end = min(at + int.from_bytes(content[at + 8 : at + HEAD], "little"), len(content))
    while place + OBJECT.size <= end:
        index, _, _, size = OBJECT.unpack_from(content, place)
        step = size if index == 0 else (OBJECT.size + (size + 7) // 8 * 8) % END
        if step == 0:
            return False
        place += step
    return True
