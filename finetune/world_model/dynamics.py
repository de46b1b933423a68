"""The part of a model that says where an action leads, and the ensemble of networks that does so by default.

`SINDy` (`sindy.py`) is the other one. Both are fitted to what is not known beforehand: the change of a state, or what
a twin of the world leaves unexplained of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...policies.nets.ensemble import EnsembleMLP
from ...policies.nets.mlp import Activation

LOG_STD = (-5.0, 0.25)  # where the learnt bounds of the log deviation begin, in normalised units
BETA = 0.5  # power of the variance by which a likelihood is weighted


class Dynamics(Protocol):
    """E members, each with a Gaussian of a normalised change, given normalised states, goals and actions."""

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(B, in), or (E, B, in) -> mean (E, B, D), and log deviation that ``bounded`` has not seen yet."""
        ...

    def bounded(self, log_std: Tensor) -> Tensor:
        """The log deviation that counts; apart, because most of the members are not asked for it."""
        ...

    def solve(self, inputs: Tensor, change: Tensor) -> None:
        """Fit at once to all ticks, (T, in) and (T, D), whatever has a solution; networks have none."""
        ...

    def loss(self, inputs: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and squared error of the ticks of each member, (E, B, in) and (E, B, D)."""
        ...


class GaussianEnsemble(EnsembleMLP):
    """Networks of their own weights (PETS) with layer norm (NEUBAY), and a deviation for each number of each tick."""

    def __init__(self, members: int, inputs: int, outputs: int, hidden: Sequence[int]) -> None:
        super().__init__(members, inputs, 2 * outputs, hidden, activation=Activation.silu, layer_norm=True)
        self.log_std = nn.Parameter(torch.tensor(LOG_STD)[:, None].repeat(1, outputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.layers(x).chunk(2, -1)
        return mean, log_std

    def bounded(self, log_std: Tensor) -> Tensor:
        low, high = self.log_std
        log_std = high - F.softplus(high - log_std)
        return low + F.softplus(log_std - low)

    def solve(self, inputs: Tensor, change: Tensor) -> None: ...

    def loss(self, inputs: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self(inputs)
        log_std = self.bounded(log_std)
        error = (change - mean).square()
        each = error * (-2 * log_std).exp() + 2 * log_std
        likelihood = (each * (2 * BETA * log_std).exp().detach()).mean((1, 2)).sum()
        return likelihood + 0.01 * (self.log_std[1] - self.log_std[0]).sum(), error.mean().detach()
