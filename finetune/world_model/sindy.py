"""SINDy: a sparse sum of candidate functions says where an action leads (Brunton et al. 2016, arXiv 1509.03517; in
reinforcement learning SINDy-RL, Zolman et al. 2024, 2403.09110).

Candidates are the products of up to ``degree`` states and goals, times at most one action. *Sequentially thresholded
least squares* solves for their coefficients with a ridge, drops those below ``threshold``, and solves again for the
rest until none falls. All is in normalised units, so a coefficient of 0.01 moves a number by 1 % of the deviation of
its changes. Members are fitted to bootstrap samples of the ticks, and disagree where these leave coefficients open.

It needs a few hundred ticks where networks need thousands, if the changes are such sums: of bodies that move freely,
not of those that touch.

**Departures.** Worlds follow one member each, with its noise, not the median of the coefficients. A member's noise is
the error on the ticks that it was not given.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn

from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges

MOST = 500  # candidates: their normal equations are solved again and again
LEAST_LOG_STD = -10.0  # of the noise, in normalised units


@dataclass
class SINDyConfig:
    """Settings of model.kind=sindy: the candidate functions, and how few of them are kept."""

    degree: int = 2  # largest number of factors of a candidate
    threshold: float = 0.01  # coefficients below it are dropped, in normalised units
    ridge: float = 1e-6  # price of the squared coefficients, per tick

    def __post_init__(self) -> None:
        ranges = {"[1, 4]": "degree", "[0, inf)": "threshold", "(0, inf)": "ridge"}
        check_ranges(self, ranges, "model.sindy.")  # without a ridge, candidates that are alike have no solution


class SINDy(nn.Module):
    """``actions`` of the ``inputs``, the last ones, are those of the action."""

    factors: Tensor
    weight: Tensor
    deviation: Tensor

    def __init__(self, config: SINDyConfig, members: int, inputs: int, actions: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.products = products(inputs, inputs - actions, config.degree)
        if len(self.products) > MOST:
            raise BurnishError(
                f"model.sindy.degree={config.degree} makes more than {MOST} candidate functions of {inputs} states and "
                "actions; lower it, or take model.kind=ensemble"
            )
        padded = [(*product, *[inputs] * (config.degree - len(product))) for product in self.products]
        self.register_buffer("factors", torch.tensor(padded), persistent=False)  # (L, degree) places of inputs, or a 1
        self.register_buffer("weight", torch.zeros(members, len(padded), outputs))
        self.register_buffer("deviation", torch.zeros(members, 1, outputs))  # log

    def candidates(self, inputs: Tensor) -> Tensor:
        """(..., L): their values."""
        with_one = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
        return with_one[..., self.factors].prod(-1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.candidates(inputs) @ self.weight
        return mean, self.deviation.expand_as(mean)

    def bounded(self, log_std: Tensor) -> Tensor:
        return log_std

    @torch.no_grad()
    def solve(self, inputs: Tensor, change: Tensor) -> None:
        library, target, ticks = self.candidates(inputs.double()), change.double(), len(inputs)
        dice = torch.Generator().manual_seed(self.seed)
        for member in range(len(self.weight)):
            drawn = torch.randint(ticks, (ticks,), generator=dice).to(library.device)
            found = thresholded(library[drawn], target[drawn], self.config.threshold, self.config.ridge)
            left = torch.ones(ticks, dtype=torch.bool, device=drawn.device).index_fill(0, drawn, False)
            left = left if bool(left.any()) else ~left
            error = (library[left] @ found - target[left]).square().mean(0)
            self.weight[member] = found
            self.deviation[member] = (error.log() / 2).clamp(min=LEAST_LOG_STD)

    def loss(self, inputs: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.new_zeros(()), (self(inputs)[0] - change).square().mean()


def products(inputs: int, states: int, degree: int) -> list[tuple[int, ...]]:
    """The factors of each candidate, the constant first. More than ``MOST`` are cut off behind one more."""
    found: list[tuple[int, ...]] = []
    for count in range(degree + 1):
        for product in combinations_with_replacement(range(inputs), count):
            if sum(factor >= states for factor in product) <= 1:
                found.append(product)
            if len(found) > MOST:
                return found
    return found


def thresholded(library: Tensor, target: Tensor, threshold: float, ridge: float) -> Tensor:
    """(T, L), (T, D) -> (L, D). Each target keeps candidates of its own; the others stand in its equations as 0 = 0."""
    eye = torch.eye(library.shape[1], dtype=library.dtype, device=library.device)
    gram, right = library.T @ library / len(library) + ridge * eye, (library.T @ target / len(library)).T
    kept = torch.ones_like(right, dtype=torch.bool)
    while True:  # each round drops one coefficient at least, or is the last
        both = kept[:, :, None] & kept[:, None, :]
        found = torch.linalg.solve(torch.where(both, gram, eye), right * kept)
        fewer = kept & (found.abs() >= threshold)
        if torch.equal(fewer, kept):
            return (found * kept).T
        kept = fewer
