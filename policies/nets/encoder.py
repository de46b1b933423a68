"""From an observation to one vector: normalise, flatten, look through the cameras, and hide the goal where asked.

An instruction is the sum of what its tokens mean at their places, which tells known sentences apart; a policy that is
to understand new ones needs a language model (`policies/vla`).

In the place of a picture an observation may hold the output of the network of its camera (``features``): a picture is
looked at once, and a replay that keeps the output needs no second look.

A row without its goal is encoded with zeros in place of every goal feature and a 0 in place of the mask, so that one
network is goal-conditioned and goal-free at once (classifier-free guidance, Ho and Salimans 2022, arXiv 2207.12598).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.errors import BurnishError
from ..core.normalize import Normalizer
from ..core.seed import Generator
from ..core.spec import ObsSpec, PolicySpec, is_image, vision_key
from ..core.tree import check
from ..core.types import Obs
from .mlp import MLP, Activation, require_widths
from .vision import VisionConfig, VisionNet, random_shift

WORD_VECTORS, WORD_WIDTH = 1024, 32  # of a token at a place: several share one, sentences hardly; and the width of each


@dataclass
class EncoderConfig:
    """Settings of the encoder of observations: cameras, and a trunk over the joined features."""

    vision: VisionConfig = field(default_factory=VisionConfig)  # network of the cameras' pictures
    # Widths of a network over the concatenated features. Empty: the features themselves; the body does the work.
    trunk: list[int] = field(default_factory=list)
    activation: Activation = Activation.silu  # activation between layers

    def __post_init__(self) -> None:
        require_widths("encoder.trunk", self.trunk)


class Parts(NamedTuple):
    """Features before they are joined; ``goal`` and ``given`` are None when the specification knows no goal."""

    sensed: Tensor  # (B, S)
    goal: Tensor | None  # (B, G), meaningful where `given`
    given: Tensor | None  # (B,) bool


ADVANTAGE = "advantage"  # (1,): how good the chunk is that is imitated; see `policies/advised.py`


def is_goal(key: str) -> bool:
    """Whether an observation key belongs to the goal."""
    return key == "goal" or key.startswith("goal_image.")


def require_shift(name: str, share: float) -> None:
    """A check that a random shift, as a share of the image, lies in [0, 0.5)."""
    if not 0 <= share < 0.5:
        raise BurnishError(f"{name}={share} is a share of an image and must lie in [0, 0.5)")


def shifted(obs: Obs, share: float, generator: Generator) -> Obs:
    """Each row's images moved by up to ``share`` of their shorter side (DrQ-v2, Yarats et al. 2021, arXiv 2107.09645:
    4 pixels of 84). Without images nothing is drawn."""
    if share <= 0 or not any(map(is_image, obs)):
        return obs
    return {
        key: random_shift(x, round(share * min(x.shape[-2:])), generator) if is_image(key) else x
        for key, x in obs.items()
    }


class ObsEncoder(nn.Module):
    """``encoder(obs) -> (B, encoder.dim)``. Keys are read in sorted order, whatever the order of the specification."""

    def __init__(self, spec: PolicySpec, config: EncoderConfig) -> None:
        super().__init__()
        shapes = {key: shape for key, shape in sorted(spec.inputs.shapes.items()) if key != "goal_mask"}
        for key, shape in spec.obs.shapes.items():
            if is_image(key) and len(shape) != 3:
                raise BurnishError(f"the image {key!r} needs the shape (C, H, W), got {shape}")
        self.goal_keys = [key for key in shapes if is_goal(key)]
        self.sensed_keys = [key for key in shapes if not is_goal(key)]
        if not self.sensed_keys:
            raise BurnishError(f"the policy senses nothing: its observations are {sorted(spec.obs.shapes)}")
        self._full = ObsSpec(shapes)
        self._sensed = ObsSpec({key: shapes[key] for key in self.sensed_keys})
        self.normalizer = Normalizer(spec.obs)
        self.shift = config.vision.shift
        # Frames of a history share the network of their camera. Dots are not legal in the names of modules.
        cameras = {key: spec.obs.shapes[key] for key in shapes if is_image(key)}
        self.vision = nn.ModuleDict({_name(key): VisionNet(shape, config.vision) for key, shape in cameras.items()})
        self.word_vectors = nn.Embedding(WORD_VECTORS, WORD_WIDTH) if "tokens" in shapes else None
        self.cameras = [key for key in cameras if not is_goal(key)]
        self._width = {
            key: config.vision.features * math.prod(shape[:-3]) if is_image(key) else math.prod(shape)
            for key, shape in shapes.items()
        }
        self._width |= {"tokens": WORD_WIDTH} if self.word_vectors else {}
        width = self.width = sum(self._width.values()) + (1 if self.goal_keys else 0)
        self.dim = config.trunk[-1] if config.trunk else width
        self.trunk = (
            nn.Sequential(
                MLP(width, self.dim, config.trunk[:-1], activation=config.activation), config.activation.make()
            )
            if config.trunk
            else nn.Identity()
        )

    def forward(
        self, obs: Mapping[str, Tensor], *, drop: Tensor | None = None, augment: Generator | None = None
    ) -> Tensor:
        """``drop`` (B,) bool hides the goal of those rows; ``augment`` shifts images at random (training only)."""
        return self.join(self.parts(obs, augment=augment), drop=drop)

    def parts(self, obs: Mapping[str, Tensor], *, augment: Generator | None = None) -> Parts:
        """Everything that costs time. An observation without any goal key is one whose goal is not given."""
        with_goal = any(key in obs for key in self.goal_keys)
        expected = self._looked(self._full if with_goal else self._sensed, obs)
        batch = expected.check(obs)
        scaled = self.normalizer({key: obs[key] for key in expected.shapes})
        sensed = self._features(scaled, self.sensed_keys, batch, augment)
        if not self.goal_keys:
            return Parts(sensed, None, None)
        if not with_goal:
            width = sum(self._width[key] for key in self.goal_keys)
            return Parts(sensed, sensed.new_zeros(batch, width), sensed.new_zeros(batch, dtype=torch.bool))
        mask = obs.get("goal_mask")
        if mask is not None and mask.shape != (batch,):
            raise BurnishError(f"the observation 'goal_mask' has shape {tuple(mask.shape)}, but ({batch},) is needed")
        given = sensed.new_ones(batch, dtype=torch.bool) if mask is None else mask > 0.5
        return Parts(sensed, self._features(scaled, self.goal_keys, batch, augment), given)

    def join(self, parts: Parts, *, drop: Tensor | None = None) -> Tensor:
        if parts.goal is None or parts.given is None:
            return self.trunk(parts.sensed)
        given = parts.given
        if drop is not None:
            check(drop, "B", {"B": len(given)})
            given = given & ~drop
        given = given[:, None]
        # Chosen, not multiplied: a goal that is hidden may be anything, even NaN.
        goal = torch.where(given, parts.goal, 0.0)
        return self.trunk(torch.cat([parts.sensed, goal, given.to(goal.dtype)], 1))

    def place(self, key: str) -> int:
        """Where the features of a sensed key begin."""
        return sum(self._width[other] for other in self.sensed_keys[: self.sensed_keys.index(key)])

    @torch.no_grad()
    def features(self, obs: Obs, level: object = None) -> Obs:
        """``obs`` with what the networks of the cameras make of their pictures in place of these, at the only level."""
        del level
        found = {key: x for key, x in obs.items() if key not in self.cameras}
        return found | {vision_key(key): self._look(key, obs[key], None) for key in self.cameras if key in obs}

    def feature_shapes(self, level: object = None) -> ObsSpec:
        """Of ``features``, where each camera is looked through."""
        del level
        return self._looked(self._full, {vision_key(key): None for key in self.cameras})

    def _looked(self, expected: ObsSpec, obs: Mapping[str, Any]) -> ObsSpec:
        """``expected`` where ``obs`` may hold features in the place of pictures."""
        looked = [key for key in self.cameras if vision_key(key) in obs]
        if not looked:
            return expected
        kept = {key: shape for key, shape in expected.shapes.items() if key not in looked}
        for key in looked:
            frames = self._full.shapes[key][:-3]
            kept[vision_key(key)] = (*frames, self._width[key] // math.prod(frames))
        return ObsSpec(kept)

    def _features(self, scaled: Mapping[str, Tensor], keys: list[str], batch: int, augment: Generator | None) -> Tensor:
        def one(key: str) -> Tensor:
            if key == "tokens":
                return self._read(scaled[key])
            if key in scaled and is_image(key):
                return self._look(key, scaled[key], augment).flatten(1)
            return scaled[key if key in scaled else vision_key(key)].reshape(batch, -1)

        return torch.cat([one(key) for key in keys], 1)

    def _read(self, tokens: Tensor) -> Tensor:
        """(B, L) int64, -1 where there is none -> (B, WORD_WIDTH), of about unit size whatever the length."""
        assert self.word_vectors is not None, "there are tokens to read"
        real = tokens >= 0
        place = torch.arange(tokens.shape[1], device=tokens.device)
        found = self.word_vectors((31 * tokens + 7919 * place).clamp(min=0) % WORD_VECTORS) * real[..., None]
        return found.sum(1) / real.sum(1, keepdim=True).clamp(min=1).sqrt()

    def _look(self, key: str, images: Tensor, augment: Generator | None) -> Tensor:
        """(B, C, H, W) or (B, h, C, H, W) -> (B, features) or (B, h, features)."""
        if augment is not None and (pad := round(self.shift * min(images.shape[-2:]))):
            images = random_shift(images, pad, augment)
        features = self.vision[_name(key)](images.flatten(0, -4))
        return features.unflatten(0, images.shape[:-3])


def _name(key: str) -> str:
    return key.replace(".", "/")
