"""A temporal U-Net over the actions of a chunk, conditioned by feature-wise scale and shift.

Diffusion Policy, Chi et al. 2023 (arXiv 2303.04137), section on the CNN body; the shape of the network is that of
Diffuser, Janner et al. 2022 (arXiv 2205.09991); conditioning is FiLM, Perez et al. 2018 (arXiv 1709.07871).

**Departures.** Any horizon is accepted: the chunk is padded at its end, with zeros as the convolutions pad, to a
multiple of 2^(levels - 1), and cut again. The FiLM projections of all blocks are one matrix product, and their scale
acts as (1 + scale). Diffuser's first skip connection, which its upward path never reads, does not exist here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import BurnishError
from .mlp import require_widths

LEVELS = 12  # a chunk is padded to a multiple of 2^(levels - 1)


@dataclass
class UNetConfig:
    """Settings of the temporal U-Net: channels of its levels, kernel, groups and time embedding."""

    channels: list[int] = field(default_factory=lambda: [64, 128, 256])  # channels, one entry per level, finest first
    kernel: int = 5  # width of the convolutions over time
    groups: int = 8  # groups of group normalisation
    time_dim: int = 64  # size of the embedding of the generation step

    def __post_init__(self) -> None:
        require_widths("unet.channels", self.channels, least=1, most=LEVELS)
        if self.groups < 1 or any(c < 1 or c % self.groups for c in self.channels):
            raise BurnishError(f"every entry of unet.channels must be a multiple of unet.groups={self.groups}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise BurnishError(f"unet.kernel must be odd, so that convolutions keep the length; got {self.kernel}")


class UNet1d(nn.Module):
    """(B, H, A) and a condition (B, C) -> (B, H, A)."""

    def __init__(self, action_dim: int, cond_dim: int, config: UNetConfig) -> None:
        super().__init__()
        channels = config.channels
        self.multiple = 2 ** (len(channels) - 1)
        # Down: each level but the last halves the length after its two blocks.
        inputs = [action_dim, *channels[:-1]]
        self.down = nn.ModuleList([_pair(a, b, config) for a, b in zip(inputs, channels, strict=True)])
        self.shrink = nn.ModuleList([nn.Conv1d(c, c, 3, stride=2, padding=1) for c in channels[:-1]])
        self.middle = _pair(channels[-1], channels[-1], config)
        # Up: each level joins the skip of its own length, then doubles the length.
        coarse, fine = channels[:0:-1], channels[-2::-1]
        self.up = nn.ModuleList([_pair(2 * a, b, config) for a, b in zip(coarse, fine, strict=True)])
        self.grow = nn.ModuleList([nn.ConvTranspose1d(c, c, 4, stride=2, padding=1) for c in fine])
        self.last = nn.Sequential(_smooth(channels[0], channels[0], config), nn.Conv1d(channels[0], action_dim, 1))
        # Channels of all blocks in the order in which they run; each is scaled and shifted once.
        self.widths = [c for level in (*channels, channels[-1], *fine) for c in (level, level)]
        self.film = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, 2 * sum(self.widths)))

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        horizon = x.shape[1]
        scales, shifts = self.film(cond)[..., None].chunk(2, 1)
        film = zip((1 + scales).split(self.widths, 1), shifts.split(self.widths, 1), strict=True)

        def blocks(pair: nn.Module, x: Tensor) -> Tensor:
            for block in pair.children():
                x = block(x, *next(film))
            return x

        x = F.pad(x.transpose(1, 2), (0, -horizon % self.multiple))
        skips = []
        for level, pair in enumerate(self.down):
            x = blocks(pair, x if level == 0 else self.shrink[level - 1](x))
            skips.append(x)
        x = blocks(self.middle, x)
        for pair, grow in zip(self.up, self.grow, strict=True):
            x = grow(blocks(pair, torch.cat([x, skips.pop()], 1)))
        return self.last(x)[..., :horizon].transpose(1, 2)


class _Block(nn.Module):
    """Two smoothing convolutions with the condition between them, around which the input is carried."""

    def __init__(self, before: int, after: int, config: UNetConfig) -> None:
        super().__init__()
        self.first = _smooth(before, after, config)
        self.second = _smooth(after, after, config)
        self.carry = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.second(torch.addcmul(shift, self.first(x), scale)) + self.carry(x)


def _pair(before: int, after: int, config: UNetConfig) -> nn.ModuleList:
    return nn.ModuleList([_Block(before, after, config), _Block(after, after, config)])


def _smooth(before: int, after: int, config: UNetConfig) -> nn.Sequential:
    convolution = nn.Conv1d(before, after, config.kernel, padding=config.kernel // 2)
    return nn.Sequential(convolution, nn.GroupNorm(config.groups, after), nn.Mish())
