"""A small convolutional network for one camera, and the random-shift augmentation.

Random shift: DrQ, Kostrikov, Yarats and Fergus 2020 (arXiv 2004.13649): pad by replication, crop at random.

**Departures.** No padded copy is made: reading at clamped coordinates is the same thing. There is no batch
normalisation anywhere, so that a row never depends on its neighbours and the moving average of the weights is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.ranges import check_ranges
from ..core.seed import Generator, integers
from .mlp import require_widths

# Strided convolutions go on until the longer side of the feature map is at most this many pixels.
SMALL = 6


@dataclass
class VisionConfig:
    """Settings of the network of one camera: its features, channels and random shift."""

    features: int = 64  # numbers that each picture becomes
    # Channels of the successive strided convolutions; the last number is repeated as long as the image is still large.
    channels: list[int] = field(default_factory=lambda: [16, 32, 64])
    # Largest random shift in training, as a share of the shorter side: 0.05 is DrQ's 4 of 84 pixels.
    shift: float = 0.05

    def __post_init__(self) -> None:
        require_widths("vision.channels", self.channels, least=1)
        check_ranges(self, {"[1, inf)": "features", "[0, 0.5)": "shift"}, "vision.")


class VisionNet(nn.Module):
    """uint8 (B, C, H, W) -> (B, features), for images of one ``shape`` (C, H, W).

    Halve until small, flatten (which keeps *where* things are, unlike pooling), project, normalise.
    """

    def __init__(self, shape: Sequence[int], config: VisionConfig) -> None:
        super().__init__()
        width, size = shape[0], shape[1:]
        layers: list[nn.Module] = []
        while max(size) > SMALL or not layers:
            wider = config.channels[min(len(layers) // 2, len(config.channels) - 1)]
            layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1), nn.SiLU()]
            width, size = wider, [(side + 1) // 2 for side in size]
        self.convolutions = nn.Sequential(*layers)
        self.project = nn.Sequential(
            nn.Flatten(), nn.Linear(width * size[0] * size[1], config.features), nn.LayerNorm(config.features)
        )

    def forward(self, images: Tensor) -> Tensor:
        # Channels last is the faster layout for these small convolutions, on a CPU.
        scaled = images.to(next(self.parameters()).dtype, memory_format=torch.channels_last) / 127.5 - 1
        return self.project(self.convolutions(scaled).contiguous())


def random_shift(images: Tensor, pad: int, generator: Generator) -> Tensor:
    """(B, ..., H, W): move each row's images by up to ``pad`` whole pixels, repeating the border.

    Everything between B and H W (channels, frames of a history) moves together, so that motion stays visible.
    """
    batch, height, width = images.shape[0], images.shape[-2], images.shape[-1]
    offset = integers(-pad, pad + 1, (2, batch, 1), generator, device=images.device, dim=1)
    row = (torch.arange(height, device=images.device) + offset[0]).clamp_(0, height - 1)
    column = (torch.arange(width, device=images.device) + offset[1]).clamp_(0, width - 1)
    planes = images.reshape(batch, -1, height, width)
    # Two gathers along one axis each: faster on a CPU than one gather over both.
    planes = planes.gather(2, row[:, None, :, None].expand(planes.shape))
    return planes.gather(3, column[:, None, None, :].expand(planes.shape)).view(images.shape)
