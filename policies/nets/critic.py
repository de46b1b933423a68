"""Critics: an ensemble of Q networks as one module, and a value network.

Both stand here and not in ``offline``, because a policy that chooses the best of several draws takes its critic along.
With ``bins`` a network predicts a distribution over equidistant values and is trained by cross-entropy on the two
neighbours of its target ("two-hot", Schrittwieser et al. 2020, arXiv 1911.08265; Farebrother et al. 2024, arXiv
2403.03950 show that it scales better than regression).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.config import LATER
from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from ..core.spec import PolicySpec
from ..core.tree import check
from .encoder import EncoderConfig, ObsEncoder
from .ensemble import EnsembleMLP
from .mlp import MLP, WIDEST_TABLE, Activation, require_widths


@dataclass
class CriticConfig:
    """Settings of an ensemble of Q networks: members, layers, and bins of a distribution over values."""

    members: int = 2  # critics in the ensemble
    hidden: list[int] = field(default_factory=lambda: [256, 256])  # width of each hidden layer
    activation: Activation = Activation.relu  # activation between layers
    layer_norm: bool = True  # layer normalisation behind each hidden layer
    bins: int = 0  # bins of a distribution over values; 0: the value itself is predicted
    low: float = -10.0  # value of the first bin
    high: float = 10.0  # value of the last bin
    average: bool = field(default=False, metadata=LATER)  # mean of the members' losses, instead of their sum
    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # encoder of observations

    def __post_init__(self) -> None:
        require_widths("critic.hidden", self.hidden)
        check_ranges(self, {"[1, inf)": "members"}, "critic.")
        bins = self.bins == 0 or (2 <= self.bins <= WIDEST_TABLE and self.low < self.high)
        if not bins:
            raise BurnishError(
                f"critic.bins={self.bins} must be 0 or 2 to {WIDEST_TABLE}, and critic.low={self.low} below "
                f"high={self.high}"
            )


def two_hot(value: Tensor, support: Tensor) -> Tensor:
    """(...) -> (..., bins): weights on the two neighbours of each value whose mean it is; outside, the border."""
    position = ((value - support[0]) / (support[1] - support[0])).clamp(0, len(support) - 1)
    below = position.floor().clamp(max=len(support) - 2)
    share = (position - below)[..., None]
    index = below.long()[..., None]
    out = torch.zeros(*value.shape, len(support), dtype=value.dtype, device=value.device)
    return out.scatter(-1, index, 1 - share).scatter(-1, index + 1, share)


class QEnsemble(nn.Module):
    """Q_i(obs, action) of E members; the action is the executed chunk (B, n, A), or M of them per row (B, M, n, A)."""

    support: Tensor

    def __init__(self, spec: PolicySpec, config: CriticConfig) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        self.action_shape = (spec.execute, spec.action.dim)
        self.encoder = ObsEncoder(spec, config.encoder)
        self.net = EnsembleMLP(
            config.members,
            self.encoder.dim + math.prod(self.action_shape),
            max(config.bins, 1),
            config.hidden,
            activation=config.activation,
            layer_norm=config.layer_norm,
        )
        support = torch.linspace(config.low, config.high, max(config.bins, 1), device="cpu")
        self.register_buffer("support", support, persistent=False)

    def encode(self, obs: Mapping[str, Tensor]) -> Tensor:
        return self.encoder(obs)

    def forward(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        return self.values(self.encode(obs), action)

    def values(self, features: Tensor, action: Tensor) -> Tensor:
        """(E, B), or (E, B, M) for M actions per row."""
        out = self._raw(features, action)
        return self._mean(out)

    def loss(
        self, features: Tensor, action: Tensor, target: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(loss, Q (E, B)); the mean over rows is weighted by ``weight`` (B,).

        The members' losses are summed (TD3, SAC, REDQ, IQL) or, with ``config.average``, averaged (RLPD, EXPO, FQL,
        ResFiT). No parameter is shared between members, except those of an encoder, and Adam cancels a constant factor.
        So the choice matters only where gradients are clipped: a limit published for one is another for the other.
        """
        check(target, f"{len(features)}")
        out = self._raw(features, action)
        if self.config.bins:
            error = -(two_hot(target, self.support) * torch.log_softmax(out, -1)).sum(-1)
        else:
            error = (out[..., 0] - target).square()
        mean = error.mean(1) if weight is None else (error * weight).sum(1) / weight.sum().clamp(min=1)
        return mean.mean() if self.config.average else mean.sum(), self._mean(out)

    def _raw(self, features: Tensor, action: Tensor) -> Tensor:
        if action.ndim == 3:
            check(action, f"{len(features)} {self.action_shape[0]} {self.action_shape[1]}")
            return self.net(torch.cat([features, action.flatten(1)], 1))
        count = check(action, f"{len(features)} M {self.action_shape[0]} {self.action_shape[1]}")["M"]
        wide = features[:, None].expand(-1, count, -1)
        out = self.net(torch.cat([wide, action.flatten(2)], 2).flatten(0, 1))
        return out.view(len(out), len(features), count, -1)

    def _mean(self, out: Tensor) -> Tensor:
        return (out.softmax(-1) * self.support).sum(-1) if self.config.bins else out[..., 0]


@dataclass
class ValueConfig:
    """Settings of a network from observations to values (V)."""

    hidden: list[int] = field(default_factory=lambda: [256, 256])  # width of each hidden layer
    activation: Activation = Activation.silu  # activation between layers
    layer_norm: bool = False  # layer normalisation behind each hidden layer
    bias: float = 0.0  # bias of the output at the start: roughly the value that a fresh network gives everywhere
    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # encoder of observations

    def __post_init__(self) -> None:
        require_widths("value.hidden", self.hidden)


class ValueNet(nn.Module):
    """V(obs): (B,)."""

    def __init__(self, spec: PolicySpec, config: ValueConfig) -> None:
        super().__init__()
        self.encoder = ObsEncoder(spec, config.encoder)
        self.net = MLP(self.encoder.dim, 1, config.hidden, activation=config.activation, layer_norm=config.layer_norm)
        self.bias = config.bias

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        return self.net(self.encoder(obs))[:, 0] + self.bias
