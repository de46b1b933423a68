"""Robot time with faults, all of it decided by one seed.

A `World` is a stand (soak_stands.py) with the control loop around it, a policy that asks for bold motions, faults at
any instant, and a person who comes when the robot has stopped. `Judge` (soak_judge.py) reads the wire. A failure is a
tick and a sentence, and the same seed makes it again at the same tick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from burnish.real_robot.adapter import Phase
from burnish.real_robot.clock import ns
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.errors import RobotError
from burnish.real_robot.safety.safe_robot import Rung, Safety
from soak_judge import Failure, Judge
from soak_stands import STANDS, Weather

DECISION_S = 0.25
GAP_S = 2.5  # on average, between a fault and the next one
LASTS_S = (0.03, 1.5)
PERSON_S = (0.6, 1.6)  # until somebody comes


@dataclass(frozen=True)
class Lived:
    digest: str
    failure: Failure | None
    counts: Counter[str]
    faults: Counter[str]
    worst: np.ndarray


class World:
    def __init__(self, robot: str, seed: int, break_it: Callable[[LocalLink], None] | None = None) -> None:
        self.clock, self.rng = Weather(), np.random.default_rng(seed)
        self.stand = STANDS[robot](seed, self.clock)
        self.adapter = self.stand.adapter
        stand = self.stand
        self.judge = Judge(self.adapter, stand.rate_hz, stand.truth, stand.true, stand.start_rad)
        stand.written = self.judge.written
        # The policy is bold, but begins where the arm is; so the first request may be farther away than usual.
        safety = Safety(rate_hz=stand.rate_hz, blend_s=0.3, **stand.safety)
        self.link = LocalLink(self.adapter, safety)
        if break_it is not None:
            break_it(self.link)
        self.judge.watch(self.link.loop)
        self.faults: Counter[str] = Counter()
        self.kinds = {**stand.kinds, "pause": self._pause, "long pause": self._long_pause, "stutter": self._stutter}
        self._first, self._refused, self._manner, self._manner_ns = True, 0, "creep", 0
        self._next_fault()

    def live(self, seconds: float) -> Lived:
        judge, end_ns = self.judge, self.clock.now_ns() + ns(seconds)
        try:
            while self.clock.now_ns() < end_ns and judge.failure is None:
                if self.link.loop.robot.rung is Rung.STOPPED:
                    self._person()
                else:
                    self._decide()
                self.link.wait_until_ns(self.clock.now_ns() + ns(DECISION_S))
            self.link.close()
        except Exception as error:
            judge.fail(f"the program fell over {error!r}")
        return Lived(judge.digest.hexdigest(), judge.failure, judge.counts, self.faults, judge.worst)

    # ---- what goes wrong ----

    def _next_fault(self) -> None:
        self.clock.at(self.clock.now_ns() + ns(self.rng.exponential(GAP_S)), self._strike)

    def _strike(self) -> None:
        if self.adapter.phase is Phase.ACTIVE:
            names = list(self.kinds)
            name = names[self.rng.integers(len(names))]
            self.judge.note(self.clock.now_ns(), name)
            self.faults[name] += 1
            self.kinds[name](self.rng)
            self.clock.at(self.clock.now_ns() + ns(self.rng.uniform(*LASTS_S)), self.stand.passes)
        self._next_fault()

    def _pause(self, rng: np.random.Generator) -> None:
        self.clock.pause(rng.uniform(0.005, 0.05))

    def _long_pause(self, rng: np.random.Generator) -> None:
        self.clock.pause(rng.uniform(0.05, 0.4))

    def _stutter(self, rng: np.random.Generator) -> None:
        """Too slow again and again."""
        for k in range(int(rng.integers(3, 25))):
            self.clock.at(self.clock.now_ns() + ns(k * 1.5 / self.stand.rate_hz), lambda: self.clock.pause(0.03))

    # ---- who acts ----

    def _person(self) -> None:
        if self.judge.counts["stops"]:  # an arm that nobody holds yet may fall
            self.link.wait_until_ns(self.clock.now_ns() + ns(self.rng.uniform(*PERSON_S)))
            self.stand.passes()
            self.link.wait_until_ns(self.clock.now_ns() + ns(0.5))
            self.judge.rests(self.stand.speed(), self.stand.rest_rad_s)
        if self.rng.random() < 0.9:
            self.stand.mend()
        self._first = True
        try:
            if self.adapter.phase is Phase.FAULT or (self._refused and self.adapter.phase is Phase.INACTIVE):
                self.link.recover()
            self.link.start()
            self._refused = 0
        except RobotError:
            self.judge.counts["not started"] += 1
            self._refused += 1

    def _decide(self) -> None:
        rng, now_ns = self.rng, self.clock.now_ns()
        if rng.random() < 0.003:
            self.judge.must_stop("a person asked to stop")
            self.link.stop()
            return
        if now_ns >= self._manner_ns:
            self._manner = MANNERS[rng.integers(len(MANNERS))]
            self._manner_ns = now_ns + ns(rng.uniform(0.3, 4.0))
        rows = self._rows("creep" if self._first else self._manner)
        self._first = False
        if rows is not None:
            self.link.plan(rows, 0.02)
            self.judge.plan = now_ns, ns(0.02), rows

    def _rows(self, manner: str) -> np.ndarray | None:
        rng, judge = self.rng, self.judge
        shape = (int(rng.integers(8, 20)), len(judge.lower))
        middle, half = (judge.upper + judge.lower) / 2, (judge.upper - judge.lower) / 2
        if manner == "creep":
            return judge.q + rng.uniform(-0.1, 0.1, shape)
        if manner == "bang":
            return middle + half * np.where(np.arange(shape[0])[:, None] // rng.integers(1, 8) % 2, 1.0, -1.0)
        if manner == "wave":
            t = self.clock.now_ns() * 1e-9 + 0.02 * np.arange(shape[0])[:, None]
            return middle + 1.3 * half * np.sin(rng.uniform(0.5, 8) * t + np.arange(shape[1]))
        if manner == "nonsense":
            rows = judge.q + np.zeros(shape)
            rows[rng.random(shape) < 0.3] = rng.choice([np.nan, np.inf, -np.inf, 1e300])
            return rows
        if manner == "silent":
            return None
        return np.broadcast_to(middle + float(manner) * half * rng.uniform(-1, 1, shape[1]), shape)


MANNERS = [
    "1",
    "1",
    "1",
    "1",
    "1",
    "3",
    "3",
    "1000",
    "bang",
    "bang",
    "bang",
    "wave",
    "wave",
    "creep",
    "creep",
    "nonsense",
    "silent",
]
