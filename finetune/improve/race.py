"""The race of ``burnish improve``, one choice among what it found, and the proof of that choice.

* *Race.* Entrants learn from one base, in shares of one budget (`shares.py`). After each share the policy plays the
  seeds of the stream "select"; the best policy of each entrant is kept.
* *Playoff.* The best few, the base from noise 0 among them, and the best of all from noise 0, play more seeds, of the
  stream "playoff": few episodes choose the lucky. The highest mean is the one choice.
* *Confirmation.* That one and the base play fresh seeds, of the stream "confirm". It is delivered if the interval of
  its difference from the base lies above 0, else the base is. Nothing was chosen on these seeds and one policy is tried
  there, so there is nothing to correct for.

Each event is written before the next one begins, so a race that was stopped goes on where it was. This module knows no
worlds: a ``Trainer`` does.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...policies.best import ERROR, difference, mean
from ...policies.cli.machine import say
from ...policies.compose import Greedy
from ...policies.core import files
from ...policies.core.config import from_data
from ...policies.core.errors import reason
from ...policies.evaluator import in_words
from ...policies.measure.evaluate import Evaluation
from ...policies.runs.interrupt import Stop
from ...policies.runs.manifest import parse
from ..compare.comparison import BASE, GREEDY
from ..compare.free_baselines import BASE_GREEDY
from .shares import LOOKS, Share, next_share, survivors, unbeaten

RACE, EVALUATIONS, CANDIDATES = "race.json", "evaluations", "candidates"
OF_GREEDY = f"_{GREEDY}"  # ends the name of a policy that plays another one from noise 0
CONTENDERS = 3  # policies of the playoff, besides the first of them from noise 0
PLAYS = CONTENDERS + 3  # of the playoff and the confirmation
RESERVE = 1.5  # the last evaluations may take that much longer than those of the base: who falls later plays longer
LEARNER = 2.0  # a step of a learner's warm-up takes that much longer than one of an evaluation
MOST = 0.3  # share of the minutes that the last evaluations, or all others together, may take


class Trained(NamedTuple):
    """An entrant after its share: its policy, the control steps that it has played in all, and whether it has got
    beyond its warm-up and its initial updates."""

    policy: Any
    steps: int
    learnt: bool = True


class Preparation(NamedTuple):
    """An entrant plays the control steps of its warm-up, then makes updates that take ``seconds``; only then it learns
    to act."""

    steps: int
    seconds: float = 0.0


class Trainer(Protocol):
    """Trains, plays, saves and loads; ``enough``, asked with the control steps of an entrant, ends its share. ``begin``
    is told when an entrant, whose worlds are made and whose run is loaded, starts to play."""

    def train(self, entrant: str, enough: Callable[[int], bool], begin: Callable[[], None]) -> Trained | None:
        """None: it was interrupted, and its run is saved."""
        ...

    def play(self, policy: Any, stream: str, episodes: int) -> Evaluation: ...

    def save(self, policy: Any, path: Path) -> None: ...

    def load(self, path: Path) -> Any: ...


class Stopped(Exception):
    """Ctrl-C was pressed; everything is written."""


@dataclass
class Budget:
    """Either is 0. ``steps`` are control steps of training; ``minutes`` are of the clock, evaluations included."""

    steps: int = 0
    minutes: float = 0.0
    episodes: int = 64  # of each evaluation on the way
    confirm: int = 256  # of the playoff and of the confirmation
    worlds: int = 1  # that an evaluation plays at once


@dataclass
class Record:
    """The events of a race, as race.json holds them."""

    seconds: float = 0.0  # of all sittings
    # entrant, its steps, the seconds in which it played and learnt, those of its start and saving, score, learnt
    shares: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)  # steps of those that failed, in the share in which they did
    dropped: dict[str, str] | None = None  # those who were not tried, and why; None: not planned yet
    raced: bool = False  # no shares are to come
    start_s: float = 0.0  # of making the worlds of the base
    evaluation_steps: int = 0
    episode_s: float = 0.0  # that an episode adds to an evaluation, by the latest one (`Race.cost`)
    step_s: float = 0.0  # and of a step
    chosen: str | None = None  # by the playoff
    delivered: bool | None = None  # whether the confirmation has confirmed it


class Race:
    """Of ``entrants``, the preferred ones first, in the folder ``out``; ``clock`` counts seconds, of which ``start_s``
    were spent just now on the worlds of the base, as each entrant will spend them on its own."""

    def __init__(
        self,
        out: Path,
        base: Any,
        budget: Budget,
        trainer: Trainer,
        stop: Stop,
        clock: Callable[[], float] = time.monotonic,
        start_s: float = 0.0,
    ) -> None:
        self.out, self.base, self.budget, self.trainer, self.stop = out, base, budget, trainer, stop
        path, self.record = out / RACE, Record()
        if path.exists():
            self.record = from_data(Record, parse(path, json.loads), RACE)
        self._clock, self._began, self._before = clock, clock() - start_s, self.record.seconds
        self.record.start_s = start_s
        self.entrants: list[str] = []
        self.looks, self.plays = LOOKS, PLAYS  # shares of the winner alone; and last evaluations that are to come

    # ---- its parts, in their order ----

    def free(self) -> dict[str, float]:
        """The base as it draws, and from noise 0 where it has any: on the seeds for selection."""
        names = [BASE, BASE_GREEDY] if has_noise(self.base) else [BASE]
        return {name: mean(self.evaluated(name, "select")) for name in names}

    def plan(self, before: Mapping[str, Preparation]) -> list[str]:
        """Of entrants those who learn before they can be beaten, each of which does something ``before`` it learns. The
        others are dropped, the slowest first, because what they leave makes the shares of those who stay larger."""
        if self.record.dropped is None and not self.record.shares:
            self.record.dropped, self.entrants = {}, list(before)
            while self.entrants:
                slowest = max(reversed(self.entrants), key=lambda name: self._amount_of(before[name]))
                if not (why := self._why_useless(before[slowest])):
                    break
                self.entrants.remove(slowest)
                self.record.dropped[slowest] = why
                say(f"{slowest} is not raced: {why}")
            self._write()
        return [name for name in before if name not in (self.record.dropped or ())]

    def _amount_of(self, before: Preparation) -> float:
        """In the unit of the budget."""
        return LEARNER * before.steps * self.record.step_s + before.seconds if self.budget.minutes else before.steps

    def _why_useless(self, before: Preparation) -> str:
        """Why one of the present entrants would not learn, if so."""
        first, amount = self._next(self.entrants)
        assert first is not None, "nothing has been played"
        share, cost = unbeaten(len(self.entrants)) * amount / first.part, self._amount_of(before)
        if share > cost:
            return ""
        if share <= 0:
            return "the evaluations and starts leave it no time to learn; raise minutes"
        unit, setting = ("s", "minutes") if self.budget.minutes else ("steps", "steps")
        also = (" and its initial updates take", " and method.loop.initial_updates")
        verb, settings = also if before.seconds and self.budget.minutes else (" takes", "")
        lengths = f"its warm-up{verb} {cost:,.0f} {unit} and its first share is {share:,.0f}"
        return f"{lengths}; raise {setting}, or lower method.loop.warmup{settings} in a file of methods="

    def run(self, entrants: Sequence[str]) -> None:
        """All shares, until the budget is spent. Entrants that got none are named."""
        self.entrants = list(entrants)
        if self.record.raced or self.record.chosen is not None:
            return
        while self._share():
            pass
        why = f"the budget was spent before its first share; raise {'minutes' if self.budget.minutes else 'steps'}"
        if self._won():
            why = "another one succeeded in all episodes before its first share"
        untried = [name for name in entrants if name not in self.record.failed and name not in self.scores()]
        self.record.raced, self.record.dropped = True, (self.record.dropped or {}) | dict.fromkeys(untried, why)
        for name in untried:
            say(f"{name} was not tried: {why}")
        self._write()

    def choose(self) -> str:
        """The playoff: the name of the one choice."""
        if self.record.chosen is None:
            names = self.contenders()
            self.plays = len(names) + 4  # the proof has twice its part: without one all was in vain
            found = {name: self.evaluated(name, "playoff") for name in names}
            # Of those who succeed as often, the one that the world pays most: usually the fastest.
            self.record.chosen = max(found, key=lambda name: (mean(found[name]), sum(found[name].returns)))
            self._write()
        return self.record.chosen

    def confirm(self) -> tuple[Evaluation, Evaluation]:
        """The choice and the base on fresh seeds, which decide whether the choice is delivered."""
        name, self.plays = self.choose(), 2
        chosen, base = (self.evaluated(each, "confirm") for each in (name, BASE))
        if self.record.delivered is None:
            self.record.delivered = difference(chosen, base, 1 - ERROR)[1] > 0
            self._write()
        return chosen, base

    # ---- policies by their names ----

    def policy(self, name: str) -> Any:
        """The base, a candidate, or either from noise 0."""
        if name.endswith(OF_GREEDY):
            return Greedy(self.policy(name.removesuffix(OF_GREEDY)))
        return self.base if name == BASE else self.trainer.load(self.out / CANDIDATES / name)

    def contenders(self) -> list[str]:
        """The best on the seeds for selection, best first, and the first of them from noise 0."""
        scores = self.free() | self.best()
        scores.pop(BASE)
        names = sorted(scores, key=lambda name: -scores[name])[:CONTENDERS]
        greedy = f"{names[0]}{OF_GREEDY}" if names and has_noise(self.policy(names[0])) else None
        return [*names, greedy] if greedy else names or [BASE]

    def scores(self) -> dict[str, list[float]]:
        """Entrant -> its scores, share by share."""
        found: dict[str, list[float]] = {}
        for share in self.record.shares:
            found.setdefault(share["entrant"], []).append(share["score"])
        return found

    def best(self) -> dict[str, float]:
        """Entrant -> its best score, of those that have learnt: until then it is the base under another name."""
        found: dict[str, float] = {}
        for share in self.record.shares:
            if share.get("learnt", True):
                found[share["entrant"]] = max(share["score"], found.get(share["entrant"], float("-inf")))
        return found

    # ---- one share ----

    def _share(self) -> bool:
        share, amount = self._next([name for name in self.entrants if name not in self.record.failed])
        if share is None or amount <= 0 or self._won():
            return False
        name, timed = share.entrant, bool(self.budget.minutes)
        number = len(self.scores().get(name, ()))
        # Of a share that was stopped before it was written down: by minutes it trains on, into another policy.
        files.remove(self.out / EVALUATIONS / f"select-{name}-{number}.json")
        played, started = sum(x["steps"] for x in self.record.shares if x["entrant"] == name), self._clock()
        began: float | None = None
        seconds, reached = 0.0, played  # in which it has played and learnt; and its steps, when it last asked

        def begin() -> None:
            nonlocal began
            began = self._clock()

        def enough(steps: int) -> bool:
            nonlocal seconds, reached
            reached = steps
            seconds = 0.0 if began is None else self._clock() - began
            return seconds >= amount if timed else steps >= played + amount

        try:
            trained = self.trainer.train(name, enough, begin)
        except Exception as error:  # a method may be another's code, and raise anything
            self.record.failed[name], self.record.lost[name] = reason(error), reached - played
            say(f"{name} is out: {self.record.failed[name]}")
            self._write()
            return True
        if trained is None:
            self._halt()
        assert trained is not None, "a halt raises"
        spent = {"seconds": seconds, "start_s": self._clock() - started - seconds}
        evaluation = self.evaluated(f"{name}-{number}", "select", trained.policy)
        score, learnt = mean(evaluation), trained.learnt
        if learnt and score >= self.best().get(name, float("-inf")):
            self.trainer.save(trained.policy, self.out / CANDIDATES / name)
        row = {"entrant": name, "steps": trained.steps - played, **spent, "score": score, "learnt": learnt}
        self.record.shares.append(row)
        self._write()
        left = max(0.0, self.left(share.coming - 1, share.alive))
        said = f"{left / 60:.1f} minutes of training left" if timed else f"{left:,.0f} steps left"
        say(f"{name}: {trained.steps:,} steps, {in_words(evaluation)}; {said}")
        return True

    def _next(self, running: Sequence[str]) -> tuple[Share | None, float]:
        """The next share and its amount. Minutes that would leave it less than its start and evaluation take are cut
        into fewer shares of the winner."""
        scores, found, amount = self.scores(), None, 0.0
        for looks in range(LOOKS, 0, -1):
            share = next_share(running, scores, looks)
            if share is None:
                break
            found, self.looks = share, looks
            amount = share.part * self.left(share.coming, share.alive)
            if not self.budget.minutes or amount >= self._besides(share.alive):
                break
        return found, amount

    def _won(self) -> bool:
        """Whether these seeds show nothing more: all episodes of one succeed. Returns know no such number."""
        latest = max((x[-1] for x in self.scores().values()), default=0.0)
        return latest >= 1 and self.evaluated(BASE, "select").success is not None

    # ---- budget ----

    def left(self, shares: int, alive: Sequence[str] = ()) -> float:
        """Control steps, or seconds of training: without those of the evaluations to come, and of the starts and
        savings of so many ``shares`` of those who are ``alive``."""
        if self.budget.minutes:
            others = RESERVE * PLAYS * self.cost(self.episodes("confirm")) + shares * self._besides(alive)
            return 60 * self.budget.minutes - self.seconds() - others
        return self.budget.steps - self.trained_steps()

    def _besides(self, alive: Sequence[str]) -> float:
        """Seconds of a share in which nothing is learnt: start, saving and evaluation."""
        latest = {x["entrant"]: x.get("start_s", 0.0) for x in self.record.shares}
        starts = [latest.get(name, self.record.start_s) for name in alive or [BASE]]
        return statistics.mean(starts) + self.cost(self.episodes("select"))

    def cost(self, episodes: int) -> float:
        """Seconds of an evaluation: of its episodes, and of half as many as there are worlds, because worlds wait for
        the last ones."""
        return self.record.episode_s * (episodes + self.budget.worlds / 2)

    def trained_steps(self) -> int:
        """Of all entrants."""
        return sum(share["steps"] for share in self.record.shares) + sum(self.record.lost.values())

    def seconds(self) -> float:
        """Of all sittings."""
        return self._before + self._clock() - self._began

    def episodes(self, stream: str) -> int:
        """Fewer than were asked for, where they would take most of the minutes; at least 2. The last evaluations may
        take all that the race has left."""
        asked = self.budget.episodes if stream == "select" else self.budget.confirm
        count, total = len(self.entrants), 60 * self.budget.minutes
        if not total or not self.record.episode_s or (stream == "select" and not count):
            return asked
        if stream == "select":
            seconds = MOST * total / (sum(survivors(count)[:-1]) + self.looks)
        else:
            left = total - self.seconds() if self.record.raced else 0.0
            seconds = max(left / self.plays, MOST * total / PLAYS) / RESERVE
        return max(2, min(asked, int(seconds / self.record.episode_s - self.budget.worlds / 2)))

    # ---- evaluations, and what is written ----

    def evaluated(self, name: str, stream: str, policy: Any = None) -> Evaluation:
        """Played once; what was played before is read. All that is compared beyond doubt has equally many episodes."""
        path = self.out / EVALUATIONS / f"{stream}-{name}.json"
        if path.exists():
            return Evaluation.load(path)
        if self.stop.requested:
            self._halt()
        peers = list((self.out / EVALUATIONS).glob(f"{stream}-*.json")) if stream != "select" else []
        count = len(Evaluation.load(peers[0]).seeds) if peers else self.episodes(stream)
        began = self._clock()
        found = self.trainer.play(self.policy(name) if policy is None else policy, stream, count)
        took = self._clock() - began
        self.record.episode_s = took / (count + self.budget.worlds / 2)
        self.record.step_s = took / sum(found.lengths)
        found.save(path)
        self.record.evaluation_steps += sum(found.lengths)
        self._write()
        if stream != "select" or name in (BASE, BASE_GREEDY):
            say(f"{name} ({stream}): {in_words(found)}")
        return found

    def _halt(self) -> None:
        self._write()
        raise Stopped

    def _write(self) -> None:
        self.record.seconds = self.seconds()
        files.replace(files.named(self.out) / RACE, json.dumps(asdict(self.record), indent=1) + "\n")


def has_noise(policy: Any) -> bool:
    """Whether noise 0 is another way to play it."""
    return getattr(policy.spec, "noise_shape", None) is not None


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Aligned text."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
