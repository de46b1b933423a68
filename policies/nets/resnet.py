"""Residual networks for images (He et al. 2016, arXiv 1512.03385) under torchvision's names, so that its weights fit.

They end with the feature map: no pooling and no classifier. ``Norm.batch`` never counts a batch: published policies
are refined with the statistics that they came with, and a row never depends on its neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import BurnishError, did_you_mean

# Blocks of each of the four stages, and whether a block is a bottleneck, which ends four times as wide.
DEPTHS: dict[str, tuple[tuple[int, int, int, int], bool]] = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}


class Norm(Enum):
    """The kinds of normalisation inside a residual network."""

    batch = "batch"  # batch normalisation with the statistics of its training
    frozen = "frozen"  # the same with scale and shift that do not learn either, as torchvision's FrozenBatchNorm2d
    group = "group"  # group normalisation, 16 channels to a group


class FixedBatchNorm(nn.BatchNorm2d):
    """Batch normalisation by its running statistics, in training too."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class FrozenBatchNorm(nn.Module):
    """Batch normalisation of which nothing learns: its four numbers per channel are buffers."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


_NORMS: dict[Norm, Callable[[int], nn.Module]] = {
    Norm.batch: FixedBatchNorm,
    Norm.frozen: FrozenBatchNorm,
    Norm.group: lambda channels: nn.GroupNorm(channels // 16, channels),
}


class _Block(nn.Module):
    """Two convolutions of 3 x 3, or as a ``bottleneck`` one between two of 1 x 1, around which the input is carried."""

    def __init__(self, before: int, width: int, stride: int, dilation: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        make, after = _NORMS[norm], width * (4 if bottleneck else 1)
        if bottleneck:
            self.conv1 = nn.Conv2d(before, width, 1, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
            self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        else:
            self.conv1 = nn.Conv2d(before, width, 3, stride, dilation, dilation, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, 1, dilation, dilation, bias=False)
        self.bn1, self.bn2 = make(width), make(width)
        if bottleneck:
            self.bn3 = make(after)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), make(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if hasattr(self, "conv3"):
            out = self.bn3(self.conv3(F.relu(out)))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def resnet(name: str, norm: Norm, *, dilate_last: bool = False) -> tuple[OrderedDict[str, nn.Module], int]:
    """The layers of a residual network up to its feature map, by torchvision's names, and the channels of that map."""
    if name not in DEPTHS:
        raise BurnishError(f"there is no vision_backbone {name!r:.60}; {did_you_mean(name, DEPTHS)}")
    depths, bottleneck = DEPTHS[name]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        bn1=_NORMS[norm](64),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, 2, 1),
    )
    channels = 64
    for stage, depth in enumerate(depths):
        width, blocks = 64 * 2**stage, []
        dilated = dilate_last and stage == 3
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 and not dilated else 1
            blocks.append(_Block(channels, width, stride, 2 if dilated and block > 0 else 1, bottleneck, norm))
            channels = width * (4 if bottleneck else 1)
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    return layers, channels
