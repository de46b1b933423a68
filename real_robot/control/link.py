"""The other end of the control loop: start it, tell it what to do, and see what the robot does.

`RobotLink` has the loop in a process of its own, as a robot needs it; `LocalLink` runs the same loop in this process as
time is waited for, so with a virtual clock an hour of a twin takes a minute. The source of actions (a policy, a
person's device, a test) sees no difference. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..adapter import Adapter, Phase
from ..clock import Clock, MonotonicClock, ns
from ..errors import Refused, RobotError
from ..safety.guard import NUMBERS, numbers
from ..safety.safe_robot import Rung, SafeRobot, Safety
from .loop import ORDERS, PHASES, RUNGS, ControlLoop, Order
from .process import LOG, PLANS, READY, REPORT, STATES, Job, about, boards_of, left_by
from .process import ORDERS as ORDERS_BOARD
from .shared_memory import MOST, Board, blank, order_dtype, plan_dtype, release, shared_folder, state_dtype
from .watchdog import WATCHED, Watch, on_duty

LONGEST_S = 1e6  # between two rows of a plan
PATIENCE_S = 20.0  # for the process to start, and for what an order asks to happen
WATCH_S, WATCH_PERIODS = 0.1, 3  # a loop may be silent for so long, and for so many of its periods at least
SAID_BYTES = 4096  # of the end of what a process has written to standard error, that are looked at
WAIT_NS = 5_000_000
SETTLED = 200  # reports after which nothing more is expected of an order, but of a robot that brakes


class Snapshot:
    """The last report of the control process. Arrays are copies."""

    def __init__(self, record: np.ndarray) -> None:
        row = record[0]
        self.heartbeat_ns, self.ticks, self.late = (int(row[name]) for name in ("heartbeat_ns", "ticks", "late"))
        self.order_seq, self.refused, self.plan_seq, self.plan_index = (
            int(row[name]) for name in ("order_seq", "refused", "plan_seq", "plan_index")
        )
        self.phase, self.rung = PHASES[int(row["phase"])], RUNGS[int(row["rung"])]
        self.changed, self.seq, self.t_ns = int(row["changed"]), int(row["seq"]), int(row["t_ns"])
        self.q, self.qd, self.effort, self.sent = (row[name].copy() for name in ("q", "qd", "effort", "sent"))
        self.truth = row["truth"].copy()
        self.gripper = float(row["gripper"])
        self.note = bytes(row["note"]).decode("utf-8", "replace")


class Link(ABC):
    """A context manager: leaving it brings the robot to rest."""

    clock: Clock
    about: dict[str, Any]  # what the loop says of itself

    def __init__(self, folder: Path, joints: int) -> None:
        self.folder, self._joints = folder, joints
        self._plans = Board.open(folder / PLANS, plan_dtype(joints))
        self._orders = Board.open(folder / ORDERS_BOARD, order_dtype())
        self._states = Board.open(folder / STATES, state_dtype(joints))
        self._plan_seq = self._order_seq = 0
        self._left: dict[str, Any] | None = None
        self._afterwards: list[Callable[[], None]] = []

    def on_close(self, call: Callable[[], None]) -> None:
        """For what belongs to the robot and ends after it."""
        self._afterwards.append(call)

    def truth(self) -> np.ndarray | None:
        """(n,) where the joints of a simulated robot are; None where nobody knows more than was measured."""
        found = self.state().truth
        return found if np.isfinite(found).all() else None

    @abstractmethod
    def wait_until_ns(self, deadline_ns: int) -> None:
        """The loop runs meanwhile."""

    @property
    def alive(self) -> bool:
        """Whether there is a loop that may still report."""
        return True

    @abstractmethod
    def _end(self) -> dict[str, Any]:
        """Bring the robot to rest; what the loop has left to say (see `control`)."""

    @abstractmethod
    def _require_alive(self, what: str) -> None:
        """Raise where an order cannot be followed any more."""

    def state(self) -> Snapshot:
        """The latest; `RobotError` where there is none, or where the loop has ended before it stopped the robot."""
        alive = self.alive  # asked first: what is read then is its last word
        record = self._states.read()
        if record is None:
            raise RobotError("the control loop has not reported anything yet")
        snapshot = Snapshot(record)
        if not alive and snapshot.rung is not Rung.STOPPED:
            self._require_alive("stop")
        return snapshot

    def start(self) -> Snapshot:
        """Take hold of the robot; returns once it is held."""
        return self._order(Order.START, lambda s: s.phase is Phase.ACTIVE and s.seq >= 0)

    def stop(self) -> Snapshot:
        return self._order(Order.STOP, lambda s: s.rung is Rung.STOPPED)

    def recover(self) -> Snapshot:
        return self._order(Order.RECOVER, lambda s: s.phase is Phase.INACTIVE)

    def blend(self) -> None:
        """Another source plans from now on: the speed grows anew, as after the start. Nothing is waited for."""
        self._send(Order.BLEND)

    def plan(
        self,
        targets: np.ndarray,
        dt_s: float,
        *,
        start_ns: int | None = None,
        linear: bool = False,
        gripper: Sequence[float] | None = None,
        obs_seq: int = -1,
    ) -> int:
        """(T, n) set-points, ``dt_s`` apart, from ``start_ns`` on (now by default). Returns the plan's number."""
        rows = numbers(targets)
        if rows is None or rows.ndim != 2 or rows.shape[1] != self._joints or not 0 < len(rows) <= MOST:
            got = type(targets).__name__ if rows is None else rows.shape
            raise Refused(f"a plan is 1 to {MOST} rows of {self._joints} joint angles, got {got}")
        fractions = None if gripper is None else numbers(gripper, (len(rows),))
        if gripper is not None and fractions is None:
            raise Refused(f"the gripper of a plan of {len(rows)} rows is as many fractions of its width")
        if not (isinstance(dt_s, NUMBERS) and 1e-9 <= dt_s < LONGEST_S):
            raise Refused(f"dt_s of a plan must be a positive number of seconds below {LONGEST_S:g}")
        self._plan_seq += 1
        record = blank(
            self._plans.dtype,
            seq=self._plan_seq,
            obs_seq=obs_seq,
            t_start_ns=self.clock.now_ns() if start_ns is None else start_ns,
            dt_ns=ns(dt_s),
            count=len(rows),
            linear=int(linear),
            gripper=np.nan,
        )
        record["targets"][0, : len(rows)] = rows
        if fractions is not None:
            record["gripper"][0, : len(rows)] = fractions
        self._plans.write(record)
        return self._plan_seq

    def close(self) -> dict[str, Any]:
        """Once more says the same."""
        if self._left is None:
            self._left = self._end()
            for board in (self._plans, self._orders, self._states):
                board.close()
            release(self.folder)
            for call in self._afterwards:
                call()
        return self._left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, order: Order) -> None:
        self._order_seq += 1
        self._orders.write(blank(self._orders.dtype, seq=self._order_seq, what=ORDERS.index(order)))

    def _order(self, order: Order, reached: Callable[[Snapshot], bool]) -> Snapshot:
        """The report in which the order was followed and ``reached`` holds."""
        self._send(order)
        followed, begun = 0, self._states.count
        deadline_ns = self.clock.now_ns() + ns(PATIENCE_S)
        while followed < SETTLED and self.clock.now_ns() < deadline_ns:
            self._require_alive(order.value)
            record = self._states.read()
            if record is not None and int(record["order_seq"][0]) == self._order_seq:
                snapshot = Snapshot(record)
                if snapshot.refused == self._order_seq:
                    break
                if reached(snapshot):
                    return snapshot
                if order is Order.STOP and snapshot.rung is Rung.RAMP:
                    begun = self._states.count  # it brakes as it should, however long that takes
                followed = self._states.count - begun
            self.wait_until_ns(self.clock.now_ns() + WAIT_NS)
        found = self.state()
        raise RobotError(
            f"the control loop could not {order.value} the robot, which is {found.phase.value} and on the rung "
            f"{found.rung.value}: {found.note}"
        )


