"""Imagined decisions as prior data that grows: what a policy does in an imagined world, the newest kept.

It stands where the loop expects recordings (`offline/sources.py`), so a batch is part played, part imagined, and no
imagined row lies in the replay of what was played.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...offline.actor_critic import ActorCritic
from ...offline.replay import Batch, Replay
from ...policies.core.chunk import DecisionEnv
from ...policies.core.seed import generator as named_generator
from ...policies.core.tree import index
from ...policies.core.types import Actor, Decision, Learner, Metrics, Obs
from .env import ImaginedEnv
from .ticks import newest, shifted


class Imagination:
    """Decisions of ``actor`` in ``view``, that of a method on ``worlds``, with the columns that ``learner`` wants."""

    grows = True

    def __init__(
        self, worlds: ImaginedEnv, view: DecisionEnv, actor: Actor, learner: Learner, capacity: int, seed: int
    ) -> None:
        self.worlds, self.view, self.actor, self.learner = worlds, view, actor, learner
        self.replay = Replay(capacity, view.num_envs, seed=seed, device=view.device)
        self.generator, self.device = self.replay.generator, self.replay.device
        self._dice = named_generator(seed, "imagined act", device=view.device)

    def __len__(self) -> int:
        return len(self.replay)

    def sample(self, batch: int, **options: Any) -> Batch:
        return self.replay.sample(batch, **options)

    @property
    def ticks(self) -> int:
        """Control ticks of each decision."""
        return getattr(self.view, "execute", getattr(self.learner.policy.spec, "execute", 1))

    @torch.no_grad()
    def grow(self, rollouts: int, depth: int) -> Metrics:
        """``rollouts`` of ``depth`` decisions, each from a tick that was played. One that ends early makes room for
        another, so there are ``rollouts`` x ``depth`` new rows, or somewhat more; but no more than are kept."""
        self.worlds.horizon = depth * self.ticks
        obs, fresh = self.view.reset(), torch.ones(self.view.num_envs, dtype=torch.bool, device=self.device)
        earned = torch.zeros((), device=self.device)
        count = min(-(-rollouts // self.view.num_envs) * depth, self.replay.rows)
        for _ in range(count):
            action, columns = self.actor.act(obs, warm=False, generator=self._dice, fresh=fresh)
            outcome = self.view.step(action)
            facts = {name: getattr(outcome, name) for name in self.learner.columns}
            self.replay.record(obs, action, outcome, {**columns, **facts})
            earned += outcome.reward.mean()
            obs, fresh = outcome.obs, outcome.ended
        self.replay.cut()
        found = {"imagined/rows": float(count * self.view.num_envs), "imagined/reward": earned / count}
        return {**found, "imagined/unknown": self.worlds.share_unknown()}

    def state_dict(self) -> dict[str, Any]:
        state = {"replay": self.replay.state_dict(), "view": self.view.state_dict()}
        return {**state, "dice": self._dice.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replay.load_state_dict(state["replay"])
        self.view.load_state_dict(state["view"])
        self._dice.set_state(state["dice"].cpu())


class Greedy:
    """The mean of an agent (LIFT, Huang et al. 2026, arXiv 2601.21363); one ``from_nothing`` warms up as ever."""

    def __init__(self, learner: ActorCritic, from_nothing: bool) -> None:
        self.agent, self.actor, self.from_nothing = learner.agent, learner.actor, from_nothing

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        if warm and self.from_nothing:
            return self.actor.act(obs, warm=True, generator=generator, fresh=fresh)
        return Decision(self.agent.spec.executed(self.agent.act(obs, greedy=True)), {})

    def state_dict(self) -> dict[str, Any]:
        return self.actor.state_dict()


class Choosing:
    """COPlanner (Wang et al. 2024, arXiv 2310.07220): of ``candidates`` draws of an actor the one with the largest

        sum_{h < lookahead} gamma^h (r_h + bonus * doubt_h) + gamma^lookahead Q(s_lookahead, a)

    where ``worlds`` imagine what the draw leads to and what the actor does next. The doubt is the disagreement of the
    model, 1 at the limit of ``worlds``. A ``bonus`` above 0 explores where the model has much to learn; below 0 it
    stays where the model knows. With ``lookahead=0`` it is Q(s, a) + bonus * doubt of the next tick.

    **Departures.** Published: no value behind the last tick; lookahead is 5 or 10."""

    def __init__(
        self,
        learner: Any,
        worlds: ImaginedEnv,
        bonus: float,
        candidates: int,
        history: int,
        lookahead: int = 0,
        gamma: float = 1.0,
    ) -> None:
        self.learner, self.actor, self.worlds, self.bonus = learner, learner.actor, worlds, bonus
        self.candidates, self.history, self.lookahead, self.gamma = candidates, history, lookahead, gamma

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        count = self.candidates
        if warm:
            return self.actor.act(obs, warm=True, generator=generator, fresh=fresh)
        size = len(next(iter(obs.values())))
        row = torch.arange(size, device=self.worlds.device)
        each: Obs = index(obs, row.repeat_interleave(count))
        action, _ = self.actor.act(each, warm=False, generator=generator)
        score = self._ahead(each, action, generator) if self.lookahead else self._now(each, action)
        best = score.view(size, count).argmax(1)
        return Decision(action[row * count + best], {})

    def _now(self, obs: Obs, action: Tensor) -> Tensor:
        executed = self.learner.transform(obs, action)
        doubt = self.worlds.model.disagreement(newest(obs, self.history), executed[:, 0]) / self.worlds.limit
        return self.learner.critic(obs, executed).mean(0) + self.bonus * doubt

    def _ahead(self, obs: Obs, action: Tensor, generator: torch.Generator) -> Tensor:
        model, count, place = self.worlds.model, len(action), {"generator": generator, "device": action.device}
        member = model.elites[torch.randint(len(model.elites), (count,), **place)]
        total, weight = torch.zeros((2, count), device=action.device)
        weight += 1
        for _ in range(self.lookahead):
            noise = torch.randn(count, sum(model.sizes), **place)
            executed = self.learner.transform(obs, action)
            found = model.predict(newest(obs, self.history), executed[:, 0], member, noise)
            total += weight * (found.reward + self.bonus * found.uncertainty / self.worlds.limit)
            weight *= self.gamma * ~(found.failure | (found.success & model.success_ends))
            obs = shifted(obs, found.next_obs, self.history)
            action, _ = self.actor.act(obs, warm=False, generator=generator)
        return total + weight * self.learner.critic(obs, self.learner.transform(obs, action)).mean(0)

    def state_dict(self) -> dict[str, Any]:
        return self.actor.state_dict()
