"""Ctrl-C as a request: the first asks a loop to finish its step, save and leave; the second one does not ask."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether Ctrl-C has asked the loop to finish its step and leave."""

    requested: bool = False


@contextmanager
def interruptible() -> Iterator[Stop]:
    """SIGINT or SIGTERM sets ``requested``; SIGINT after that raises KeyboardInterrupt at once. Further SIGTERMs change
    nothing: schedulers send several, and a save in progress must survive them. Only the main thread may handle
    signals; elsewhere nothing is ever requested."""
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.requested:
            stop.requested = True
            # os.write, because a handler may run in the middle of a buffered write to the same stream.
            os.write(2, b"\nstopping after the next step; Ctrl-C again stops at once and saves nothing\n")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not installed from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
