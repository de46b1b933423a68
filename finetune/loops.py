"""The only two interaction loops. A method decides what happens inside ``actor.act`` and ``learner.update``.

Both count *decisions*, summed over worlds, so that a budget and an update-to-data ratio mean the same whatever the
number of worlds is. Both can be stopped after any iteration and continued exactly: ``state_dict`` holds the worlds, the
learner, the memory and every generator. A robot is the exception: its episode under way cannot be continued, so it is
cut there, and the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..offline.replay import Replay
from ..offline.sources import Mixture, Rows, ahead
from ..offline.storage import Place
from ..policies.core.chunk import DecisionEnv
from ..policies.core.config import LATER
from ..policies.core.ranges import check_ranges
from ..policies.core.seed import generator as named_generator
from ..policies.core.tree import index, map_tree, to
from ..policies.core.types import Learner, Learns, Memory, Metrics, Obs, Outcome, Source
from ..policies.core.wrapper import continues
from ..policies.improve import Training
from ..policies.runs.stopwatch import Stopwatch
from .diagnostics import q_against_return
from .episode_statistics import EpisodeStatistics
from .people.intervened_rows import InterventionUse, as_executed
from .rollout import Rollout

L = TypeVar("L", bound=Learner)
View = TypeVar("View", bound=DecisionEnv)
Learnt = TypeVar("Learnt", bound=Learns, covariant=True)


class Assembly(NamedTuple, Generic[View, L]):
    """The result of a method's ``build``: the view it learns on, and its learner."""

    env: View
    learner: L


class Loop(Training, Protocol[Learnt]):
    """A method at work in its worlds: one of the two loops of this file, or that of another library."""

    env: DecisionEnv
    statistics: EpisodeStatistics

    @property
    def learner(self) -> Learnt: ...

    @property
    def replay(self) -> Replay | None: ...

    @property
    def decisions_per_iteration(self) -> float: ...

    @property
    def pretraining(self) -> int:
        """The number of iterations before anything is played."""
        ...

    def iterations(self, total: int) -> int: ...

    def report(self) -> Metrics: ...

    def deliver(self, folder: Path) -> str:
        """Writes what stays beside the policy in the end, and says a sentence about it."""
        ...


@dataclass
class OnPolicyConfig:
    """Settings of the on-policy loop: the length of a rollout."""

    decisions_per_update: int = 128  # decisions of each world between two updates

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "decisions_per_update"}, "loop.")


