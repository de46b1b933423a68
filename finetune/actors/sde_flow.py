"""A flow policy as a stochastic process: noise in closed form, with a drift that takes back what the noise adds.

Flow-SDE: Chen et al. 2025 (pi_RL, arXiv 2510.25889), after Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470). Their time
tau runs from 1 (noise) to 0 (action); ours is t = 1 - tau. With d = 1/K and v = v(x, t) the two ends that a straight
path through x would have are

    action  y = x + (1 - t) v,      noise  e = x - t v,      so that  x = (1 - t) e + t y.

The ordinary step is x + d v = (1 - t - d) e + (t + d) y. The stochastic one is, with sigma = level sqrt((1 - t) / t),

    x_{k+1} ~ N(x + d v - d sigma^2 / (2 (1 - t)) e,  d sigma^2).

For the exact velocity, e = E[noise | x] = -(1 - t) score(x), so this is an Euler step of
dx = (v + sigma^2 / 2 score) dt + sigma dw, which has the marginals of dx = v dt. At t = 0, where sigma is infinite, the
denominator t is that of the next grid time, 1/K, as in both implementations: sigma^2 = level^2 K.

Near t = 0 the noise of a step, about level^2 / k, does not become small with 1/K, so the Euler step leaves an error
that more steps do not remove: about 1 % of the variance at level 0.5. With few steps the stochastic chain also spreads
wider than the ordinary one, whose own error is toward too little spread. A shortcut model gives the mean velocity of a
whole step, for which e is an approximation.

**mixed**: one random step of each draw is stochastic, all others are ordinary; only that step has a likelihood, so that
an update costs one pass of the network per row instead of K. Its gradient is that of the random step's share.

**Departures.** The published likelihood counts the executed coordinates of whichever step was random. Only at the last
step is that enough: at an earlier one every coordinate steers the executed ones through the steps that follow, and
counts here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.chain import start_noise, state_shape, step_index
from ...policies.core.errors import BurnishError
from ...policies.core.seed import Noise, normal, uniform
from ...policies.core.tree import check, rows
from ...policies.core.types import Condition, Draw, Normal, Obs
from ...policies.trainable import TrainableConfig
from .trainable_flow import FlowActor, evidence, trainable_flow


@dataclass
class SDEConfig:
    """Settings of the noise that makes a flow stochastic: its level, and at how many steps it acts."""

    level: float = 0.5  # strength of the noise of the stochastic steps
    mixed: bool = True  # one random stochastic step per draw; false: all of them, one joint likelihood

    def __post_init__(self) -> None:
        if not 0 < self.level < math.sqrt(2):
            raise BurnishError(
                f"noise.level={self.level} must lie in (0, 1.41): without noise there is no likelihood, and above the "
                "limit the first step turns its state around"
            )


class SDEFlowActor(FlowActor):
    """The trace (B, M, 1 + 2 H A) lists the stochastic transitions of a draw,
    M = 1 if mixed and K otherwise: each is its step k, the state where it began, and the state where it led."""

    def __init__(self, base: Any, config: SDEConfig, train: TrainableConfig | None = None) -> None:
        super().__init__(trainable_flow(base, "flow_sde", train))
        self.config = config
        chunk, last = math.prod(self.spec.chunk_shape), self.spec.execute * self.spec.action.dim
        count = self.num_steps
        terms, joined = float((count - 1) * chunk + last), float(count)
        if config.mixed:  # on average over its random step
            terms, joined = terms / count, 1.0
        self._count(terms, joined)

    def transition(self, x: Tensor, k: Tensor, cond: Condition, stochastic: Tensor | None = None) -> Normal:
        """``stochastic`` (B,) bool: rows outside take the ordinary step of the flow, without spread."""
        flow, count = self.flow, self.num_steps
        t = flow.time(k)
        v = flow.velocity(x, t, flow.step_size, cond)
        variance = self.config.level**2 * (1 - t) / t.clamp(min=1 / count)
        if stochastic is not None:
            variance = variance * stochastic
        pull = variance / (2 * (1 - t) * count)
        t, pull, std = (rows(c.to(x.dtype), x) for c in (t, pull, (variance / count).sqrt()))
        drift = self.padded(self.real(pull * (x - t * v)))  # of what gets noise
        return Normal(x + v / count - drift, self.padded(std.expand(-1, -1, self.spec.action.dim)))

    def draw(self, obs: Obs, *, generator: Noise | None = None) -> Draw:
        cond = self.encode(obs)
        x = start_noise(self.spec, cond.given, None, False, generator)
        batch, count, mixed = len(x), self.num_steps, self.config.mixed
        chosen = random_step(batch, count, generator, x.device) if mixed else None
        seen: list[list[Tensor]] = []  # of each step: where it began, where it led, mean and deviation of that
        noise = x
        for k in range(count):
            law = self.transition(x, step_index(x, k), cond, None if chosen is None else chosen == k)
            if k == 0 or not mixed:  # A mixed draw spends its one noise where it is stochastic.
                noise = normal(x.shape, generator, device=x.device, dtype=x.dtype)
            after = law.sample(noise)
            seen.append([x, after, law.mean, law.std])
            x = after
        began, led, mean, std = (torch.stack(list(states), 1) for states in zip(*seen, strict=True))
        k = torch.arange(count, device=x.device).expand(batch, -1)
        if chosen is not None:
            pick = (torch.arange(batch, device=x.device)[:, None], chosen[:, None])
            k, began, led, mean, std = (states[pick] for states in (k, began, led, mean, std))
        trace = torch.cat([k.to(x.dtype)[..., None], began.flatten(2), led.flatten(2)], 2)
        steps = torch.full((batch,), self.spec.execute, device=x.device)
        log_prob = evidence(self.spec, self._density(Normal(mean, std), led), k == count - 1, steps)
        return Draw(self.flow.decode(x), trace, log_prob)

    def log_prob(self, obs: Obs, trace: Tensor, steps: Tensor) -> Tensor:
        """All stochastic transitions of all rows in one pass of the network."""
        count = 1 if self.config.mixed else self.num_steps
        shape = state_shape(self.spec)
        check(trace, f"B {count} {1 + 2 * math.prod(shape)}")
        k = trace[..., 0].long()
        began, led = (x.unflatten(-1, shape).flatten(0, 1) for x in trace[..., 1:].chunk(2, -1))
        law = self.transition(began, k.flatten(), self.encode(obs).repeat(count))
        density = self._density(law, led).unflatten(0, (-1, count))
        return evidence(self.spec, density, k == self.num_steps - 1, steps)

    def _density(self, law: Normal, led: Tensor) -> Tensor:
        """Elementwise, of the coordinates that are no padding."""
        return Normal(self.real(law.mean), self.real(law.std)).log_prob(self.real(led))


def random_step(batch: int, count: int, source: Noise | None, device: torch.device) -> Tensor:
    """(B,) int64, uniform in 0..count-1."""
    return (uniform((batch, 1), source, device=device, dtype=torch.float64)[:, 0] * count).long()