def watch_time(watch_s: float | None, rate_hz: float) -> float:
    """Seconds for which a control loop of that rate may be silent; by default as few as it allows."""
    least_s = WATCH_PERIODS / rate_hz
    if watch_s is None:
        return max(WATCH_S, least_s)
    if 0 < watch_s < least_s:
        raise Refused(
            f"watch_s={watch_s:g} is less than {WATCH_PERIODS} periods of a control loop at {rate_hz:g} Hz, so the "
            f"watchdog would take a loop for hung that waits for its next tick; give at least {least_s:.3f}"
        )
    return watch_s


def _begun(folder: Path, module: str, line: str) -> subprocess.Popen[str]:
    """A process of ours that is told what to do by one line; standard error goes to a file, which is never full."""
    with (folder / f"{module}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"burnish.real_robot.control.{module}"],
            stdin=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.close()
    return process


class RobotLink(Link):
    """One robot in a process of its own."""

    def __init__(
        self,
        robot: str,
        config: dict[str, Any],
        safety: Safety,
        *,
        priority: int = 50,
        core: int | None = None,
        watch_s: float | None = None,
    ) -> None:
        """The watchdog kills the control process, and stops the robot by another way, after ``watch_s`` of silence. The
        watchdog itself may be silent for as long. With 0 there is no watchdog. None is 0.1 s, or three periods of the
        loop where these are longer."""
        silent_s = watch_time(watch_s, safety.rate_hz)
        folder = shared_folder()
        self.clock = MonotonicClock()
        own_s = WATCH_S if watch_s is None else watch_s  # his own silence has nothing to do with the loop's rate
        job = Job(robot, config, safety, folder, priority, core, own_s, os.getpid())
        self._process, self._log = _begun(folder, "process", job.to_json()), folder / LOG
        self.about = self._wait_for(folder / READY)
        super().__init__(folder, len(self.about["joints"]))
        self._watchdog = None
        if silent_s > 0:
            stop_s = self.about["stop_s"]
            watch = Watch(folder, self.pid, self._joints, robot, config, silent_s, stop_s, parent=os.getpid())
            self._watchdog = _begun(folder, "watchdog", watch.to_json())
            while not on_duty(folder):
                if self._watchdog.poll() is not None:
                    self.close()
                    raise RobotError("the watchdog ended at once, so nothing is driven")
                time.sleep(0.005)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ns(self, deadline_ns: int) -> None:
        self.clock.sleep_until_ns(deadline_ns)

    def _require_alive(self, what: str) -> None:
        if not self.alive:
            said = self._said() or f"exit status {self._process.poll()}"
            raise RobotError(
                f"the control process ended before it could {what} the robot ({said}); look at it, then begin again"
            )

    def _end(self) -> dict[str, Any]:
        if self.alive:
            self._send(Order.QUIT)
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._watchdog is not None:
            try:
                self._watchdog.wait(1.0)
            except subprocess.TimeoutExpired:
                self._watchdog.kill()
                self._watchdog.wait()
        found: dict[str, Any] = {}
        for path in (self.folder / WATCHED, self.folder / REPORT):
            found |= json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def _wait_for(self, path: Path) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            if not self.alive:
                said = self._said()
                release(path.parent)
                raise Refused(said or "the control process ended at once")
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                release(path.parent)
                raise RobotError(f"the control process was not ready after {PATIENCE_S:g} s")
            time.sleep(0.005)
        return json.loads(path.read_text(encoding="utf-8"))

    def _said(self) -> str:
        try:
            said = self._log.read_bytes()[-SAID_BYTES:].decode("utf-8", "replace").split("\n")
        except FileNotFoundError:  # the link is closed
            said = []
        lines = [line.strip() for line in said if line.strip()]
        return lines[-1] if lines else ""


class LocalLink(Link):
    """The loop in this process, on the adapter's clock: a tick is played when its deadline is waited for."""

    def __init__(self, adapter: Adapter, safety: Safety) -> None:
        robot = SafeRobot(adapter, safety)
        folder, self.clock = shared_folder(), adapter.clock
        self.loop = ControlLoop(robot, *boards_of(folder, robot.spec))
        self.about = about(robot)
        super().__init__(folder, len(robot.spec.joints))

    def wait_until_ns(self, deadline_ns: int) -> None:
        self.loop.run_until_ns(deadline_ns)

    def _require_alive(self, what: str) -> None:
        pass  # it is as alive as the caller

    def _end(self) -> dict[str, Any]:
        self.loop.robot.close()
        return left_by(self.loop)