class _Interaction(Generic[L]):
    """The common state of both loops."""

    replay: Replay | None = None
    pretraining = 0

    def __init__(self, learner: L, env: DecisionEnv, seed: int) -> None:
        self.learner = learner
        self.env = env
        self.statistics = EpisodeStatistics(env.num_envs, env.device)
        self.watch = Stopwatch()
        self.generator = named_generator(seed, "act", device=env.device)
        self.obs: Obs | None = None
        self.fresh = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)  # worlds in which an episode begins

    @torch.no_grad()
    def decide(self, warm: bool) -> tuple[Obs, Tensor, dict[str, Tensor], Outcome]:
        """One decision of every world."""
        if self.obs is None:
            self.obs = self.env.reset()
            self.fresh.fill_(True)
        before = self.obs
        with self.watch("acting"):
            action, columns = self.learner.actor.act(before, warm=warm, generator=self.generator, fresh=self.fresh)
        with self.watch("playing"):  # the worlds, and in a view on a base that base
            outcome = self.env.step(action)
        self.note(outcome)
        self.obs, self.fresh = outcome.obs, outcome.ended.clone()
        return before, action, columns, outcome

    def note(self, outcome: Outcome) -> None:
        self.statistics.note(outcome)

    def report(self) -> Metrics:
        """The events since the last report, and the seconds since the beginning; asked when something is logged, not
        in every iteration."""
        return {**self.statistics.report(), **self.watch.metrics()}

    def deliver(self, folder: Path) -> str:
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(),
            "env": self.env.state_dict(),
            "ledger": self.statistics.state_dict(),
            "generator": self.generator.get_state(),
            "fresh": self.fresh.clone(),
            "obs": None if self.obs is None or not continues(self.env) else map_tree(torch.clone, self.obs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self.env.load_state_dict(state["env"])
        self.statistics.load_state_dict(state["ledger"])
        self.generator.set_state(state["generator"].cpu())
        seen = state["obs"] if continues(self.env) else None
        self.obs = None if seen is None else to(seen, self.env.device)
        fresh = state.get("fresh", torch.zeros_like(self.fresh))  # older states lack it
        self.fresh = fresh.to(self.env.device, copy=True)
        if self.obs is None:
            self.statistics.abandon()
            self.learner.abandon()


class OnPolicy(_Interaction[L]):
    """An iteration is ``decisions_per_update`` decisions of every world, then one ``update`` on exactly those, of which
    the learner leaves out the decisions of an expert or a person (`people/intervened_rows.py`)."""

    def __init__(self, learner: L, env: DecisionEnv, *, decisions_per_update: int, seed: int = 0) -> None:
        super().__init__(learner, env, seed)
        self.length = OnPolicyConfig(decisions_per_update).decisions_per_update

    @property
    def decisions_per_iteration(self) -> int:
        return self.length * self.env.num_envs

    def iterations(self, total: int) -> int:
        """The number of iterations until ``total`` decisions of all worlds together."""
        return -(-total // self.decisions_per_iteration)

    def iterate(self) -> Metrics:
        if self.learner.afresh and self.obs is not None:
            self.obs = None
            self.statistics.abandon()
        batch = self.play()
        with self.watch("learning"):
            return self.learner.update(Rows(batch))

    def play(self) -> dict[str, Any]:
        """The decisions of an iteration, as ``Rollout`` has them."""
        rollout = Rollout(self.length, self.env.num_envs)
        for _ in range(self.length):
            obs, _, columns, outcome = self.decide(warm=False)
            rollout.add(obs, columns, outcome)
        return rollout.batch()


@dataclass
class OffPolicyConfig:
    """Collection, memory and updates; every number counts decisions."""

    capacity: int = 1_000_000  # decisions that the replay holds
    # place of the replay: device (that of the networks), host, file; auto: by the memory that is free
    place: Place = field(default=Place.auto, metadata=LATER)
    warmup: int = 1000  # decisions played by the actor's prior before anything is learnt
    initial_updates: int = 0  # updates at the end of the warm-up, all at once
    updates_per_decision: float = 1.0  # updates for each stored decision
    batch: int = 256  # decisions of each update
    n_step: int = 1  # decisions that a target sums up
    # share of prior data in each batch, where there is any; 0 ignores it, null draws from the union
    prior_share: float | None = 0.5

    def __post_init__(self) -> None:
        ranges = {"[1, inf)": "capacity n_step", "[2, inf)": "batch", "[0, 1]": "prior_share"}
        check_ranges(self, {**ranges, "[0, inf)": "warmup initial_updates updates_per_decision"}, "loop.")


SLICE = 50  # initial updates in one iteration: between iterations a run can be watched, stopped and saved


class OffPolicy(_Interaction[L]):
    """An iteration is one decision of every world, and the updates that are owed for it: ``updates_per_decision`` per
    *stored decision*, so 40 worlds owe 40 times what one owes; fractions add up. ``pretrain_updates`` from ``prior``
    alone come before the first decision, and the ``initial_updates`` between the warm-up and the next one, as
    iterations in which nothing is played. ``interventions`` is the use of decisions that are not
    ``valid``, because a person or expert played in them; a decision that is not stored owes nothing."""

    replay: Replay

    def __init__(
        self,
        learner: L,
        env: DecisionEnv,
        replay: Replay,
        config: OffPolicyConfig,
        *,
        prior: Memory | None = None,
        pretrain_updates: int = 0,
        interventions: InterventionUse = InterventionUse.left_out,
        seed: int = 0,
    ) -> None:
        super().__init__(learner, env, seed)
        self.replay, self.config, self.interventions = replay, config, interventions
        self.owed = 0.0
        self.gradient_steps = 0  # updates of the learner so far
        self.pretrain = self.pretrain_updates = pretrain_updates  # what is left of them, and all
        self.study = config.initial_updates  # what is left of them
        self.mix(prior, config.prior_share)

    def mix(self, prior: Memory | None, share: float | None) -> None:
        """From now on ``share`` of each batch comes from ``prior``. One that ``grows`` is saved with the loop."""
        config, self.prior = self.config, prior
        self.source: Source = Mixture(self.replay, prior, batch=config.batch, n_step=config.n_step, share=share)

    @property
    def decisions_per_iteration(self) -> int:
        return self.env.num_envs

    def iterations(self, total: int) -> int:
        """The number of iterations until ``total`` decisions of all worlds together, with the updates that they owe."""
        playing = -(-total // self.env.num_envs)
        warmed = playing * self.env.num_envs >= self.config.warmup
        return self.pretraining + playing + (-(-self.config.initial_updates // SLICE) if warmed else 0)

    @property
    def pretraining(self) -> int:
        return -(-self.pretrain_updates // SLICE)

    @property
    def studied(self) -> int:
        """Updates that no decision owes: those of pretraining, and the initial ones."""
        return self.pretrain_updates - self.pretrain + self.config.initial_updates - self.study

    @property
    def warm(self) -> bool:
        """Whether the next decision is one of the warm-up."""
        return self.statistics.decisions < self.config.warmup

    def iterate(self) -> Metrics:
        return self.learn(self.advance())

    def advance(self) -> int:
        """The decision of an iteration, unless updates come before it; how many updates are due then."""
        if count := self.to_study():
            return count
        warm = self.warm
        if self.obs is None:
            self.replay.cut()  # of an earlier loop: what it was about to see is not what comes now
        self.store(*self.played(warm), warm=warm)
        return self.due()

    def to_study(self) -> int:
        """The number of updates that are due before anything else is played."""
        if self.pretrain:
            count = min(SLICE, self.pretrain)
            self.pretrain -= count
            return count
        if self.warm or not len(self.replay):
            return 0
        count = min(SLICE, self.study)
        self.study -= count
        return count

    def played(self, warm: bool) -> tuple[Obs, Tensor, dict[str, Tensor], Outcome]:
        """One decision of every world, with all columns that are to be stored."""
        obs, action, columns, outcome = self.decide(warm)
        return obs, action, {**columns, **{name: getattr(outcome, name) for name in self.learner.columns}}, outcome

    def store(
        self,
        obs: Obs,
        action: Tensor,
        columns: dict[str, Tensor],
        outcome: Outcome,
        *,
        warm: bool,
        absent: Tensor | None = None,
    ) -> None:
        """Remember it, and what is owed for it. Worlds that are ``absent`` (N,) did not play: their place in the row
        stays without meaning."""
        self.learner.observe(obs if absent is None else index(obs, ~absent))
        cut = ~outcome.valid & (self.interventions is not InterventionUse.taught)
        left_out = cut & (self.interventions is InterventionUse.left_out)
        if absent is not None:
            cut, left_out = cut | absent, left_out | absent
        stored, seam = self.env.num_envs, bool(cut.any())
        if seam:
            self.replay.cut(cut)
            stored -= int(left_out.sum())
            read = "executed" in columns  # by the learner itself
            if self.interventions is InterventionUse.executed and not read:
                action = as_executed(action, outcome)
        if stored:
            self.replay.record(obs, action, outcome, columns)
            self.learner.stored(self.replay)
        if seam and 0 < stored < self.env.num_envs:
            self.replay.leave_out(left_out)
        if not warm:
            self.owed += self.config.updates_per_decision * stored

    def due(self) -> int:
        """The whole updates that are owed, which the caller is to make; the fraction stays."""
        count = int(self.owed)
        self.owed -= count
        return count

    def learn(self, count: int) -> Metrics:
        metrics: Metrics = {}
        with self.watch("learning"):
            memories = [x for x in (self.replay, self.prior) if x is not None]
            for source in ahead(self.source, memories, count) if self.replay.away else repeat(self.source, count):
                metrics = self.learner.update(source)
        self.gradient_steps += count
        return metrics

    def report(self) -> Metrics:
        found = {**super().report(), **q_against_return(self.learner, self.replay)}
        found["gradient_steps"] = self.gradient_steps
        if self.interventions is InterventionUse.taught:
            found.pop("intervened", None)  # such a learner says it itself, of the latest ticks that it remembers
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.memory()}

    def memory(self) -> dict[str, Any]:
        """The part of the state that is not the learner's, and not that of the acting."""
        # Recordings do not change, so only the state of their generator is kept.
        grows: Any = self.prior if getattr(self.prior, "grows", False) else None
        prior = None if self.prior is None else grows.state_dict() if grows else self.prior.generator.get_state()
        counts = {"owed": self.owed, "study": self.study, "gradient_steps": self.gradient_steps}
        if self.pretrain_updates:
            counts["pretrain"] = self.pretrain
        return {"replay": self.replay.state_dict(), "prior": prior, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.load_memory(state)

    def load_memory(self, state: dict[str, Any]) -> None:
        self.replay.load_state_dict(state["replay"])
        prior: Any = self.prior
        if getattr(prior, "grows", False):
            prior.load_state_dict(state["prior"])
        elif prior is not None:
            prior.generator.set_state(state["prior"].cpu())
        self.owed, self.study = float(state["owed"]), int(state["study"])
        self.gradient_steps = int(state.get("gradient_steps", 0))  # older states do not count them
        self.pretrain = int(state.get("pretrain", 0))


def planned(loop: Loop[Learns], total: int) -> int:
    """The number of iterations until ``total`` decisions, which the learner is told for its schedules."""
    count = loop.iterations(total)
    loop.learner.plan(count)
    return count
