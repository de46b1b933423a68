"""A flow policy whose every Euler step has learned noise, so that its chain x_0 -> ... -> x_K has a likelihood.

ReinFlow: Zhang et al. 2025 (arXiv 2505.22094), section 4: x_{k+1} ~ N(x_k + v(x_k, k/K, s) / K, sigma_phi(k, s)^2).
Velocity and noise are trained together; the deployed policy is the flow without the noise. One factor (J = 1) joins
all transitions of a draw.

**Departures.** Sampler and density use the one transition on the one grid t = k / K; the published state agents sample
on another grid than they evaluate, so that their ratio is not 1 before the first update. The noise network reads
sinusoids of the time rather than the flow's embedding, which moves under it while the flow learns; it starts at the
geometric mean of its bounds for every observation. Actions that were not executed do not count in the last transition.
Clipping means, states and noise, as the published sampler does unseen by its density, is off unless asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...policies.chain import start_noise, step_index
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import Noise, normal
from ...policies.core.tree import check
from ...policies.core.types import Condition, Draw, Normal, Obs
from ...policies.nets.mlp import MLP, Activation, SinusoidalTime
from ...policies.trainable import TrainableConfig
from .trainable_flow import FlowActor, evidence, trainable_flow

# Entropy of a standard normal.
_UNIT_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)


@dataclass
class NoiseConfig:
    """The published bounds: hopper and walker 0.10 to 0.24, ant and humanoid 0.08 to 0.16, manipulation from states
    0.05 to 0.14, pi_RL's Flow-Noise 0.08 to 0.16. From states the upper bound comes down as by default here; from
    pixels, and in Flow-Noise, it stays (``decay=0``)."""

    min_std: float = 0.10  # lower bound of the learnt noise, per Euler step, in units of the action range [-1, 1]
    max_std: float = 0.24  # upper bound of the learnt noise, in the same units
    hidden: list[int] = field(default_factory=lambda: [64, 64])  # width of each hidden layer of the noise network
    time_dim: int = 16  # size of the embedding of the step; 0: the same noise at every step, as published for pixels
    count_initial: bool = True  # log N(x_0) too: cancels in the ratio, but is counted by ``ppo.reduction``
    decay: int | None = None  # updates over which the upper bound comes down; null: those of the run; 0: it stays
    hold: float = 0.35  # share of these updates before it moves
    floor: float = 0.7  # share of max_std - min_std that is left in the end
    clip_mean: bool = False  # means of every step are clipped to [-1, 1], in sampler and density
    clip_state: bool = False  # states are clipped after their noise; the density ignores that
    # limit of the noise, in deviations, 3 in the published sampler; the density ignores that
    clip_noise: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.min_std < self.max_std < math.inf:
            raise BurnishError(
                f"noise.min_std={self.min_std} and noise.max_std={self.max_std} must satisfy 0 < min_std < max_std: "
                "without noise a flow has no likelihood"
            )
        if not self.hidden or min(self.hidden) < 1:
            raise BurnishError(f"noise.hidden={self.hidden} needs at least one width, each at least 1")
        check_ranges(self, {"[0, inf)": "decay", "[0, 1)": "hold", "[0, 1]": "floor"}, "noise.")
        if self.clip_noise is not None and self.clip_noise <= 0:
            raise BurnishError(f"noise.clip_noise={self.clip_noise} must be positive; null is no clip")


class NoiseNet(nn.Module):
    """log sigma_phi(t, s) between the bounds. How far the upper one has come down is state: it resumes, and a recorded
    graph reads it."""

    updates: Tensor
    log_max: Tensor

    def __init__(self, cond_dim: int, chunk_shape: tuple[int, int], config: NoiseConfig) -> None:
        super().__init__()
        self.config, self.chunk_shape = config, chunk_shape
        self.time = SinusoidalTime(config.time_dim) if config.time_dim else None
        self.net = MLP(
            config.time_dim + cond_dim,
            math.prod(chunk_shape),
            config.hidden,
            activation=Activation.tanh,
            zero_last=True,
        )
        self.log_min = math.log(config.min_std)
        self.decay = config.decay or 0  # null: the bound stays until `plan` says how long the run is
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("log_max", torch.tensor(math.log(config.max_std)))

    def forward(self, t: Tensor, given: Tensor) -> Tensor:
        """t (R,), given (R, C) -> (R, H, A). The noise does not train the encoder."""
        given = given.detach()
        known = given if self.time is None else torch.cat([self.time(t.to(given.dtype)), given], 1)
        out = torch.tanh(self.net(known))
        log_std = self.log_min + 0.5 * (1 + out) * (self.log_max - self.log_min)
        return log_std.view(-1, *self.chunk_shape)

    @torch.no_grad()
    def advance(self) -> None:
        """After an update: the upper bound holds, then follows half a cosine down."""
        config = self.config
        self.updates += 1
        if self.decay:
            progress = ((self.updates / self.decay - config.hold) / (1 - config.hold)).clamp(0, 1)
            share = config.floor + (1 - config.floor) * 0.5 * (1 + torch.cos(math.pi * progress))
            self.log_max.copy_(torch.log(config.min_std + share * (config.max_std - config.min_std)))


class NoisyFlowActor(FlowActor):
    """``noise`` is only for training. The trace is the chain (B, K + 1, H, A), unclamped."""

    def __init__(self, base: Any, config: NoiseConfig, train: TrainableConfig | None = None) -> None:
        super().__init__(trainable_flow(base, "reinflow", train))
        self.config = config
        self.noise = NoiseNet(self.flow.cond_dim, self.spec.chunk_shape, config)
        chunk, count = math.prod(self.spec.chunk_shape), self.num_steps
        last = self.spec.execute * self.spec.action.dim
        terms = (count - 1 + config.count_initial) * chunk + last
        self._count(float(terms), float(count + config.count_initial))

    def transition(self, x: Tensor, k: Tensor, cond: Condition) -> Normal:
        """The Euler step of the flow, with noise."""
        mean = self.flow.transition(x, k, cond).mean
        if self.config.clip_mean:
            mean = mean.clamp(-1, 1)
        return Normal(mean, self.padded(self.noise(self.flow.time(k), cond.given).exp()))

    def draw(self, obs: Obs, *, generator: Noise | None = None) -> Draw:
        config, cond = self.config, self.encode(obs)
        x = start_noise(self.spec, cond.given, None, False, generator)
        states, density = [x], []
        for k in range(self.num_steps):
            law = self.transition(x, step_index(x, k), cond)
            noise = normal(x.shape, generator, device=x.device, dtype=x.dtype)
            if config.clip_noise is not None:
                noise = noise.clamp(-config.clip_noise, config.clip_noise)
            x = law.sample(noise)
            if config.clip_state:
                x = x.clamp(-1, 1)
            states.append(x)
            density.append(self._density(law, x))
        steps = torch.full((len(x),), self.spec.execute, device=x.device)
        log_prob = self._evidence(states[0], torch.stack(density, 1), steps)
        return Draw(self.flow.decode(x), torch.stack(states, 1), log_prob)

    def log_prob(self, obs: Obs, trace: Tensor, steps: Tensor) -> Tensor:
        """All transitions of all rows in one pass of the network: the states are known, so none waits for another."""
        count = self.num_steps
        batch = check(trace, f"B {count + 1} H A")["B"]
        cond, k = self.encode(obs).repeat(count), torch.arange(count, device=trace.device).repeat(batch)
        law = self.transition(trace[:, :-1].flatten(0, 1), k, cond)
        density = self._density(law, trace[:, 1:].flatten(0, 1))
        return self._evidence(trace[:, 0], density.unflatten(0, (batch, count)), steps)

    def entropy_rate(self, obs: Obs) -> Tensor:
        """(B,): the entropy of the terms of a full chunk's evidence, per term. It trains the noise network alone."""
        with torch.no_grad():
            given = self.encode(obs).given
        batch, count = len(given), self.num_steps
        given, k = given.repeat_interleave(count, 0), torch.arange(count, device=given.device).repeat(batch)
        entropy = self.noise(self.flow.time(k), given).unflatten(0, (batch, count)) + _UNIT_ENTROPY
        steps = torch.full((batch,), self.spec.execute, device=given.device)
        total = evidence(self.spec, entropy, k[:count] == count - 1, steps)[:, 0]
        if self.config.count_initial:
            total = total + math.prod(self.spec.chunk_shape) * _UNIT_ENTROPY
        return total / self.coordinates

    def _density(self, law: Normal, x: Tensor) -> Tensor:
        """Elementwise, of the coordinates that are no padding."""
        return Normal(self.real(law.mean), self.real(law.std)).log_prob(self.real(x))

    def _evidence(self, x_0: Tensor, density: Tensor, steps: Tensor) -> Tensor:
        count = self.num_steps
        total = evidence(self.spec, density, torch.arange(count, device=x_0.device) == count - 1, steps)
        if self.config.count_initial:
            x_0 = self.real(x_0)
            unit = Normal(torch.zeros_like(x_0), torch.ones((), dtype=x_0.dtype, device=x_0.device))
            total = total + unit.log_prob(x_0).sum((1, 2))[:, None]
        return total
