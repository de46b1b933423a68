"""Real-time scheduling: what the operating system grants a loop that must be on time.

Nothing here is required: without the rights for it a loop runs all the same, later now and then, and says so.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_LOCK_CURRENT, _LOCK_FUTURE = 1, 2
LOOK_S = 0.02


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


def die_with_parent(sign: int = signal.SIGTERM, parent: int | None = None) -> bool:
    """This process gets ``sign`` when the one that began it (``parent``, or today's parent) is gone. False where the
    system cannot tell (Windows). It is the process that is watched, by a thread that sleeps: Linux's own signal
    (PR_SET_PDEATHSIG) comes when the *thread* ends that began this process, though the program lives on."""
    if sys.platform == "win32":
        return False
    began = os.getppid() if parent is None else parent

    def watch() -> None:
        _outlive(began)
        os.kill(os.getpid(), sign)

    beside(watch, "parent")
    return True


def beside(call: Callable[[], None], name: str) -> None:
    """A thread that ends with the process, with a small stack, which is locked with the rest of the memory."""
    before = threading.stack_size(1 << 18)
    threading.Thread(target=call, name=name, daemon=True).start()
    threading.stack_size(before)


def _outlive(parent: int) -> None:
    """Returns when that process is not this one's parent any more."""
    with suppress(AttributeError, OSError):  # no such call, an old kernel, or it is gone already
        handle = os.pidfd_open(parent)
        if os.getppid() == parent:  # so the handle is its own, and not of a later process of that number
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            waiting.poll()
        os.close(handle)
    while os.getppid() == parent:
        time.sleep(LOOK_S)


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
