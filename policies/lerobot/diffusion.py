"""LeRobot's diffusion policy (Chi et al. 2023, arXiv 2303.04137, with its convolutional U-Net), under its own names.

It is a `DiffusionPolicy` with another network, so every method that refines a chain refines it. Its actions in [-1, 1]
are those of its normalisation: the limits of its specification are the smallest and largest action of its data.

Of the published sampler are kept: the discrete steps that the network is told, the linear betas without stretch, and
a DDIM that does not derive the noise again after it clipped the clean action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..chain import require_chunk
from ..core.config import LATER
from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from ..core.spec import PolicySpec
from ..core.types import Normal, Obs
from ..diffusion import DiffusionConfig, DiffusionPolicy, Sampler
from ..nets.denoiser import Cond
from ..nets.mlp import require_widths
from ..nets.resnet import Norm, resnet
from ..schedule import Prediction, Spacing
from .features import Feature, Inputs, Kind


@dataclass
class VisionBackboneConfig:
    """Settings of the image encoder: a residual network, and keypoints by a spatial softmax."""

    backbone: str = "resnet18"  # residual network
    norm: Norm = Norm.batch  # normalisation inside it
    resize: list[int] | None = None  # (H, W) that pictures are resized to
    crop: list[int] | None = None  # (H, W) that is cut out of the middle
    # in training it is cut out at a random place
    random_crop: bool = field(default=True, metadata=LATER)
    keypoints: int = 32  # points that each picture becomes
    separate: bool = True  # one encoder per camera, not one for all

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "keypoints"}, "vision.")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and (len(size) != 2 or not all(1 <= side <= 4096 for side in size)):
                raise BurnishError(f"vision.{name}={size} must be a height and a width of 1 to 4096 pixels")


@dataclass
class LeRobotNetConfig:
    """Settings of LeRobot's denoiser: the features that it observes, its U-Net and its image encoder."""

    features: list[Feature] = field(default_factory=list)  # features in the order of the checkpoint
    channels: list[int] = field(default_factory=lambda: [512, 1024, 2048])  # channels of the U-Net's levels
    kernel: int = 5  # width of the convolutions over time
    groups: int = 8  # groups of group normalisation
    time_dim: int = 128  # size of the embedding of the denoising step
    film_scale: bool = True  # the condition scales the channels too, not only shifts them
    vision: VisionBackboneConfig = field(default_factory=VisionBackboneConfig)  # image encoder

    def __post_init__(self) -> None:
        require_widths("net.channels", self.channels, least=2, most=8)
        check_ranges(self, {"[1, inf)": "kernel groups", "[4, inf)": "time_dim"}, "net.")


@dataclass
class LeRobotDiffusionConfig(DiffusionConfig):
    """Settings of a diffusion policy that LeRobot trained."""

    spacing: Spacing = Spacing.whole  # spacing of the levels that are visited
    beta_start: float = 0.0001  # first beta of a linear schedule
    beta_end: float = 0.02  # last beta of a linear schedule
    net: LeRobotNetConfig = field(default_factory=LeRobotNetConfig)  # type: ignore[assignment] # the denoising network

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta_start <= self.beta_end < 1:
            raise BurnishError(f"the betas {self.beta_start} and {self.beta_end} must rise within (0, 1)")
        if not self.gaussian_chain or self.prediction is Prediction.v:
            raise BurnishError("a diffusion policy of LeRobot is sampled by ddpm or ddim and predicts eps or sample")

    def betas(self) -> tuple[float, float]:
        return self.beta_start, self.beta_end


class LeRobotDiffusion(DiffusionPolicy):
    """A diffusion policy of LeRobot as a chain of Gaussians."""

    def network(self, spec: PolicySpec, config: LeRobotDiffusionConfig) -> LeRobotDenoiser:
        return LeRobotDenoiser(spec, config.net)

    def output(self, x: Tensor, index: Tensor, cond: Cond) -> Tensor:
        return self.net(x, index, cond)

    def transition(self, x: Tensor, k: Tensor, cond: Cond) -> Normal:
        if self.config.sampler is Sampler.ddpm:
            return super().transition(x, k, cond)
        of_x, of_output, of_clean, of_state, std = self.weights[k, :, None, None].unbind(1)
        clean = of_x * x + of_output * self.output(x, self.indices[k], cond)
        clipped = self._clip(clean)
        # The noise that goes on is what the network said, not what the clipped action leaves of x.
        kept = of_state * self.visited[k, None, None].sqrt() * (clipped - clean)
        return Normal(of_clean * clipped + of_state * x + kept, std)


