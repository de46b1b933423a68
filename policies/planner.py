"""A policy that plans: in a latent model, by MPPI, with the plans of a learnt prior among those that are tried.

Hansen et al. 2024 (TD-MPC2, arXiv 2310.16828), section 3.3. A plan is H actions; its value is what the model expects to
be paid for them, and the mean of the critics behind the last. In each of ``steps`` rounds plans are drawn from one
Gaussian per action, the best of them are weighted by exp(temperature * value), and the Gaussians are fitted to these.
All worlds plan at once, as rows of one batch, and with noise of their own, so that evaluations are paired.

A chunk is the plan, of which the first action is played. ``act`` knows no last plan and begins anew; the controller
begins each search at the rest of the last plan of its world, and anew where an episode begins.

**Departures.** The value behind a plan is the mean of all critics instead of two random ones. ``greedy`` plays the mean
of the best plans; else one of them is drawn by its weight, as published.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .chain import with_prefix
from .controllers import ChunkController
from .core.errors import BurnishError
from .core.ranges import check_ranges
from .core.seed import EpisodeSeeds, Noise, RowNoise, normal
from .core.spec import PolicySpec, require_bytes
from .core.time_limit import first_act, go_on
from .core.tree import map_tree
from .core.types import Controller, Obs, Prefix
from .nets.latent_model import LatentModel, LatentModelConfig

LARGEST_SEARCH = 1 << 26  # bytes of all plans of one world


@dataclass
class PlannerConfig:
    """Settings of a planner: its model, and how it searches."""

    horizon: int = 3  # actions of a plan
    steps: int = 4  # rounds of planning; 0: the prior acts alone (policy.steps=0 of a checkpoint)
    samples: int = 128  # plans of a round
    prior_samples: int = 16  # plans among the samples that the prior makes
    elites: int = 24  # best plans, to which the next round is fitted
    temperature: float = 0.5  # weight of a plan's value among the best
    min_std: float = 0.05  # least deviation of an action
    max_std: float = 2.0  # deviation of an action in the first round
    gamma: float | None = None  # discount of a later reward; null: that of the method
    model: LatentModelConfig = field(default_factory=LatentModelConfig)  # the model that plans are tried in

    def __post_init__(self) -> None:
        ranges = {"[1, 1000]": "horizon elites", "[0, 1000]": "steps prior_samples", "[1, 65536]": "samples"}
        check_ranges(self, {**ranges, "(0, inf)": "temperature min_std", "[0, 1]": "gamma"}, "planner.")
        if not self.prior_samples <= self.samples or not self.elites <= self.samples:
            raise BurnishError(
                f"planner.samples={self.samples} plans hold the {self.prior_samples} of the prior and the "
                f"{self.elites} best; raise samples, or lower prior_samples or elites"
            )
        if not self.min_std <= self.max_std < float("inf"):
            raise BurnishError(f"planner.max_std={self.max_std} must be at least planner.min_std={self.min_std}")


class Search(NamedTuple):
    """The result of planning."""

    chunk: Tensor  # (B, H, A), the plan that is chosen
    mean: Tensor  # (B, H, A), of the last round
    std: Tensor  # (B, H, A)


class PlannerPolicy(nn.Module):
    """A policy that plans in its ``model``, which `finetune/methods/tdmpc.py` trains. It has no loss of imitation."""

    def __init__(self, spec: PolicySpec, config: PlannerConfig) -> None:
        super().__init__()
        self.spec = replace(spec, horizon=config.horizon, execute=1, start=0, noise_shape=None)
        require_bytes(4 * config.samples * config.horizon * (spec.action.dim + config.model.latent), LARGEST_SEARCH,
                      f"planner.samples={config.samples} plans of {config.horizon} actions")  # fmt: skip
        self.config, self.model = config, LatentModel(spec, config.model)
        self.gamma = 0.99 if config.gamma is None else config.gamma

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        if noise is not None:
            raise BurnishError("a planner has no single noise to start from; leave noise= out")
        return with_prefix(self.search(obs, greedy=greedy, generator=generator).chunk, prefix)

    @torch.no_grad()
    def search(
        self, obs: Obs, start: Tensor | None = None, *, greedy: bool = False, generator: Noise | None = None
    ) -> Search:
        """``start`` (B, H, A) is where the search begins; 0 by default."""
        config, z = self.config, self.model.encode(obs)
        if not config.steps:
            plan = self._prior_plans(z, 1, generator, greedy=greedy)[:, 0]
            return Search(plan, plan, torch.zeros_like(plan))
        rows, (horizon, size) = len(z), self.spec.chunk_shape
        mean = z.new_zeros(rows, horizon, size) if start is None else start
        std = torch.full_like(mean, config.max_std)
        known = self._prior_plans(z, config.prior_samples, generator)
        elite, share = known, z.new_zeros(rows, config.elites)
        for _ in range(config.steps):
            go_on()
            noise = normal((rows, config.samples - config.prior_samples, horizon, size), generator, device=z.device)
            plans = torch.cat([known, (mean[:, None] + std[:, None] * noise).clamp(-1, 1)], 1)
            value, best = self._value(z, plans, generator).topk(config.elites, 1)
            elite = plans.gather(1, best[..., None, None].expand(-1, -1, horizon, size))
            share = (config.temperature * value).softmax(1)
            weight = share[..., None, None]
            mean = (weight * elite).sum(1)
            std = (weight * (elite - mean[:, None]).square()).sum(1).sqrt().clamp(config.min_std, config.max_std)
        if greedy:
            return Search(mean, mean, std)
        uniform = torch.special.ndtr(normal((rows, 1), generator, device=z.device))
        chosen = (share.cumsum(1) < uniform).sum(1).clamp(max=config.elites - 1)
        return Search(elite[torch.arange(rows, device=z.device), chosen], mean, std)

    def _prior_plans(self, z: Tensor, count: int, generator: Noise | None, *, greedy: bool = False) -> Tensor:
        """(B, count, H, A): the prior plays in the model."""
        rows, (horizon, size) = len(z), self.spec.chunk_shape
        noise = z.new_zeros(rows, count, horizon, size)
        if not greedy and count:
            noise = normal(noise.shape, generator, device=z.device)
        at, plan = z.repeat_interleave(count, 0), []
        for t in range(horizon):
            if plan:
                at = self.model.next(at, plan[-1])
            plan.append(self.model.law(at).sample(noise[:, :, t].flatten(0, 1)).tanh())
        return torch.stack(plan, 1).unflatten(0, (rows, count))

    def _value(self, z: Tensor, plans: Tensor, generator: Noise | None) -> Tensor:
        """(B, M) of plans (B, M, H, A). Behind a predicted termination nothing is paid."""
        rows, count, horizon, size = plans.shape
        at, actions = z.repeat_interleave(count, 0), plans.flatten(0, 1)
        total, factor = z.new_zeros(rows * count), z.new_ones(rows * count)
        for t in range(horizon):
            total = total + factor * self.model.bins.value(self.model.reward_logits(at, actions[:, t]))
            at = self.model.next(at, actions[:, t])
            factor = self.gamma * factor
            if self.model.end is not None:
                factor = factor * (self.model.end(at)[:, 0] < 0)
        noise = normal((rows, count, size), generator, device=z.device).flatten(0, 1)
        behind = self.model.values(at, self.model.law(at).sample(noise).tanh()).mean(0)
        return (total + factor * behind).unflatten(0, (rows, count))

    def controller(self, num_envs: int, *, seed: int = 0, greedy: bool = False, device: Any = "cpu") -> Controller:
        if self.spec.execute > 1:  # plans that are played further before the next
            return ChunkController(self, num_envs, seed=seed, greedy=greedy, device=device)
        return PlannerController(self, num_envs, seed=seed, greedy=greedy, device=device)


def rest(plan: Tensor) -> Tensor:
    """The rest of plans (B, H, A) when their first action was played; the last action is open, thus 0."""
    return torch.cat([plan[:, 1:], torch.zeros_like(plan[:, :1])], 1)


class PlannerController:
    """Each search begins at the rest of the last plan of its world. An observation is planned for once: what ``peek``
    found, ``step`` plays."""

    def __init__(
        self, policy: PlannerPolicy, num_envs: int, *, seed: int = 0, greedy: bool = False, device: Any = "cpu"
    ) -> None:
        self.policy, self.greedy, self.execute = policy, greedy, 1
        self._seeds = EpisodeSeeds(seed, num_envs, device)
        self._decision = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._start = torch.zeros(num_envs, *policy.spec.chunk_shape, device=device)
        self._found: tuple[Obs, Search] | None = None
        self._acted = False  # before: its first act may be that of an untrusted policy, and has a limit of time

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        self._seeds.begin(mask, seeds)
        self._decision = self._decision.masked_fill(mask, 0)
        self._start = self._start.masked_fill(mask[:, None, None], 0.0)
        self._found = None

    def peek(self, obs: Obs) -> Tensor:
        return self._searched(obs).chunk[:, 0]

    def ahead(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """The chunk (N, 1, A) that ``step`` would play from, and the place (N,) in it. Changes nothing."""
        return self.peek(obs)[:, None], torch.zeros_like(self._decision)

    def step(self, obs: Obs) -> Tensor:
        found = self._searched(obs)
        self._start, self._found, self._decision = rest(found.mean), None, self._decision + 1
        return found.chunk[:, 0]

    def _searched(self, obs: Obs) -> Search:
        if self._found is None or not all(torch.equal(obs[key], x) for key, x in self._found[0].items()):
            noise = RowNoise(self._seeds.current, self._decision)
            with nullcontext() if self._acted else first_act():
                found = self.policy.search(obs, self._start, greedy=self.greedy, generator=noise)
            self._acted = True
            # Worlds may reuse the memory of their observations, so a copy is kept.
            self._found = map_tree(torch.clone, obs), found
        return self._found[1]

    def state_dict(self) -> dict[str, Any]:
        """Without the last search, which is made again: the noise of a decision is addressed by it."""
        return {"seeds": self._seeds.state_dict(), "decision": self._decision, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seeds.load_state_dict(state["seeds"])
        device = self._start.device
        self._decision, self._start, self._found = state["decision"].to(device), state["start"].to(device), None
