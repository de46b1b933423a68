"""Folders in a storage that machines share by its address, such as s3://bucket/name, where they share no file system.
`fsspec` knows the protocols.

A file is kept under the hash of its content (``files/``), so what is there already is not sent again. A folder is a
list of names and hashes (``folders/``). The list is written after its files, so a reader finds all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

from ..core import files
from ..core.errors import BurnishError, reason

PIECE = 1 << 23
SEND_S = 5.0  # between two looks whether a folder has new parts
TRIES = 5  # of sending a folder whose files are removed meanwhile
SETTLED_NS = 2_000_000_000  # clocks of file systems are no finer than that: a younger file may still change unseen
_HASHES: dict[tuple[object, ...], str] = {}  # of files that have not changed since


class Storage:
    """``url`` as fsspec reads it; a key is a path with slashes. One thread at a time uses it: a transaction
    takes in whatever any thread writes meanwhile."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            fsspec: Any = import_module("fsspec")
        except ImportError as error:
            raise BurnishError("storage=... needs fsspec; pip install 'burnish[ray]'") from error
        try:
            self._remote, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise BurnishError(
                f"storage={url} cannot be used: {reason(error)}; it is an address as fsspec reads it, such as "
                "s3://bucket/name, and the package for its protocol must be installed on every machine"
            ) from error

    def send(self, path: Path, key: str, deep: int | None = None) -> None:
        """The file or folder as it is now, of a folder perhaps the first ``deep`` levels. Links are left out."""
        for last in range(1 - TRIES, 1):
            try:
                listed = {name: self._kept(file) for name, file in _below(path, deep)}
                return self._write(f"folders/{key}.json", [json.dumps(listed).encode()])
            except FileNotFoundError as error:  # a checkpoint that was removed for a newer one
                if not last:
                    raise self._failed(error) from error
            except Exception as error:  # each protocol has its own
                raise self._failed(error) from error

    def listed(self, key: str) -> dict[str, str] | None:
        """Name and hash of each file of what was sent last under ``key``; nothing if nothing was."""
        try:
            return json.loads(self._remote.cat_file(f"{self._root}/folders/{key}.json"))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed(error) from error

    def fetch(self, key: str, path: Path) -> bool:
        """``path`` is made what was sent last under ``key``, and what else lies there goes; False if nothing was."""
        if (listed := self.listed(key)) is None:
            return False
        self._require_inside([key, *listed])
        places = {name: PurePosixPath(name).parts for name in listed}  # of a file itself: no parts
        kept = {path.joinpath(*parts) for parts in places.values()}
        kept |= {folder for file in kept for folder in file.parents}
        for folder, inner, names in os.walk(path):
            for other in {Path(folder) / name for name in [*inner, *names]} - kept:
                files.remove(other)
        for name, wanted in listed.items():
            folder = files.below(path, *places[name][:-1]) if places[name] else files.named(path.parent)
            target = path.joinpath(*places[name])
            if not (target.is_file() and sha256_of(target) == wanted):
                self._fetch_file(wanted, folder / target.name)
        return True

    def keys(self, below: str) -> list[str]:
        """All keys, of those under which something was sent, that begin with ``below``."""
        start = f"{self._root}/folders/"
        try:
            found = self._remote.find(f"{start}{below}")
        except Exception as error:
            raise self._failed(error) from error
        keys = sorted(name.removeprefix(start).removesuffix(".json") for name in found)
        self._require_inside(keys)
        return keys

    @contextmanager
    def sending(self, folder: Path, key: str, parts: str) -> Iterator[None]:
        """Meanwhile ``folder`` is sent whenever other files lie in its folder ``parts``, and once more in the end."""
        over = threading.Event()

        def send() -> None:
            sent: list[str] = []
            while not over.wait(SEND_S):
                there = sorted(x.name for x in (folder / parts).glob("[!.]*"))
                try:
                    if there != sent:
                        self.send(folder, key)
                        sent = there
                except BurnishError as error:  # it is tried again
                    sys.stderr.write(f"{error}\n")

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.send(folder, key)

    def _kept(self, path: Path) -> str:
        """The hash of a file that is in the storage now. One that grows is cut where it ends as this begins."""
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            size = about.st_size
            known = (path, about.st_ino, about.st_mtime_ns, size)
            if (digest := _HASHES.get(known)) is None:
                summed = hashlib.sha256()
                for piece in _pieces(file, size):
                    summed.update(piece)
                digest = summed.hexdigest()
            if time.time_ns() - about.st_mtime_ns > SETTLED_NS:
                _HASHES[known] = digest
            if not self._remote.exists(f"{self._root}/{_place(digest)}"):
                self._write(_place(digest), _pieces(file, size))
        return digest

    def _write(self, name: str, content: Iterable[bytes]) -> None:
        """In one act, where the protocol can do that."""
        path = f"{self._root}/{name}"
        self._remote.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._remote.transaction, self._remote.open(path, "wb") as file:
            for piece in content:
                file.write(piece)

    def _fetch_file(self, digest: str, path: Path) -> None:
        scratch = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            self._remote.get_file(f"{self._root}/{_place(digest)}", str(scratch))
        except Exception as error:
            raise self._failed(error) from error
        if sha256_of(scratch) != digest:
            files.remove(scratch)
            raise BurnishError(f"{path.name} is damaged in {self._url}: its content is not that which was sent")
        files.move(scratch, path)

    def _require_inside(self, names: Iterable[str]) -> None:
        """Names that others may have written lead, on no system, out of the folder that they are put into."""
        for name in names:
            parts = name.split("/")
            if not parts[0] or "\\" in name or any(part == ".." or PureWindowsPath(part).drive for part in parts):
                raise BurnishError(
                    f"{self._url} names {name}, which is outside of its folder; take another storage=..."
                )

    def _failed(self, error: Exception) -> BurnishError:
        return BurnishError(f"storage={self._url} cannot be read or written: {reason(error)}")


def _below(path: Path, deep: int | None = None) -> Iterator[tuple[str, Path]]:
    """Name and place of each file of a folder; a file itself has the name "."."""
    if path.is_file():
        yield ".", path
    for folder, inner, names in os.walk(path):
        where = Path(folder).relative_to(path)
        if deep is not None and len(where.parts) + 1 >= deep:
            inner.clear()
        yield from (((where / x).as_posix(), path / where / x) for x in names if not files.is_link(path / where / x))


def _place(digest: str) -> str:
    return f"files/{digest[:2]}/{digest}"


def sha256_of(path: Path) -> str:
    """The digest of a file's bytes, by which a storage names it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(file: IO[Any], size: int) -> Iterator[bytes]:
    file.seek(0)
    while size > 0 and (piece := file.read(min(PIECE, size))):
        size -= len(piece)
        yield piece
