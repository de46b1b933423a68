"""A model of a world in a latent space of its own: what follows, what is paid, what it is worth, and how to act.

Hansen et al. 2024 (TD-MPC2, arXiv 2310.16828): observations are never predicted. A latent state is groups of numbers
that each sum to one (SimNorm, Lavoie et al. 2022, arXiv 2204.00616); rewards and values are distributions over bins on
the scale of symlog (Hafner et al. 2023, arXiv 2301.04104), so that one setting fits rewards of any size; every layer is
followed by layer norm and Mish.

**Departures.** The critics have no dropout (.01 in the published code).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from ..core.spec import PolicySpec
from ..core.types import Normal, Obs
from .critic import two_hot
from .encoder import EncoderConfig, ObsEncoder
from .ensemble import EnsembleLinear, EnsembleMLP
from .mlp import MLP, WIDEST_TABLE, Activation, require_widths


@dataclass
class LatentModelConfig:
    """Settings of a latent model: its networks, and the bins of rewards and values."""

    latent: int = 64  # numbers of a latent state
    group: int = 8  # latent numbers that sum to one together
    encoder_hidden: list[int] = field(default_factory=lambda: [128])  # hidden layers between observation and latent
    hidden: list[int] = field(default_factory=lambda: [128, 128])  # hidden layers of all other networks
    members: int = 5  # critics in the ensemble
    bins: int = 101  # bins of a distribution over rewards or values
    limit: float = 10.0  # largest bin, on the scale of symlog: 10 stands for 22,000
    ends: bool = True  # terminations are predicted, and nothing is expected behind one; false where worlds have none
    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # encoder of observations

    def __post_init__(self) -> None:
        require_widths("model.encoder_hidden", self.encoder_hidden)
        require_widths("model.hidden", self.hidden)
        check_ranges(self, {"[1, inf)": "latent group members", "(0, inf)": "limit"}, "model.")
        if self.latent % self.group:
            raise BurnishError(f"model.latent={self.latent} must be a multiple of model.group={self.group}")
        if not 2 <= self.bins <= WIDEST_TABLE or self.limit > 50:
            raise BurnishError(
                f"model.bins={self.bins} must be 2 to {WIDEST_TABLE}, and model.limit={self.limit} at most 50, since "
                "symexp of more is no number that float32 counts with"
            )


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|)."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of ``symlog``."""
    return x.sign() * x.abs().expm1()


class SimNorm(nn.Module):
    """A softmax within each group of ``group`` numbers."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.group)).softmax(-1).flatten(-2)


class SymlogBins(nn.Module):
    """Numbers as distributions over equidistant bins of their symlog."""

    support: Tensor

    def __init__(self, count: int, limit: float) -> None:
        super().__init__()
        self.register_buffer("support", torch.linspace(-limit, limit, count, device="cpu"), persistent=False)

    def value(self, logits: Tensor) -> Tensor:
        """(..., bins) -> (...)."""
        return symexp((logits.softmax(-1) * self.support).sum(-1))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """(..., bins) and (...) -> (...): the cross-entropy with the two bins around each target."""
        return -(two_hot(symlog(target), self.support) * logits.log_softmax(-1)).sum(-1)


class LatentModel(nn.Module):
    """Shapes: latent states (..., D), actions (..., A), logits over bins (..., bins)."""

    def __init__(self, spec: PolicySpec, config: LatentModelConfig) -> None:
        super().__init__()
        size, both = spec.action.dim, config.latent + spec.action.dim
        usual = {"activation": Activation.mish, "layer_norm": True}
        self.encoder = ObsEncoder(spec, config.encoder)
        self.bins = SymlogBins(config.bins, config.limit)
        self.to_latent, self.dynamics = (
            nn.Sequential(
                MLP(inputs, config.latent, hidden, **usual), nn.LayerNorm(config.latent), SimNorm(config.group)
            )
            for inputs, hidden in ((self.encoder.dim, config.encoder_hidden), (both, config.hidden))
        )
        self.reward = MLP(both, config.bins, config.hidden, **usual)
        self.prior = MLP(config.latent, 2 * size, config.hidden, **usual)
        self.critic = EnsembleMLP(config.members, both, config.bins, config.hidden, **usual)
        self.end = MLP(config.latent, 1, config.hidden, **usual) if config.ends else None
        self.apply(_begin)
        for net in (self.reward, self.critic):
            *_, last, _ = net.parameters()  # the weights of the last layer, and its biases
            nn.init.zeros_(last)

    def encode(self, obs: Obs) -> Tensor:
        return self.to_latent(self.encoder(obs))

    def next(self, z: Tensor, action: Tensor) -> Tensor:
        return self.dynamics(torch.cat([z, action], -1))

    def reward_logits(self, z: Tensor, action: Tensor) -> Tensor:
        return self.reward(torch.cat([z, action], -1))

    def value_logits(
        self, z: Tensor, action: Tensor, members: Tensor | None = None, critic: EnsembleMLP | None = None
    ) -> Tensor:
        """(E, B, bins) of (B, D): of ``members`` alone where they are given; of another ``critic``, a target's."""
        net, both = self.critic if critic is None else critic, torch.cat([z, action], -1)
        if members is None:
            return net(both)
        return functional_call(net, {name: x[members] for name, x in net.named_parameters()}, (both,))

    def values(
        self, z: Tensor, action: Tensor, members: Tensor | None = None, critic: EnsembleMLP | None = None
    ) -> Tensor:
        """(E, B)."""
        return self.bins.value(self.value_logits(z, action, members, critic))

    def law(self, z: Tensor) -> Normal:
        """The policy prior, before its tanh; the log of its deviation lies in [-10, 2]."""
        mean, raw = self.prior(z).chunk(2, -1)
        return Normal(mean, (6 * torch.tanh(raw) - 4).exp())


def _begin(layer: nn.Module) -> None:
    """Small weights and no biases: a fresh model predicts nothing in particular."""
    if isinstance(layer, (nn.Linear, EnsembleLinear)):
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
