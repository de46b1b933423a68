"""How much recordings explore and exploit: SACo and TQ of "A Dataset Perspective on Offline Reinforcement Learning"
(Schweighofer et al. 2022, arXiv 2111.04714).

    SACo(D) = u(D) / u(D_ref)                        u: the number of unique pairs of state and action
    TQ(D) = (g(D) - g_worst) / (g_best - g_worst)    g: the mean return of the episodes

Imitation wants a high TQ; value-based learning can make use of a high SACo, and needs it where TQ is low.

**Departures.** The paper counts in discrete worlds; of real numbers nearly every pair is unique, and in the cells of a
grid of 30 axes too. So pairs are counted in grids of three axes: an action's number and two others, ``GROUPS`` times
drawn (always the same), or one grid of all numbers where there are no more than three. An axis has equal bins, as many
as give one cell per frame, between the limits of an action and between the 1st and the 99th percentile of a state;
beyond lies the last bin. u is the sum of occupied cells over the grids. The reference is the number of cells that as
many frames, drawn uniformly over the grids, would occupy on average, or those of another set. So SACo is about 1 for
noise that fills all ranges, and near 0 for one pose that is kept. Neighbours in time share a cell: the measure falls as
the control rate rises, so it compares sets of one world and one rate. Pictures are not counted. TQ is that of
undiscounted returns; without given ends it lies between the worst and the best episode of the set itself, where it says
no more than how the returns are spread.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.spec import ActionSpec, dtype_of
from .episodes import Episode, Episodes

AXES, GROUPS = 3, 100


class Coverage(NamedTuple):
    """SACo, and the counts that it is made of."""

    saco: float
    cells: int  # that the frames occupy, of all grids
    reference: float  # that those of the reference do
    frames: int  # that were counted, of each
    bins: int  # of each axis
    grids: int
    numbers: int  # of state and action that are counted


class Quality(NamedTuple):
    """TQ and its ends; None where all returns are equal and no ends were given."""

    tq: float | None
    mean: float
    worst: float
    best: float


@dataclass(frozen=True)
class Grids:
    """Equal bins of each number between ``low`` and ``high``, and the groups of numbers that are the axes of a grid."""

    low: np.ndarray  # (D,)
    high: np.ndarray
    bins: int
    groups: list[list[int]]

    @classmethod
    def of(cls, states: np.ndarray, action: ActionSpec) -> Grids:
        """For (F, S) states, and actions within their limits. A state that does not move is not counted."""
        low, high = np.quantile(states, [0.01, 0.99], axis=0) if states.shape[1] else np.empty((2, 0))
        moving = (high - low > 1e-6 * np.maximum(1, np.abs(low))).nonzero()[0].tolist()
        actions = list(range(len(low), len(low) + action.dim))
        low, high = np.append(low, action.low), np.append(high, action.high)
        groups, draw = [moving + actions], random.Random(0)
        if len(groups[0]) > AXES:
            first = [draw.choice(actions) for _ in range(GROUPS)]
            groups = [[i, *draw.sample([j for j in moving + actions if j != i], AXES - 1)] for i in first]
        bins = max(2, math.ceil(len(states) ** (1 / len(groups[0])) - 1e-9))
        return cls(low, high, bins, groups)

    def occupied(self, pairs: np.ndarray) -> int:
        """The cells in which (F, D) pairs lie, of all grids."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.nan_to_num((pairs - self.low) / (self.high - self.low))
        place = np.clip(share * self.bins, 0, self.bins - 1).astype(np.int64)
        cells = (place[:, group] @ self.bins ** np.arange(len(group)) for group in self.groups)
        return sum(int((np.bincount(cell) > 0).sum()) for cell in cells)

    def expected(self, frames: int) -> float:
        """The cells that so many uniform draws occupy on average: K (1 - (1 - 1/K)^F) of each grid of K."""
        cells = float(self.bins) ** len(self.groups[0])
        return -len(self.groups) * cells * math.expm1(frames * math.log1p(-1 / cells))


def numbers(episode: Episode, keys: Iterable[str]) -> np.ndarray:
    """(T, S): what was observed before each action, of the ``keys`` that hold real numbers, one after the other."""
    parts = [rows_of(episode.obs[key][:-1]).numpy() for key in keys if dtype_of(key) == torch.float32]
    return np.concatenate([np.empty((len(episode), 0), np.float32), *parts], axis=1)


def rows_of(x: Tensor) -> Tensor:
    """(T, ...) -> (T, n)."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _pairs(episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    keys = sorted(episodes.spec.obs.shapes)  # in whatever order another set has them
    states = np.concatenate([numbers(episode, keys) for episode in episodes]).astype(np.float64)
    return states, np.concatenate([episode.action.numpy() for episode in episodes])


def coverage(episodes: Episodes, reference: Episodes | None = None) -> Coverage:
    """SACo against uniform draws, or against ``reference``: then both are cut to the same number of frames, which are
    taken at even distances."""
    states, actions = _pairs(episodes)
    grid_states, against = states, None
    if reference is not None:
        others, other_actions = _pairs(reference)
        if others.shape[1] != states.shape[1] or other_actions.shape[1] != actions.shape[1]:
            raise BurnishError(
                f"the reference has {others.shape[1]} numbers of state and {other_actions.shape[1]} of action, the set "
                f"{states.shape[1]} and {actions.shape[1]}; take one of the same world"
            )
        kept = min(len(states), len(others))
        states, actions, others, other_actions = (
            x[np.linspace(0, len(x) - 1, kept).round().astype(int)] for x in (states, actions, others, other_actions)
        )
        grid_states, against = others, np.hstack([others, other_actions])
    grids = Grids.of(grid_states, (reference or episodes).spec.action)
    cells = grids.occupied(np.hstack([states, actions]))
    expected = grids.expected(len(states)) if against is None else float(grids.occupied(against))
    counted = len({i for group in grids.groups for i in group})
    return Coverage(cells / expected, cells, expected, len(states), grids.bins, len(grids.groups), counted)


def quality(returns: Sequence[float], worst: float | None = None, best: float | None = None) -> Quality:
    """TQ between the returns ``worst`` (say, of a random policy) and ``best`` (of an expert), by default those of the
    worst and the best episode."""
    worst = min(returns) if worst is None else worst
    best = max(returns) if best is None else best
    mean = float(np.mean(returns))
    return Quality((mean - worst) / (best - worst) if best > worst else None, mean, worst, best)
