"""The observations of a LeRobot policy: features of its config.json, and the keys that they have here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import torch
from torch import Tensor, nn

from ..core.errors import BurnishError
from ..core.spec import ObsSpec, PolicySpec
from ..core.types import Obs
from ..data.lerobot_layout import column_of
from .scaling import FeatureScaling, Normalization


class Kind(Enum):
    """The types of an input feature: state of the robot, state of its environment, or picture."""

    state = "STATE"
    environment = "ENV"
    visual = "VISUAL"


@dataclass
class Feature:
    """One input of a LeRobot policy."""

    key: str  # name of the observation here, such as state or image.top
    kind: Kind  # type of the feature
    normalization: Normalization  # normalisation of its numbers
    column: str = ""  # its name in LeRobot, where the key does not give it

    @property
    def name(self) -> str:
        """Its name in LeRobot."""
        return self.column or column_of(self.key)

    @property
    def module(self) -> str:
        """The name of its scaling. A dot separates modules, so it may not occur within one."""
        return self.key.replace(".", "/")

    def statistic_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a feature of ``shape``: the statistics of a picture are per channel."""
        return (shape[0], 1, 1) if self.kind is Kind.visual else shape


class Inputs(nn.Module):
    """The features of an observation, normalised, as a network of LeRobot sees them."""

    def __init__(self, spec: PolicySpec, features: Sequence[Feature]) -> None:
        super().__init__()
        for feature in features:
            shape = spec.obs.shapes.get(feature.key)
            if shape is None or len(shape) != (3 if feature.kind is Kind.visual else 1):
                raise BurnishError(f"the feature {feature.key!r} is not among the observations {dict(spec.obs.shapes)}")
        if sorted(spec.obs.shapes) != sorted(feature.key for feature in features):
            raise BurnishError(f"the policy observes {sorted(spec.obs.shapes)}, but has other features")
        self.spec, self.features = spec, list(features)
        self.scalings = nn.ModuleDict(
            {x.module: FeatureScaling(x.normalization, x.statistic_shape(spec.obs.shapes[x.key])) for x in features}
        )

    def scaling(self, feature: Feature) -> FeatureScaling:
        """The normalisation of a feature."""
        return cast(FeatureScaling, self.scalings[feature.module])

    def width(self, kind: Kind) -> int:
        """Numbers of all features of this kind, which is not the visual one."""
        return sum(self.spec.obs.shapes[f.key][0] for f in self.features if f.kind is kind)

    def cameras(self) -> list[tuple[int, ...]]:
        """Shapes (C, H, W) of the pictures, in the order of the checkpoint."""
        return [self.spec.obs.shapes[f.key] for f in self.features if f.kind is Kind.visual]

    def forward(self, obs: Obs, dtype: torch.dtype, kinds: Collection[Kind] = tuple(Kind)) -> dict[Kind, list[Tensor]]:
        """(B, history, ...) of each feature of these ``kinds``, or (B, ...) of a policy without history."""
        chosen = [feature for feature in self.features if feature.kind in kinds]
        if chosen:
            ObsSpec({feature.key: self.spec.inputs.shapes[feature.key] for feature in chosen}).check(obs)
        parts: dict[Kind, list[Tensor]] = {kind: [] for kind in Kind}
        for feature in chosen:
            x = obs[feature.key].to(dtype)
            x = self.scalings[feature.module](x / 255 if feature.kind is Kind.visual else x)
            parts[feature.kind].append(x)
        return parts
