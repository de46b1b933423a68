"""LeRobot's Action Chunking Transformer (Zhao et al. 2023, arXiv 2304.13705), under its own names.

A chunk is regressed from the observation and a latent z. As published, z is 0 when the policy acts: so it is here
unless ``noise=`` gives another, which is how a method that steers by noise reaches it. Its actions are not bounded:
they are clipped to the limits of the specification, the smallest and largest action of its data. Dropout is for
``bc_loss`` alone: in training mode too, the policy acts without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..chain import masked_mean, require_chunk, start_noise, with_prefix
from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from ..core.scale import scale_of
from ..core.seed import Generator, Noise, integers, normal
from ..core.spec import PolicySpec
from ..core.types import Obs, Prefix
from ..nets.resnet import Norm, resnet
from .features import Feature, Inputs, Kind
from .scaling import FeatureScaling, Normalization

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


@dataclass
class LeRobotACTConfig:
    """Settings of an Action Chunking Transformer that LeRobot trained."""

    features: list[Feature] = field(default_factory=list)  # features in the order of the checkpoint
    action: Normalization = Normalization.mean_std  # normalisation of the actions
    backbone: str = "resnet18"  # residual network of the cameras
    dilate_last: bool = False  # its last stage dilates instead of halving
    pre_norm: bool = False  # layer normalisation before each part of a layer, not behind it
    width: int = 512  # width of the transformers
    heads: int = 8  # heads of attention
    feedforward: int = 3200  # width inside the feed-forward parts
    activation: str = "relu"  # activation of the feed-forward parts
    encoder_layers: int = 4  # layers of the encoder
    decoder_layers: int = 1  # layers of the decoder
    latent: int = 32  # size of z
    vae: bool = True  # whether z was learnt by a variational encoder
    vae_layers: int = 4  # layers of that encoder
    dropout: float = 0.1  # dropout in training
    kl_weight: float = 10.0  # weight of the Kullback-Leibler divergence in the loss

    def __post_init__(self) -> None:
        sizes = "width heads feedforward encoder_layers decoder_layers latent vae_layers"
        check_ranges(self, {"[1, 65536]": sizes, "[0, 1)": "dropout", "[0, inf)": "kl_weight"}, "policy.")
        if self.width % self.heads or self.width % 4:
            raise BurnishError(f"policy.width={self.width} must be a multiple of 4 and of policy.heads={self.heads}")
        if self.activation not in ACTIVATIONS:
            raise BurnishError(f"policy.activation={self.activation!r:.40} is none of {', '.join(ACTIVATIONS)}")
        if max(self.encoder_layers, self.decoder_layers, self.vae_layers) > 64:
            raise BurnishError("a transformer of more than 64 layers is refused")


class LeRobotACT(nn.Module):
    """A policy that regresses a chunk from an observation and a latent z."""

    def __init__(self, spec: PolicySpec, config: LeRobotACTConfig) -> None:
        super().__init__()
        if spec.history != 1 or spec.start != 0:
            raise BurnishError("an Action Chunking Transformer observes one frame, and its chunk begins now")
        self.config = config
        self.spec = replace(spec, noise_shape=(1, config.latent) if config.vae else None)
        self.inputs = Inputs(spec, config.features)
        self.action_scaling = FeatureScaling(config.action, (spec.action.dim,))
        self.model = ACT(self.inputs, spec.chunk_shape, config).eval()

    def train(self, mode: bool = True) -> LeRobotACT:
        super().train(mode)
        self.model.eval()  # but inside the loss
        return self

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        del generator  # it draws nothing
        dtype = self.model.action_head.weight.dtype
        parts = self.inputs(obs, dtype)
        like = next(x for group in parts.values() for x in group)
        if self.spec.noise_shape is not None:
            z = start_noise(self.spec, like, noise, noise is None or greedy, None)[:, 0]
        elif noise is not None:
            raise BurnishError("this policy has no latent to choose: it was trained without one (use_vae)")
        else:
            z = like.new_zeros(len(like), self.config.latent)
        return with_prefix(self.to_unit(self.model(parts, z)), prefix)

    def to_unit(self, output: Tensor) -> Tensor:
        """From the normalisation of the data to [-1, 1] of the specification."""
        return scale_of(self.spec.action, output.device).to_unit(self.action_scaling.inverse(output))

    def bc_loss(
        self,
        obs: Obs,
        action: Tensor,
        *,
        mask: Tensor | None = None,
        drop: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """(B,): the absolute error in units of the normalisation, and the divergence of z from N(0, I)."""
        del drop  # these policies have no goals
        require_chunk(self.spec, action, len(next(iter(obs.values()))))
        with self._dropping(action, generator):
            return self._loss(obs, action, mask, generator)

    @contextmanager
    def _dropping(self, action: Tensor, generator: Generator | None) -> Iterator[None]:
        """In training mode the model drops out meanwhile. Dropout draws from the generators of torch itself: seeded
        here, so that a run repeats and resumes exactly. A CUDA graph, which cannot, goes on with them as they are."""
        drops = self.training and self.config.dropout > 0
        seeded = drops and generator is not None
        self.model.train(drops)
        try:
            if not seeded or (action.is_cuda and torch.cuda.is_current_stream_capturing()):
                yield
                return
            seed = integers(0, 1 << 62, (len(action),), generator)[0]  # a number for each row: ranks draw alike
            with torch.random.fork_rng([action.device] if action.device.type == "cuda" else []):
                torch.manual_seed(int(seed))
                yield
        finally:
            self.model.eval()

    def _loss(self, obs: Obs, action: Tensor, mask: Tensor | None, generator: Generator | None) -> Tensor:
        parts = self.inputs(obs, self.model.action_head.weight.dtype)
        target = self.action_scaling(scale_of(self.spec.action, action.device).to_actuator(action))
        if not self.config.vae:
            error = self.model(parts, target.new_zeros(len(target), self.config.latent)) - target
            return masked_mean(error.abs(), mask)
        mean, log_var = self.model.infer(parts, target, mask)
        z = mean + (log_var / 2).exp() * normal(mean.shape, generator, device=mean.device, dtype=mean.dtype)
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)
        return masked_mean((self.model(parts, z) - target).abs(), mask) + self.config.kl_weight * divergence


class ACT(nn.Module):
    """The transformers: ``model(parts, z)`` -> (B, H, A), and ``model.infer`` z from a chunk."""

    vae_encoder_pos_enc: Tensor

    def __init__(self, inputs: Inputs, chunk_shape: tuple[int, int], config: LeRobotACTConfig) -> None:
        super().__init__()
        (horizon, dim), width = chunk_shape, config.width
        self.horizon = horizon
        state, environment, cameras = inputs.width(Kind.state), inputs.width(Kind.environment), inputs.cameras()
        if config.vae:
            self.vae_encoder = Encoder(config, config.vae_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state, width)
            self.vae_encoder_action_input_proj = nn.Linear(dim, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * config.latent)
            self.register_buffer("vae_encoder_pos_enc", sinusoids(1 + bool(state) + horizon, width)[None])
        if cameras:
            layers, channels = resnet(config.backbone, Norm.frozen, dilate_last=config.dilate_last)
            self.backbone = nn.Sequential(layers)
            self.encoder_img_feat_input_proj = nn.Conv2d(channels, width, 1)
        self.encoder = Encoder(config, config.encoder_layers)
        self.decoder = Decoder(config)
        if state:
            self.encoder_robot_state_input_proj = nn.Linear(state, width)
        if environment:
            self.encoder_env_state_input_proj = nn.Linear(environment, width)
        self.encoder_latent_input_proj = nn.Linear(config.latent, width)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + bool(state) + bool(environment), width)
        self.decoder_pos_embed = nn.Embedding(horizon, width)
        self.action_head = nn.Linear(width, dim)

    def forward(self, parts: dict[Kind, list[Tensor]], z: Tensor) -> Tensor:
        tokens = [self.encoder_latent_input_proj(z)]
        tokens += [self.encoder_robot_state_input_proj(x) for x in parts[Kind.state]]
        tokens += [self.encoder_env_state_input_proj(x) for x in parts[Kind.environment]]
        seen, places = [torch.stack(tokens, 1)], [self.encoder_1d_feature_pos_embed.weight]
        for images in parts[Kind.visual]:
            maps = self.backbone(images)
            seen.append(self.encoder_img_feat_input_proj(maps).flatten(2).transpose(1, 2))
            places.append(sinusoids_2d(maps.shape[2], maps.shape[3], seen[0].shape[2]).to(maps))
        place = torch.cat(places)[None]
        memory = self.encoder(torch.cat(seen, 1), place)
        blank = memory.new_zeros(len(z), self.horizon, memory.shape[2])
        return self.action_head(self.decoder(blank, memory, place, self.decoder_pos_embed.weight[None]))

    def infer(self, parts: dict[Kind, list[Tensor]], chunk: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and log variance (B, L) of z, given the normalised chunk; ``mask`` (B, H) marks its real actions."""
        heads = [self.vae_encoder_cls_embed.weight.expand(len(chunk), 1, -1)]
        heads += [self.vae_encoder_robot_state_input_proj(x)[:, None] for x in parts[Kind.state]]
        tokens = torch.cat([*heads, self.vae_encoder_action_input_proj(chunk)], 1)
        padding = None if mask is None else F.pad(~mask, (len(heads), 0), value=False)
        found = self.vae_encoder(tokens, self.vae_encoder_pos_enc, padding)[:, 0]
        mean, log_var = self.vae_encoder_latent_output_proj(found).chunk(2, 1)
        return mean, log_var


