"""The record of a run in imagination, for `burnish report`: each imagined score beside a real one, the success head by
what happened, and imagined episodes beside real ones. It lies in the folder of the run, in numbers and names alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError
from ...policies.core.tree import index, where
from ...policies.core.types import Controller, Obs, VecEnv
from ...policies.core.wrapper import state_names
from .env import ImaginedEnv
from .films import FRAMES, Course
from .model import WorldModel, ends_of
from .ticks import Ticks, of_episodes

RECORD = "imagined.json"
EPISODES, NUMBERS = 2, 4  # pairs of episodes that are kept, and numbers of each
BINS = 5


@dataclass
class Pair:
    """An episode of the world and what is imagined from its start, with the same noise in the policy."""

    real: list[list[float]]  # (T, numbers)
    imagined: list[list[float]]  # likewise; it may be shorter or longer
    succeeded: list[bool]  # the real one, the imagined one; empty where the world knows no success


@dataclass
class Record:
    """All that a run keeps; older runs have none."""

    trials: list[list[float | None]] = field(default_factory=list)  # real ticks, real score, the score imagined before
    # of held-out episodes, a few at a time: highest score of success (mean), share that succeeded, how many
    reliability: list[list[float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the numbers of an episode
    episodes: list[Pair] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = chain.from_iterable((*pair.real, *pair.imagined) for pair in self.episodes)
        if (
            any(len(row) != 3 or None in row[:2] for row in self.trials)
            or any(len(row) != 3 or row[2] < 1 for row in self.reliability)
            or any(len(row) != len(self.names) for row in rows)
            or any(len(pair.succeeded) not in (0, 2) for pair in self.episodes)
        ):
            raise BurnishError(f"{RECORD} is malformed: its rows do not have the numbers that they must have")


@torch.no_grad()
def reliability(model: WorldModel, ticks: Ticks) -> list[list[float]]:
    """Held-out episodes in ``BINS`` of as many each, by their highest score of success."""
    held = ticks.split()[1]
    said, happened = (of_episodes(x, held) for x in (model.scores_of(held)[:, 0], ends_of(held)[0]))
    bins = said.argsort().tensor_split(min(BINS, len(said)))
    return [[float(said[i].mean()), float(happened[i].mean()), float(len(i))] for i in bins]


@torch.no_grad()
def episodes_beside(
    env: ImaginedEnv, world: VecEnv, controller: Controller, ticks: Ticks, numbers: Sequence[int], seeds: Sequence[int]
) -> tuple[list[str], list[Pair], list[Course]]:
    """The episodes ``numbers`` of ``ticks``, beside those of ``env``, one from each of their starts; ``world`` is
    ``env`` or a history on top of it, and ``seeds`` are those that the policy had. Also the names of the numbers, and
    all that was seen at the beginning of each episode, for films."""
    model, data = env.model, ticks.all()
    real: list[dict[str, Any]] = [index(data, (data["episode"] == number).nonzero()[:, 0]) for number in numbers]
    env.begin_at({key: torch.stack([x["obs"][key][0] for x in real]) for key in env.spec.obs.shapes})
    active = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    obs = world.reset(active, seeds)
    controller.reset(active, seeds)
    states, lengths, won = [env.state()], torch.ones_like(active, dtype=torch.int64), torch.zeros_like(active)
    while bool(active.any()):
        step = world.step(controller.step(obs), active)
        states.append(env.state())
        won = won | (active & step.info.get("success", torch.zeros_like(won)))
        obs, lengths = where(active, step.obs, obs), lengths + active
        active = active & ~(step.terminated | step.truncated)
    played = [torch.cat([model.state_of(x["obs"])[:1], model.state_of(x["next_obs"])]) for x in real]
    moved = torch.cat(played).std(0, correction=0) / model.states.scale
    chosen = moved.topk(min(NUMBERS, len(moved))).indices.sort().values
    imagined = torch.stack(states, 1)
    pairs, courses = [], []
    for i, (x, y) in enumerate(zip(real, played, strict=True)):
        succeeded = [bool(ends_of(x)[0].any()), bool(won[i])] if ticks.knows_success else []
        pairs.append(Pair(y[:, chosen].tolist(), imagined[i, : lengths[i], chosen].tolist(), succeeded))
        begun = index(x["obs"], slice(0, 1))
        courses.append(Course(*(_shown(model, begun, rows[:FRAMES]) for rows in (y, imagined[i, : lengths[i]]))))
    return [names_of(model, env)[i] for i in chosen.tolist()], pairs, courses


def _shown(model: WorldModel, begun: Obs, states: Tensor) -> Obs:
    """The observations of an episode that began so, (T, ...)."""
    kept = {key: x.expand(len(states), *x.shape[1:]) for key, x in begun.items()}
    return model.with_state(kept, states)


def names_of(model: WorldModel, env: Any) -> list[str]:
    """A name of each number of a state: the world's own, or its place."""
    own = state_names(env)
    if own is not None and model.moving == ["state"] and len(own) == sum(model.sizes):
        return list(own)
    return [f"{key} {i}" for key, size in zip(model.moving, model.sizes, strict=True) for i in range(size)]
