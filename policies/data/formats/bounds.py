"""Bounds of what is read out of a dataset that may be untrusted: plain numbers under plain names, no more than fit.

A small file can promise any number of numbers, because what repeats is packed, and because it may name the same array
many times. So each array is counted before it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ...core.errors import BurnishError
from ...core.spec import MOST_AXES
from ...runs.manifest import memory

PACKED = 1100  # bytes that one byte of a file may become: deflate reaches 1032
ROOM = 1 << 26  # bytes that any file may become


def refusal(path: Path, what: str) -> BurnishError:
    """The error that a dataset cannot be read, in one sentence."""
    return BurnishError(f"the dataset {path} {what}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of code that does not know the dataset say which one it is."""
    try:
        yield
    except BurnishError as error:
        raise refusal(path, f"cannot be used: {error}") from error


def regular(path: Path) -> Path:
    """``path`` where it is a file: to open a pipe or a device may wait, or read, for ever."""
    if not path.is_file():
        raise refusal(path, "is no file")
    return path


def plain_name(path: Path, name: str | bytes) -> str:
    """A name in a file, once it is one that can stand in a path and on a terminal; bytes are no text."""
    if isinstance(name, bytes) or not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise refusal(path, f"has an array or a group with the name {name!r:.80}, which could lead elsewhere")
    return name


def kept_as(path: Path, name: str, dtype: np.dtype) -> np.dtype:
    """The type in which an array is kept in memory: pictures and flags as they are, other numbers as float32."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise refusal(path, f"has {name!r} of type {dtype}, and plain numbers are read only")
    return dtype if dtype in (np.uint8, np.bool_) else np.dtype(np.float32)


class Budget:
    """Bytes that one file may become in memory. ``copies`` counts those of an array that is kept beside what is made
    of it."""

    def __init__(self, path: Path, copies: int = 1) -> None:
        self._path, self.copies, self._taken = path, copies, 0
        self._most = PACKED * path.stat().st_size + ROOM

    def take(self, name: str, shape: tuple[int, ...], size: int) -> None:
        """An array of ``size`` bytes for each number, about to be read."""
        if len(shape) > MOST_AXES or min(shape, default=0) < 0:
            raise refusal(self._path, f"has {name!r} of shape {shape}, and {MOST_AXES} axes are read at most")
        self._taken += math.prod(shape) * size
        if self._taken > self._most:
            raise refusal(self._path, f"promises {self._taken:.3g} bytes with {name!r}, which its size cannot hold")
        if self.copies * self._taken > memory() // 2:
            raise refusal(
                self._path,
                f"promises more than {self._taken:.3g} bytes, more than half of the {memory() / 2**30:.3g} GiB of "
                "memory that there are; take a machine with more, write a part of it as a file of its own or, if each "
                "episode is a group, name some: burnish data convert FILE out=... episodes=0:50",
            )
