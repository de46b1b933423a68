"""A model of many actors and one learner (`finetune/processes/asynchronous.py`), and a simulation of their protocol.

**The model.** A row is one decision of all worlds. With K actors of w worlds each and r updates per decision, it takes

    max(learner, actors) seconds
    learner = store + K * (message + keep) + r * K * w * (update + K * watch + (pack + K * post) / publish_every)
    actors  = the slowest of K, by measured times of an actor's row

An actor may be `ahead` rows in front, so that not every slow row of one is waited for. In a stretch of m rows that the
slowest actor plays, m + FREE * (ahead - 1) rows pass, and the stretch that costs most per row sets the pace. That
stretch is one row long if no actor may be ahead. If actors may be far ahead, the pace is their mean. A stretch includes
the wait for the receipt of an actor's last row, if an actor waits for that.

Where processes share cores, n busy ones get cores(n) together, and the seconds above are those of a core of one's own:
while learner and actors work, each gets 1 / (K + 1) of cores(K + 1); then those that have not finished share the rest.

A network (`Network`, `over`) delays each message, and carries the rows of K actors to the learner one after the other,
while it works: a row of all takes at least K times as long as one message is on the wire. Weights go the other way, and
actors do not wait for them: they act with older ones where the network is slower than the updates (`weights_share`).

**The simulation** plays the protocol row by row: actors that stop when `backlog` is used up, rows read one after the
other once the learner is free, receipts, updates that are owed for stored decisions, and weights that are sent to one
actor after the other and read between two rows; on their way both queue for the network of the learner. It knows no
deaths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[Any]
SUMS = 4000  # sums of several rows that are drawn to know their distribution
LONGEST = 16  # stretches, in rows that an actor may be ahead
FREE = (
    0.65  # fitted to simulations of lognormal and Pareto times: 1 would be as if it were known who will be the slowest
)
ENDLESS = 1e6  # rows of a stretch in which nothing varies any more
MOST = 100_000  # actors, where more are not looked for


class Costs(NamedTuple):
    """Seconds, of a process with a core of its own."""

    worlds: int  # of one actor
    rows: Times  # measured times of an actor's row: choosing, playing, packing, sending
    updates: Times  # measured times of the learner's update
    message: float  # the learner receives and reads the row of one actor, and sends the receipt
    keep: float  # the share of one actor in joining the rows and storing them
    store: float  # what that costs besides, for the row of all
    watch: float  # for each update and actor: whether it is still there
    pack: float  # weights made ready to be sent
    post: float  # to one actor
    adopt: float  # an actor reads them
    turn: float  # from the sending of a message to the arrival of an answer
    row_wire: float = 0.0  # the row of one actor on the network of the learner
    weights_wire: float = 0.0  # weights for one actor there


class Network(NamedTuple):
    """Between the learner and its actors."""

    name: str
    bytes_per_s: float  # each way, of the learner
    latency_s: float  # one way


NETWORKS = [Network("10 Gbit/s, 0.05 ms", 1.25e9, 5e-5), Network("1 Gbit/s, 0.2 ms", 1.25e8, 2e-4)]
NETWORKS += [Network("100 Mbit/s, 2 ms", 1.25e7, 2e-3), Network("10 Mbit/s, 20 ms", 1.25e6, 2e-2)]


def over(costs: Costs, network: Network, row_bytes: int, weight_bytes: int) -> Costs:
    """The costs where messages cross a network too."""
    return costs._replace(
        turn=costs.turn + 2 * network.latency_s,
        row_wire=row_bytes / network.bytes_per_s,
        weights_wire=weight_bytes / network.bytes_per_s,
    )


class Terms(NamedTuple):
    """Settings of a run."""

    ratio: float  # updates per stored decision
    backlog: int = 64
    publish_every: int = 10

    def ahead(self, worlds: int) -> int:
        """Rows that an actor may be ahead, as `Asynchronous` gives them out; ``worlds`` are those of all."""
        return max(1, self.backlog // worlds)


def apart(count: int) -> float:
    """Cores that ``count`` processes get on a cluster: one each."""
    return float(count)


def learner_s(costs: Costs, terms: Terms, actors: int, rows: float = 1, updates: float | None = None) -> float:
    """Seconds of the learner for ``rows`` rows of all worlds, with as many updates as they owe on average, or more."""
    if updates is None:
        updates = terms.ratio * actors * costs.worlds * rows
    publishing = (costs.pack + actors * costs.post) / terms.publish_every
    receiving = costs.store + actors * (costs.message + costs.keep)
    return rows * receiving + updates * (float(costs.updates.mean()) + actors * costs.watch + publishing)


def stretches(costs: Costs, terms: Terms, actors: int) -> Iterator[tuple[float, Times, Times]]:
    """For stretches of 1, 2, 4, ... rows of an actor: the rows of all that pass meanwhile, the seconds of the slowest
    of K such stretches, and how probable each is."""
    worlds = actors * costs.worlds
    ahead, random = terms.ahead(worlds), np.random.default_rng(0)
    adopting = costs.adopt * terms.ratio * worlds / terms.publish_every
    receipt, line = costs.turn + costs.row_wire + costs.store + actors * costs.keep, np.arange(actors)
    each = max(costs.message, costs.row_wire)
    sums, length = costs.rows, 1
    while length <= LONGEST * ahead:
        usual = np.quantile(sums, (line + 1) / (actors + 1))  # of the first, the second, ... that arrive
        reading = float((usual + each * (actors - line)).max() - usual[-1])  # one after the other
        times = np.sort(sums) + length * adopting + receipt + reading
        below = np.linspace(0, 1, len(times) + 1) ** actors  # that all actors are among the first so many
        yield length + FREE * (ahead - 1), times, np.diff(below)
        sums, length = random.choice(sums, (SUMS, 2)).sum(1), 2 * length
    yield ENDLESS, ENDLESS * np.array([float(costs.rows.mean()) + adopting]), np.ones(1)


def actors_s(costs: Costs, terms: Terms, actors: int) -> float:
    """Seconds of a row where only the actors set the pace."""
    return max(float((weights * times).sum()) / rows for rows, times, weights in stretches(costs, terms, actors))


def row_s(costs: Costs, terms: Terms, actors: int, cores: Callable[[int], float] = apart) -> float:
    """Seconds between two rows of all worlds."""
    found = []
    for rows, theirs, weights in stretches(costs, terms, actors):
        updates = terms.ratio * actors * costs.worlds * rows
        whole = math.floor(updates)
        seconds = 0.0
        for count, share in ((whole, whole + 1 - updates), (whole + 1, updates - whole)):
            mine = learner_s(costs, terms, actors, rows, count)
            together = np.minimum(mine, theirs) * (actors + 1) / cores(actors + 1)
            alone = np.maximum(mine - theirs, 0) / cores(1) + np.maximum(theirs - mine, 0) * actors / cores(actors)
            seconds += share * float((weights * (together + alone)).sum())
        found.append(seconds / rows)
    return max(*found, actors * costs.row_wire)


def weights_share(costs: Costs, terms: Terms, actors: int, seconds: float) -> float:
    """Of the time of a row, the part in which weights are on the network; above 1 they get there later and later."""
    sendings = terms.ratio * actors * costs.worlds / terms.publish_every
    return sendings * actors * costs.weights_wire / seconds


def enough(costs: Costs, terms: Terms) -> int:
    """The number of actors from which on the learner, or its network, sets the pace."""
    few, many = 1, MOST
    while few < many:
        middle = (few + many) // 2
        learner = max(learner_s(costs, terms, middle), middle * costs.row_wire)
        reached = learner >= actors_s(costs._replace(row_wire=0.0), terms, middle)
        few, many = (few, middle) if reached else (middle + 1, many)
    return few


class Simulated(NamedTuple):
    """The outcome of a simulation, without its first tenth."""

    row_s: float
    updates: int  # in all
    learner_waits: float  # shares of their time, as a run reports them
    actor_waits: float


def queued(times: Times, each: float, busy: float) -> Times:
    """When things that come at ``times``, in order, are through where they wait for one another, and for ``busy``."""
    line = np.arange(len(times))
    return np.maximum.accumulate(np.maximum(times - each * line, busy)) + each * (line + 1)


def simulate(costs: Costs, terms: Terms, actors: int, rows: int, seed: int = 0) -> Simulated:
    """``rows`` rows of all worlds, each process with a core of its own."""
    random, first = np.random.default_rng(seed), rows // 10
    ahead = terms.ahead(actors * costs.worlds)
    line = np.arange(actors)
    sent = np.zeros(actors)  # when each actor's latest row was on its way
    receipts: list[Times] = []  # when each actor had that of each row
    weights: list[Times] = []  # when each actor had those that it has not read yet
    free = owed = began = waited = actors_waited = 0.0
    updates = published = 0
    receiving = sending = 0.0  # until when the network is busy, each way
    for row in range(rows):
        if row == first:
            began, waited, actors_waited = free, 0.0, 0.0
        start = np.maximum(sent, receipts[row - ahead]) if row >= ahead else sent
        heard = np.zeros(actors)
        left = []
        for arrived in weights:
            there = arrived <= start
            heard += there
            if not there.all():
                left.append(np.where(there, np.inf, arrived))  # inf: it was read
        weights = left
        start += heard * costs.adopt
        actors_waited += float((start - sent).mean())
        sent = start + random.choice(costs.rows, actors)
        # Rows are read as they come, none before the learner is free.
        there = queued(np.sort(sent) + costs.turn / 2, costs.row_wire, receiving)
        receiving, arrived = float(there[-1]), np.maximum(there, free)
        complete = float((arrived + costs.message * (actors - line)).max())
        waited += max(0.0, complete - free - costs.message * actors)
        stored = complete + costs.store
        receipts.append(stored + costs.keep * (line + 1) + costs.turn / 2)
        free = stored + costs.keep * actors
        owed += terms.ratio * actors * costs.worlds
        count, owed = int(owed), owed % 1
        for update in random.choice(costs.updates, count):
            free += update + actors * costs.watch
            updates += 1
            if updates - published >= terms.publish_every:
                published = updates
                through = queued(free + costs.pack + costs.post * (line + 1), costs.weights_wire, sending)
                sending = float(through[-1])
                weights.append(through + costs.turn / 2)
                free += costs.pack + actors * costs.post
    elapsed = free - began
    return Simulated(elapsed / (rows - first), updates, waited / elapsed, actors_waited / elapsed)
