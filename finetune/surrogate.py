"""The formulae of PPO: advantages, and the clipped surrogate for policies whose likelihood has J factors.

Schulman et al. 2017 (PPO, arXiv 1707.06347), equation 7. DPPO (Ren et al. 2024, arXiv 2409.00588) makes every denoising
step a factor of its own, with an advantage that is discounted towards the noisy steps and a clip that grows towards the
clean ones; a Gaussian has one factor. The estimate of the divergence is Schulman's k3: r - 1 - log r, never negative.

Generalised advantage estimation: Schulman et al. 2016 (arXiv 1506.02438), equation 16, over time (T, N), with the two
flags of `offline/returns.py`: *discount* and *ended*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from ..policies.core.tree import check


def gae(
    reward: Tensor, discount: Tensor, ended: Tensor, value: Tensor, next_value: Tensor, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantage, value target), each (T, N). ``next_value`` is V(next_obs): where the decision led, not the reset."""
    sizes = check(reward, "T N")
    for x in (discount, ended, value, next_value):
        check(x, "T N", sizes)
    future = torch.where(discount > 0, discount * next_value, 0.0)
    delta = reward + future - value
    carry = lam * discount * ~ended
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage, advantage + value


class Reduction(Enum):
    """The quantity that a clip applies to. Published code differs here, so one number means several trust regions."""

    sum = "sum"  # the log-ratio of the whole factor: the textbook
    mean_dim = "mean_dim"  # divided by the coordinates of one transition (DPPO)
    mean_dim_and_step = "mean_dim_and_step"  # and by the transitions that a factor joins (ReinFlow)
    mean_step = "mean_step"  # by these alone (pi_RL's Flow-Noise)


def divisor(reduction: Reduction, coordinates: Tensor, transitions: Tensor) -> Tensor:
    """(J,): what the summed log-ratio of each factor is divided by. ``coordinates`` counts all terms of a factor of a
    full chunk. It is constant, so a chunk that was cut short keeps its weight in the gradient."""
    check(transitions, "J", check(coordinates, "J"))
    if reduction is Reduction.sum:
        return torch.ones_like(coordinates)
    if reduction is Reduction.mean_step:
        return transitions
    return coordinates if reduction is Reduction.mean_dim_and_step else coordinates / transitions


def normalized(advantage: Tensor, quantiles: Sequence[float] | None = None) -> Tensor:
    """Of mean 0 and deviation 1; then no further out than ``quantiles``."""
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    if quantiles is None:
        return advantage
    low, high = (torch.quantile(advantage, q) for q in quantiles)
    return torch.minimum(torch.maximum(advantage, low), high)


def value_error(value: Tensor, target: Tensor, before: Tensor, clip: float | None = None) -> Tensor:
    """The squared error, or with ``clip`` the larger one of that and of a value that moved no further than that."""
    error = (value - target).square()
    if clip is None:
        return error
    near = before + (value - before).clamp(-clip, clip)
    return torch.maximum(error, (near - target).square())


def effective_clip(clip: Tensor, divided_by: Tensor) -> Tensor:
    """(J,): the largest rise of a factor's summed log-likelihood that still moves the policy: D log(1 + clip). It may
    fall a little further, by -D log(1 - clip)."""
    return divided_by * torch.log1p(clip)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, weight: Tensor, clip: Tensor) -> Tensor:
    """-mean over rows and factors of min(r A, clip(r) A), where A = advantage * weight.

    log_ratio (B, J), advantage (B,), weight and clip (J,). It is the only policy loss of the on-policy methods.
    """
    sizes = check(log_ratio, "B J")
    check(advantage, "B", sizes)
    check(weight, "J", sizes)
    check(clip, "J", sizes)
    ratio = log_ratio.exp()
    scaled = advantage[:, None] * weight
    clipped = torch.minimum(torch.maximum(ratio, 1 - clip), 1 + clip)
    return -torch.minimum(ratio * scaled, clipped * scaled).mean()


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Scalar estimate of KL(old, new) from samples of the old policy."""
    return (torch.expm1(log_ratio) - log_ratio).mean()  # also for ratios so near 1 that exp(x) - 1 is all rounding


def clip_fraction(log_ratio: Tensor, clip: Tensor) -> Tensor:
    """The share of likelihood ratios that lie further than ``clip`` from 1."""
    return ((log_ratio.exp() - 1).abs() > clip).float().mean()


def clip_schedule(count: int, base: float, top: float, growth: float = 3.0) -> Tensor:
    """(J,): from ``base`` at the noisiest trained step to ``top`` at the last, exponentially; a single step gets
    ``top`` (the published formula divides 0 by 0 there)."""
    if count == 1:
        return torch.tensor([top])
    u = torch.linspace(0, 1, count)
    return base + (top - base) * torch.expm1(growth * u) / math.expm1(growth)


def denoising_weight(count: int, gamma: float) -> Tensor:
    """(J,): gamma^(J - 1 - j): the last, cleanest step counts in full."""
    return gamma ** torch.arange(count - 1, -1, -1, dtype=torch.get_default_dtype())
