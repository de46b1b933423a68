"""Functions that maximum-entropy and deterministic actor-critic methods share, and a temperature that tunes itself.

Haarnoja et al. 2018 (SAC, arXiv 1801.01290 and 1812.05905: the temperature of section 5); Fujimoto et al. 2018 (TD3,
arXiv 1802.09477: target policy smoothing, equation 14).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..policies.core.spec import PolicySpec
from ..policies.core.tree import check
from ..policies.core.types import Metrics, Obs
from .descent import descend

# The action that the critic sees, from the agent's: (obs, action (B, n, A)) -> (B, n, A).
ActionTransform = Callable[[Obs, Tensor], Tensor]
# The actions of the warm-up: (obs, generator) -> (N, n, A).
Warm = Callable[[Obs, torch.Generator], Tensor]


def unchanged(obs: Obs, action: Tensor) -> Tensor:
    """The action itself: the map from the agent's action to the critic's where there is none."""
    return action


def uniform(spec: PolicySpec) -> Warm:
    """The warm-up of an agent from scratch: anything in [-1, 1]."""

    def play(obs: Obs, generator: torch.Generator) -> Tensor:
        shape = (len(next(iter(obs.values()))), spec.execute, spec.action.dim)
        return 2 * torch.rand(shape, generator=generator, device=generator.device) - 1

    return play


class Temperature(nn.Module):
    """alpha > 0. With ``target`` None it stays what it is."""

    def __init__(self, init: float = 1.0, target: float | None = None) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(init)), requires_grad=target is not None)
        self.target = target

    def forward(self) -> Tensor:
        return self.log_alpha.detach().exp()

    def loss(self, log_prob: Tensor) -> Tensor:
        """Its gradient raises alpha while the entropy, -E[log_prob], is below the target."""
        if self.target is None:
            return torch.zeros_like(self.log_alpha)
        return -self.log_alpha * (log_prob.detach() + self.target).mean()


def soft_value(q: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """(B,): E[Q - alpha log pi] by its one sample."""
    check(log_prob, "B", check(q, "B"))
    return q - alpha * log_prob


def soft_losses(q: Tensor, log_prob: Tensor, temperature: Temperature) -> tuple[Tensor, Metrics]:
    """The loss of an actor that climbs ``q``, which is the mean of alpha log pi - Q over a batch, plus that of the
    temperature, which the same step moves to its target."""
    alpha = temperature()
    loss = -soft_value(q, log_prob, alpha).mean()
    metrics: Metrics = {"actor_loss": loss.detach(), "entropy": -log_prob.detach().mean(), "alpha": alpha}
    return loss + temperature.loss(log_prob), metrics


def soft_step(
    q: Tensor,
    log_prob: Tensor,
    temperature: Temperature,
    optimizer: torch.optim.Optimizer,
    limit: float | None = None,
    *parts: Iterable[nn.Parameter],
) -> Metrics:
    """One step down ``soft_losses``; ``limit`` as in ``descend``."""
    loss, metrics = soft_losses(q, log_prob, temperature)
    descend(optimizer, loss, limit, *parts)
    return metrics


def smoothed(action: Tensor, noise: Tensor, scale: float, clip: float) -> Tensor:
    """The target action of TD3: clipped noise on top, back into [-1, 1]."""
    return (action + (scale * noise).clamp(-clip, clip)).clamp(-1, 1)


def q_scale(q: Tensor) -> Tensor:
    """1 / mean |Q|, detached: makes the weight of a Q term independent of the scale of rewards."""
    return 1 / q.detach().abs().mean().clamp(min=1e-6)


@torch.no_grad()
def polyak(target: Iterable[Tensor], online: Iterable[Tensor], tau: float) -> None:
    """target += tau (online - target), in one group of kernels."""
    torch._foreach_lerp_(list(target), list(online), tau)  # pyright: ignore
