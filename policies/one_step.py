"""A policy that answers in one forward pass what a flow needs many for: (observation, noise) -> chunk.

Flow Q-learning (Park et al. 2025, arXiv 2502.02538) distils a flow into it, and climbs a critic with it: no gradient
ever passes through the steps of the flow. It is as expressive as its noise: one observation has as many answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from .chain import start_noise, with_prefix
from .core.seed import Generator, Noise
from .core.spec import PolicySpec
from .core.tree import check
from .core.types import Obs, Prefix
from .nets.encoder import EncoderConfig, ObsEncoder
from .nets.mlp import MLP, Activation, require_widths


@dataclass
class OneStepConfig:
    """Settings of a one-step policy: its layers and its encoder."""

    hidden: list[int] = field(default_factory=lambda: [512, 512, 512, 512])  # width of each hidden layer
    activation: Activation = Activation.gelu  # activation between layers
    layer_norm: bool = False  # layer normalisation behind each hidden layer
    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # encoder of observations

    def __post_init__(self) -> None:
        require_widths("hidden", self.hidden)


class OneStepPolicy(nn.Module):
    """A network from an observation and noise to a chunk in one pass."""

    def __init__(self, spec: PolicySpec, config: OneStepConfig) -> None:
        super().__init__()
        self.spec = replace(spec, noise_shape=spec.chunk_shape, goal_free=False)
        self.config = config
        self.encoder = ObsEncoder(spec, config.encoder)
        size = math.prod(spec.chunk_shape)
        self.trunk = MLP(
            self.encoder.dim + size, size, config.hidden, activation=config.activation, layer_norm=config.layer_norm
        )

    def forward(self, obs: Obs, noise: Tensor, *, augment: Generator | None = None) -> Tensor:
        """(B, H, A), not clipped: what is distilled must feel how far it is outside."""
        check(noise, f"B {self.spec.horizon} {self.spec.action.dim}")
        seen = self.encoder(obs, augment=augment)
        return self.trunk(torch.cat([seen, noise.flatten(1)], 1)).view(noise.shape)

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        like = next(self.trunk.parameters()).new_zeros(len(next(iter(obs.values()))))
        action = self(obs, start_noise(self.spec, like, noise, greedy, generator)).clamp(-1, 1)
        return with_prefix(action, prefix)
