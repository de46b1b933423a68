"""What the operating system can do for a loop that must be on time, and how much of it was obtained.

Nothing here is required: without the rights for it a loop runs all the same, later now and then, and says so.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from dataclasses import asdict, dataclass

_LOCK_CURRENT, _LOCK_FUTURE = 1, 2
_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Obtained:
    scheduler: str  # "fifo 50", or "other"
    locked: bool  # the process's memory is never swapped out
    core: int | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def hurry(priority: int = 50, core: int | None = None) -> Obtained:
    """The real-time scheduler, memory that stays, one core, no garbage collection in the middle of a period. Memory of
    before is frozen: it is not looked at again. Never raises; what cannot be had is missing in the answer."""
    gc.collect()
    gc.freeze()
    gc.disable()
    return Obtained(_fifo(priority), _lock(), None if core is None else _pinned(core))


def die_with_parent(sign: int = signal.SIGTERM) -> bool:
    """Ask to be told when the parent dies, by ``sign``. False where the system cannot (macOS, Windows)."""
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, int(sign), 0, 0, 0) == 0


def _pinned(core: int) -> int | None:
    try:
        os.sched_setaffinity(0, {core})
    except (AttributeError, OSError, ValueError, OverflowError):  # no such system, no such core, no such number
        return None
    return core


def _fifo(priority: int) -> str:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except (AttributeError, OSError, OverflowError):
        return "other"
    return f"fifo {priority}"


def _lock() -> bool:
    try:
        return ctypes.CDLL(None, use_errno=True).mlockall(_LOCK_CURRENT | _LOCK_FUTURE) == 0
    except (AttributeError, OSError):
        return False
