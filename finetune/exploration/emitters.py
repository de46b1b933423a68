"""Emitters of SERENE (`finetune/methods/serene.py`): a few policies each, which evolve by what they earn alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tried(NamedTuple):
    """Policies that have played an episode."""

    genome: Tensor  # (n, W) weights
    behaviour: Tensor  # (n, B) in units of the world
    score: Tensor  # (n,) sum of rewards

    @classmethod
    def loaded(cls, saved: Sequence[Tensor], device: torch.device) -> Tried:
        return cls(*(x.to(device, copy=True) for x in saved))

    def rows(self, chosen: Any) -> Tried:
        return Tried(*(x[chosen] for x in self))

    def and_(self, other: Tried) -> Tried:
        return Tried(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


@dataclass
class Emitter:
    """A few policies that evolve by their scores alone."""

    members: Tried  # at first the ancestor
    ancestor: Tensor  # (B,) its behaviour
    sigma: float  # deviation of its mutants
    best: float  # highest score so far
    means: list[float] = field(default_factory=list)  # mean score of each generation
    still: int = 0  # generations without a better policy

    @property
    def improvement(self) -> float:
        """Of the mean of three generations, since the first three."""
        first, last = self.means[:3], self.means[-3:]
        return sum(last) / len(last) - sum(first) / len(first)

    def go_on(self, mutants: Tried, size: int) -> Tried:
        """The best of both; what is better than all before is returned."""
        better = mutants.rows(mutants.score > self.best)
        both = self.members.and_(mutants)
        self.members = both.rows(both.score.argsort(descending=True, stable=True)[:size])
        self.means.append(float(self.members.score.mean()))
        self.still = 0 if len(better.score) else self.still + 1
        self.best = max(self.best, float(self.members.score[0]))
        return better

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "members": tuple(self.members), "means": list(self.means)}

    @classmethod
    def loaded(cls, state: Mapping[str, Any], device: torch.device) -> Emitter:
        moved = {"members": Tried.loaded(state["members"], device), "ancestor": state["ancestor"].to(device, copy=True)}
        return cls(**{**state, **moved, "means": list(state["means"])})


def together(emitters: Sequence[Emitter]) -> dict[str, Any]:
    """The state of all of them in a few tensors: a checkpoint can name only so many."""
    if not emitters:
        return {}
    each = [emitter.state_dict() for emitter in emitters]
    found: dict[str, Any] = {name: [state[name] for state in each] for name in each[0]}
    found["sizes"] = [len(emitter.members.score) for emitter in emitters]
    members = tuple(map(torch.cat, zip(*found["members"], strict=True)))
    return {**found, "members": members, "ancestor": torch.stack(found["ancestor"])}


def apart(state: Any, device: torch.device) -> list[Emitter]:
    """The emitters of such a state; older ones are a list, of one state for each."""
    if isinstance(state, Mapping) and state:
        members = zip(*(x.split(state["sizes"]) for x in state["members"]), strict=True)
        columns = {**state, "members": list(members)}
        names = [name for name in columns if name != "sizes"]
        rows = zip(*(columns[name] for name in names), strict=True)
        state = [dict(zip(names, row, strict=True)) for row in rows]
    return [Emitter.loaded(each, device) for each in state]


def front(points: Tensor) -> Tensor:
    """(n, d) -> (n,) bool: the points that no other surpasses in all that counts."""
    others = points[None] >= points[:, None]
    return ~(others.all(-1) & (points[None] > points[:, None]).any(-1)).any(1)
