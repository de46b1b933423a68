"""Adversarial surprise: the policy is paid for what a second one, which takes turns with it, cannot make unsurprising.

Fickinger et al. 2021 (Explore and Control, arXiv 2107.07394). Two policies move one body in turns. *Control* earns
log p(o), p a density of what it saw in its turns of this episode: it learns to bring the world back to what it knows,
and to stay there. *Explore* earns -log p(o) of the turn of Control behind its own. Noise pays it as long as
Control has not learnt to leave it or to switch it off; from then on pays what is far from all that Control knows, and
hard to undo. Novelty, in comparison, pays for noise for ever.

Explore is the policy of the method, whichever that is. Control is a Gaussian policy with PPO of its own, and a part of
the worlds: its turn is played within the last tick of each turn of the method, which sees the state behind it next.

**Departures.** The density is that of independent Gaussians, in deviations of all that was seen, with a prior N(0, 1)
that counts as one observation; the paper counts the classes of each cell. Surprise is a mean over numbers and ticks.
Explore may earn the task's rewards too, those of its own ticks, and does not see the density. An episode that ends in
Control's turn is cut for the method where its own turn was over. Control has no bonus on entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...offline.critics import adopt_normalizers
from ...offline.sources import Rows
from ...policies.build import build_policy
from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution
from ...policies.core.ranges import check_ranges
from ...policies.core.scale import Scale
from ...policies.core.seed import derive
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import ObsSpec, agent_spec
from ...policies.core.tree import concatenate, index, map_tree, where
from ...policies.core.types import Obs, Outcome, Step, VecEnv
from ...policies.core.wrapper import Wrapper
from ...policies.gaussian import GaussianConfig
from ..ppo import PPO, PPOConfig
from ..rollout import Rollout
from .observed import ExploreConfig, Observed


class Span(Enum):
    """The turns of Control that one density knows."""

    turn = "turn"
    episode = "episode"


@dataclass
class AdversarialSurpriseConfig(ExploreConfig):
    """Settings of explore=adversarial_surprise: the turns, and the policy that the method's takes turns with."""

    turn: int = 32  # control ticks of each turn of the method's policy, and of Control
    free: float = 0.5  # share of Control's turn, at its beginning, that counts nothing, so that it can leave a place
    density: Span = Span.episode  # Control's turns that a density knows: each alone, or all of an episode so far
    gamma: float = 0.99  # discount of Control's later rewards, per control tick
    agent: GaussianConfig = field(default_factory=lambda: GaussianConfig(hidden=[64, 64]))  # network of Control
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(epochs=4, lr=1e-3))  # the PPO that trains Control

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"[1, inf)": "turn", "[0, 1)": "free", "[0, 1]": "gamma"}, "explore.")
        if self.ppo.scale_reward or self.ppo.execution is Execution.cudagraph:
            raise BurnishError(
                "Control learns from as many turns as have come together, and explore.ppo.scale_reward=true and "
                "explore.ppo.execution=cudagraph need the same number each time; leave both out"
            )


def surprise(density: Tensor, x: Tensor) -> Tensor:
    """(N, D) -> (N,): -log p per number, under Gaussians of (3, N, D): count, mean, sum of squared deviations."""
    count, mean, squares = density
    variance = squares / count
    return ((x - mean).square() / variance + (2 * math.pi * variance).log()).mean(1) / 2


