"""A controller at work in N worlds -> one episode per seed, whatever N is.

A world that ends is given the next seed at once, so no world waits for the slowest. An episode is a function of its
seed if the world and the controller are; the toy worlds and their experts are so bit for bit, a network up to the
rounding of its matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.scale import Scale
from ..policies.core.types import Controller, Obs, VecEnv
from ..policies.data.episodes import Episode, Episodes


def collect(
    env: VecEnv,
    controller: Controller,
    seeds: Sequence[int],
    *,
    progress: Callable[[int, int], None] | None = None,
    meta: dict[str, Any] | None = None,
) -> Episodes:
    """``env`` is the raw world, in actuator units, and ``controller`` speaks [-1, 1]. The action recorded is what was
    executed, in actuator units. ``progress(finished, total)`` is called after each tick in which an episode ended."""
    if len(seeds) == 0:
        raise BurnishError("collecting needs at least one seed")
    scale, tape = Scale(env.spec.action, env.device), _Tape(env)
    finished: dict[int, Episode] = {}  # by place in ``seeds``
    place = [-1] * env.num_envs  # the episode that each world works on, -1: none is left for it
    given = 0

    def assign(worlds: Sequence[int]) -> Obs:
        """The next seeds to these worlds; those for which none is left stay idle."""
        nonlocal given
        begins = torch.zeros(env.num_envs, dtype=torch.bool)
        for world in worlds:
            place[world] = given if given < len(seeds) else -1
            begins[world] = place[world] >= 0
            given += place[world] >= 0
        row_seeds = [seeds[p] if p >= 0 else 0 for p in place]
        begins = begins.to(env.device)
        obs = env.reset(begins, row_seeds)
        controller.reset(begins, row_seeds)
        tape.begin(begins, obs)
        return obs

    obs = assign(range(env.num_envs))
    while len(finished) < len(seeds):
        active = torch.tensor([p >= 0 for p in place], device=env.device)
        units = scale.to_actuator(controller.step(obs))
        step = env.step(units, active)
        tape.write(active, step.info.get("executed", units), step.reward, step.obs)
        obs = step.obs
        ended = (active & (step.terminated | step.truncated)).nonzero()[:, 0].tolist()
        for world in ended:
            finished[place[world]] = tape.episode(
                world,
                seed=int(seeds[place[world]]),
                terminated=bool(step.terminated[world]),
                truncated=bool(step.truncated[world]),
                success=bool(step.info["success"][world]) if "success" in step.info else False,
            )
        if ended:
            obs = assign(ended)
            if progress is not None:
                progress(len(finished), len(seeds))
    return Episodes([finished[i] for i in range(len(seeds))], env.spec, dict(meta or {}))


class _Tape:
    """The episodes under way, in host memory: one preallocated block per quantity, written for all worlds at once."""

    def __init__(self, env: VecEnv) -> None:
        n, limit = env.num_envs, env.spec.max_steps
        self._limit = limit
        self._tick = torch.zeros(n, dtype=torch.int64)
        self._action = torch.zeros(n, limit, env.spec.action.dim)
        self._reward = torch.zeros(n, limit)
        self._keys = list(env.spec.obs.shapes)
        self._obs: Obs = {}

    def begin(self, mask: Tensor, obs: Obs) -> None:
        mask = mask.cpu()
        self._tick[mask] = 0
        for key in self._keys:
            x = obs[key].cpu()
            if key not in self._obs:
                self._obs[key] = torch.zeros(x.shape[0], self._limit + 1, *x.shape[1:], dtype=x.dtype)
            self._obs[key][mask, 0] = x[mask]

    def write(self, active: Tensor, action: Tensor, reward: Tensor, obs: Obs) -> None:
        worlds = active.cpu().nonzero()[:, 0]
        tick = self._tick[worlds]
        if bool((tick >= self._limit).any()):
            raise BurnishError(f"the environment did not end an episode at its own max_steps={self._limit}")
        self._action[worlds, tick] = action.cpu()[worlds].float()
        self._reward[worlds, tick] = reward.cpu()[worlds].float()
        for key in self._keys:
            self._obs[key][worlds, tick + 1] = obs[key].cpu()[worlds]
        self._tick[worlds] += 1

    def episode(self, world: int, *, seed: int, terminated: bool, truncated: bool, success: bool) -> Episode:
        steps = int(self._tick[world])
        return Episode(
            obs={key: x[world, : steps + 1].clone() for key, x in self._obs.items()},
            action=self._action[world, :steps].clone(),
            reward=self._reward[world, :steps].clone(),
            terminated=terminated,
            truncated=truncated,
            success=success,
            seed=seed,
        )
