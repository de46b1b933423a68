"""A controller at work in N worlds -> one episode per seed, whatever N is, as soon as it is there.

A world that ends is given the next seed at once, so no world waits for the slowest; episodes come in the order of the
seeds, and one that ends early waits for those before it. An episode is a function of its seed if the world and the
controller are; our worlds and their experts are so bit for bit, a network up to the rounding of its matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.scale import Scale, ScaledEnv
from ..policies.core.spec import ActionSpec
from ..policies.core.types import Controller, Obs, VecEnv
from ..policies.core.wrapper import instructions
from ..policies.data.episodes import Episode, Episodes
from ..policies.measure.checks import Replays


def collect(
    env: VecEnv,
    controller: Controller,
    seeds: Sequence[int],
    *,
    progress: Callable[[int, int], None] | None = None,
    meta: dict[str, Any] | None = None,
) -> Episodes:
    """All episodes, in memory; the arguments are those of ``stream``."""
    ticks = stream(env, controller, seeds, progress=progress)
    return Episodes([episode for ready in ticks for episode in ready], env.spec, dict(meta or {}))


def stream(
    env: VecEnv,
    controller: Controller,
    seeds: Sequence[int],
    *,
    progress: Callable[[int, int], None] | None = None,
    state: Callable[[], Mapping[str, Tensor]] | None = None,
    limits: ActionSpec | None = None,
) -> Iterator[list[Episode]]:
    """After each tick, the episodes that are next in the order of ``seeds``: often none.

    ``env`` is the raw world, in actuator units, and ``controller`` speaks [-1, 1]. The action recorded is what was
    executed, in actuator units. ``progress(finished, total)`` is called after each tick in which an episode ended.
    ``state`` is the ``state_dict`` of the world, if its rows are to be kept with every observation. ``limits`` are the
    actions that the controller's -1 and 1 stand for, if they are not those of the world.
    """
    if len(seeds) == 0:
        raise BurnishError("collecting needs at least one seed")
    bounds, tape = Scale(env.spec.action, env.device), _Tape(env, state)
    scale = ScaledEnv(env, limits).scale
    waiting: dict[int, Episode] = {}  # by place in ``seeds``: ended before an earlier one
    place = [-1] * env.num_envs  # the episode that each world works on, -1: none is left for it
    tasks = [""] * env.num_envs  # the instruction with which its episode began
    won = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)  # success in any tick, as evaluations count it
    given = finished = handed = 0
    again = Replays()

    def assign(worlds: Sequence[int], repeated: Sequence[int] = ()) -> Obs:
        """The next seeds to these worlds, or their own once more; those for which none is left stay idle."""
        nonlocal given
        begins = torch.zeros(env.num_envs, dtype=torch.bool)
        for world in worlds:
            if world not in repeated:
                place[world] = given if given < len(seeds) else -1
                given += place[world] >= 0
            begins[world] = place[world] >= 0
        row_seeds = [seeds[p] if p >= 0 else 0 for p in place]
        begins = begins.to(env.device)
        won[begins] = False
        obs = env.reset(begins, row_seeds)
        controller.reset(begins, row_seeds)
        tape.begin(begins, obs)
        texts = instructions(env) or tasks
        tasks[:] = [texts[world] if world in worlds else task for world, task in enumerate(tasks)]
        return obs

    obs = assign(range(env.num_envs))
    while handed < len(seeds):
        active = torch.tensor([p >= 0 for p in place], device=env.device)
        units = scale.to_actuator(controller.step(obs)).clamp(bounds.low, bounds.high)
        step = env.step(units, active)
        tape.write(active, step.info.get("executed", units), step.reward, step.obs)
        won |= active & step.info["success"] if "success" in step.info else won
        obs = step.obs
        ended = (active & (step.terminated | step.truncated)).nonzero()[:, 0].tolist()
        cut_off = [world for world in ended if "lost" in step.info and bool(step.info["lost"][world])]
        for world in cut_off:
            again.count(place[world], int(seeds[place[world]]))
        for world in set(ended) - set(cut_off):
            waiting[place[world]] = tape.episode(
                world,
                seed=int(seeds[place[world]]),
                terminated=bool(step.terminated[world]),
                truncated=bool(step.truncated[world]),
                success=bool(won[world]),
                task=tasks[world],
            )
        if ended:
            obs = assign(ended, cut_off)
            finished += len(ended) - len(cut_off)
            if progress is not None:
                progress(finished, len(seeds))
        ready = []
        while handed in waiting:
            ready.append(waiting.pop(handed))
            handed += 1
        yield ready
    again.tell()


class _Tape:
    """The episodes under way, in host memory: one preallocated block per quantity, written for all worlds at once."""

    def __init__(self, env: VecEnv, state: Callable[[], Mapping[str, Tensor]] | None) -> None:
        n, limit = env.num_envs, env.spec.max_steps
        self._worlds, self._limit, self._state = n, limit, state
        self._tick = torch.zeros(n, dtype=torch.int64)
        self._action = torch.zeros(n, limit, env.spec.action.dim)
        self._reward = torch.zeros(n, limit)
        self._keys = list(env.spec.obs.shapes)
        self._obs: Obs = {}
        self._states: dict[str, Tensor] = {}

    def begin(self, mask: Tensor, obs: Obs) -> None:
        mask = mask.cpu()
        self._tick[mask] = 0
        for block, now in self._after(obs):
            for key, x in now.items():
                if key not in block:
                    block[key] = torch.zeros(x.shape[0], self._limit + 1, *x.shape[1:], dtype=x.dtype)
                block[key][mask, 0] = x[mask]

    def write(self, active: Tensor, action: Tensor, reward: Tensor, obs: Obs) -> None:
        worlds = active.cpu().nonzero()[:, 0]
        tick = self._tick[worlds]
        if bool((tick >= self._limit).any()):
            raise BurnishError(f"the environment did not end an episode at its own max_steps={self._limit}")
        self._action[worlds, tick] = action.cpu()[worlds].float()
        self._reward[worlds, tick] = reward.cpu()[worlds].float()
        for block, now in self._after(obs):
            for key, x in now.items():
                block[key][worlds, tick + 1] = x[worlds]
        self._tick[worlds] += 1

    def episode(self, world: int, *, seed: int, terminated: bool, truncated: bool, success: bool, task: str) -> Episode:
        steps = int(self._tick[world])
        return Episode(
            obs={key: x[world, : steps + 1].clone() for key, x in self._obs.items()},
            action=self._action[world, :steps].clone(),
            reward=self._reward[world, :steps].clone(),
            terminated=terminated,
            truncated=truncated,
            success=success,
            seed=seed,
            task=task,
            sim_state={key: x[world, : steps + 1].clone() for key, x in self._states.items()} or None,
        )

    def _after(self, obs: Obs) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """(block, what belongs into it now) of the observations, and of the world's states if they are kept."""
        pairs = [(self._obs, {key: obs[key].cpu() for key in self._keys})]
        if self._state is not None:
            now = {key: x.cpu() if isinstance(x, Tensor) else x for key, x in self._state().items()}
            strange = [key for key, x in now.items() if not isinstance(x, Tensor) or x.shape[:1] != (self._worlds,)]
            if strange or not now:
                raise BurnishError(
                    f"the state of this world cannot be kept per episode, because {strange or 'it'} holds no row per "
                    "world; collect without sim_state"
                )
            if any(self._states[key].shape[2:] != x.shape[1:] for key, x in now.items() if key in self._states):
                raise BurnishError(
                    "the state of this world grows with time, so it cannot be kept; collect without sim_state"
                )
            pairs.append((self._states, now))
        return pairs
