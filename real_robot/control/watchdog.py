"""The process that watches the control process, and stops the robot by another way when that one falls silent.

A control loop can hang: in a driver, in the SDK, in the kernel. It tells its heartbeat in shared memory; when that is
older than ``limit_s`` while the robot is active, the watchdog kills the process: what hangs cannot be asked, might come
to life again and send something, and may hold the only port that the device has. While the driver stops the device it
has ``stop_s`` more, because that takes its time. Once it is gone, the robot's second channel stops the robot, if it has
one (`discovery.second_channel`): the dashboard of a controller, the bus of servos. It does so too where the control
process died in motion by itself. Then the device's own watchdog is the last layer.

It is watched in turn: its own heartbeat is a board, and a control loop that was told to expect it comes to rest
without. Where the process that started both dies, the control process brings the robot to rest and ends; the watchdog
sees to that, and is the last to leave.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.core.errors import reason
from ...policies.core.parent import die_with_parent
from ..adapter import Phase
from ..clock import Clock, MonotonicClock, ns
from ..discovery import second_channel
from ..errors import RobotError
from .loop import PHASES
from .scheduling import heed, hurry
from .shared_memory import Board, blank, hold, state_dtype

WATCH, WATCHED = "watch", "watched.json"
PERIOD_S = 0.01
GONE_S = 0.1  # until a process that was killed has let go of what it held
ORPHAN_S = 5.0  # for the control process to end after the one that started it
WATCH_KIND = np.dtype([("heartbeat_ns", "<i8")])


@dataclass(frozen=True)
class Watch:
    """The task of the watchdog: the process to watch, and the silence in s after which the robot is stopped."""

    folder: Path  # where the control process has its boards
    pid: int
    joints: int
    robot: str
    config: Mapping[str, Any]
    limit_s: float = 0.1
    stop_s: float = 0.0  # so much longer while the driver stops the device (`RobotSpec.stop_s`)
    second_channel: bool = True  # whether it is used
    parent: int | None = None  # as in `control.Job`

    @classmethod
    def from_json(cls, text: str) -> Watch:
        data = json.loads(text)
        return cls(**{**data, "folder": Path(data["folder"])})

    def to_json(self) -> str:
        return json.dumps({**self.__dict__, "config": dict(self.config), "folder": str(self.folder)})


class Watchdog:
    """``look`` every ``PERIOD_S``; it says when the watch is over, and why."""

    def __init__(
        self,
        watch: Watch,
        states: Board,
        own: Board,
        clock: Clock,
        stop_now: Callable[[], None] | None,
        orphaned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._watch, self._states, self._own, self._clock = watch, states, own, clock
        self._stop_now, self._orphaned = stop_now, orphaned
        self._orphan_ns: int | None = None

    def look(self) -> str | None:
        now_ns = self._clock.now_ns()
        self._own.write(blank(WATCH_KIND, heartbeat_ns=now_ns))
        alive = _alive(self._watch.pid)
        record = self._states.read()
        phase = PHASES[int(record["phase"][0])] if record is not None else None
        active = phase in (Phase.ACTIVE, Phase.STOPPING)
        if not alive:
            return self._act("it died in motion") if active else "it ended"
        silent_ns = now_ns - int(record["heartbeat_ns"][0]) if record is not None else 0
        limit_s = self._watch.limit_s + (self._watch.stop_s if phase is Phase.STOPPING else 0.0)
        if active and silent_ns > ns(limit_s):
            return self._end(f"it was silent for {silent_ns / 1e9:.3f} s", active)
        if self._orphaned():
            self._orphan_ns = self._orphan_ns or now_ns
            if now_ns - self._orphan_ns > ns(ORPHAN_S):
                return self._end("it did not end with the process that started it", active)
        return None

    def _end(self, why: str, active: bool) -> str:
        os.kill(self._watch.pid, signal.SIGKILL)
        deadline_ns = self._clock.now_ns() + ns(GONE_S)
        while _alive(self._watch.pid) and self._clock.now_ns() < deadline_ns:
            self._clock.sleep_until_ns(self._clock.now_ns() + ns(GONE_S / 100))
        why += ", and was killed"
        return self._act(why) if active else why

    def _act(self, why: str) -> str:
        if self._stop_now is None:
            return f"{why}; this robot has no second channel"
        began_ns = self._clock.now_ns()
        try:
            self._stop_now()
        except Exception as error:  # whatever a driver raises: there is nobody to raise it to
            return f"{why}; its second channel failed: {reason(error)}"
        return f"{why}; stopped by its second channel in {(self._clock.now_ns() - began_ns) / 1e9:.3f} s"


def on_duty(folder: Path) -> bool:
    """Has the watchdog of that folder looked yet?"""
    path = folder / WATCH
    return path.exists() and Board.open(path, WATCH_KIND).count > 0


def _alive(pid: int) -> bool:
    """A process that has ended and waits for its parent to notice (a zombie) is not alive, but it holds its files, and
    so a port, until the last of its threads has ended: all of them are looked at."""
    try:
        states = [_state(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return False
    return any(state not in ("Z", "X") for state in states)


def _state(stat: Path) -> str:
    try:
        return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"  # it ended while it was looked at


def main() -> int:
    """The program: the watch of standard input, until the control process ends or has to be stopped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for all of its processes: the robot still moves
    orphaned: list[int] = []
    heed(lambda number, frame: orphaned.append(number), signal.SIGTERM)
    try:
        watch = Watch.from_json(sys.stdin.readline())
        die_with_parent(parent=watch.parent)
        hold(watch.folder)
        stop_now = second_channel(watch.robot, watch.config) if watch.second_channel else None
        states = Board.open(watch.folder / "states", state_dtype(watch.joints))
        hurry(priority=55)  # above the loop: a machine that is busy is no reason to stop a robot
        own = Board.create(watch.folder / WATCH, WATCH_KIND)
    except (OSError, RobotError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    clock = MonotonicClock()
    watchdog, why = Watchdog(watch, states, own, clock, stop_now, lambda: bool(orphaned)), None
    while why is None:
        why = watchdog.look()
        clock.sleep_until_ns(clock.now_ns() + ns(PERIOD_S))
    if watch.folder.exists():
        (watch.folder / WATCHED).write_text(json.dumps({"why": why}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
