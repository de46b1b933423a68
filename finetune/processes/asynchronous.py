"""Acting and learning in processes of their own: for one slow robot, to use all cores, or those of a cluster.

    acting processes (`actor_process.py`)             learning process, which the user started
    worlds, the method's view, its actor              replay, learner, run folder
        decisions of its worlds, one row a message  ->
        <-  a receipt for each row that is taken up; the actor's weights, every so many updates

Nothing else is shared, so either side may die. If an actor dies, the learner keeps what was played, and starts another
one in fresh episodes. If the learner dies, the actors stop and leave; the run is resumed from the last checkpoint,
which holds the learner and its memory, and no worlds.

Several actors share the worlds out among them, and each world has its own column of the replay, as with one. A row of
the replay is taken up once all actors that play have sent theirs, so the slowest sets the pace, and ``backlog`` evens
out what varies. An actor that begins anew is not waited for: meanwhile the places of its worlds stay empty, are
never drawn, owe no updates, and count as no decisions.

An iteration is that of ``OffPolicy``: as many decisions as there are worlds, and the updates that are owed for them. So
budgets count alike, and the learner never makes more than ``updates_per_decision`` for a stored decision: it waits for
more. The difference is *when* it acted: with weights that are some updates old, while up to ``backlog`` decisions wait
to be stored. That depends on the clock, so such a run is never repeated bit for bit, resumed or not.

It pays where acting takes about as long as learning, as on a robot, which would stand still meanwhile. A toy world is
played sooner than its decisions are written into a pipe.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.types import Metrics
from ..loops import OffPolicy
from .actor_process import (
    FAILED,
    GRACE_S,
    READY,
    ROW,
    TAKEN,
    WEIGHTS,
    ActorConfig,
    Make,
    Running,
    gone,
    of_rows,
    spawned,
)
from .mailbox import Line, Mailbox, packed

DEATHS, WITHIN_S = 3, 60.0  # so many deaths of one actor within so many seconds are no accident
PATIENCE_S = 60.0  # for actors that have not begun yet, at the beginning

_log = logging.getLogger(__name__)


@dataclass
class AsynchronousConfig:
    """Settings of acting and learning in processes of their own: backlog and rate of new weights."""

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
        self.heard: int | None = None  # the updates behind the weights that it was sent last
        self.rows = 0  # taken up so far


class ActorSlot:
    """A share of the worlds, and the actors that play it, one after the other's death."""

    def __init__(self) -> None:
        self.handles: deque[ActorHandle] = deque()  # of a dead one there may be rows to take up before the next one's
        self.row: dict[str, Any] | None = None  # the next one to take up, if it has come
        self.deaths: deque[tuple[float, int]] = deque(maxlen=DEATHS)  # when, and after how many rows


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
    from ``config``, with an equal share of the worlds, in each of the ``actors`` processes that ``launch`` starts.
    ``share`` prepares a message that is sent to all of them. One actor alone plays no more than ``total`` decisions."""

    def __init__(
        self,
        loop: OffPolicy[Any],
        make: Make,
        config: Any,
        terms: AsynchronousConfig,
        *,
        actors: int = 1,
        total: int | None = None,
        seed: int = 0,
        tell: Callable[[str], object] = _log.warning,
        launch: Callable[[Make, Any, ActorConfig], tuple[Running, Line]] = spawned,
        share: Callable[[bytes], Any] = bytes,
    ) -> None:
        self.loop, self.terms, self.total, self.actors = loop, terms, total, actors
        self.learner, self.replay = loop.learner, loop.replay
        self._make, self._config, self._seed, self._tell = make, config, seed, tell
        self._launch, self._share = launch, share
        self.begun = 0  # acting processes so far, each with a seed of its own
        self.deaths = 0
        self.updates = 0
        self._published = 0
        self._weights: tuple[int, Any] | None = None  # the newest that were shared, and the updates behind them
        self._slots = [ActorSlot() for _ in range(actors)]
        self._news = threading.Event()  # something has arrived
        self._began_s, self._patient = 0.0, True  # when the actors were begun; whether those are still waited for
        self._warm = 0  # decisions of the warm-up so far
        self._short = 0  # decisions that the iterations so far still want
        self._metrics: Metrics = {}
        self._tally = self._fresh_tally()

    def iterate(self) -> Metrics:
        if self.loop.pretrain:  # before anything is played
            count = self.loop.to_study()
            self.updates += count
            return self.loop.learn(count)
        if not self._slots[0].handles:
            self._began_s, self._patient = time.monotonic(), True
            for slot in self._slots:
                self._begin(slot)
        if count := self.loop.to_study():
            return self._learn(count)
        self._short += self.loop.env.num_envs
        while self._short > 0:
            if not self.terms.backlog:
                # Rows are never kept waiting: what is owed is paid until the next one arrives.
                while self.loop.owed >= 1 and not self._complete():
                    self.loop.owed -= 1
                    self._learn(1)
            self._short -= self._take_up()
            if self.terms.backlog:
                self._learn(self.loop.due())
        return self._metrics

    def _learn(self, count: int) -> Metrics:
        for _ in range(count):
            self._metrics = self.loop.learn(1)
            self.updates += 1
            for slot in self._slots:
                self._watch(slot)
            if self.updates - self._published >= self.terms.publish_every:
                self._publish()
        return self._metrics

    def _publish(self) -> None:
        """The weights, packed once, to all that are ready and have not got them."""
        handles = [slot.handles[-1] for slot in self._slots]
        if not (behind := [handle for handle in handles if handle.ready and handle.heard != self.updates]):
            return
        if self._weights is None or self._weights[0] != self.updates:
            content = {"updates": self.updates, "actor": self.loop.learner.actor.state_dict()}
            self._weights = self.updates, self._share(packed(WEIGHTS, content))
        self._published = self.updates
        for handle in behind:
            handle.heard = self.updates
            handle.mail.post(self._weights[1])

    def _take_up(self) -> int:
        """The next row becomes part of the replay; the number of decisions in it."""
        loop, tally = self.loop, self._tally
        while True:
            self._news.clear()
            if self._complete():
                break
            began = time.perf_counter()
            self._news.wait(1.0)
            tally.waited_s += time.perf_counter() - began  # reading rows is work
        came = {slot: slot.row for slot in self._slots if slot.row is not None}
        # Its worlds began in fresh episodes: what came before, if anything did, was cut off.
        if fresh := [slot for slot in came if slot.handles[0].rows == 0]:
            loop.replay.cut(self._worlds(fresh))
            loop.statistics.abandon(self._worlds(fresh))
        gaps = [slot for slot in self._slots if slot not in came]
        absent = self._worlds(gaps) if gaps else None
        # In a gap stands what another one played, so that all is within range.
        other = next(iter(came.values()))
        obs, action, columns, outcome = of_rows([came.get(slot, other) for slot in self._slots], loop.env.device)
        warm = loop.warm
        loop.statistics.note(outcome, absent)
        loop.store(obs, action, columns, outcome, warm=warm, absent=absent)
        if warm:
            self._warm = loop.statistics.decisions
        for slot, row in came.items():
            handle, slot.row = slot.handles[0], None
            handle.mail.send(TAKEN)
            handle.rows += 1
            tally.acted_s += row["lasted_s"]
            tally.actor_waited_s += row["waited_s"]
            if not warm:
                tally.rows += 1
                tally.age += self.updates - row["updates"]
        return loop.env.num_envs // len(self._slots) * len(came)

    def _worlds(self, slots: list[ActorSlot]) -> Tensor:
        """(N,): the worlds of ``slots``."""
        chosen = torch.tensor([slot in slots for slot in self._slots])
        return chosen.repeat_interleave(self.loop.env.num_envs // len(chosen)).to(self.loop.env.device)

    def _complete(self) -> bool:
        """Whether a row of each actor is there that is waited for."""
        there = [self._listen(slot) for slot in self._slots]
        if self._patient and time.monotonic() - self._began_s > PATIENCE_S:
            self._patient = False
            if late := sum(not slot.handles[0].ready for slot in self._slots):
                self._tell(f"{late} of {len(there)} actors have not begun in {PATIENCE_S:.0f} s, and join when they do")
        wanted = [slot.handles[0].rows or (self._patient and not slot.deaths) for slot in self._slots]
        return any(there) and all(row or not waited for row, waited in zip(there, wanted, strict=True))

    def _listen(self, slot: ActorSlot) -> bool:
        """Whether its next row is there, once all that came before it was heard."""
        while slot.row is None:
            handle = slot.handles[0]
            closed = handle.mail.closed  # asked first: after that nothing more comes
            message = handle.mail.take(wait=False)
            if message is None:
                if not closed:
                    return False
                self._watch(slot)  # it is dead, and nothing of it is left
                slot.handles.popleft()
            elif message.kind == READY:
                handle.ready = True
                self._publish()
            elif message.kind == FAILED:
                raise BurnishError(f"the acting process could not go on: {message.read()['why']}")
            else:
                slot.row = message.read()
        return True

    # ---- start and death of an actor ----

    def _begin(self, slot: ActorSlot) -> None:
        loop, worlds = self.loop, self.loop.env.num_envs
        waiting = (slot.row is not None) + sum(handle.mail.waiting(ROW) for handle in slot.handles)
        played = loop.statistics.decisions + worlds * waiting

        def rows_until(decisions: int) -> int:
            return max(0, -(-(decisions - played) // worlds))

        self.begun += 1
        acting = ActorConfig(
            seed=derive(self._seed, "acting", self.begun),
            warm=rows_until(loop.config.warmup),
            ahead=max(1, self.terms.backlog // worlds) if self.terms.backlog else 0,
            # Of several, one may have to play what another one did not.
            rows=None if self.total is None or len(self._slots) > 1 else rows_until(self.total),
        )
        process, line = self._launch(self._make, self._config, acting)
        slot.handles.append(ActorHandle(process, Mailbox(line, arrived=self._news.set)))
        atexit.register(self.close)  # before multiprocessing would wait for a child that waits for messages

    def _watch(self, slot: ActorSlot) -> None:
        """If its last actor is dead, begin another one."""
        handle = slot.handles[-1]
        if not handle.mail.closed:
            return
        now, how = time.monotonic(), gone(handle.process)
        self.deaths += 1
        slot.deaths.append((now, handle.rows))
        count = len(self._slots)
        name = "the acting process" if count == 1 else f"acting process {self._slots.index(slot) + 1} of {count}"
        often = now - slot.deaths[0][0] < WITHIN_S or not any(rows for _, rows in slot.deaths)
        if len(slot.deaths) == DEATHS and often:
            raise BurnishError(
                f"{name} died {DEATHS} times in short order, at last with {how}; what it "
                "wrote before that may say why, and resume=true continues from the last checkpoint"
            )
        kept = len(self.loop.replay)
        self._tell(f"{name} died ({how}); another one begins, {kept} decisions are kept")
        self._begin(slot)

    def close(self) -> None:
        """The other processes do not act any more when this returns."""
        atexit.unregister(self.close)
        handles = [handle for slot in self._slots for handle in slot.handles]
        for handle in handles:
            handle.mail.stop()
        until = time.monotonic() + GRACE_S
        for handle in handles:
            gone(handle.process, max(0.0, until - time.monotonic()))
        self._slots = [ActorSlot() for _ in self._slots]

    # ---- what is known, and what is kept ----

    @property
    def updates_per_decision(self) -> float:
        """Made so far behind the warm-up, without the initial updates."""
        return (self.updates - self.loop.studied) / max(1, self.loop.statistics.decisions - self._warm)

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
        return {**kept, "begun": self.begun, "updates": self.updates, "warm": self._warm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.learner.load_state_dict(state["learner"])
        self.loop.statistics.load_state_dict(state["ledger"])
        self.loop.load_memory(state)
        self.begun, self.updates = int(state["begun"]), int(state["updates"])
        worlds = self.loop.env.num_envs
        self._warm = int(state.get("warm", -(-self.loop.config.warmup // worlds) * worlds))  # older states lack it
        self._published, self._tally = self.updates, self._fresh_tally()