def with_seen(density: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """The densities with ``x`` (N, D) seen too, in the worlds of ``rows`` (N,)."""
    count, mean, squares = density
    count = count + rows[:, None]
    delta = torch.where(rows[:, None], x - mean, 0.0)  # other rows may be undefined
    return torch.stack([count, mean + delta / count, squares + delta.square() * (1 - 1 / count)])


class AdversarialSurprise(Wrapper):
    """A world in which Control plays, and learns, after each turn of the policy that steps the world."""

    def __init__(self, config: AdversarialSurpriseConfig, env: VecEnv, seed: int) -> None:
        super().__init__(env)
        device = torch.device(env.device)
        self.config, self.observed = config, Observed(config, env.spec, device)
        self.free = int(config.free * config.turn)
        shown = ObsSpec({**env.spec.obs.shapes, "turn": (1 + 2 * len(self.observed),)})
        spec = agent_spec(replace(env.spec, obs=shown))
        self.control: Any = build_policy(config.agent, spec, seed=derive(seed, "control"), device=device)
        options: dict[str, Any] = {"num_envs": env.num_envs, "normalize": True, "seed": seed, "device": device}
        self.learner = PPO(self.control, self.control, config.ppo, **options)
        adopt_normalizers(self.learner.value, self.control)
        self.generator = named_generator(seed, "control", device=device)
        self.scale = Scale(env.spec.action, device)
        self.density = torch.zeros(3, env.num_envs, len(self.observed), device=device)  # of Control's ticks
        self.played = torch.zeros(env.num_envs, dtype=torch.int64, device=device)  # ticks of the turn under way
        self.ticks = 0
        self.turns: list[Any] = []  # turns of Control that it has not learnt from: their first ticks, their second ...

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        obs = self.env.reset(mask, seeds)
        rows = torch.ones_like(self.played, dtype=torch.bool) if mask is None else mask
        self.observed.absorb(self.observed.raw(obs)[rows])
        self.played = self.played.masked_fill(rows, 0)
        self._forget(rows)
        return obs

    def _forget(self, rows: Tensor) -> None:
        self.density[:, rows] = self.density.new_tensor([1.0, 0.0, 1.0])[:, None, None]

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        active = torch.ones_like(step.truncated) if active is None else active
        self.observed.absorb(self.observed.raw(step.obs)[active])
        weight = self.config.weight_after(self.ticks)
        self.ticks += int(active.sum())
        self.played = self.played + active
        due = active & ~(step.terminated | step.truncated) & (self.played >= self.config.turn)
        bonus = torch.zeros_like(step.reward)
        if weight and bool(due.any()):
            led = map_tree(torch.clone, step.obs)
            after, ended, found = self._turn(led, due)
            bonus, self.played = weight * found.to(bonus), self.played.masked_fill(due, 0)
            step = step._replace(obs=where(due & ~ended, after, led), truncated=step.truncated | ended)
        return step._replace(reward=step.reward + bonus, info={**step.info, "bonus": bonus})

    @torch.no_grad()
    def _turn(self, obs: Obs, due: Tensor) -> tuple[Obs, Tensor, Tensor]:
        """Control plays in the worlds of ``due`` (N,). Where that led, where episodes ended in it, and its surprise."""
        rows, active, total, played = due.nonzero()[:, 0], due, torch.zeros_like(self.density[0, :, 0]), list[Any]()
        if self.config.density is Span.turn:
            self._forget(due)
        shown = self._shown(obs, 0)
        for tick in range(self.config.turn):
            chosen = self.learner.actor.act(shown, warm=False, generator=self.generator)
            step = self.env.step(self.scale.to_actuator(chosen.action[:, 0]), active)
            obs = where(active, step.obs, obs)
            raw = self.observed.raw(obs)
            self.observed.absorb(raw[active])
            counts = active & (tick >= self.free)
            x = self.observed.scaled(raw) * len(self.observed) ** 0.5
            found = torch.where(counts, surprise(self.density, x), 0.0)
            self.density, total = with_seen(self.density, x, counts), total + found
            # Behind the last tick the next turn begins.
            terminated, before, shown = active & step.terminated, shown, self._shown(obs, (tick + 1) % self.config.turn)
            ended = active & (step.terminated | step.truncated)
            outcome = Outcome(
                shown,
                shown,
                -found,
                self.config.gamma * (~terminated).to(found),
                ended,
                terminated,
                active.long(),
                chosen.action,
                {"intervened": ~active[:, None]},  # where it is over, a row says nothing
            )
            tick_of: Any = {"obs": before, "columns": chosen.columns, "outcome": outcome._asdict()}
            played.append(index(tick_of, rows))
            active = active & ~ended
        self.turns = [concatenate(pair) for pair in zip(self.turns, played, strict=True)] if self.turns else played
        self._learn()
        return obs, due & ~active, total / (self.config.turn - self.free)

    def _shown(self, obs: Obs, tick: int) -> Obs:
        """The observation of Control: that of the world, the time of its turn, and its density."""
        count, mean, squares = self.density
        time = torch.full_like(mean[:, :1], tick / self.config.turn)
        return {**obs, "turn": torch.cat([time, mean, (squares / count).sqrt()], 1)}

    def _learn(self) -> None:
        """As soon as there are as many turns as worlds."""
        count = len(self.turns[0]["outcome"]["reward"])
        if count < self.num_envs:
            return
        rollout = Rollout(self.config.turn, count)
        for tick in self.turns:
            rollout.add(tick["obs"], tick["columns"], Outcome(**tick["outcome"]))
        self.turns = []
        with torch.enable_grad():
            self.learner.update(Rows(rollout.batch()))

    def state_dict(self) -> dict[str, Any]:
        kept = {"density": self.density, "played": self.played, "ticks": self.ticks, "turns": self.turns}
        kept |= {"generator": self.generator.get_state(), "observed": self.observed.state_dict()}
        return {**super().state_dict(), **kept, "control": self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.learner.load_state_dict(state["control"])
        self.density, self.played = (state[x].to(self.device, copy=True) for x in ("density", "played"))
        self.ticks = int(state["ticks"])
        self.turns = [map_tree(lambda x: x.to(self.device, copy=True), tick) for tick in state["turns"]]
        self.generator.set_state(state["generator"].cpu())
        self.observed.load_state_dict(state["observed"])
