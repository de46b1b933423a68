"""HDF5 files that may be untrusted: groups, and arrays of numbers that lie in the file itself.

HDF5 can name other files (links, external storage, virtual datasets), load programs (filters that are plug-ins) and
unpack a chunk to far more than it declares. Nothing of that is followed: an array is examined before it is read.
"""

from __future__ import annotations

import importlib
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BurnishError, reason
from ...core.spec import MOST_AXES, MOST_KEYS
from .bounds import PACKED, ROOM, Budget, kept_as, plain_name, refusal, regular
from .heaps import check_heaps

SIGNATURE = b"\x89HDF\r\n\x1a\n"
GZIP, FILTERS = 1, {1: "gzip", 2: "shuffle", 3: "fletcher32"}  # numbers of filters that are part of HDF5
LARGEST_TEXT = 1 << 24  # bytes of an attribute
MOST_WORDS = 100_000  # in a list, each of up to a kilobyte
CHECKSUM = 4  # bytes that fletcher32 adds to a chunk
REWRITE = "rewrite it with `h5repack -f GZIP=4`"


@contextmanager
def opened(path: Path, copies: int = 1) -> Iterator[Group]:
    """The root of the file at ``path``. Errors of HDF5 become one sentence."""
    try:
        h5py: Any = importlib.import_module("h5py")
    except ImportError as error:
        raise refusal(path, "is an HDF5 file, and those need h5py; pip install 'burnish[hdf5]'") from error
    try:
        with h5py.File(regular(path), "r", locking="best-effort") as file:
            yield Group(h5py, file, path, Budget(path, copies))
    except BurnishError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError, MemoryError, zlib.error) as error:
        raise refusal(path, f"is damaged or truncated ({reason(error)})") from error


class Group:
    """A group of an open file; iterated it gives the names of its members."""

    def __init__(self, h5py: Any, node: Any, path: Path, budget: Budget) -> None:
        self._h5py, self._node, self.path, self._budget = h5py, node, path, budget

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __contains__(self, name: str) -> bool:
        return self._node.get(name, getlink=True) is not None

    def __getitem__(self, name: str) -> Group | Array:
        plain_name(self.path, name)
        link, h5py = self._node.get(name, getlink=True), self._h5py
        if link is None:
            raise refusal(self.path, f"has no {name!r} in {self._node.name}")
        if not isinstance(link, h5py.HardLink):
            raise refusal(self.path, f"has {name!r} as a link to another place; put there what it leads to")
        node = self._node[name]
        if isinstance(node, h5py.Group):
            return Group(h5py, node, self.path, self._budget)
        if isinstance(node, h5py.Dataset):
            return Array(h5py, node, self.path, self._budget)
        raise refusal(self.path, f"has {name!r}, which is neither a group nor an array")

    def group(self, name: str) -> Group:
        """The member ``name``, which must be a group."""
        found = self[name]
        if not isinstance(found, Group):
            raise refusal(self.path, f"has {name!r} as an array, and a group is needed")
        return found

    def array(self, name: str) -> Array:
        """The member ``name``, which must be an array."""
        found = self[name]
        if not isinstance(found, Array):
            raise refusal(self.path, f"has {name!r} as a group, and one array is needed")
        return found

    def numbered(self, prefix: str) -> dict[int, str]:
        """Number -> name of the members ``prefix0``, ``prefix1``, ..., in the order of their numbers."""
        found = [re.fullmatch(re.escape(prefix) + r"(\d{1,9})", name, re.ASCII) for name in self]
        return dict(sorted((int(match[1]), match[0]) for match in found if match))

    def leaves(self, name: str) -> dict[tuple[str, ...], Array]:
        """The arrays at ``name`` and below, by the names that lead there from it; a single array has no name."""
        found: dict[tuple[str, ...], Array] = {}
        self._collect((), name, found)
        return found

    def _collect(self, path: tuple[str, ...], name: str, found: dict[tuple[str, ...], Array]) -> None:
        member = self[name]
        if isinstance(member, Array):
            found[path] = member
        else:
            for inner in member:
                member._collect((*path, inner), inner, found)
        if len(found) > MOST_KEYS or len(path) > MOST_AXES:
            raise refusal(self.path, f"has more than {MOST_KEYS} arrays in {name!r}, or groups that are nested deeper")

    def text(self, name: str) -> str | None:
        """The text of an attribute, None without one."""
        found = self._attribute(name)
        if found is None:
            return None
        if self._h5py.check_string_dtype(found.dtype) is None or found.get_storage_size() > LARGEST_TEXT:
            raise refusal(self.path, f"has an attribute {name!r} that is no text")
        check_heaps(self.path)
        value = self._node.attrs[name]
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def number(self, name: str) -> int | None:
        """The whole number of an attribute, None without one that fits into 64 bits."""
        found = self._attribute(name)
        value = 1 << 63 if found is None or found.dtype.kind not in "iu" else int(self._node.attrs[name])
        return value if abs(value) < 1 << 63 else None

    def _attribute(self, name: str) -> Any:
        if name not in self._node.attrs:
            return None
        found = self._node.attrs.get_id(name)
        if found.shape != ():
            raise refusal(self.path, f"has an attribute {name!r} of many values, and one is needed")
        return found


