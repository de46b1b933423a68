"""A folder that grows in public: a reader, at any instant, finds one complete version of it or none.

Each version is built in a hidden sibling, ``.<name>.<hex>.partial/next``, with hard links to what has not changed,
flushed to the disk, and exchanged with the folder at the target in one system call. A process killed at any instant
leaves the last version at the target, and a hidden folder that the next writer of that target removes.

Where the file system cannot exchange two folders (NFS, some containers) the old version is moved aside first. Between
those two renames nothing stands at the target; a kill exactly there hides the set until the next writer puts it back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ..core.errors import BurnishError
from ..core.files import is_link, link_or_copy, lock, move, named, new, refuse_link, remove, sync

NEXT, ASIDE, FINISHED, LOCK = "next", "aside", "finished", "lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux
_RENAME_SWAP = 2  # macOS
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}


class GrowingFolder:
    """One process writes a target at a time: its hidden folder is locked, and the kernel frees the lock with it.

    ``finished`` is a folder for files that will not change any more: every later version links them. Files that others
    have put into a published version stay in it.
    """

    def __init__(self, target: Path, *, resume: bool = False) -> None:
        """``resume`` continues the folder at the target; otherwise nothing may stand there."""
        self.target = Path(os.path.realpath(target)) if resume else target.absolute()
        self.root = self.target.parent / f".{self.target.name}.{secrets.token_hex(4)}.partial"
        self.finished = self.root / FINISHED
        self._published: tuple[int, int] | None = None
        named(self.target.parent)
        new(new(self.root) / FINISHED)
        self._taken = f"another process is writing {self.target}; wait for it, or choose another path"
        self._lock = -1
        try:
            self._lock = lock(self.root / LOCK, self._taken)
            self._clear_leftovers()
            if resume and self.target.is_dir():
                self._published = _identity(self.target)
            self._check_target()
        except BaseException:
            self.close()
            raise

    @property
    def published(self) -> bool:
        return self._published is not None

    def publish(self, write: Callable[[Path], None]) -> None:
        """Make what ``write`` puts into an empty folder, and all older files that it does not write, the next version
        at the target."""
        fresh = new(self.root / NEXT)
        write(fresh)
        _link_missing(self.finished, fresh)
        if self.published:
            _link_missing(self.target, fresh)
        for path in [*(p for p in fresh.rglob("*") if not is_link(p)), fresh]:
            sync(path)  # a rename is atomic, but only what was flushed before it is sure to survive a power cut
        identity = _identity(fresh)
        self._check_target()
        if self.published:
            _replace(fresh, self.target)
        else:
            move(fresh, self.target)
        self._published = identity
        sync(self.target.parent)
        for stale in (fresh, self.root / ASIDE):
            remove(stale)

    def close(self) -> None:
        """Remove the hidden folder; what was published stays."""
        remove(self.root)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            remove(self.root)  # Windows removes no file that is open

    def _check_target(self) -> None:
        found = _identity(self.target) if os.path.lexists(self.target) else None
        if found == self._published:
            return
        if self._published is None:
            raise BurnishError(f"{self.target} exists already; choose another path or remove it first")
        raise BurnishError(f"{self.target} was moved or replaced while it was being written; nothing more is written")

    def _clear_leftovers(self) -> None:
        for left in self._siblings():
            try:
                descriptor = lock(left / LOCK, self._taken)
            except FileNotFoundError:
                continue  # its writer has just finished
            try:
                if (left / ASIDE).exists() and not os.path.lexists(self.target):
                    move(refuse_link(left / NEXT), self.target)  # killed between two renames: this version was complete
                remove(left)
            finally:
                os.close(descriptor)
            remove(left)  # Windows removes no file that is open

    def _siblings(self) -> Iterator[Path]:
        pattern = re.compile(rf"\.{re.escape(self.target.name)}\.[0-9a-f]{{8}}\.partial")
        for path in sorted(self.target.parent.iterdir()):
            if pattern.fullmatch(path.name) and path != self.root and path.is_dir() and not is_link(path):
                yield path


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _link_missing(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if (path.is_dir() and not is_link(path)) or os.path.lexists(copy):
            continue
        link_or_copy(path, named(copy.parent) / copy.name)


def _replace(fresh: Path, target: Path) -> None:
    """``fresh`` becomes ``target``; the old one is left where ``fresh`` was, or beside it."""
    if _exchange(fresh, target):
        return
    aside = fresh.with_name(ASIDE)
    move(target, aside)
    try:
        move(fresh, target)
    except BaseException:
        move(aside, target)
        raise


def _exchange(one: Path, two: Path) -> bool:
    """Swap two names atomically; False where the system or its file system cannot."""
    if os.name == "nt":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(one), os.fsencode(two)
    try:
        if sys.platform == "darwin":
            status = libc.renamex_np(first, second, ctypes.c_uint(_RENAME_SWAP))
        else:
            status = libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, ctypes.c_uint(_RENAME_EXCHANGE))
    except AttributeError:  # a C library that lacks the call
        return False
    if status == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(two))
