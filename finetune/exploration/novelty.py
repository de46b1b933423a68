"""Novelty: a tick is paid for the distance of where it led to the nearest of what was seen before.

Lehman and Stanley 2011 (novelty search, "Abandoning objectives", Evolutionary Computation 19(2)): novelty is the mean
distance to the k nearest in an archive. It finds the way where the reward leads into a dead end.

**Departures.** The archive holds states, not one behaviour of an episode, so that a learner of values is paid where the
new thing is. It is a uniform sample of all states so far, however many there were. Distances are root mean squares, in
deviations of what was seen. A replay keeps what was paid when a state was new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.core.ranges import check_ranges
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import EnvSpec
from ...policies.core.types import Obs
from .observed import ExploreConfig, Observed


@dataclass
class NoveltyConfig(ExploreConfig):
    """Settings of explore=novelty: the archive and the neighbours in it."""

    neighbours: int = 15  # nearest states of the archive, whose mean distance is the novelty
    archive: int = 2000  # states that are kept, a uniform sample of all so far

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"[1, inf)": "neighbours archive"}, "explore.")


def novelty(points: Tensor, archive: Tensor, neighbours: int, own: bool = False) -> Tensor:
    """(N, D), (M, D) -> (N,): the mean distance to the nearest of the archive, 0 where that is empty. Where it holds
    the points themselves (``own``), none is its own neighbour."""
    count = min(neighbours + own, len(archive))
    if count <= own:
        return points.new_zeros(len(points))
    return torch.cdist(points, archive).topk(count, largest=False).values[:, int(own) :].mean(1)


def keep_sample(archive: Tensor, rows: Tensor, seen: int, generator: torch.Generator) -> None:
    """Some of ``rows``, which come after ``seen`` others, take places in a full ``archive``, so that it stays a uniform
    sample (Vitter 1985, algorithm R)."""
    so_far = seen + 1 + torch.arange(len(rows))
    places = (torch.rand(len(rows), generator=generator, dtype=torch.float64) * so_far).long()
    for row, place in zip(rows, places.tolist(), strict=True):
        if place < len(archive):
            archive[place] = row


class Novelty:
    """The archive, and what it pays."""

    def __init__(self, config: NoveltyConfig, world: EnvSpec, num_envs: int, device: torch.device, seed: int) -> None:
        self.config, self.observed = config, Observed(config, world, device)
        self.archive = torch.zeros(config.archive, len(self.observed), device=device)
        self.seen = 0  # states so far, of which the archive is a sample
        self.generator = named_generator(seed, "archive")

    def begin(self, obs: Obs, mask: Tensor) -> None:
        self._keep(self.observed.raw(obs)[mask])

    def __call__(self, obs: Obs, action: Tensor, next_obs: Obs, active: Tensor) -> Tensor:
        raw, paid = self.observed.raw(next_obs)[active], action.new_zeros(len(action))
        archive = self.archive[: min(self.seen, len(self.archive))]
        paid[active] = novelty(self.observed.scaled(raw), self.observed.scaled(archive), self.config.neighbours)
        self._keep(raw)
        return paid

    def _keep(self, raw: Tensor) -> None:
        self.observed.absorb(raw)
        room = max(0, len(self.archive) - self.seen)
        self.archive[self.seen : self.seen + len(raw[:room])] = raw[:room]
        keep_sample(self.archive, raw[room:], self.seen + len(raw[:room]), self.generator)
        self.seen += len(raw)

    def state_dict(self) -> dict[str, Any]:
        kept = {"archive": self.archive, "seen": self.seen, "generator": self.generator.get_state()}
        return {**kept, "observed": self.observed.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.archive, self.seen = state["archive"].to(self.archive, copy=True), int(state["seen"])
        self.generator.set_state(state["generator"].cpu())
        self.observed.load_state_dict(state["observed"])
