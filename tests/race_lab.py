"""A race without worlds: entrants whose skill is a function of their steps, and a clock of their own."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from burnish.finetune.improve.race import Budget, Preparation, Race, Trained
from burnish.policies.measure.evaluate import Evaluation, evaluation_seeds
from burnish.policies.runs.interrupt import Stop


@dataclass
class Skilled:
    """A policy that succeeds on a share of the seeds, on others than a policy with another name."""

    name: str
    skill: float
    spec: Any = field(default_factory=lambda: SimpleNamespace(noise_shape=None))


@dataclass
class Toy:
    """A trainer without worlds: ``curves`` tell the skill of an entrant after so many steps, an iteration is 10 steps
    or a second of its clock, and as many episodes as there are worlds take ``wave_s``."""

    curves: dict[str, Any]
    seed: int = 0
    played: list[tuple[str, str]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    stop: Stop = field(default_factory=Stop)
    stop_after: int = 10**6  # evaluations
    worlds: int = 1
    wave_s: float = 0.1
    learns_after: dict[str, int] = field(default_factory=dict)  # entrant -> steps of its warm-up and initial updates
    start_s: dict[str, float] = field(default_factory=dict)  # entrant, or base -> what making its worlds takes

    def train(self, entrant, enough, begin=lambda: None):
        self.now += self.start_s.get(entrant, 0.0)
        begin()
        known = self.steps.get(entrant, 0)
        if known and enough(known):
            return Trained(Skilled(entrant, self.curves[entrant](known)), known)
        while True:
            self.steps[entrant] = steps = self.steps.get(entrant, 0) + 10
            self.now += 1
            skill = self.curves[entrant](steps)  # may raise
            if enough(steps):
                return Trained(Skilled(entrant, skill), steps, steps > self.learns_after.get(entrant, 0))

    def play(self, policy, stream, episodes):
        self.played.append((stream, policy.name))
        self.now += self.wave_s * -(-episodes // self.worlds)
        self.stop.requested = len(self.played) >= self.stop_after
        seeds = evaluation_seeds(episodes, stream=stream)
        # The luck of a seed is shared by all policies, but for a part: pairs help, and do not decide.
        common = [random.Random(f"{self.seed} {seed}").random() for seed in seeds]
        own = [random.Random(f"{self.seed} {seed} {policy.name}").random() for seed in seeds]
        won = [(a if i % 2 else b) < policy.skill for i, (a, b) in enumerate(zip(common, own, strict=True))]
        nothing = [False] * episodes
        return Evaluation(seeds, [float(x) for x in won], [5] * episodes, won, nothing, won, won)

    def save(self, policy, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([policy.name, policy.skill]))

    def load(self, path):
        return Skilled(*json.loads(Path(path).read_text()))


def race(out, toy, **budget):
    budget = Budget(**{"episodes": 64, "confirm": 256, "worlds": toy.worlds} | budget)
    return Race(out, Skilled("base", 0.3), budget, toy, toy.stop, lambda: toy.now, toy.start_s.get("base", 0.0))


def played(out, toy, names, **budget):
    toy.stop.requested = False
    found = race(out, toy, **budget)
    found.free()
    found.run(names)
    found.confirm()
    return found


def planned(found, **warmups):
    return found.plan({name: Preparation(steps) for name, steps in warmups.items()})


def flat(skill):
    return lambda steps: skill