class LeRobotDenoiser(nn.Module):
    """The conditional U-Net with its encoders; the interface is that of ``Denoiser``."""

    def __init__(self, spec: PolicySpec, config: LeRobotNetConfig) -> None:
        super().__init__()
        self.spec, self.history, self.goal_drop = spec, spec.history, 0.0
        self.inputs = Inputs(spec, config.features)
        cameras, separate = self.inputs.cameras(), config.vision.separate
        width = self.inputs.width(Kind.state) + self.inputs.width(Kind.environment)
        if cameras:
            made = [RgbEncoder(shape, config.vision) for shape in (cameras if separate else cameras[:1])]
            self.rgb_encoder = nn.ModuleList(made) if separate else made[0]
            width += made[0].dim * len(cameras)
        self.unet = ConditionalUNet(spec.action.dim, width * spec.history, config)

    def encode(self, obs: Obs, *, augment: torch.Generator | None = None) -> Cond:
        parts = self.inputs(obs, next(self.unet.parameters()).dtype)
        looked = [self._look(i, images, augment) for i, images in enumerate(parts[Kind.visual])]
        features = [*parts[Kind.state], *looked, *parts[Kind.environment]]
        batch = len(features[0])
        return Cond(torch.cat([x.reshape(batch, self.history, -1) for x in features], 2).flatten(1))

    def _look(self, camera: int, images: Tensor, augment: torch.Generator | None) -> Tensor:
        encoder = self.rgb_encoder[camera] if isinstance(self.rgb_encoder, nn.ModuleList) else self.rgb_encoder
        return encoder(images.reshape(-1, *images.shape[-3:]), augment).view(len(images), self.history, -1)

    def encode_for_loss(self, obs: Obs, action: Tensor, drop: Tensor | None, generator: torch.Generator | None) -> Cond:
        """The condition of a training batch: in training mode the crop may be a random one."""
        require_chunk(self.spec, action, len(next(iter(obs.values()))))
        return self.encode(obs, augment=generator if self.training else None)

    def forward(self, x: Tensor, index: Tensor, cond: Cond) -> Tensor:
        """x (B, H, A), index (B,) of the training level -> (B, H, A)."""
        return self.unet(x, index, cond.given)


class SpatialSoftmax(nn.Module):
    """(B, C, H, W) -> (B, points, 2): where in the picture, x before y in [-1, 1], each channel's weight lies."""

    pos_grid: Tensor

    def __init__(self, channels: int, size: tuple[int, int], points: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, points, 1)
        y, x = torch.meshgrid(*(torch.linspace(-1, 1, n, dtype=torch.float64) for n in size), indexing="ij")
        self.register_buffer("pos_grid", torch.stack([x.flatten(), y.flatten()], 1).float())

    def forward(self, maps: Tensor) -> Tensor:
        return self.nets(maps).flatten(2).softmax(-1) @ self.pos_grid


class RgbEncoder(nn.Module):
    """float (B, 3, H, W), normalised -> (B, dim)."""

    def __init__(self, shape: tuple[int, ...], config: VisionBackboneConfig) -> None:
        super().__init__()
        self.resize, self.crop, self.random_crop = config.resize, config.crop, config.random_crop
        whole = tuple(config.resize or shape[1:])
        height, width = config.crop or whole
        if height > whole[0] or width > whole[1]:
            raise BurnishError(f"a crop of {config.crop} pixels does not fit into pictures of {whole}")
        layers, channels = resnet(config.backbone, config.norm)
        self.backbone = nn.Sequential(*layers.values())
        self.pool = SpatialSoftmax(channels, (_mapped(height), _mapped(width)), config.keypoints)
        self.dim = 2 * config.keypoints
        self.out = nn.Linear(self.dim, self.dim)

    def forward(self, x: Tensor, augment: torch.Generator | None = None) -> Tensor:
        if self.resize is not None and list(x.shape[2:]) != self.resize:
            x = F.interpolate(x, self.resize, mode="bilinear", antialias=True)
        if self.crop is not None:
            x = _cropped(x, self.crop, augment if self.random_crop else None)
        return self.out(self.pool(self.backbone(x)).flatten(1)).relu()


def _mapped(side: int) -> int:
    """Of five layers of stride 2, each with its padding."""
    for _ in range(5):
        side = (side + 1) // 2
    return side


