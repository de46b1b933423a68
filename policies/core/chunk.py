"""From control time to decision time, and a memory of past frames: ``ChunkEnv`` and ``HistoryEnv``.

A decision is a chunk of up to n control ticks. Everything that a learner needs to know of the inside of a chunk
happens here and nowhere else: discounting, early ends, who was active.

    tick          0      1      2      3          a world that ends at tick 1 of n = 4
    action       a_0    a_1     -      -          executed = [a_0, a_1, 0, 0], steps = 2
    reward       r_0    r_1                       reward   = r_0 + gamma r_1
    end                  x                        discount = gamma^2 if truncated, 0 if terminated
    obs after           next_obs | reset obs      next_obs is where a_1 led; obs is the first of the new episode
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import BurnishError
from .spec import EnvSpec, stacked_by_history
from .tree import check, map_tree, rows, to, where
from .types import Obs, Outcome, Saved, Step, VecEnv
from .wrapper import Wrapper


class DecisionEnv(Saved, Protocol):
    """``ChunkEnv``, ``BaseEnv``, or anything else that plays a decision and says what came of it."""

    num_envs: int
    device: torch.device
    spec: EnvSpec

    def reset(self, seeds: Sequence[int] | None = None) -> Obs: ...

    def step(self, action: Tensor, /) -> Outcome: ...


class Chunked(DecisionEnv, Protocol):
    """``ChunkEnv``, or a view of it that shows other observations."""

    execute: int


class ChunkEnv:
    """N worlds at decision time. ``gamma`` is the discount per *control tick*, whatever n is."""

    def __init__(self, env: VecEnv, execute: int, gamma: float) -> None:
        if execute < 1:
            raise BurnishError(f"execute={execute}: a decision needs at least one control tick")
        if not 0 <= gamma <= 1:
            raise BurnishError(f"gamma={gamma} must lie in [0, 1]; it discounts one control tick, not one chunk")
        self.env, self.execute, self.gamma = env, execute, gamma
        self.num_envs, self.device, self.spec = env.num_envs, env.device, env.spec

    def reset(self, seeds: Sequence[int] | None = None) -> Obs:
        return map_tree(torch.clone, self.env.reset(None, seeds))

    def step(self, chunk: Tensor) -> Outcome:
        """Play a chunk (N, n, A); worlds that end are reset once, after it."""
        check(chunk, f"{self.num_envs} {self.execute} {self.spec.action.dim}")
        active = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        reward = torch.zeros(self.num_envs, device=self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        terminated, truncated = torch.zeros_like(active), torch.zeros_like(active)
        executed, info = torch.zeros_like(chunk), {}
        intervened: Tensor | None = None
        next_obs: Obs = {}
        for tick in range(self.execute):
            step = self.env.step(chunk[:, tick], None if tick == 0 else active)
            # Rows of worlds that had ended before this tick are undefined; `where` keeps them out, even a NaN. The
            # first observation is copied: a world may answer in the same memory again and again.
            next_obs = map_tree(torch.clone, step.obs) if tick == 0 else where(active, step.obs, next_obs)
            reward = torch.where(active, reward + self.gamma**tick * step.reward, reward)
            taken = step.info.get("executed", chunk[:, tick])
            executed[:, tick] = torch.where(active[:, None], taken, executed[:, tick])
            info = _gathered(info, step.info, active)
            if "intervened" in step.info:
                intervened = torch.zeros_like(chunk[..., 0], dtype=torch.bool) if intervened is None else intervened
                intervened[:, tick] = active & step.info["intervened"]
            terminated |= active & step.terminated
            truncated |= active & step.truncated & ~step.terminated
            steps += active
            active = ~(terminated | truncated)
            if not bool(active.any()):
                break
        if intervened is not None:
            info["intervened"] = intervened
        ended = ~active
        obs = next_obs
        if bool(ended.any()):
            obs = where(ended, self.env.reset(mask=ended), next_obs)
        discount = (torch.pow(self.gamma, steps.double()) * ~terminated).to(reward)
        return Outcome(obs, next_obs, reward, discount, ended, terminated, steps, executed, info)

    def state_dict(self) -> dict[str, Any]:
        return Wrapper(self.env).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Wrapper(self.env).load_state_dict(state)


def _gathered(so_far: dict[str, Tensor], new: dict[str, Tensor], active: Tensor) -> dict[str, Tensor]:
    """Flags that were ever true, other facts as they were last seen; what is told of each tick is kept apart."""
    out = dict(so_far)
    for key, value in new.items():
        if key in ("executed", "intervened"):
            continue
        old = so_far.get(key, torch.zeros_like(value))
        if value.dtype == torch.bool:
            value = value | old
        elif key == "weight" and key in so_far:  # a decision is believed as far as its worst tick
            value = torch.minimum(value, old)
        elif key == "bonus":  # what its ticks earned, together
            value = value + old
        out[key] = torch.where(rows(active, value), value, old)
    return out


class HistoryEnv(Wrapper):
    """Stacks the last ``history`` sensed frames as (N, history, ...), oldest first, at control rate.

    The first frame of an episode fills the whole stack. Goals are not stacked.
    """

    def __init__(self, env: VecEnv, history: int) -> None:
        super().__init__(env)
        if history < 2:
            raise BurnishError(
                f"history={history}: a stack needs at least two frames; without one, leave HistoryEnv out"
            )
        self.history = history
        self.spec = replace(env.spec, obs=env.spec.obs.with_history(history))
        self._frames: Obs = {}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        obs = self.env.reset(mask, seeds)
        filled = {k: x.unsqueeze(1).expand(-1, self.history, *x.shape[1:]) for k, x in _sensed(obs).items()}
        if mask is None or not self._frames:
            self._frames = map_tree(torch.clone, filled)
        else:
            self._frames = where(mask, filled, self._frames)
        return {**obs, **self._frames}

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        moved = {k: torch.cat([self._frames[k][:, 1:], x.unsqueeze(1)], 1) for k, x in _sensed(step.obs).items()}
        self._frames = moved if active is None else where(active, moved, self._frames)
        return step._replace(obs={**step.obs, **self._frames})

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "frames": self._frames}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._frames = to(state["frames"], self.device)


def _sensed(obs: Obs) -> Obs:
    return {key: x for key, x in obs.items() if stacked_by_history(key)}
