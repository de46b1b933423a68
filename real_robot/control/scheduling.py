"""Real-time scheduling: what the operating system grants a loop that must be on time.

Nothing here is required: without the rights for it a loop runs all the same, later now and then, and says so.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LOCK_CURRENT, _LOCK_FUTURE = 1, 2


@dataclass(frozen=True)
class SchedulingResult:
    """The scheduling that the operating system has granted."""

    scheduler: str  # "fifo 50", or "other"
    locked: bool  # the process's memory is never swapped out
    core: int | None


def hurry(priority: int = 50, core: int | None = None) -> SchedulingResult:
    """The real-time scheduler, memory that stays, one core, no garbage collection in the middle of a period. Memory of
    before is frozen: it is not looked at again. Never raises; what cannot be had is missing in the answer."""
    gc.collect()
    gc.freeze()
    gc.disable()
    return SchedulingResult(_fifo(priority), _lock(), None if core is None else _pinned(core))


def heed(handler: Callable[[int, Any], None], *signs: signal.Signals) -> None:
    """Signals go to ``handler``, also where the process that began this one had them blocked, which is inherited."""
    for sign in signs:
        signal.signal(sign, handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signs)


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
