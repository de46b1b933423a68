"""A chain behind a pseudo-terminal, in real time: what a vendor's SDK opens as if it were a USB adapter.

`PtyServer` serves it from a thread. `PtyProcess` does so from a process of its own, so that neither the interpreter
lock nor a ``kill -9`` of the computer's side reaches the device. Both are found under a path that stays the same when
the cable is pulled and put back.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import select
import tempfile
import threading
import tty
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..clock import SECOND, Clock, MonotonicClock
from ..control.scheduling import hurry
from ..errors import DeviceFault
from .line import Chain

PATIENCE_S = 60.0  # for an answer: a spawned process on a busy machine imports for some of these
IDLE_S = 0.02


class PtyServer:
    """``with PtyServer(chain) as server: ... server.path``"""

    def __init__(self, chain: Chain, clock: Clock | None = None) -> None:
        self.chain = chain
        self.lock = threading.Lock()  # hold it to look into the chain
        self._clock = clock or MonotonicClock()
        self._folder = tempfile.TemporaryDirectory(prefix="burnish-pty-")
        self.path = str(Path(self._folder.name) / "adapter")
        self._master = self._slave = -1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pty", daemon=True)
        self.plug()

    def __enter__(self) -> PtyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.unplug()
        self._folder.cleanup()

    def plug(self) -> None:
        with self.lock:
            self._master, self._slave = os.openpty()
            # The server's own handle of the far side keeps the terminal alive while no driver has it open.
            tty.setraw(self._slave)
            os.set_blocking(self._master, False)
            Path(self.path).unlink(missing_ok=True)
            Path(self.path).symlink_to(os.ttyname(self._slave))

    def unplug(self) -> None:
        with self.lock:
            Path(self.path).unlink(missing_ok=True)
            for handle in (self._slave, self._master):
                if handle >= 0:
                    os.close(handle)
            self._master = self._slave = -1

    def turn(self, wait_s: float) -> None:
        """Serve once, after at most ``wait_s`` of waiting."""
        master = self._master
        if master < 0:
            self._stopped.wait(wait_s)
            return
        coming_ns = self.chain.next_ns()
        if coming_ns is not None:
            wait_s = min(wait_s, max(0.0, (coming_ns - self._clock.now_ns()) / SECOND))
        with suppress(OSError, ValueError):  # the cable may be pulled meanwhile
            readable = select.select([master], [], [], wait_s)[0]
            with self.lock:
                if self._master != master:
                    return
                if readable:
                    self.chain.feed(os.read(master, 4096), self._clock.now_ns())
                sent = self.chain.take(self._clock.now_ns())
                if sent:
                    os.write(master, sent)

    def _serve(self) -> None:
        while not self._stopped.is_set():
            self.turn(IDLE_S)


class PtyProcess:
    """The chain that ``make`` builds, in a new process, where ``make`` is a function of a module.

    >>> with PtyProcess(partial(so101, mjcf)) as device:
    ...     driver_on(device.path)
    ...     t_ns, ticks, velocities = device.motion()
    """

    def __init__(self, make: Callable[[], Chain]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_serve_chain, args=(make, self._theirs), daemon=True)
        self.path = ""

    def __enter__(self) -> PtyProcess:
        self._process.start()
        self._theirs.close()  # so that its end is seen
        self.path = self._asked("path")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, EOFError):
            self._pipe.send("end")
        self._process.join(5)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def motion(self) -> tuple[int, list[int], list[float]]:
        """The time, positions in ticks and velocities in rad/s."""
        return self._asked("motion")

    def truth(self) -> np.ndarray:
        """(n,) rad from the middle of each servo's turn, as it is and not as its sensor has it."""
        return np.array(self._asked("truth"))

    def log(self) -> list[Any]:
        return self._asked("log")

    def history(self) -> tuple[np.ndarray, np.ndarray]:
        """(T,) ns and (T, n) rad until now, of a chain whose plant has a ``history``."""
        t_ns, q = zip(*self._asked("history"), strict=True)
        return np.array(t_ns), np.array(q)

    def _asked(self, question: str) -> Any:
        try:
            self._pipe.send(question)
            if not self._pipe.poll(PATIENCE_S):
                raise DeviceFault(f"the emulator's process has not answered for {PATIENCE_S:g} s; is the machine busy?")
            return self._pipe.recv()
        except (OSError, EOFError) as error:
            raise DeviceFault("the emulator's process ended with an error of its own, which it wrote above") from error


def _serve_chain(make: Callable[[], Chain], pipe: Connection) -> None:
    clock = MonotonicClock()
    chain = make()
    hurry(priority=60)  # a servo answers in time, however busy the computer is
    server = PtyServer(chain, clock)
    question = None
    while question != "end":
        server.turn(0.001)
        if not pipe.poll():
            continue
        question = pipe.recv()
        now_ns = clock.now_ns()
        if question == "path":
            pipe.send(server.path)
        elif question == "motion":
            pipe.send((now_ns, *chain.motion(now_ns)))
        elif question == "truth":
            chain.motion(now_ns)  # up to now
            pipe.send([float(x) - math.pi for x in chain.plant.motion()[0]])
        elif question == "history":
            chain.motion(now_ns)  # up to now
            pipe.send(list(getattr(chain.plant, "history", [])))
        elif question == "log":
            pipe.send(list(getattr(chain, "log", [])))
    server.unplug()
