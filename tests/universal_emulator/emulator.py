"""A Universal Robots controller on a loopback address, for the unmodified ur-rtde: RTDE, dashboard and script ports.

ur-rtde opens fixed ports (30004, 29999, 30003), so each emulator has an address of its own: 127.0.0.1, 127.0.0.2, ...
`UniversalEmulator` starts one in a process of its own (`server.py`), because ur-rtde holds the interpreter's
lock while it connects, and talks to it in JSON lines; when the pipe closes, that process ends. Every data frame that
arrives is kept as bytes with its time (`wire`), and every step of the joints (`motion`), so that a test need not
believe a driver about what it sent or when the arm was still.

Troubles are switched on and off while it runs; those with a share hit single frames, drawn from a seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import rtde
from .polyscope import Do


class Trouble(StrEnum):
    """The faults that a test can cause in the emulated controller."""

    MUTE = "mute"  # all connections stay, and nothing is said on them
    MUTE_DATA = "mute_data"  # no data, while the dashboard answers
    MUTE_DASHBOARD = "mute_dashboard"
    FREEZE = "freeze"  # the last package again and again, time stamp included
    BACKWARD = "backward"  # time stamps step back by a second
    FORWARD = "forward"  # and ahead by ten
    NAN_Q = "nan_q"
    INF_QD = "inf_qd"
    HUGE_Q = "huge_q"
    JUMP_Q = "jump_q"  # half a radian, which would be a position like any other
    HUGE_QD = "huge_qd"
    GARBAGE = "garbage"  # random bytes before a frame
    NOISE = "noise"  # one byte of a package is another one
    TRUNCATE = "truncate"  # the end of a frame is missing
    LENGTH = "length"  # a header claims 65,535 bytes
    EMPTY = "empty"  # a header claims no bytes
    STRANGE = "strange"  # a frame of a type that does not exist
    TEXT = "text"  # messages between the packages
    LATE = "late"  # packages are held back by 50 ms
    LAG = "lag"  # packages for a client that gives orders are held back by 300 ms, and for others they are not
    SLOW = "slow"  # only every tenth package
    STUCK = "stuck"  # the program never becomes ready
    DEAF = "deaf"  # set-points arrive and are not followed
    REFUSE = "refuse"  # no new connections


@dataclass(frozen=True)
class Package:
    """An input package that the controller has received."""

    t_ns: int  # when it arrived
    step: int  # of the controller, of 2 ms
    values: dict[str, Any]

    @property
    def numbers(self) -> list[float]:
        """The six of a set-point."""
        return [self.values[f"input_double_register_{i}"] for i in range(6)]


@dataclass(frozen=True)
class Motion:
    """The recorded motion of the emulated arm over T steps."""

    t_ns: NDArray[np.int64]  # (T,)
    step: NDArray[np.int64]
    q: NDArray[np.float64]  # (T, 6), rad
    qd: NDArray[np.float64]

    def still_from(self, tolerance: float = 1e-3) -> int:
        """The first row after which no joint is faster, in rad/s."""
        fast = np.flatnonzero((np.abs(self.qd) > tolerance).any(axis=1))
        return int(fast[-1]) + 1 if len(fast) else 0


class UniversalEmulator:
    """A handle on an emulator in a process of its own."""

    def __init__(self, address: str, settings: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        self.address = address
        words = [address, json.dumps(dict(settings or {})), str(seed)]
        command, here = [sys.executable, "-m", f"{__package__}.server", *words], Path(__file__).parents[1]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, cwd=here)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise OSError(f"no emulator of a UR controller could be started at {address}; are its ports free?")

    def __enter__(self) -> UniversalEmulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def order(self, do: str, **details: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **details}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def inject(self, *troubles: Trouble, share: float = 1.0) -> None:
        """These troubles from now on, and no others."""
        self.order("trouble", troubles={trouble.value: share for trouble in troubles})

    def wire(self) -> list[Package]:
        """All data packages that arrived, decoded from their bytes."""
        found = []
        for t_ns, step, payload, names in self.order("read", log="wire"):
            data = bytes.fromhex(payload)
            recipe = rtde.Recipe(data[0], tuple(names), tuple(rtde.INPUTS[name] for name in names))
            found.append(Package(t_ns, step, recipe.unpack(data)))
        return found

    def set_points(self) -> list[Package]:
        """Those of them that ask ``servoj`` for six positions."""
        return [p for p in self.wire() if p.values.get("input_int_register_0") == Do.SERVOJ]

    def events(self) -> list[tuple[int, int, str]]:
        """Monotonic ns, step of the controller, and words."""
        return [(t_ns, step, what) for t_ns, step, what in self.order("read", log="events")]

    def motion(self, rows: int = 0) -> Motion:
        """Of the last minute, or so many rows of it."""
        t_ns, step, q, qd = zip(*self.order("read", log="motion", rows=rows), strict=True)
        return Motion(np.array(t_ns), np.array(step), np.array(q), np.array(qd))

    def kill(self) -> None:
        """The controller dies without a word."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        self.kill()