class Array:
    """An array of an open file, examined and not yet read."""

    def __init__(self, h5py: Any, node: Any, path: Path, budget: Budget) -> None:
        self._node, self._path, self._budget, self.name = node, path, budget, str(node.name)
        plan = node.id.get_create_plist()
        if node.is_virtual or plan.get_external_count():
            raise self._refusal("in other files; put its values into this one")
        if node.shape is None or (node.size and not node.id.get_storage_size()):
            raise self._refusal("without values")
        filters = [plan.get_filter(i)[0] for i in range(plan.get_nfilters())]
        if strange := [number for number in filters if number not in FILTERS or filters.count(number) > 1]:
            raise self._refusal(f"packed with filter {strange[0]}; {REWRITE}")
        self.shape: tuple[int, ...] = node.shape
        self.dtype: np.dtype = node.dtype
        self._gzip = filters.index(GZIP) if GZIP in filters else None  # its place in the mask of a chunk
        self.of_bytes = h5py.check_vlen_dtype(node.dtype) == np.uint8  # rows of any length, as Minari's JPEGs are
        self.of_text = h5py.check_string_dtype(node.dtype) is not None

    def read(self, first: int = 0, kind: type | None = None) -> np.ndarray:
        """The rows from ``first`` on (negative: from the end), as they are kept in memory, or as ``kind``."""
        dtype = kept_as(self._path, self.name, self.dtype) if kind is None else np.dtype(kind)
        if not self.shape:
            raise self._refusal("as a single number, and rows are needed")
        rows = range(self.shape[0])[first:]
        self._budget.take(self.name, (len(rows), *self.shape[1:]), dtype.itemsize)
        self._check_chunks()
        return self._node.astype(dtype)[rows.start : rows.stop]

    def packed(self, unpacked: int) -> Packed:
        """The rows of an array of bytes, of any length; each is to become ``unpacked`` bytes."""
        if not self.of_bytes and (self.dtype != np.uint8 or len(self.shape) != 2):
            raise self._refusal(f"of type {self.dtype}, which holds no packed pictures")
        self._budget.take(self.name, (*self.shape[:1], unpacked), 1)
        check_heaps(self._path)
        self._check_chunks()
        return Packed(self._node)

    def words(self) -> list[str]:
        """An array of text, row by row: what is stored once may be named by many rows."""
        if not self.of_text or len(self.shape) != 1 or self.shape[0] > MOST_WORDS or self.dtype.itemsize > 1 << 10:
            raise self._refusal("instead of a list of names")
        check_heaps(self._path)
        self._check_chunks()
        return [x.decode(errors="replace")[: 1 << 10] for x in (bytes(self._node[i]) for i in range(self.shape[0]))]

    def _check_chunks(self) -> None:
        """A chunk is unpacked whole by HDF5, whatever it becomes. Large ones are tried here first, within bounds."""
        if self._node.chunks is None:
            return
        size = math.prod(self._node.chunks) * self._node.id.get_type().get_size()
        if size > max(ROOM, 2 * self._node.size * self.dtype.itemsize):
            raise self._refusal(f"in chunks of {size} bytes, more than it has; {REWRITE}")
        if self._gzip is None:
            return
        large: list[Any] = []
        self._node.id.chunk_iter(lambda chunk: large.append(chunk) if chunk.size * PACKED > ROOM else None)
        for chunk in large:
            mask, data = self._node.id.read_direct_chunk(chunk.chunk_offset)
            most = size + CHECKSUM
            if not mask >> self._gzip & 1 and len(zlib.decompressobj().decompress(data, most + 1)) > most:
                raise self._refusal(f"in a chunk that unpacks to more than its {size} bytes")

    def _refusal(self, what: str) -> BurnishError:
        return refusal(self._path, f"has {self.name!r} {what}")


class Packed(Sequence[dict[str, bytes]]):
    """The rows of an array of bytes as cells of pictures, read one by one: many may name what is stored once."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __len__(self) -> int:
        return len(self._node)

    def __getitem__(self, row: Any) -> Any:
        if row >= len(self):
            raise IndexError(row)
        return {"bytes": self._node[row].tobytes()}
