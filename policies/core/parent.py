"""A process that ends with the one that began it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 0.02


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
