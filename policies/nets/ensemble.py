"""E networks as one batched module: every layer is one (E, in, out) product instead of E small ones.

Initial weights are those of ``nn.Linear``, drawn member by member: uniform in +-1 / sqrt(in).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mlp import Activation


class EnsembleLinear(nn.Module):
    """(E, B, in), or (B, in) seen by all members -> (E, B, out)."""

    def __init__(self, members: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_dim)
        self.weight = nn.Parameter(torch.empty(members, in_dim, out_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_dim).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        each = x.expand(len(self.weight), -1, -1) if x.ndim == 2 else x
        if self.weight.shape[2] == 1:
            # One column: kernels of batched matrix products take several times as long as the sum that it is.
            return (each * self.weight.transpose(1, 2)).sum(2, keepdim=True) + self.bias
        return torch.baddbmm(self.bias, each, self.weight)


class EnsembleNorm(nn.Module):
    """Layer norm over the last dimension, with a scale and a shift per member."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, width))
        self.bias = nn.Parameter(torch.zeros(members, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


class EnsembleMLP(nn.Module):
    """(B, in) or (E, B, in) -> (E, B, out). Layer norm stands before the activation."""

    def __init__(
        self,
        members: int,
        in_dim: int,
        out_dim: int,
        hidden: Sequence[int],
        *,
        activation: Activation = Activation.relu,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_dim
        for wider in hidden:
            norm = [EnsembleNorm(members, wider)] if layer_norm else []
            layers += [EnsembleLinear(members, width, wider), *norm, activation.make()]
            width = wider
        self.layers = nn.Sequential(*layers, EnsembleLinear(members, width, out_dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