class Layer(nn.Module):
    """Attention to itself, attention to a memory in a decoder, and a feed-forward part, each around its input."""

    def __init__(self, config: LeRobotACTConfig, crossed: bool) -> None:
        super().__init__()
        self.pre_norm, self.activation = config.pre_norm, ACTIVATIONS[config.activation]
        self.self_attn = nn.MultiheadAttention(config.width, config.heads, config.dropout, batch_first=True)
        if crossed:
            self.multihead_attn = nn.MultiheadAttention(config.width, config.heads, config.dropout, batch_first=True)
        self.linear1 = nn.Linear(config.width, config.feedforward)
        self.linear2 = nn.Linear(config.feedforward, config.width)
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        if crossed:
            self.norm3 = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def around(self, norm: nn.Module, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.pre_norm:
            return x + self.dropout(part(norm(x)))
        return norm(x + self.dropout(part(x)))

    def forward(
        self,
        x: Tensor,
        place: Tensor,
        padding: Tensor | None = None,
        memory: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """``memory`` holds keys and values."""

        def attend(x: Tensor) -> Tensor:
            asked = x + place
            return self.self_attn(asked, asked, x, key_padding_mask=padding, need_weights=False)[0]

        def feed(x: Tensor) -> Tensor:
            return self.linear2(self.dropout(self.activation(self.linear1(x))))

        x = self.around(self.norm1, attend, x)
        if memory is None:
            return self.around(self.norm2, feed, x)
        keys, values = memory

        def cross(x: Tensor) -> Tensor:
            return self.multihead_attn(x + place, keys, values, need_weights=False)[0]

        return self.around(self.norm3, feed, self.around(self.norm2, cross, x))


class Encoder(nn.Module):
    """tokens (B, S, D) and their places (1, S, D) -> (B, S, D)."""

    def __init__(self, config: LeRobotACTConfig, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, crossed=False) for _ in range(layers))
        self.norm = nn.LayerNorm(config.width) if config.pre_norm else nn.Identity()

    def forward(self, x: Tensor, place: Tensor, padding: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, place, padding)
        return self.norm(x)


class Decoder(nn.Module):
    """queries (B, H, D) and a memory (B, S, D), with their places -> (B, H, D)."""

    def __init__(self, config: LeRobotACTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, crossed=True) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, memory: Tensor, memory_place: Tensor, place: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, place, memory=(memory + memory_place, memory))
        return self.norm(x)


def sinusoids(count: int, dim: int) -> Tensor:
    """(count, dim): sines at even and cosines at odd places, as in Vaswani et al. 2017."""
    even = torch.arange(dim, dtype=torch.float64) // 2 * 2
    angle = torch.arange(count, dtype=torch.float64)[:, None] / 10000 ** (even / dim)
    return torch.where(torch.arange(dim) % 2 == 0, angle.sin(), angle.cos()).float()


def sinusoids_2d(height: int, width: int, dim: int) -> Tensor:
    """(height * width, dim): half of the numbers say the row, half the column, each in (0, 2 pi]."""
    half = dim // 2
    rate = 10000 ** (2 * (torch.arange(half, dtype=torch.float32) // 2) / half)

    def along(count: int) -> Tensor:
        place = torch.arange(1, count + 1, dtype=torch.float32)
        angle = (place / (count + 1e-6) * (2 * math.pi))[:, None] / rate
        return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], 2).flatten(1)

    rows, columns = along(height)[:, None], along(width)[None]
    return torch.cat([rows.expand(height, width, half), columns.expand(height, width, half)], 2).flatten(0, 1)
