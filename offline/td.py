"""Pure functions of temporal-difference learning: targets, pessimism, weights. Shapes: E members, B rows, M candidates.

Expectile regression: Kostrikov et al. 2021 (IQL, arXiv 2110.06169), equations 5 and 6. Conservative gap: Kumar et al.
2020 (CQL, arXiv 2006.04779), equation 4 and appendix F; its calibration: Nakamoto et al. 2023 (Cal-QL, arXiv
2303.05479), equation 5.1. Minimum over a random subset: Chen et al. 2021 (REDQ, arXiv 2101.05982).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..policies.core.seed import Generator, permutation
from ..policies.core.tree import check


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """(B,): the one target of the house. ``discount`` is gamma^steps * (1 - terminated), so a termination is cut by
    it and a truncation is not; a next value behind a termination is not read, whatever it is."""
    sizes = check(reward, "B")
    check(discount, "B", sizes)
    check(next_value, "B", sizes)
    return (reward + torch.where(discount > 0, discount * next_value, 0.0)).detach()


def pessimistic(q: Tensor, subset: int = 0, generator: Generator | None = None) -> Tensor:
    """(E, ...) -> (...): the minimum over all members, or over ``subset`` of them drawn afresh at each call."""
    if not 0 < subset < len(q):
        return q.amin(0)
    chosen = permutation(len(q), generator, device=q.device)[:subset]
    return q[chosen].amin(0)


def expectile(error: Tensor, tau: float) -> Tensor:
    """|tau - 1(u < 0)| u^2, elementwise; u = target - prediction."""
    return torch.where(error < 0, 1 - tau, tau) * error.square()


def advantage_weight(advantage: Tensor, beta: float, cap: float = 100.0) -> Tensor:
    """min(exp(beta A), cap), detached; the cap is applied before the exponential, which thus never overflows."""
    return (beta * advantage).clamp(max=math.log(cap)).exp().detach()


def chunk_weight(terminated: Tensor, steps: Tensor, execute: int) -> Tensor:
    """(B,): 1 where the executed actions tell the whole chunk's value, else 0.

    A chunk that a truncation cut short says nothing about the value of its unplayed rest; after a termination there is
    no rest.
    """
    check(steps, "B", check(terminated, "B"))
    return (terminated | (steps == execute)).float()


def row_weight(columns: Mapping[str, Tensor], execute: int) -> Tensor:
    """(B,): ``chunk_weight``, times what an imagined world says that a row counts, where it says so."""
    known = chunk_weight(columns["terminated"], columns["steps"], execute)
    return known * columns["weight"] if "weight" in columns else known


def row_mean(x: Tensor, weight: Tensor) -> Tensor:
    """(..., B) -> (...): the mean over the rows that count; ``weight`` (B,) lies in [0, 1]. Nothing at all counts 0."""
    check(weight, "B", {"B": x.shape[-1]})
    return (x * weight).sum(-1) / weight.sum().clamp(min=1)


def uniform_log_density(action_size: int) -> float:
    """Log-density of the uniform proposal on [-1, 1]^D; D counts all coordinates of a chunk."""
    return -action_size * math.log(2)


def calibrated(q: Tensor, bound: Tensor) -> Tensor:
    """(E, B, M) raised to at least the Monte-Carlo return (B,) of the data: an action's Q below what the behaviour
    earned need not be pushed down further."""
    sizes = check(q, "E B M")
    check(bound, "B", sizes)
    return torch.maximum(q, bound[None, :, None])


def cql_gap(q_data: Tensor, q_sampled: Tensor, log_proposal: Tensor, temperature: float = 1.0) -> Tensor:
    """(E, B): T log(1/M sum_m exp(Q_m / T - log p_m)) - Q(data), an importance-sampled log-sum-exp over actions.

    The mean over M, not the sum: the sum's constant T log M has no gradient but would shift the Lagrange threshold.
    """
    sizes = check(q_sampled, "E B M")
    check(q_data, "E B", sizes)
    check(log_proposal, "B M", sizes)
    spread = torch.logsumexp(q_sampled / temperature - log_proposal, -1) - math.log(sizes["M"])
    return temperature * spread - q_data
