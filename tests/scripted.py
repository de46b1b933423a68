"""A world whose every end is written down beforehand, and which poisons every row that must not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.policies.core import tree
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.core.types import Obs, Step

TERMINATED, TRUNCATED = "terminated", "truncated"


class ScriptedWorld:
    """World i plays its ``script[i]``, a list of (length, kind of end), over and over.

    ``state`` is (world, episode, tick): an observation tells where it comes from. The reward of a tick is
    100 * world + 10 * episode + tick, counted from 1. Inactive rows of a step are NaN. Every answer is in the same
    memory, so whoever keeps an observation without copying it sees it change.
    """

    def __init__(self, script: Sequence[Sequence[tuple[int, str]]], image: bool = False, goal: bool = False) -> None:
        self.script, self.image, self.goal = script, image, goal
        self.num_envs, self.device = len(script), torch.device("cpu")
        shapes: dict[str, tuple[int, ...]] = {"state": (3,)}
        if image:
            shapes["image.top"] = (1, 2, 2)
        if goal:
            shapes["goal"] = (2,)
        longest = max(length for ends in script for length, _ in ends)
        self.spec = EnvSpec(ObsSpec(shapes), ActionSpec((-2.0, 0.0), (2.0, 1.0)), 10.0, "test", longest)
        self.episode = torch.full((self.num_envs,), -1)
        self.tick = torch.zeros(self.num_envs, dtype=torch.int64)
        self._memory: Obs = {}
        self.resets: list[tuple[list[bool], list[int] | None]] = []
        self.taken: list[Tensor] = []

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        self.resets.append((mask.tolist(), None if seeds is None else list(seeds)))
        self.episode = self.episode + mask
        self.tick = self.tick.masked_fill(mask, 0)
        return self._answer(self._obs())

    def _answer(self, obs: Obs) -> Obs:
        for key, x in obs.items():
            self._memory.setdefault(key, torch.empty_like(x)).copy_(x)
        return dict(self._memory)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        self.taken.append(action.clone())
        self.tick = self.tick + active
        ends = [self.script[i][int(self.episode[i]) % len(self.script[i])] for i in range(self.num_envs)]
        at_end = torch.tensor([int(self.tick[i]) >= ends[i][0] for i in range(self.num_envs)])
        kind = torch.tensor([end[1] == TERMINATED for end in ends])
        reward = 100.0 * torch.arange(self.num_envs) + 10.0 * self.episode + self.tick
        poison = ~active
        obs = {
            key: torch.where(
                tree.rows(poison, x), torch.full_like(x, float("nan") if x.is_floating_point() else 255), x
            )
            for key, x in self._obs().items()
        }
        # An inactive row may say anything: it claims an end of both kinds, and success.
        return Step(
            self._answer(obs),
            reward.masked_fill(poison, float("nan")),
            (at_end & kind) | poison,
            (at_end & ~kind) | poison,
            {"success": (at_end & kind) | poison, "tick": self.tick.clone()},
        )

    def _obs(self) -> Obs:
        state = torch.stack([torch.arange(self.num_envs), self.episode, self.tick], 1).float()
        obs: dict[str, Any] = {"state": state}
        if self.image:
            obs["image.top"] = self.tick.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).clone()
        if self.goal:
            obs["goal"] = state[:, :2] * 7
        return obs

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self.episode.clone(), "tick": self.tick.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.episode, self.tick = state["episode"].clone(), state["tick"].clone()
