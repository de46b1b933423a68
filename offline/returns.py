"""Returns along time (T, N), T decisions of N worlds. A discount is that of ``Outcome``: gamma^steps (1 - terminated).

There are two flags instead of one: the *discount* decides whether the future counts (not after a termination), *ended*
where the sum over later decisions stops (at both kinds of end).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ..policies.core.ranges import check_ranges
from ..policies.core.tree import check


class Per(Enum):
    """The unit of time that one factor of gamma discounts."""

    step = "step"  # one control tick
    chunk = "chunk"  # one decision of n ticks


@dataclass
class Discount:
    """A discount says what it counts. ``per_step`` is what ``ChunkEnv`` wants."""

    gamma: float = 0.99  # weight of a reward one unit of time later
    per: Per = Per.step  # the unit of time: a control tick, or a chunk

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, 1]": "gamma"}, "discount.")

    def per_step(self, execute: int) -> float:
        """A discount per chunk, spread over its n ticks: a full chunk is discounted by exactly gamma."""
        return self.gamma if self.per is Per.step else self.gamma ** (1 / execute)


def lambda_returns(reward: Tensor, discount: Tensor, ended: Tensor, next_value: Tensor, lam: float) -> Tensor:
    """(T, N): R_t = r_t + d_t ((1 - lam) V_{t+1} + lam R_{t+1}), from V_{t+1} alone at an end and at the last row."""
    sizes = check(reward, "T N")
    for x in (discount, ended, next_value):
        check(x, "T N", sizes)
    out = torch.empty_like(reward)
    running = next_value[-1]
    for t in range(len(reward) - 1, -1, -1):
        blended = torch.where(ended[t], next_value[t], torch.lerp(next_value[t], running, lam))
        running = reward[t] + torch.where(discount[t] > 0, discount[t] * blended, 0.0)
        out[t] = running
    return out


def returns_to_go(reward: Tensor, discount: Tensor, ended: Tensor, tail: Tensor) -> Tensor:
    """(T, N): the discounted sum to the end of each episode; ``tail`` (T, N) is what follows where a sum stops without
    a termination (a value, or 0), read at truncations and at the last row only."""
    return lambda_returns(reward, discount, ended, tail, 1.0)


def n_step(reward: Tensor, discount: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, L) of consecutive decisions -> (reward, discount, steps taken), each (B,).

    ``valid`` (B, L) is a run of True from the left: the decisions up to the first end or the write head. The sum stops
    with it, and what follows is bootstrapped from where the last valid decision led.
    """
    sizes = check(reward, "B L")
    check(discount, "B L", sizes)
    check(valid, "B L", sizes)
    discount = torch.where(valid, discount, 1.0)
    before = torch.cat([torch.ones_like(discount[:, :1]), discount.cumprod(1)[:, :-1]], 1)
    total = torch.where(valid, before * reward, 0.0).sum(1)
    return total, discount.prod(1), valid.sum(1)
