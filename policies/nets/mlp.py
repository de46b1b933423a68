"""Multilayer perceptrons, and the embedding of times.

Sinusoidal embedding: Vaswani et al. 2017 (arXiv 1706.03762), as used for diffusion times by Ho et al. 2020
(arXiv 2006.11239).

**Departures.** Times are in [0, 1] and multiplied by 1000 inside, which is the range that the frequencies were made
for. Cosines are sines of a shifted angle, which is one kernel instead of three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from ..core.errors import BurnishError


class Activation(Enum):
    """The activation functions that settings can name."""

    silu = "silu"
    relu = "relu"
    gelu = "gelu"
    mish = "mish"
    tanh = "tanh"

    def make(self) -> nn.Module:
        return _ACTIVATIONS[self]()


_ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    Activation.silu: nn.SiLU,
    # In place: it stands behind a linear layer or a norm, whose backward does not need what they gave.
    Activation.relu: partial(nn.ReLU, inplace=True),
    Activation.gelu: nn.GELU,
    Activation.mish: nn.Mish,
    Activation.tanh: nn.Tanh,
}


DEEPEST, WIDEST_TABLE = 64, 1 << 16  # layers of a network; numbers of a table that follows from its settings alone


def require_widths(name: str, hidden: Sequence[int], least: int = 0, most: int = DEEPEST) -> None:
    """Of the hidden layers of a network; none at all is a linear map."""
    if not least <= len(hidden) <= most:
        raise BurnishError(f"{name} has {len(hidden)} widths, and {least} to {most} are allowed")
    if any(width < 1 for width in hidden):
        raise BurnishError(f"every width of {name} must be at least 1, got {list(hidden)}")


class MLP(nn.Module):
    """(..., in_dim) -> (..., out_dim). Without hidden layers it is linear.

    ``residual`` adds its input to the output of each hidden layer that keeps the width; ``zero_last`` starts the
    whole map at exactly zero.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        hidden: Sequence[int],
        *,
        activation: Activation = Activation.silu,
        layer_norm: bool = False,
        residual: bool = False,
        zero_last: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = in_dim
        for wider in hidden:
            norm = [nn.LayerNorm(wider)] if layer_norm else []
            layer = nn.Sequential(nn.Linear(width, wider), *norm, activation.make())
            layers.append(_Residual(layer) if residual and width == wider else layer)
            width = wider
        last = nn.Linear(width, out_dim)
        if zero_last:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class _Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class SinusoidalTime(nn.Module):
    """(...) times in [0, 1] -> (..., dim): sines, then cosines, of 1000 t at wavelengths from 2 pi to 20000 pi."""

    frequency: Tensor
    phase: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        if not 4 <= dim <= WIDEST_TABLE or dim % 2:
            raise BurnishError(f"a time embedding needs an even dimension of 4 to {WIDEST_TABLE}, got {dim}")
        half = dim // 2
        with torch.device("cpu"):  # numbers, also where a network is asked for its shapes alone
            frequency = 1000.0 * torch.exp(-math.log(10000.0) * torch.arange(half) / (half - 1))
            phase = torch.cat([torch.zeros(half), torch.full((half,), math.pi / 2)])
        # Constants, not state: they are not saved.
        self.register_buffer("frequency", frequency.repeat(2), persistent=False)
        self.register_buffer("phase", phase, persistent=False)

    def forward(self, times: Tensor) -> Tensor:
        return torch.addcmul(self.phase, times[..., None], self.frequency).sin()


class TimeEmbedding(nn.Module):
    """(B, num_times) -> (B, dim): each time embedded by sinusoids, then one small network over all of them."""

    def __init__(self, num_times: int, dim: int) -> None:
        super().__init__()
        self.sinusoidal = SinusoidalTime(dim)
        self.mlp = MLP(num_times * dim, dim, [2 * dim])

    def forward(self, times: Tensor) -> Tensor:
        return self.mlp(self.sinusoidal(times).flatten(1))
