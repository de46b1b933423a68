"""InfoPower: a latent state keeps what actions decide, and no more of the rest than it has to.

Bharadhwaj et al. 2022 (arXiv 2204.08585). Beside the losses of a model in a latent space:

    empowerment   max E log q(a | z, z')      an inverse model; log pi(a | z) of the bound is fixed by what was played
    information   I(O; Z) >= ``information``   noise contrastive: z finds its own observation among those of a batch

The second is a constraint, whose multiplier rises while it is missed and falls to 0 where it is met: what actions
decide comes first, because it serves both.

**Departures.** The paper has a recurrent model; here the consistency of TD-MPC2 stands for its KL between what is
encoded and what was predicted. The inverse model pays nothing in imagination.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...policies.core.ranges import check_ranges
from ...policies.core.types import Normal
from ...policies.nets.mlp import MLP, Activation

MULTIPLIER = 10.0  # the most that missing information counts, relative to empowerment


@dataclass
class InfoPowerConfig:
    """Settings of InfoPower, by which a latent state keeps what actions decide (research)."""

    weight: float = 0.0  # weight of its losses; 0: there are none
    # nats that a latent state has to tell of its observation; of a batch of n it can tell log n
    information: float = 1.0
    rate: float = 0.01  # share of what is missing by which the multiplier rises in an update

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "weight information", "(0, inf)": "rate"}, "infopower.")


class InfoPower(nn.Module):
    """The inverse model, and the network by which a latent state finds its observation."""

    multiplier: Tensor

    def __init__(self, config: InfoPowerConfig, latent: int, seen: int, action: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.inverse = MLP(2 * latent, 2 * action, hidden, activation=Activation.mish, layer_norm=True)
        self.shown = MLP(seen, latent, hidden, activation=Activation.mish, layer_norm=True)
        self.register_buffer("multiplier", torch.ones(()))

    def loss(self, z: Tensor, action: Tensor, after: Tensor, seen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """``z`` and ``after`` (B, D) are encoded of the observations before and behind ``action`` (B, A); ``seen``
        (B, F) is the former as it is."""
        mean, raw = self.inverse(torch.cat([z, after], -1)).chunk(2, -1)
        known = Normal(mean, (3 * torch.tanh(raw) - 1).exp()).log_prob(action).sum(-1).mean()
        found = (z @ self.shown(seen).T).log_softmax(-1).diagonal().mean() + math.log(len(z))
        missing = self.config.information - found
        loss = self.config.weight * (self.multiplier.clone() * missing - known)
        self.multiplier.add_(self.config.rate * missing.detach()).clamp_(0, MULTIPLIER)
        metrics = {"empowerment": known, "information": found, "multiplier": self.multiplier}
        return loss, {f"infopower/{name}": x.detach().clone() for name, x in metrics.items()}
