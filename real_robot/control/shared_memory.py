"""Shared memory between processes while a robot moves: the latest value of one writer, mapped by all of them.

A reader never waits for the writer, nor the other way round, and a process that dies leaves the memory as it is. The
writer counts up before and after (odd: it is writing), so a reader sees that it read something torn, and reads again
(in Linux, a seqlock). A writer that is held up in the middle, or was killed there, is not waited for: a reader then has
the last record that it read, whose age says what it is worth. A checksum covers machines that reorder stores.

Records are NumPy structures of numbers: nothing that is read here can be anything else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RobotError

MAGIC = 0x4255524E49534801  # of this layout
ATTEMPTS = 100
HEADER = np.dtype([("magic", "<u8"), ("size", "<u8"), ("count", "<u8"), ("sum", "<u8")])
MOST = 64  # set-points in a plan


def plan_dtype(joints: int) -> np.dtype:
    """The plan of the policy side: ``count`` set-points from ``t_start_ns`` on, ``dt_ns`` apart."""
    return np.dtype(
        [
            ("seq", "<i8"),
            ("obs_seq", "<i8"),  # of the state that it was made from
            ("t_start_ns", "<i8"),
            ("dt_ns", "<i8"),
            ("count", "<i8"),
            ("linear", "<i8"),  # 1: straight lines between set-points; 0: each one is held
            ("targets", "<f8", (MOST, joints)),
            ("gripper", "<f8", (MOST,)),  # NaN: no wish
        ]
    )


def order_dtype() -> np.dtype:
    """An order to the control process; ``what`` is an index of `loop.ORDERS`."""
    return np.dtype([("seq", "<i8"), ("what", "<i8")])


def state_dtype(joints: int) -> np.dtype:
    """The state of the control process."""
    vector = ("<f8", (joints,))
    return np.dtype(
        [
            ("heartbeat_ns", "<i8"),
            ("ticks", "<i8"),
            ("late", "<i8"),  # deadlines missed so far
            ("order_seq", "<i8"),  # the last order that was followed
            ("refused", "<i8"),  # the last order that was not, whose reason is the note
            ("plan_seq", "<i8"),  # the plan in use, -1: none
            ("plan_index", "<i8"),
            ("phase", "<i8"),
            ("rung", "<i8"),
            ("changed", "<i8"),  # ticks whose request was not sent as it was
            ("seq", "<i8"),
            ("t_ns", "<i8"),
            ("q", *vector),
            ("qd", *vector),
            ("effort", *vector),  # NaN where the robot does not know it
            ("sent", *vector),
            ("truth", *vector),  # positions that only a simulated robot knows; NaN
            ("gripper", "<f8"),
            ("note", "S240"),  # the robot's last event, in words
        ]
    )


class Board:
    """One record in a file of shared memory. ``create`` by the process that owns it, ``open`` by the others."""

    def __init__(self, path: Path, dtype: np.dtype, create: bool) -> None:
        self.path, self.dtype = path, dtype
        size = HEADER.itemsize + dtype.itemsize
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0) | os.O_NOFOLLOW
        file = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(file, size)
            elif os.fstat(file).st_size != size:
                raise RobotError(f"{path} is not a record of {dtype.itemsize} bytes; both sides must be of one version")
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._header = np.frombuffer(self._map, HEADER, 1)
        self._count, self._sum = self._header["count"], self._header["sum"]
        self._last = b""  # the latest record that was read whole
        self._body = np.frombuffer(self._map, np.uint8, dtype.itemsize, HEADER.itemsize)
        if create:
            self._header["size"], self._header["magic"] = dtype.itemsize, MAGIC
        elif int(self._header["magic"][0]) != MAGIC:
            raise RobotError(f"{path} is no record of this program")

    @classmethod
    def create(cls, path: Path, dtype: np.dtype) -> Board:
        return cls(path, dtype, True)

    @classmethod
    def open(cls, path: Path, dtype: np.dtype) -> Board:
        return cls(path, dtype, False)

    def write(self, record: np.ndarray) -> None:
        """``record`` is of this board's dtype and has one entry."""
        data = record.tobytes()
        total, body = zlib.crc32(data), np.frombuffer(data, np.uint8)
        count = self._count.item() | 1  # after a writer that was killed it is odd already
        self._count[0] = count
        self._body[:] = body
        self._sum[0] = total
        self._count[0] = count + 1

    def read(self) -> np.ndarray | None:
        """The latest record, (1,), or None where nothing (whole) has been written."""
        for _ in range(ATTEMPTS):
            before = self._count.item()
            if before & 1 == 0:
                data, total = self._body.tobytes(), self._sum.item()
                if before == self._count.item() and (before == 0 or zlib.crc32(data) == total):
                    self._last = data if before else b""
                    break
        return np.frombuffer(bytearray(self._last), self.dtype, 1) if self._last else None

    @property
    def count(self) -> int:
        """Grows with every record; cheap to look at."""
        return self._count.item() // 2

    def close(self) -> None:
        del self._header, self._count, self._sum, self._body
        self._map.close()


PREFIX = "burnish-held-"
_held: dict[Path, int] = {}  # folders of this process, and its lock on each


def shared_folder(prefix: str = PREFIX) -> Path:
    """A new folder in memory, readable by this user alone. It lasts until `release`, or until every process that holds
    it is gone: then the next one that makes a folder removes it, because who was killed cannot."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else Path(tempfile.gettempdir())
    _sweep(place)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        if hold(folder):
            return folder


def hold(folder: Path) -> bool:
    """Keep a folder for as long as this process lives: the kernel ends a lock with the process that has it. False where
    it has been removed meanwhile."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    fcntl.flock(lock, fcntl.LOCK_SH)
    if os.fstat(lock).st_nlink == 0:
        os.close(lock)
        return False
    _held[folder] = lock
    return True


def release(folder: Path) -> None:
    """Remove it, even while another process looks into it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _held:
        os.close(_held.pop(folder))


def _sweep(place: Path) -> None:
    """Remove this user's folders that no process holds."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, no folder, or another user's
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # a process holds it
            continue
        finally:
            os.close(lock)


def blank(dtype: np.dtype, **values: Any) -> np.ndarray:
    """A record of that dtype, shape (1,), zero except for ``values``."""
    record = np.zeros(1, dtype)
    for name, value in values.items():
        record[name] = value
    return record
