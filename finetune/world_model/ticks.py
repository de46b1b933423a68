"""Control ticks, as a model of a world learns from them: written while episodes are played, or read from recordings.

A replay of decisions (`offline/replay.py`) has lost the ticks inside each chunk, so they are kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...policies.core import tree
from ...policies.core.errors import BurnishError
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import ActionSpec, EnvSpec, ObsSpec, require_like_actions, stacked_by_history
from ...policies.core.types import Obs, Step, VecEnv
from ...policies.core.wrapper import Wrapper
from ...policies.data.episodes import Episodes, scaled_actions

HELD_OUT = 5  # every fifth part is kept for validation
PART = 100  # ticks of a part, where episodes are held out in parts
MOST_PARTS = 2**20  # parts of an episode
LOOKED_AT = 2_000  # ticks at which a fit is examined, where there are more

Twin = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # (obs, action) -> (T, D): where an action is said to lead


class Ticks:
    """Columns (T, ...): "obs" and "next_obs" of single frames, "action" in [-1, 1], "reward", "terminated", "success",
    "first" of an episode, and "episode", its number. Once a twin was asked also "expected", what it said (``ask``)."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._pieces: list[dict[str, Any]] = []
        self._twin: Twin | None = None
        self._expected: Tensor | None = None  # what it said about the first ticks
        self.episodes = 0  # begun so far
        self.knows_success = False

    def __len__(self) -> int:
        return sum(len(piece["reward"]) for piece in self._pieces)

    def add(self, piece: Mapping[str, Any]) -> None:
        if len(piece["reward"]):
            self._pieces.append(tree.map_tree(lambda x: x.to(self.device, copy=True), piece))

    def all(self) -> dict[str, Any]:
        """Every tick so far, in the order in which they came."""
        if not self._pieces:
            raise BurnishError("no tick was played or recorded, so there is nothing to learn a model from")
        if len(self._pieces) > 1:
            self._pieces = [_joined(self._pieces)]
        data, known = self._pieces[0], self._expected
        return data if known is None or len(known) < len(data["reward"]) else {**data, "expected": known}

    def ask(self, twin: Twin) -> None:
        """Adds the column "expected". A twin is a simulation, so it is asked once about each tick."""
        known = self._expected if self._twin in (None, twin) else None
        self._twin, data = twin, self.all()
        new = slice(0 if known is None else len(known), len(data["reward"]))
        if new.start < new.stop:
            said = twin(tree.index(data["obs"], new), data["action"][new])
            self._expected = said if known is None else torch.cat([known, said])

    def split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(for fitting, held out), by whole episodes, or by parts of them in a world that knows no success, where one
        episode may be all that was played for long; where there are too few, both are all."""
        ticks = self.all()
        part = torch.zeros_like(ticks["episode"]) if self.knows_success else tick_of(ticks["episode"]) // PART
        held = (ticks["episode"] + part) % HELD_OUT == HELD_OUT - 1
        if not bool(held.any()):
            return ticks, ticks
        ticks = {**ticks, "episode": ticks["episode"] * MOST_PARTS + part}
        return tree.index(ticks, ~held), tree.index(ticks, held)

    def width_of_returns(self) -> float:
        """Of all episodes, the largest minus the smallest; where they hardly differ, a hundredth of their size."""
        ticks = self.all()
        _, owner = ticks["episode"].unique(return_inverse=True)
        returns = ticks["reward"].new_zeros(int(owner.max()) + 1).index_add_(0, owner, ticks["reward"])
        return max(float(returns.max() - returns.min()), float(returns.abs().max()) / 100)

    def state_dict(self) -> dict[str, Any]:
        state = {"episodes": self.episodes, "knows_success": self.knows_success}
        ticks = {key: x for key, x in self.all().items() if key != "expected"} if self._pieces else None
        return {**state, "ticks": ticks, "expected": self._expected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episodes, self.knows_success = int(state["episodes"]), bool(state["knows_success"])
        self._pieces = []
        self.add(state["ticks"] or {"reward": ()})
        known = state.get("expected")  # older states have none
        self._twin, self._expected = None, None if known is None else known.to(self.device, copy=True)


class Tape(Wrapper):
    """A world whose ticks are written into ``ticks``. It stands on top of a history, whose newest frame it takes."""

    def __init__(self, env: VecEnv, ticks: Ticks, history: int = 1) -> None:
        super().__init__(env)
        self.ticks, self.history = ticks, history
        self._episode = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._first = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)  # no tick was played yet
        self._seen: Obs = {}

    @property
    def single_frames(self) -> EnvSpec:
        """The specification of the world without its history."""
        return replace(self.spec, obs=self.spec.obs.without_history(self.history))

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        obs = self.env.reset(mask, seeds)
        self._first = torch.ones_like(self._first) if mask is None else self._first | mask
        self._seen = self._frame(obs)
        return obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        rows = torch.ones_like(self._first) if active is None else active
        begun = self._first & rows
        self._episode = torch.where(begun, self.ticks.episodes + begun.long().cumsum(0) - 1, self._episode)
        self.ticks.episodes += int(begun.sum())
        after, nothing = self._frame(step.obs), torch.zeros_like(step.terminated)
        self.ticks.knows_success |= "success" in step.info
        played = {
            "obs": self._seen,
            "next_obs": after,
            "action": step.info.get("executed", action.clamp(-1, 1)).float(),
            "reward": step.reward.float(),
            "terminated": step.terminated,
            "success": step.info.get("success", nothing).bool(),
            "first": self._first,
            "episode": self._episode,
        }
        self.ticks.add(tree.index(played, rows))
        self._first = self._first & ~rows
        self._seen = tree.where(rows, after, self._seen)
        return step

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "episode": self._episode, "first": self._first, "seen": dict(self._seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._episode, self._first = state["episode"].to(self.device), state["first"].to(self.device)
        self._seen = tree.to(state["seen"], self.device)

    def _frame(self, obs: Obs) -> Obs:
        return tree.map_tree(torch.clone, newest(obs, self.history))


def newest(obs: Obs, history: int) -> Obs:
    """The last frame of observations that hold ``history`` of them."""
    return {k: x[:, -1] if history > 1 and stacked_by_history(k) else x for k, x in obs.items()}


def shifted(obs: Obs, after: Obs, history: int) -> Obs:
    """``obs`` a tick later, when ``after`` is seen: its last frames, and that one."""
    old = {k: x for k, x in obs.items() if history > 1 and stacked_by_history(k)}
    return {**after, **{k: torch.cat([x[:, 1:], after[k][:, None]], 1) for k, x in old.items()}}


def recorded_ticks(
    episodes: Episodes,
    limits: ActionSpec,
    seen: ObsSpec,
    mode: str | None,
    device: torch.device | str = "cpu",
) -> Ticks:
    """The ticks of recordings, of the observations that a world shows. A success is that of the last tick."""
    require_like_actions("the world", mode, "the recordings", episodes.spec.action_mode)
    missing = sorted(seen.shapes.keys() - episodes.spec.obs.shapes.keys())
    if missing:
        raise BurnishError(f"the recordings lack {', '.join(missing)}, which the world shows; record them there")
    found = Ticks(device)
    actions = scaled_actions(episodes, limits).split([len(episode) for episode in episodes])
    for number, (episode, action) in enumerate(zip(episodes, actions, strict=True)):
        last, length = torch.zeros(len(episode), dtype=torch.bool), len(episode)
        last[-1] = True
        found.add(
            {
                "obs": {key: episode.obs[key][:-1] for key in seen.shapes},
                "next_obs": {key: episode.obs[key][1:] for key in seen.shapes},
                "action": action,
                "reward": episode.reward,
                "terminated": last & episode.terminated,
                "success": last & episode.success,
                "first": torch.arange(length) == 0,
                "episode": torch.full((length,), number),
            }
        )
        found.knows_success |= episode.success
    found.episodes = len(episodes)
    return found


def looked_at(ticks: Mapping[str, Any]) -> dict[str, Any]:
    """Some ``LOOKED_AT`` of these ticks where there are more: whole episodes, the same ones of the same number."""
    if (count := len(ticks["episode"])) <= LOOKED_AT:
        return dict(ticks)
    _, owner, lengths = ticks["episode"].unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(lengths), generator=named_generator(count, "looked at")).to(owner.device)
    before = lengths[order].cumsum(0) - lengths[order]
    chosen = torch.zeros_like(lengths, dtype=torch.bool).scatter(0, order, before < LOOKED_AT)
    return tree.index(ticks, chosen[owner])


def previous(episode: Tensor) -> Tensor:
    """(T,): the tick before each tick in its episode; itself where the episode began."""
    order = episode.argsort(stable=True)
    before = order.roll(1)
    before = torch.where(episode[before] == episode[order], before, order)
    before[:1] = order[:1]  # of a single episode the last tick came round
    return torch.empty_like(order).scatter(0, order, before)


def tick_of(episode: Tensor) -> Tensor:
    """(T,): the ticks of its episode before each tick."""
    order = episode.argsort(stable=True)
    place = torch.arange(len(order), device=order.device)
    begins = torch.cat([place[:1] == 0, episode[order][1:] != episode[order][:-1]])
    return torch.empty_like(order).scatter(0, order, place - torch.where(begins, place, 0).cummax(0).values)


def of_episodes(values: Tensor, ticks: Mapping[str, Any]) -> Tensor:
    """(episodes,): the largest of ``values`` (T,) in each."""
    _, owner = ticks["episode"].unique(return_inverse=True)
    none = torch.zeros(int(owner.max()) + 1, device=owner.device)
    return none.scatter_reduce(0, owner, values.to(none), "amax", include_self=False)


def _joined(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = pieces[0]
    return {
        key: _joined([piece[key] for piece in pieces])
        if isinstance(x, Mapping)
        else torch.cat([piece[key] for piece in pieces])
        for key, x in first.items()
    }
