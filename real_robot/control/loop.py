"""The control loop: once per period, at absolute deadlines, the plan's set-point of now goes to `SafeRobot`.

Deadlines do not drift, and what is missed is skipped: a loop that has fallen behind never sends in a burst. Nothing in
a period waits for another process: the plan, the orders and the report are boards of shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np

from ..adapter import Phase
from ..clock import ns
from ..errors import Refused, RobotError
from ..safety.safe_robot import Rung, SafeRobot, StepInfo
from .shared_memory import Board, blank
from .timing import Timing

PHASES, RUNGS = tuple(Phase), tuple(Rung)


class Order(StrEnum):
    """The orders that the control loop takes."""

    NONE = "none"
    START = "start"
    STOP = "stop"
    RECOVER = "recover"
    BLEND = "blend"
    QUIT = "quit"


ORDERS = tuple(Order)


class Plan:
    """Set-points in time, checked as they come out of shared memory: what is not a plan is nothing."""

    def __init__(self, record: np.ndarray) -> None:
        row = record[0]
        self.seq, self.start_ns, self.dt_ns = int(row["seq"]), int(row["t_start_ns"]), int(row["dt_ns"])
        count = int(row["count"])
        self.count = count if 0 < count <= len(row["targets"]) and self.dt_ns > 0 else 0
        self._targets, self._gripper, self._linear = row["targets"], row["gripper"], bool(row["linear"])

    def at(self, now_ns: int) -> tuple[int, np.ndarray, float | None] | None:
        """(index, joint angles, gripper) of this moment; None before the plan begins and after its last set-point's
        time is over."""
        since_ns = now_ns - self.start_ns
        index = since_ns // self.dt_ns if self.dt_ns > 0 else -1
        if not 0 <= index < self.count:
            return None
        target = self._targets[index]
        if self._linear and index + 1 < self.count:
            share = (since_ns - index * self.dt_ns) / self.dt_ns
            target = target + share * (self._targets[index + 1] - target)
        gripper = float(self._gripper[index])
        return int(index), target, None if np.isnan(gripper) else gripper


class ControlLoop:
    """``tick`` once per period; ``run`` until the order QUIT comes or ``quit`` says so."""

    def __init__(
        self,
        robot: SafeRobot,
        plans: Board,
        orders: Board,
        states: Board,
        watched: Callable[[], bool] = lambda: True,
    ) -> None:
        """``watched`` says whether the watchdog is there; without him the robot comes to rest."""
        self._watched = watched
        self.robot, self.clock = robot, robot.clock
        robot.stopping = self._tell_stopping
        self.timing = Timing()
        self.asked = self.changed = 0  # set-points that a plan had, and of these, those that were not sent as they were
        self._plans, self._orders, self._states = plans, orders, states
        self._plan: Plan | None = None
        self._plan_count = -1
        self._order_seq = self._order_count = self._refused = 0
        self._index = -1
        self._report = blank(states.dtype, plan_seq=-1, seq=-1, effort=np.nan, truth=np.nan, gripper=np.nan)
        self._row = {name: self._report[name] for name in states.dtype.names or ()}  # views: a look-up costs a tenth
        self._period_ns = ns(robot.limits.period_s)
        self._next_ns = 0
        self._skipped_ns = 0  # from the first deadline that was skipped to the next one
        self._late = False
        self._leaving = False

    def run(self, leave: Callable[[], bool] = lambda: False) -> None:
        """However it ends, the robot is brought to rest first."""
        self._next_ns, self._skipped_ns, self._leaving = self.clock.now_ns(), 0, False
        try:
            while not (self._leaving or leave()):
                self.clock.sleep_until_ns(self._next_ns)
                self.tick()
        finally:
            self.robot.stop(each=lambda: self._tell(None))  # braking may take longer than a watchdog waits
            self._tell(None)

    def run_until_ns(self, deadline_ns: int) -> None:
        """The ticks whose deadlines come until then; the caller's time is the loop's."""
        if not self.timing.ticks:
            self._next_ns = self.clock.now_ns()
        while self._next_ns <= deadline_ns:
            self.clock.sleep_until_ns(self._next_ns)
            self.tick()
        self.clock.sleep_until_ns(deadline_ns)

    def tick(self) -> StepInfo | None:
        """One period, and the deadline of the next one."""
        began_ns = self.clock.now_ns()
        self._follow_orders()
        info = None
        if self.robot.rung is not Rung.STOPPED:
            if not self._watched():
                self.robot.ramp("nobody watches this process any more")
            wish = self._wish(began_ns)
            try:
                info = self.robot.step(*wish, late=self._late)
                if wish[0] is not None:
                    self.asked, self.changed = self.asked + 1, self.changed + info.changed
            except RobotError:
                info = None  # it is in the robot's events, and the report says in which phase the robot is
        self._tell(info)
        ended_ns = self.clock.now_ns()
        self.timing.add(self._next_ns - self._skipped_ns, began_ns, ended_ns, self._late)
        self._next_ns += self._period_ns
        behind = (ended_ns - self._next_ns) // self._period_ns + 1
        self._late = behind > 0
        self._skipped_ns = behind * self._period_ns if self._late else 0
        self._next_ns += self._skipped_ns  # the deadlines that are over are skipped
        return info

    def _wish(self, now_ns: int) -> tuple[Any, Any]:
        if (count := self._plans.count) != self._plan_count:  # counted before it is read: none that comes now is lost
            self._plan_count, record = count, self._plans.read()
            if record is not None:
                self._plan = Plan(record)
        found = self._plan.at(now_ns) if self._plan is not None else None
        if found is None:
            self._index = -1
            return None, None
        self._index = found[0]
        return found[1], found[2]

    def _follow_orders(self) -> None:
        if (count := self._orders.count) == self._order_count:
            return
        self._order_count, record = count, self._orders.read()
        if record is None or int(record["seq"][0]) == self._order_seq:
            return
        self._order_seq = int(record["seq"][0])
        what = int(record["what"][0])
        order = ORDERS[what] if 0 <= what < len(ORDERS) else Order.NONE
        try:
            if order is Order.START and not self._watched():
                raise Refused("nobody watches this process")
            if order is Order.START:
                before = self._plans.count
                self.robot.start()
                self._plan, self._plan_count = None, before  # a plan of before is not taken up again
            elif order is Order.STOP:
                self.robot.ramp("an order to stop")
            elif order is Order.RECOVER:
                self.robot.recover()
            elif order is Order.BLEND:
                self.robot.blend()
            elif order is Order.QUIT:
                self._leaving = True
        except RobotError as error:
            self._refused = self._order_seq
            self.robot.note("refused", f"{order.value}: {error}")

    def _tell_stopping(self) -> None:
        """A sign of life before the device is stopped: a watchdog gives that more time than a tick."""
        self._row["heartbeat_ns"][0], self._row["phase"][0] = self.clock.now_ns(), PHASES.index(Phase.STOPPING)
        self._states.write(self._report)

    def _tell(self, info: StepInfo | None) -> None:
        row, robot = self._row, self.robot
        row["heartbeat_ns"][0] = self.clock.now_ns()
        row["ticks"][0] += 1
        row["late"][0] = self.timing.misses
        row["order_seq"][0], row["refused"][0] = self._order_seq, self._refused
        row["plan_seq"][0] = self._plan.seq if self._plan is not None else -1
        row["plan_index"][0] = self._index
        row["phase"][0], row["rung"][0] = PHASES.index(robot.phase), RUNGS.index(robot.rung)
        if robot.events:
            row["note"][0] = robot.events[-1].text.encode()[: row["note"].itemsize]
        if info is not None:
            state, truth = info.state, robot.truth()
            row["changed"][0] += info.changed
            row["seq"][0], row["t_ns"][0] = state.seq, state.t_ns
            row["q"][0], row["qd"][0], row["sent"][0] = state.q, state.qd, info.sent
            row["effort"][0] = state.effort if state.effort is not None else np.nan
            row["truth"][0] = truth if truth is not None else np.nan
            row["gripper"][0] = state.gripper if state.gripper is not None else np.nan
        self._states.write(self._report)
