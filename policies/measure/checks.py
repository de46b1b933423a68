"""Checks of an evaluation: of numbers that are none, episodes without an end, worlds that fail or ignore their seed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core import tree
from ..core.errors import BurnishError, WorldError
from ..core.types import Obs, VecEnv
from ..core.wrapper import innermost, repeatable

_log = logging.getLogger(__name__)

TRIES = 10  # of an episode that errors of its world cut off
TRIED = 4  # steps, to see whether equal seeds lead to equal observations
EQUAL = {torch.uint8: 2.0}  # of 255, of a pixel
ROUNDING = 1e-4  # relative, or of what is less than 1: where steps of all worlds are one product of matrices


def refuse_non_finite(values: Mapping[str, Tensor], active: Tensor, world_seeds: Sequence[int]) -> None:
    """A single NaN would spread into every mean, so the culprit is named instead."""
    names = [key for key, x in values.items() if x.is_floating_point()]
    if not names:
        return
    bad = torch.stack([~values[key].isfinite().reshape(len(active), -1).all(1) for key in names]) & active
    if bad.any():
        name, world = bad.nonzero()[0].tolist()
        raise BurnishError(
            f"{names[name]!r} is not finite in the episode of seed {world_seeds[world]}, so it cannot be evaluated"
        )


def refuse_endless(lengths: Tensor, active: Tensor, max_steps: int, world_seeds: Sequence[int]) -> None:
    """A check that each episode ends within ``max_steps``, as its world promises."""
    late = active & (lengths > max_steps)
    if late.any():
        seed = world_seeds[int(late.nonzero()[0])]
        raise BurnishError(
            f"the episode of seed {seed} runs past its max_steps={max_steps}; "
            "the world must report `truncated` there, or promise more steps"
        )


class Replays:
    """Counts the episodes that an error of their world cut off (``lost`` in the info of a step): they are played again
    on their seeds, since they say nothing of the policy."""

    def __init__(self) -> None:
        self._tries: Counter[int] = Counter()

    def count(self, row: int, seed: int) -> None:
        """One more of the episode ``row``; refused where it was cut off too often."""
        self._tries[row] += 1
        if self._tries[row] >= TRIES:
            raise WorldError(
                f"errors of the world cut off the episode of seed {seed} {TRIES} times, so it cannot be played to its "
                "end; correct the world"
            )

    def tell(self) -> None:
        if cut := self._tries.total():
            _log.warning("errors of the world cut off %d episodes, which were played again on their seeds", cut)


def beginning(env: VecEnv, everyone: Tensor, world_seeds: Sequence[int]) -> tuple[Obs, bool]:
    """The first observations, and whether equal seeds lead to equal ones, in another row too: bit for bit in the first
    observation, and but for rounding in the steps after it. Episodes that an error ends say nothing of that."""
    if not repeatable(env):
        return env.reset(everyone, world_seeds), False
    world = innermost(env)  # so that no wrapper counts or records what is tried
    turned, cut = _tried(world, everyone, [*world_seeds[1:], world_seeds[0]])
    straight, lost = _tried(world, everyone, world_seeds)
    # NaN would count as unequal, but an episode that begins with one is refused anyway.
    honours = all(torch.equal(x, turned[0][key].roll(1, 0)) for key, x in straight[0].items())
    rows = ~(lost | cut.roll(1, 0))
    for one, other in zip(straight[1:], turned[1:], strict=True):
        honours = honours and all(_close(x[rows], other[key].roll(1, 0)[rows]) for key, x in one.items())
    return env.reset(everyone, world_seeds), honours


def _tried(world: VecEnv, everyone: Tensor, world_seeds: Sequence[int]) -> tuple[list[Obs], Tensor]:
    """The observations of the beginning and, with the rewards, of a few steps, and which episodes an error ended. A
    world that has ended stays there."""
    lost = torch.zeros_like(everyone)
    obs, active, source = world.reset(everyone, world_seeds), everyone, torch.Generator().manual_seed(0)
    low, high = torch.tensor(world.spec.action.low), torch.tensor(world.spec.action.high)
    seen = [tree.map_tree(torch.clone, obs)]
    for _ in range(TRIED):
        action = (low + (high - low) * torch.rand(len(low), generator=source)).clamp(low, high)
        step = world.step(action.to(world.device).expand(world.num_envs, -1), active)
        obs = tree.where(active, step.obs, obs)
        seen.append({**tree.map_tree(torch.clone, obs), "/reward": torch.where(active, step.reward, 0.0)})
        active = active & ~(step.terminated | step.truncated)
        lost = lost | step.info.get("lost", lost)
    return seen, lost


def _close(one: Tensor, other: Tensor) -> bool:
    x, y = one.double(), other.double()
    return bool(((x - y).abs() <= EQUAL.get(one.dtype, ROUNDING * x.abs().clamp(min=1.0))).all())
