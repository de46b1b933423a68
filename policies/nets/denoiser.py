"""The network that flow and diffusion share: from a noisy chunk, its times and a condition to a chunk.

Guidance: classifier-free, Ho and Salimans 2022 (arXiv 2207.12598), for goals as in BESO, Reuss et al. 2023
(arXiv 2304.02532): prediction = free + guidance * (given - free), where ``free`` has its goal hidden. It stands inside
the network, so that the sampler and the density of a chain can never disagree about it.

**Departures.** The observation is looked at once for both conditions, and both predictions are one pass of 2B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..chain import drop_rows, require_chunk
from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from ..core.seed import Generator
from ..core.spec import PolicySpec
from ..core.tree import check
from .encoder import ADVANTAGE, EncoderConfig, ObsEncoder
from .mlp import MLP, Activation, TimeEmbedding, require_widths
from .unet1d import UNet1d, UNetConfig


class Body(Enum):
    """The kinds of network between encoder and output: a multilayer perceptron or a temporal U-Net."""

    mlp = "mlp"
    unet = "unet"


@dataclass
class MlpBodyConfig:
    """Settings of a denoiser's multilayer perceptron."""

    hidden: list[int] = field(default_factory=lambda: [256, 256, 256])  # width of each hidden layer
    time_dim: int = 64  # size of the embedding of the generation step
    activation: Activation = Activation.silu  # activation between layers
    layer_norm: bool = True  # layer normalisation behind each hidden layer
    residual: bool = True  # add the input of each hidden layer to its output

    def __post_init__(self) -> None:
        require_widths("mlp.hidden", self.hidden, least=1)


@dataclass
class DenoiserConfig:
    """Settings of the network of flow and diffusion policies: body, encoder and guidance by the goal."""

    body: Body = Body.mlp  # the network between encoder and output
    mlp: MlpBodyConfig = field(default_factory=MlpBodyConfig)  # multilayer perceptron, with body=mlp
    unet: UNetConfig = field(default_factory=UNetConfig)  # U-Net, with body=unet
    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # encoder of observations
    # weight of the goal: 0 ignores it, 1 is the plain conditional prediction, more exaggerates it
    guidance: float = 1.0
    goal_drop: float = 0.0  # share of training rows whose goal is hidden

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, 1)": "goal_drop", "(-inf, inf)": "guidance"})
        if self.guidance != 1 and self.goal_drop == 0:
            raise BurnishError(
                f"guidance={self.guidance} needs a policy that also learned without its goal; "
                "set goal_drop above 0 (0.1 is usual) or guidance=1"
            )


class Cond(NamedTuple):
    """The encoded observation, computed once per decision and read at every generation step."""

    given: Tensor  # (B, C)
    free: Tensor | None = None  # (B, C) with the goal hidden; None: no guidance

    def rows(self, index: Any) -> Cond:
        """``cond[index]`` by rows: any slice, mask or (repeating) index."""
        return Cond(self.given[index], None if self.free is None else self.free[index])

    def repeat(self, times: int) -> Cond:
        """Every row ``times`` times in a row. Repeating by a number has a sum for its backward, by an index a
        scatter."""
        free = None if self.free is None else self.free.repeat_interleave(times, 0)
        return Cond(self.given.repeat_interleave(times, 0), free)


class Denoiser(nn.Module):
    """``num_times`` is 1 for flow and diffusion, and 2 for shortcut models (time and step size)."""

    def __init__(self, spec: PolicySpec, config: DenoiserConfig, num_times: int = 1) -> None:
        super().__init__()
        self.spec, self.goal_drop = spec, config.goal_drop
        self.encoder = ObsEncoder(spec, config.encoder)
        self.guidance = float(config.guidance)
        self.num_times = num_times
        if config.goal_drop > 0 and not self.encoder.goal_keys:
            raise BurnishError(
                f"goal_drop={config.goal_drop} hides the goal, but the policy observes none; it observes "
                f"{sorted(spec.obs.shapes)}. Set goal_drop=0 and guidance=1"
            )
        horizon, action_dim = self.chunk_shape = spec.chunk_shape
        if config.body is Body.mlp:
            body = config.mlp
            self.time = TimeEmbedding(num_times, body.time_dim)
            self.body: nn.Module = MLP(
                horizon * action_dim + body.time_dim + self.encoder.dim,
                horizon * action_dim,
                body.hidden,
                activation=body.activation,
                layer_norm=body.layer_norm,
                residual=body.residual,
            )
        else:
            self.time = TimeEmbedding(num_times, config.unet.time_dim)
            self.body = UNet1d(action_dim, config.unet.time_dim + self.encoder.dim, config.unet)
        self.flat = config.body is Body.mlp

    def encode(
        self, obs: Mapping[str, Tensor], *, drop: Tensor | None = None, augment: Generator | None = None
    ) -> Cond:
        """``drop`` (B,) bool hides the goal of those rows. It belongs to training, which fits the plain prediction that
        guidance extrapolates; so there is no guidance where ``drop`` is given, even if it hides nothing."""
        parts = self.encoder.parts(obs, augment=augment)
        given = self.encoder.join(parts, drop=drop)
        if drop is not None or self.guidance == 1:
            return Cond(given)
        if ADVANTAGE in self.encoder.sensed_keys:  # which guides in place of the goal
            untold = parts.sensed.clone()
            untold[:, self.encoder.place(ADVANTAGE)] = 0
            return Cond(given, self.encoder.join(parts._replace(sensed=untold)))
        if parts.given is None:
            return Cond(given)
        return Cond(given, self.encoder.join(parts, drop=torch.ones_like(parts.given)))

    def encode_for_loss(
        self, obs: Mapping[str, Tensor], action: Tensor, drop: Tensor | None, generator: Generator | None
    ) -> Cond:
        """The condition of a training batch: in training mode images are shifted and goals dropped at random."""
        require_chunk(self.spec, action, len(next(iter(obs.values()))))
        random = generator if self.training else None
        if drop is None and self.training:
            drop = drop_rows(self.goal_drop, len(action), generator, action.device)
        if drop is None:
            drop = torch.zeros(len(action), dtype=torch.bool, device=action.device)
        return self.encode(obs, drop=drop, augment=random)

    def forward(self, x: Tensor, times: Tensor, cond: Cond) -> Tensor:
        """x (B, H, A), times (B, num_times) in [0, 1] -> (B, H, A)."""
        sizes = check(x, "B H A", {"H": self.chunk_shape[0], "A": self.chunk_shape[1]})
        check(times, "B T", sizes | {"T": self.num_times})
        embedded = self.time(times)
        if cond.free is None:
            return self._predict(x, embedded, cond.given)
        both = self._predict(x.repeat(2, 1, 1), embedded.repeat(2, 1), torch.cat([cond.given, cond.free]))
        given, free = both.chunk(2)
        return torch.lerp(free, given, self.guidance)

    def _predict(self, x: Tensor, embedded: Tensor, cond: Tensor) -> Tensor:
        if self.flat:
            return self.body(torch.cat([x.flatten(1), embedded, cond], 1)).view(x.shape)
        return self.body(x, torch.cat([embedded, cond], 1))
