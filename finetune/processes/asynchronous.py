"""Acting and learning in two processes: for one slow robot, or to use both cores.

    acting process (`actor_process.py`)               learning process, which the user started
    worlds, the method's view, its actor              replay, learner, run folder
        decisions of all worlds, one row a message  ->
        <-  a receipt for each row that is taken up; the actor's weights, every so many updates

Nothing else is shared, so either side may die. If the actor dies, the learner keeps what was played, and starts another
one in fresh episodes. If the learner dies, the actor stops and leaves; the run is resumed from the last checkpoint,
which holds the learner and its memory, and no worlds.

An iteration is that of ``OffPolicy``: one decision of every world, and the updates that are owed for it. So budgets
count alike, and the learner never makes more than ``updates_per_decision`` for a stored decision: it waits for more.
The difference is *when* it acted: with weights that are some updates old, while up to ``backlog`` decisions wait to be
stored. That depends on the clock, so such a run is never repeated bit for bit, resumed or not.

It pays where acting takes about as long as learning, as on a robot, which would stand still meanwhile. A toy world is
played sooner than its decisions are written into a pipe.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.types import Metrics
from ..loops import OffPolicy
from .actor_process import FAILED, READY, ROW, TAKEN, WEIGHTS, ActorConfig, Make, Running, gone, of_row, spawned
from .mailbox import Mailbox

DEATHS, WITHIN_S = 3, 60.0  # so many deaths within so many seconds are no accident

_log = logging.getLogger(__name__)


@dataclass
class AsynchronousConfig:
    """Settings of acting and learning in two processes: backlog and rate of new weights."""

    # Decisions of all worlds that may wait to be learnt from before the actor waits too. 0: it never does, as a robot
    # may not; a learner that is too slow then makes fewer updates per decision, and the ratio is reported.
    backlog: int = 64
    publish_every: int = 10  # updates between two sendings of the actor's weights

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "backlog", "[1, inf)": "publish_every"}, "asynchronous.")


class ActorHandle:
    """An acting process, as the learner sees it."""

    def __init__(self, process: Running, mail: Mailbox) -> None:
        self.process, self.mail = process, mail
        self.ready = False  # to be sent weights
        self.rows = 0  # taken up so far


@dataclass
class Tally:
    """The events since the last report."""

    decisions: int  # these three: at its beginning
    ticks: int
    updates: int
    began_s: float
    waited_s: float = 0.0
    acted_s: float = 0.0  # of the actor, whatever it did in it
    actor_waited_s: float = 0.0
    rows: int = 0  # behind the warm-up
    age: int = 0  # in updates, summed over these


class Asynchronous:
    """A training: iterate, state_dict, load_state_dict; to be closed in the end. ``loop`` is never played itself, so
    its worlds stand still: it is the replay, the learner, and the count of what was played. ``make`` builds such a loop
    from ``config`` in the acting process. No actor plays beyond ``total`` decisions of all worlds."""

    def __init__(
        self,
        loop: OffPolicy[Any],
        make: Make,
        config: Any,
        terms: AsynchronousConfig,
        *,
        total: int | None = None,
        seed: int = 0,
        tell: Callable[[str], object] = _log.warning,
        launch: Callable[[Make, Any, ActorConfig], tuple[Running, Connection]] = spawned,
    ) -> None:
        self.loop, self.terms, self.total = loop, terms, total
        self.learner, self.replay = loop.learner, loop.replay
        self._make, self._config, self._seed, self._tell, self._launch = make, config, seed, tell, launch
        self.begun = 0  # acting processes so far, each with a seed of its own
        self.deaths = 0
        self.updates = 0
        self._published = 0
        self._actors: deque[ActorHandle] = deque()  # of a dead one there may be rows to take up before the next one's
        self._recent: deque[tuple[float, int]] = deque(maxlen=DEATHS)  # deaths: when, and after how many rows
        self._metrics: Metrics = {}
        self._tally = self._fresh_tally()

    def iterate(self) -> Metrics:
        if self.loop.pretrain:  # before anything is played
            count = self.loop.to_study()
            self.updates += count
            return self.loop.learn(count)
        if not self._actors:
            self._begin()
        if count := self.loop.to_study():
            return self._learn(count)
        if not self.terms.backlog:
            # Rows are never kept waiting: what is owed is paid until the next one arrives.
            while self.loop.owed >= 1 and not any(handle.mail.waiting() for handle in self._actors):
                self.loop.owed -= 1
                self._learn(1)
        self._take_up()
        if self.terms.backlog:
            self._learn(self.loop.due())
        return self._metrics

    def _learn(self, count: int) -> Metrics:
        for _ in range(count):
            self._metrics = self.loop.learn(1)
            self.updates += 1
            self._watch()
            if self.updates - self._published >= self.terms.publish_every:
                self._publish()
        return self._metrics

    def _publish(self) -> None:
        handle = self._actors[-1]
        if handle.ready:
            self._published = self.updates
            handle.mail.send(WEIGHTS, {"updates": self.updates, "actor": self.loop.learner.actor.state_dict()})

    def _take_up(self) -> None:
        """The next row becomes part of the replay."""
        loop, tally = self.loop, self._tally
        handle, row = self._next_row()
        handle.mail.send(TAKEN)
        if handle.rows == 0:
            # Its worlds began in fresh episodes: what came before, if anything did, was cut off.
            loop.replay.cut()
            loop.statistics.abandon()
        handle.rows += 1
        warm = loop.warm
        obs, action, columns, outcome = of_row(row, loop.env.device)
        loop.statistics.note(outcome)
        loop.store(obs, action, columns, outcome, warm=warm)
        tally.acted_s += row["lasted_s"]
        tally.actor_waited_s += row["waited_s"]
        if not warm:
            tally.rows += 1
            tally.age += self.updates - row["updates"]

    def _next_row(self) -> tuple[ActorHandle, dict[str, Any]]:
        while True:
            handle = self._actors[0]
            began = time.perf_counter()
            message = handle.mail.take(wait=True)
            self._tally.waited_s += time.perf_counter() - began
            if message is None:  # it is dead, and nothing of it is left
                self._watch()
                self._actors.popleft()
            elif message.kind == READY:
                handle.ready = True
                self._publish()
            elif message.kind == FAILED:
                raise BurnishError(f"the acting process could not go on: {message.read()['why']}")
            else:
                return handle, message.read()

    # ---- start and death of the actor ----

    def _begin(self) -> None:
        loop, worlds = self.loop, self.loop.env.num_envs
        played = loop.statistics.decisions + worlds * sum(handle.mail.waiting(ROW) for handle in self._actors)

        def rows_until(decisions: int) -> int:
            return max(0, -(-(decisions - played) // worlds))

        self.begun += 1
        acting = ActorConfig(
            seed=derive(self._seed, "acting", self.begun),
            warm=rows_until(loop.config.warmup),
            ahead=max(1, self.terms.backlog // worlds) if self.terms.backlog else 0,
            rows=None if self.total is None else rows_until(self.total),
        )
        process, connection = self._launch(self._make, self._config, acting)
        self._actors.append(ActorHandle(process, Mailbox(connection)))
        atexit.register(self.close)  # before multiprocessing would wait for a child that waits for messages

    def _watch(self) -> None:
        """If the last actor is dead, begin another one."""
        handle = self._actors[-1]
        if not handle.mail.closed:
            return
        now, status = time.monotonic(), gone(handle.process)
        self.deaths += 1
        self._recent.append((now, handle.rows))
        often = now - self._recent[0][0] < WITHIN_S or not any(rows for _, rows in self._recent)
        if len(self._recent) == DEATHS and often:
            raise BurnishError(
                f"the acting process died {DEATHS} times in short order, at last with exit status {status}; what it "
                "wrote before that may say why, and resume=true continues from the last checkpoint"
            )
        kept = len(self.loop.replay)
        self._tell(f"the acting process died (exit status {status}); another one begins, {kept} decisions are kept")
        self._begin()

    def close(self) -> None:
        """The other process does not act any more when this returns."""
        atexit.unregister(self.close)
        for handle in self._actors:
            handle.mail.stop()
        for handle in self._actors:
            gone(handle.process)
        self._actors.clear()

    # ---- what is known, and what is kept ----

    @property
    def updates_per_decision(self) -> float:
        """Made so far behind the warm-up, without the initial updates."""
        loop, worlds = self.loop, self.loop.env.num_envs
        warm = -(-loop.config.warmup // worlds) * worlds
        return (self.updates - loop.studied) / max(1, loop.statistics.decisions - warm)

    def report(self) -> Metrics:
        """Beside what every loop reports: the ratio that was reached, the updates between the weights that acted and
        the taking up of what they did (staleness), and which share of its time either side waited."""
        tally, loop = self._tally, self.loop
        self._tally = now = self._fresh_tally()
        elapsed_s = max(1e-9, now.began_s - tally.began_s)
        found: Metrics = {
            "asynchronous/updates_per_decision": self.updates_per_decision,
            "asynchronous/deaths": float(self.deaths),
            "time/decisions_per_s": (now.decisions - tally.decisions) / elapsed_s,
            "time/control_steps_per_s": (now.ticks - tally.ticks) / elapsed_s,
            "time/updates_per_s": (now.updates - tally.updates) / elapsed_s,
            "time/learner_waits": tally.waited_s / elapsed_s,
        }
        if tally.acted_s:
            found["time/actor_waits"] = tally.actor_waited_s / tally.acted_s
        if tally.rows:
            found["asynchronous/staleness"] = tally.age / tally.rows
        return {**loop.report(), **found}

    def _fresh_tally(self) -> Tally:
        statistics = self.loop.statistics
        return Tally(statistics.decisions, int(statistics.ticks), self.updates, time.perf_counter())

    def state_dict(self) -> dict[str, Any]:
        loop = self.loop
        kept = {"learner": loop.learner.state_dict(), "ledger": loop.statistics.state_dict(), **loop.memory()}
        return {**kept, "begun": self.begun, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.learner.load_state_dict(state["learner"])
        self.loop.statistics.load_state_dict(state["ledger"])
        self.loop.load_memory(state)
        self.begun, self.updates = int(state["begun"]), int(state["updates"])
        self._published, self._tally = self.updates, self._fresh_tally()