def _cropped(x: Tensor, size: list[int], augment: torch.Generator | None) -> Tensor:
    """The middle, or with ``augment`` a random place for each row."""
    spare = [int(have) - want for have, want in zip(x.shape[2:], size, strict=True)]  # traced, a size is a tensor
    if augment is None or not any(spare):
        top, left = (round(rest / 2) for rest in spare)
        return x[:, :, top : top + size[0], left : left + size[1]]
    corner = torch.stack([torch.randint(rest + 1, (len(x),), generator=augment) for rest in spare]).to(x.device)
    row = corner[0, :, None] + torch.arange(size[0], device=x.device)
    column = corner[1, :, None] + torch.arange(size[1], device=x.device)
    place = torch.arange(len(x), device=x.device)[:, None, None]
    return x[place, :, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2)


class ConditionalUNet(nn.Module):
    """x (B, H, A), index (B,), cond (B, C) -> (B, H, A)."""

    def __init__(self, dim: int, cond_dim: int, config: LeRobotNetConfig) -> None:
        super().__init__()
        time, channels = config.time_dim, config.channels
        self.diffusion_step_encoder = nn.Sequential(
            StepEmbedding(time), nn.Linear(time, 4 * time), nn.Mish(), nn.Linear(4 * time, time)
        )

        def pair(before: int, after: int) -> list[nn.Module]:
            return [ResidualBlock(a, after, time + cond_dim, config) for a in (before, after)]

        down = list(pairwise([dim, *channels]))
        rests = [nn.Conv1d(c, c, 3, 2, 1) for c in channels[:-1]] + [nn.Identity()]
        self.down_modules = nn.ModuleList(
            nn.ModuleList([*pair(a, b), rest]) for (a, b), rest in zip(down, rests, strict=True)
        )
        self.mid_modules = nn.ModuleList(pair(channels[-1], channels[-1]))
        self.up_modules = nn.ModuleList(
            nn.ModuleList([*pair(2 * b, a), nn.ConvTranspose1d(a, a, 4, 2, 1)]) for a, b in reversed(down[1:])
        )
        smooth = ConvBlock(channels[0], channels[0], config.kernel)
        self.final_conv = nn.Sequential(smooth, nn.Conv1d(channels[0], dim, 1))

    def forward(self, x: Tensor, index: Tensor, cond: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        embedding, *layers = self.diffusion_step_encoder
        cond = torch.cat([nn.Sequential(*layers)(embedding(index).to(x)), cond], 1)
        skips = []
        for level in self.down_modules:
            first, second, shrink = level.children()
            x = second(first(x, cond), cond)
            skips.append(x)
            x = shrink(x)
        for block in self.mid_modules:
            x = block(x, cond)
        for level in self.up_modules:
            first, second, grow = level.children()
            x = grow(second(first(torch.cat([x, skips.pop()], 1), cond), cond))
        return self.final_conv(x).transpose(1, 2)


class StepEmbedding(nn.Module):
    """(B,) training levels -> (B, dim): sines, then cosines."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.count = dim // 2

    def forward(self, index: Tensor) -> Tensor:
        rate = math.log(10000) / (self.count - 1)
        angle = index[:, None] * torch.exp(torch.arange(self.count, device=index.device) * -rate)
        return torch.cat([angle.sin(), angle.cos()], 1)


class ConvBlock(nn.Module):
    """Convolution over time, group normalisation, Mish."""

    def __init__(self, before: int, after: int, kernel: int, groups: int = 8) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(before, after, kernel, padding=kernel // 2), nn.GroupNorm(groups, after), nn.Mish()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class ResidualBlock(nn.Module):
    """Two convolutions with the condition between them, around which the input is carried."""

    def __init__(self, before: int, after: int, cond_dim: int, config: LeRobotNetConfig) -> None:
        super().__init__()
        self.film_scale = config.film_scale
        self.conv1 = ConvBlock(before, after, config.kernel, config.groups)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, after * (2 if config.film_scale else 1)))
        self.conv2 = ConvBlock(after, after, config.kernel, config.groups)
        self.residual_conv = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        out, film = self.conv1(x), self.cond_encoder(cond)[:, :, None]
        if self.film_scale:
            scale, shift = film.chunk(2, 1)
            out = scale * out + shift
        else:
            out = out + film
        return self.conv2(out) + self.residual_conv(x)
