"""The common part of learners with critics: what they save, and what their critics say of a batch.

``JointLearner`` is the part of those that step all their losses at once, on chunks of the data. ``Wrapping`` is the
part of those that change what another learner is shown, or add to what it reports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..policies.core.execute import execution
from ..policies.core.seed import generator as named_generator
from ..policies.core.spec import PolicySpec
from ..policies.core.types import Decisions, Learner, Memory, Metrics, Obs, Source
from ..policies.runs.module_state import restore, state_of
from .critics import fresh_critic
from .imitation import neighbours, played_around
from .sources import Rows


def columns_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The columns of a batch of decisions that are not observations; "weight" where an imagined world gave it."""
    names = ("action", "reward", "discount", "terminated", "steps", "weight")
    return {name: batch[name] for name in names if name in batch}


def weigh(learner: Learner) -> None:
    """Have a weight stored with each decision of an off-policy learner, whose losses read it (`Outcome.weight`)."""
    learner.columns = (*learner.columns, "weight")


class Wrapping(Learner):
    """``inner`` learns: what is not said here is asked of it."""

    inner: Learner

    def __init__(self, inner: Learner) -> None:
        self.inner, self.actor, self.policy, self.columns = inner, inner.actor, inner.policy, inner.columns
        self.entropy_bonus, self.afresh = inner.entropy_bonus, inner.afresh

    def update(self, source: Source) -> Metrics:
        batch = source.sample()
        metrics = self.inner.update(Rows(batch))
        return {**metrics, **self.extra_metrics(batch, metrics)}

    def extra_metrics(self, batch: Mapping[str, Any], metrics: Mapping[str, Any]) -> Metrics:
        """More metrics of an update on ``batch``."""
        return {}

    def plan(self, updates: int) -> None:
        self.inner.plan(updates)

    def describe(self) -> str:
        return self.inner.describe()

    def observe(self, obs: Obs) -> None:
        self.inner.observe(obs)

    def stored(self, replay: Decisions) -> None:
        self.inner.stored(replay)

    def abandon(self) -> None:
        self.inner.abandon()

    def prior(self, replay: Decisions, recordings: Decisions | None) -> Memory | None:
        return self.inner.prior(replay, recordings)

    def q_values(self, batch: dict[str, Any]) -> Tensor | None:
        return self.inner.q_values(batch)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class CriticLearner(Learner):
    """``saved`` names the parts that are saved of it, beside the number of updates."""

    saved: tuple[str, ...]

    def __init__(self, spec: PolicySpec, config: Any, *, seed: int, device: torch.device | str) -> None:
        self.config = config
        self.critic = fresh_critic(spec, config.critic, seed=seed, device=device)
        self.noise = named_generator(seed, "noise", device=device)
        self.updates = 0

    def q_values(self, batch: dict[str, Any]) -> Tensor:
        return self.critic(batch["obs"], batch["action"]).mean(0)

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def state_dict(self) -> dict[str, Any]:
        return {**state_of(self._parts()), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._parts(), state)
        self.updates = int(state.get("updates", 0))  # older states of Q-chunking do not say it


class JointLearner(CriticLearner):
    """``_descend`` takes the step, from the executed actions and from those around them that imitation reaches into."""

    def __init__(self, spec: PolicySpec, config: Any, *, seed: int, device: torch.device | str) -> None:
        super().__init__(spec, config, seed=seed, device=device)
        self.around = neighbours(spec)
        self._step = execution(self._descend, config.execution, device=device, generators=[self.noise])

    def update(self, source: Source) -> Metrics:
        batch = source.sample(around=self.around)
        self.updates += 1
        return self._step(batch["obs"], batch["next_obs"], columns_of(batch), played_around(batch))

    @abstractmethod
    def _descend(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor], around: dict[str, Tensor]) -> Metrics:
        """One step down all losses."""
