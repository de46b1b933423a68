"""npz files that may be untrusted: a zip of arrays, read without pickle and without a file being unpacked on disk."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from ...core.errors import BurnishError, reason
from ...core.spec import MOST_KEYS
from .bounds import Budget, kept_as, plain_name, refusal, regular

SIGNATURE, EMPTY = b"PK\x03\x04", b"PK\x05\x06"  # of a zip file, and of one that holds nothing
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
ENCRYPTED = 1  # a bit among the flags of a member


@contextmanager
def opened(path: Path) -> Iterator[dict[tuple[str, ...], Array]]:
    """The arrays of the file at ``path``, by their names, whose parts are divided by '/'."""
    try:
        with zipfile.ZipFile(regular(path)) as archive:
            yield _arrays(path, archive)
    except BurnishError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise refusal(path, f"is damaged or truncated ({reason(error)})") from error


def _arrays(path: Path, archive: zipfile.ZipFile) -> dict[tuple[str, ...], Array]:
    members, budget = archive.infolist(), Budget(path, copies=3)  # as they are stored, as float32, and as episodes
    if len(members) > MOST_KEYS:
        raise refusal(path, f"holds {len(members)} arrays, and {MOST_KEYS} are read at most")
    found: dict[tuple[str, ...], Array] = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        key = tuple(plain_name(path, part) for part in name.split("/"))
        if name == member.filename or key in found:
            raise refusal(path, f"holds {member.filename!r:.80}, which is no array or there twice")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & ENCRYPTED:
            raise refusal(path, f"holds {name!r} packed otherwise than by numpy.savez or numpy.savez_compressed")
        found[key] = Array(path, archive, member, name, budget)
    return found


class Array:
    """An array in the zip, of which only the header was read."""

    def __init__(
        self, path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, budget: Budget
    ) -> None:
        self._path, self._archive, self._member, self.name, self._budget = path, archive, member, name, budget
        with archive.open(member) as file:
            self.shape, self.dtype = self._header(file)

    def read(self, first: int = 0, kind: type | None = None) -> np.ndarray:
        """The rows from ``first`` on, as they are kept in memory, or as ``kind``."""
        dtype = kept_as(self._path, self.name, self.dtype) if kind is None else np.dtype(kind)
        self._budget.take(self.name, self.shape, self.dtype.itemsize)
        with self._archive.open(self._member) as file, np.errstate(over="ignore", invalid="ignore"):
            return np.atleast_1d(npy.read_array(file, allow_pickle=False))[first:].astype(dtype)

    def _header(self, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
        version = npy.read_magic(file)
        if version not in HEADERS:
            raise refusal(
                self._path, f"has {self.name!r} in version {version} of numpy's format, and 1.0 and 2.0 are read"
            )
        shape, _, dtype = HEADERS[version](file)
        if dtype.hasobject:
            raise refusal(
                self._path, f"has {self.name!r} of Python objects, which are stored as pickles and never read"
            )
        return shape, dtype
