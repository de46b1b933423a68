"""The common part of SAC and TD3: an agent, critics that regress on a target, and when each is stepped.

``SAC`` and ``TD3`` say what the target is, how the agent climbs its critics, and what follows whom.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..policies.core.execute import execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.normalize import Running
from ..policies.core.types import Actor, Decision, Decisions, Memory, Metrics, Obs, Policy, Source
from ..policies.gaussian import GaussianPolicy
from ..policies.nets.encoder import shifted
from .critics import spread
from .descent import adam, descend
from .learner import CriticLearner, columns_of
from .soft import ActionTransform, Warm, unchanged, uniform
from .td import row_weight


class Algorithm(Enum):
    """The learners that a method with either can use."""

    sac = "sac"
    td3 = "td3"


class AgentActor:
    """Plays ``explore`` of the agent, and ``warm`` before learning begins."""

    def __init__(self, agent: GaussianPolicy, warm: Warm | None) -> None:
        self.agent, self.warm = agent, warm or uniform(agent.spec)

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        return Decision((self.warm if warm else self.explore)(obs, generator), {})

    @abstractmethod
    def explore(self, obs: Obs, generator: torch.Generator) -> Tensor:
        """(N, n, A): an action of the agent, with the noise by which it explores."""

    def state_dict(self) -> dict[str, Any]:
        return self.agent.state_dict()


class ActorCritic(CriticLearner):
    """``agent`` acts on the view that it learns from; ``policy`` is what is deployed (the agent itself by default).

    ``own`` names networks that an algorithm adds; what needs gradients in them is stepped with the agent, and those in
    ``scaled`` observe as it does. ``normalize`` scales observations as those that ``observe`` was shown lie, for
    agents that know no data; a replay holds them raw."""

    def __init__(
        self,
        agent: GaussianPolicy,
        config: Any,
        actor: Actor,
        own: tuple[str, ...],
        *,
        scaled: tuple[nn.Module, ...] = (),
        policy: Policy | None = None,
        transform: ActionTransform = unchanged,
        normalize: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(agent.spec, config, seed=seed, device=device)
        self.agent, self.transform = agent, transform
        self.actor: Actor = executed_actor(actor, config.execution, device)
        self.policy = agent if policy is None else policy
        self.seen = Running(agent, *scaled, self.critic) if normalize else None
        self.networks = ("agent", *own, "critic")
        self.saved = (*self.networks, "critic_optimizer", "actor_optimizer", "noise")
        self.saved += () if self.seen is None else ("seen",)
        self.equip()

    def equip(self) -> None:
        """Fresh optimisers and steps for the networks."""
        config, acting = self.config, [getattr(self, name) for name in self.networks if name != "critic"]
        self.trained = [p for part in acting for p in part.parameters() if p.requires_grad]
        self.critic_optimizer = adam(self.critic.online.parameters(), config.lr, config.execution)
        self.actor_optimizer = adam(self.trained, config.actor_lr, config.execution)
        options: dict[str, Any] = {"device": self.noise.device, "generators": [self.noise]}
        self._step_critic = execution(self._critic_step, config.execution, **options)
        self._step_actor = execution(self._actor_step, config.execution, **options)

    def observe(self, obs: Obs) -> None:
        if self.seen is not None:
            self.seen.absorb(obs)

    def prior(self, replay: Decisions, recordings: Decisions | None) -> Memory | None:
        if self.seen is not None and recordings is not None:
            self.seen.absorb(recordings.latest()["obs"])
        return recordings

    def update(self, source: Source) -> Metrics:
        return self.learn(self.shown(source.sample()))

    def shown(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The part of a batch that is learnt from, with its images moved at random."""
        moved = {name: shifted(batch[name], self.config.image_shift, self.noise) for name in ("obs", "next_obs")}
        return {**moved, **columns_of(batch)}

    def learn(self, shown: dict[str, Any]) -> Metrics:
        obs, next_obs, columns = shown["obs"], shown["next_obs"], columns_of(shown)
        self.updates += 1
        metrics = self._step_critic(obs, next_obs, columns)
        due, moves = self.turn(self.updates)
        if moves:
            metrics |= self._step_actor(obs)
        self._follow(due, moves)
        return metrics

    def turn(self, update: int) -> tuple[bool, bool]:
        """Whether the actor's turn has come in this update, and whether it is stepped."""
        due = update % self.config.actor_every == 0
        return due, due and update > self.config.critic_warmup

    def _follow(self, due: bool, moved: bool) -> None:
        """Behind each update: ``due`` where the actor's turn has come, ``moved`` where it was stepped."""

    def q_values(self, batch: dict[str, Any]) -> Tensor:
        return self.critic(batch["obs"], self.transform(batch["obs"], batch["action"])).mean(0)

    @abstractmethod
    def _target(self, next_obs: Obs, columns: dict[str, Tensor]) -> Tensor:
        """(B,): the target of the critics."""

    @abstractmethod
    def _actor_loss(self, obs: Obs) -> tuple[Tensor, Metrics]:
        """The loss of the agent, and of what is stepped with it."""

    def _actor_step(self, obs: Obs) -> Metrics:
        loss, metrics = self._actor_loss(obs)
        descend(self.actor_optimizer, loss, self.config.max_grad_norm, self.agent.parameters())
        return metrics

    def _critic_step(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> Metrics:
        loss, metrics = self._critic_loss(obs, next_obs, columns)
        descend(self.critic_optimizer, loss, self.config.max_grad_norm)
        return metrics

    def _critic_loss(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        target = self._target(next_obs, columns)
        online = self.critic.online
        weight = columns.get("weight")
        if self.agent.spec.execute > 1:  # an agent of one action may choose for several ticks: a noise, for one
            weight = row_weight(columns, self.agent.spec.execute)
        loss, q = online.loss(online.encode(obs), self.transform(obs, columns["action"]), target, weight)
        q = q.detach()
        return loss, {"critic_loss": loss.detach(), "q": q.mean(), "q/spread": spread(q), "target": target.mean()}
