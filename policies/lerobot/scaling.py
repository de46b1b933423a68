"""The normalisation of LeRobot's features, by the statistics of the data that a policy was trained on.

mean_std   (x - mean) / (std + 1e-8), back x std + mean
min_max    2 (x - min) / (max - min) - 1; where max = min the denominator is 1e-8
quantiles  the same with q01 and q99, quantile10 with q10 and q90
identity   x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from ..core.errors import BurnishError

EPSILON = 1e-8


class Normalization(Enum):
    """The kinds of normalisation, as ``normalization_mapping`` of a config.json names them."""

    identity = "IDENTITY"
    mean_std = "MEAN_STD"
    min_max = "MIN_MAX"
    quantiles = "QUANTILES"
    quantile10 = "QUANTILE10"

    @property
    def statistics(self) -> tuple[str, str] | tuple[()]:
        """The names of the two statistics that it needs."""
        return _STATISTICS[self]


_STATISTICS: dict[Normalization, tuple[str, str] | tuple[()]] = {
    Normalization.identity: (),
    Normalization.mean_std: ("mean", "std"),
    Normalization.min_max: ("min", "max"),
    Normalization.quantiles: ("q01", "q99"),
    Normalization.quantile10: ("q10", "q90"),
}


class FeatureScaling(nn.Module):
    """``scaling(x)`` is what the network sees of one feature, ``scaling.inverse(y)`` the way back."""

    first: Tensor  # mean, or the low end of the range
    second: Tensor  # standard deviation, or the high end of the range

    def __init__(self, kind: Normalization, shape: Sequence[int]) -> None:
        super().__init__()
        self.kind = kind
        for name, value in zip(("first", "second"), (0.0, 1.0), strict=True):
            if kind is not Normalization.identity:
                self.register_buffer(name, torch.full(tuple(shape), value))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is Normalization.identity:
            return x
        if self.kind is Normalization.mean_std:
            return (x - self.first) / (self.second + EPSILON)
        return 2 * (x - self.first) / self._width() - 1

    def inverse(self, y: Tensor) -> Tensor:
        if self.kind is Normalization.identity:
            return y
        if self.kind is Normalization.mean_std:
            return y * self.second + self.first
        return (y + 1) / 2 * self._width() + self.first

    def _width(self) -> Tensor:
        width = self.second - self.first
        return torch.where(width == 0, EPSILON, width)


def statistics_of(
    kind: Normalization, feature: str, shape: Sequence[int], found: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """The buffers of a ``FeatureScaling``, out of the statistics that lie in ``where``; refused if some are missing."""
    state = {}
    for name, statistic in zip(("first", "second"), kind.statistics, strict=False):
        x = found.get(statistic)
        if x is None:
            raise BurnishError(
                f"{where} normalises {feature} by {kind.value}, which needs its statistic {statistic!r}, and has "
                f"{sorted(found) or 'none of this feature'}; add the statistics of the data that it was trained on"
            )
        if x.numel() != torch.Size(shape).numel() or not bool(x.isfinite().all()):
            raise BurnishError(
                f"{where} has the statistic {statistic!r} of {feature} with shape {tuple(x.shape)}, but "
                f"{tuple(shape)} finite numbers are needed"
            )
        state[name] = x.to(torch.float32).reshape(tuple(shape))
    return state
