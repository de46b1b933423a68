"""The arithmetic of a diffusion process: time grids, predictions, and the Gaussian kernel between two noise levels.

x_t = sqrt(a) clean + sqrt(1 - a) noise, where the *level* a is the cumulative product that Ho et al. (2020, arXiv
2006.11239) call alpha-bar: 1 is clean, 0 is noise. Train index 0 is the cleanest level, T - 1 the noisiest.
Everything here is pure and elementwise over levels; compute it in float64 and store what comes out.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor


class Prediction(Enum):
    """The quantity that the network predicts; v is that of Salimans and Ho (2022, arXiv 2202.00512)."""

    eps = "eps"
    sample = "sample"
    v = "v"


class Spacing(Enum):
    """Which K of T levels a sampler visits, after Lin et al. (2023, arXiv 2305.08891), table 2; T = 10, K = 3:

    leading   6 3 0   begins below the top, where the modes part, and ends at the bottom;
    trailing  9 6 2   begins at the top, which is what N(0, I) really is, and jumps from its last level to clean.
    whole     6 3 0   is leading as diffusers has it: T / K is truncated before it is multiplied.
    """

    leading = "leading"
    trailing = "trailing"
    whole = "whole"


def train_indices(train_steps: int, steps: int, spacing: Spacing) -> Tensor:
    """(K,) int64, decreasing; the full grid when K = T.

    diffusers truncates T / K before it multiplies (``whole``), so that 60 of 100 steps begin at 59, half way to clean;
    ``leading`` truncates afterwards, which is the same where K divides T.
    """
    count = torch.arange(steps, 0, -1)
    if spacing is Spacing.whole:
        return (count - 1) * (train_steps // steps)
    if spacing is Spacing.leading:
        return (count - 1) * train_steps // steps
    return (count.double() * (train_steps / steps)).round().long() - 1


def noisy(clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """The sample at signal level ``level`` (alpha bar): sqrt(level) clean + sqrt(1 - level) noise."""
    return level.sqrt() * clean + (1 - level).sqrt() * noise


def target(prediction: Prediction, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """The network's target for ``noisy(clean, noise, level)``."""
    if prediction is Prediction.eps:
        return noise
    if prediction is Prediction.sample:
        return clean
    return level.sqrt() * noise - (1 - level).sqrt() * clean


def clean_weights(prediction: Prediction, level: Tensor) -> tuple[Tensor, Tensor]:
    """(of x, of the output): the clean action that the network implies is their weighted sum."""
    signal, spread = level.sqrt(), (1 - level).sqrt()
    if prediction is Prediction.eps:
        return 1 / signal, -spread / signal
    if prediction is Prediction.sample:
        return torch.zeros_like(level), torch.ones_like(level)
    return signal, -spread


def kernel(level: Tensor, following: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """(weight of the clean action, weight of x, std) of the law of the next, cleaner state.

    Equations 12 and 16 of Song et al. (2021, arXiv 2010.02502), where eta = 0 is DDIM and eta = 1 is DDPM with its
    posterior variance (Ho et al., equation 7). The noise in x is what ``clean`` leaves of it, so that a clipped
    ``clean`` and its noise still add up to x.
    """
    std = eta * ((1 - following) / (1 - level) * (1 - level / following)).sqrt()
    # The clamp only catches rounding: with eta <= 1 the variance never exceeds the noise that is left.
    of_x = ((1 - following - std.square()).clamp(min=0) / (1 - level)).sqrt()
    return following.sqrt() - of_x * level.sqrt(), of_x, std
