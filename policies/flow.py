"""Flow-matching policy: the action chunk is where an ODE carries Gaussian noise.

Rectified flow (Liu et al. 2022, arXiv 2209.03003): x_t = (1 - t) x_0 + t x_1 with x_0 ~ N(0, I), x_1 the data, and a
network v(x_t, t) regressed on x_1 - x_0; Euler steps of 1/K carry x_0 to the action. Training times are uniform,
logit-normal (Esser et al. 2024, arXiv 2403.03206) or beta (Black et al. 2024, arXiv 2410.24164: more weight on noise).
**Shortcut** models (Frans et al. 2024, arXiv 2410.12557) also see the step size d, and learn that one step of size d
equals two of size d/2, so that 1, 2 or 4 steps suffice.

One grid everywhere: step k of K is at t = k / K (`FlowPolicy.time`), in sampling, density and export.

**Departures.** Shortcut targets come from the online network under `no_grad` rather than from its moving average;
the smallest step is written d = 0, which is the plain flow. The beta density is Beta(a, 1), whose quantile function is
closed, and covers the published choice a = 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from .chain import (
    Stage,
    committed,
    masked_mean,
    pin_prefix,
    pull_prefix,
    require_steps,
    sample_chain,
    start_noise,
    with_actions,
    with_prefix,
)
from .core.errors import BurnishError
from .core.ranges import check_ranges
from .core.seed import Generator, Noise, first_rows, integers, normal, uniform
from .core.spec import PolicySpec
from .core.tree import rows
from .core.types import ActOptions, Condition, Normal, Obs, Prefix
from .nets.denoiser import Cond, Denoiser, DenoiserConfig


class TimeSampling(Enum):
    """The distributions from which training draws flow times in [0, 1]."""

    uniform = "uniform"
    logit_normal = "logit_normal"
    beta = "beta"


@dataclass
class FlowConfig:
    """Settings of a flow policy: Euler steps, the distribution of training times, shortcuts, and the network."""

    steps: int = 10  # K, Euler steps when acting
    time: TimeSampling = TimeSampling.uniform  # distribution from which training draws the time of a sample
    beta_a: float = 1.5  # shape of the Beta distribution, with time=beta
    logit_mean: float = 0.0  # mean of the logit-normal distribution, with time=logit_normal
    logit_std: float = 1.0  # deviation of the logit-normal distribution, with time=logit_normal
    shortcut: bool = False  # train for few steps too (shortcut models)
    shortcut_share: float = 0.25  # share of a batch that trains self-consistency
    shortcut_levels: int = 7  # the smallest step is 2^-levels
    net: DenoiserConfig = field(default_factory=DenoiserConfig)  # the denoising network

    def __post_init__(self) -> None:
        require_steps(self.steps)
        own = {"(0, inf)": "beta_a logit_std", "(-inf, inf)": "logit_mean"}
        check_ranges(self, {"(0, 1)": "shortcut_share", "[1, 16]": "shortcut_levels", **own}, "policy.")
        if self.shortcut and (self.steps & (self.steps - 1) or self.steps > 2**self.shortcut_levels):
            raise BurnishError(
                f"policy.steps={self.steps}: a shortcut model steps by powers of two up to "
                f"2^shortcut_levels={2**self.shortcut_levels}; take 1, 2, 4, ... or policy.shortcut=false"
            )


def sample_time(config: FlowConfig, shape: Sequence[int], generator: Generator | None, like: Tensor) -> Tensor:
    """Training times of ``shape``, (B, ...), in [0, 1]; 0 is noise, 1 is data."""
    if config.time is TimeSampling.logit_normal:
        z = normal(shape, generator, device=like.device, dtype=like.dtype)
        return torch.sigmoid(config.logit_mean + config.logit_std * z)
    u = uniform(shape, generator, device=like.device, dtype=like.dtype)
    # If u is uniform, u^(1/a) is Beta(a, 1), which leans to 1; the flow's time leans to noise.
    return 1 - u ** (1 / config.beta_a) if config.time is TimeSampling.beta else u


class FlowPolicy(nn.Module):
    """The flow-matching policy: a velocity network, integrated from noise to a chunk in K Euler steps."""

    def __init__(self, spec: PolicySpec, config: FlowConfig) -> None:
        super().__init__()
        self.spec = replace(spec, noise_shape=spec.chunk_shape, goal_free=config.net.goal_drop > 0)
        self.config = config
        self.net = Denoiser(spec, config.net, num_times=2 if config.shortcut else 1)

    @property
    def num_steps(self) -> int:
        return self.config.steps

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        """Act with another number of Euler steps; a shortcut model refuses what it was not trained for."""
        self.config = replace(self.config, steps=steps)

    def time(self, k: Tensor) -> Tensor:
        """The one time grid: step k of K begins at t = k / K."""
        return k.double() / self.num_steps

    @property
    def step_size(self) -> float:
        """The step size that a shortcut model is conditioned on; its smallest step is the plain flow, written 0."""
        return 0.0 if self.num_steps == 2**self.config.shortcut_levels else 1 / self.num_steps

    @property
    def cond_dim(self) -> int:
        """The width of ``encode(obs).given``."""
        return self.net.encoder.dim

    def decode(self, x: Tensor) -> Tensor:
        """From a state of the chain to actions in [-1, 1]."""
        return x.clamp(-1, 1)

    def in_chain(self, action: Tensor) -> Tensor:
        """From actions in [-1, 1] to a state of the chain."""
        return action

    def velocity(self, x: Tensor, t: Tensor, d: Tensor | float, cond: Any) -> Tensor:
        """v(x, t), or v(x, t, d) of a shortcut model; t (B,), d (B,) or a number."""
        t = t.to(x.dtype)
        if not self.config.shortcut:
            return self.net(x, t[:, None], cond)
        sizes = d if isinstance(d, Tensor) else torch.full_like(t, d)
        return self.net(x, torch.stack([t, sizes.to(x.dtype)], 1), cond)

    def encode(self, obs: Obs) -> Any:
        return self.net.encode(obs)

    def transition(self, x: Tensor, k: Tensor, cond: Condition) -> Normal:
        """One Euler step, as a Gaussian without spread: x_{k+1} = x_k + v(x_k, k/K) / K."""
        mean = x + self.velocity(x, self.time(k), self.step_size, cond) / self.num_steps
        return Normal(mean, torch.zeros((), dtype=x.dtype, device=x.device))

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        return self.generate(self.encode(obs), **how)

    def generate(
        self,
        cond: Any,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        """A chunk for each row of an encoded observation."""
        x_0 = start_noise(self.spec, cond.given, noise, greedy, generator)

        def level(known: Tensor, k: int) -> Tensor:
            t = k / self.num_steps
            return (1 - t) * x_0[:, : known.shape[1]] + t * known

        inside = with_actions(prefix, self.in_chain)
        pin, guide = pin_prefix(self, committed(inside), x_0, level), pull_prefix(self, inside, x_0, self._stage)
        chunk = self.decode(sample_chain(self, x_0, cond, inject=False, pin=pin, guide=guide)[-1])
        return with_prefix(chunk, committed(prefix))

    def _stage(self, k: int) -> Stage:
        t, rest = k / self.num_steps, self.num_steps - k
        return Stage(t, 1 - t, 1 / rest, 1 - 1 / rest)

    def bc_loss(
        self,
        obs: Obs,
        action: Tensor,
        *,
        mask: Tensor | None = None,
        drop: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        cond, batch = self.net.encode_for_loss(obs, action, drop, generator), len(action)
        x_0 = normal(action.shape, generator, device=action.device, dtype=action.dtype)
        t = sample_time(self.config, (batch,), generator, action)
        d = torch.zeros_like(t)
        target = action - x_0
        # The first rows of a batch, which is in random order, train self-consistency instead.
        consistent = first_rows(self.config.shortcut_share, batch, generator) if self.config.shortcut else 0
        if self.config.shortcut:
            t_c, d_c = self._shortcut_times(batch, generator, action)
            t, d = torch.cat([t_c[:consistent], t[consistent:]]), torch.cat([d_c[:consistent], d[consistent:]])
        x_t = torch.lerp(x_0, action, rows(t, action))
        if consistent:
            head = slice(0, consistent)
            halves = self._two_half_steps(x_t[head], t[head], d[head], cond.rows(head))
            target = torch.cat([halves, target[consistent:]])
        return masked_mean((self.velocity(x_t, t, d, cond) - target).square(), mask)

    def _shortcut_times(self, count: int, generator: Generator | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Step sizes d = 2^-i, i in 0..levels-1, and start times on the grid of multiples of d."""
        level = integers(0, self.config.shortcut_levels, (count,), generator, device=like.device)
        u = uniform((count,), generator, device=like.device, dtype=like.dtype)
        d = torch.pow(2.0, -level.to(like.dtype))
        return (u / d).floor() * d, d

    @torch.no_grad()
    def _two_half_steps(self, x: Tensor, t: Tensor, d: Tensor, cond: Cond) -> Tensor:
        """The mean velocity of two steps of d/2, which one step of d shall reproduce."""
        half = d / 2
        size = torch.where(half > 2.0**-self.config.shortcut_levels, half, torch.zeros_like(half))
        first = self.velocity(x, t, size, cond)
        second = self.velocity(x + rows(half, x) * first, t + half, size, cond)
        return (first + second) / 2
