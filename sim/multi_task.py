"""Several worlds as one, each with its instruction: the seed of an episode says which of them it is played in.

    burnish collect env=multi_task 'env.tasks={put the cube on the stand: pick_place, stack the cubes: stack}'

Each row holds a world of every task, of which one is under way, so an episode is a function of its seed whatever row
plays it. All tasks must have the same observations and actions; what differs is what counts.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.clock import Clock
from ..policies.core.errors import BurnishError
from ..policies.core.types import Controller, Obs, Step
from ..policies.core.wrapper import Wrapper, continues, instructions, pictures
from ..policies.runs.stored_world import plain_world

MOST = 64  # tasks
USUAL = {"put the cube on the stand": "pick_place", "put the red cube on the blue one": "stack"}


@dataclass
class MultiTaskConfig:
    """Settings of env=multi_task: instruction -> the name of a world, or {name: ..., config: {...}}."""

    # the worlds by their instructions, two of the arm's by default; one that speaks itself keeps its own words
    tasks: Any = None

    def __post_init__(self) -> None:
        self.tasks = dict(USUAL if self.tasks is None else self.tasks)
        if not 1 <= len(self.tasks) <= MOST:
            raise BurnishError(f"multi_task needs 1 to {MOST} tasks, and {len(self.tasks)} are given")
        for text, world in self.tasks.items():
            name = world.get("name") if isinstance(world, Mapping) else world
            if not text or not isinstance(name, str) or name == "multi_task":
                raise BurnishError(f"multi_task needs one world for each instruction, but {text!r} has {world!r:.80}")
        plain_world({"tasks": self.tasks}, "env=multi_task")  # it is to be stored

    def worlds(self) -> dict[str, Any]:
        """Instruction -> the configuration of its world."""
        build = importlib.import_module(".build", __package__)  # whose table this world is in
        stored = {text: {"name": x} if isinstance(x, str) else x for text, x in self.tasks.items()}
        return {text: build.world_from(data) for text, data in stored.items()}


class MultiTask:
    """N rows, in each of which one of the tasks is under way."""

    def __init__(
        self, num_envs: int, config: MultiTaskConfig, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.num_envs, self.device = config, num_envs, torch.device(device)
        build = importlib.import_module(".build", __package__)
        self._texts = list(config.tasks)
        self.worlds: list[Any] = [build.make_env(x, num_envs, device=device) for x in config.worlds().values()]
        first = self.worlds[0].spec
        for text, world in zip(self._texts, self.worlds, strict=True):
            if replace(world.spec, max_steps=first.max_steps) != first:
                raise BurnishError(
                    f"the tasks {self._texts[0]!r} and {text!r} differ in more than what counts: {first} against "
                    f"{world.spec}; give both worlds the same observations, actions and rate"
                )
        self.spec = replace(first, max_steps=max(world.spec.max_steps for world in self.worlds))
        self.state_names, self.action_names = (
            getattr(self.worlds[0], name, None) for name in ("state_names", "action_names")
        )
        self._clock = Clock(num_envs, seed, device)
        self.task = torch.zeros(num_envs, dtype=torch.int64, device=self.device)  # the number of each row's task

    @property
    def continues(self) -> bool:
        """Whether a state holds the episodes under way: where that of every world does."""
        return all(continues(world) for world in self.worlds)

    @property
    def instructions(self) -> list[str]:
        each = [
            instructions(world) or [text] * self.num_envs for text, world in zip(self._texts, self.worlds, strict=True)
        ]
        return [each[k][row] for row, k in enumerate(self.task.tolist())]

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        share = self._clock.noise("task").uniform((self.num_envs, 1))[:, 0]
        self.task = torch.where(mask, (share * len(self.worlds)).long(), self.task)
        row_seeds = self._clock.seeds.tolist()
        return self._gathered([world.reset(mask & (self.task == k), row_seeds) for k, world in enumerate(self.worlds)])

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        ticking = self._clock.advance(active)
        steps = [world.step(action, ticking & (self.task == k)) for k, world in enumerate(self.worlds)]
        ends = [{"reward": x.reward, "terminated": x.terminated, "truncated": x.truncated} for x in steps]
        shared = set.intersection(*(set(x.info) for x in steps))
        info = self._gathered([{key: x.info[key] for key in sorted(shared)} for x in steps])
        return Step(self._gathered([x.obs for x in steps]), **self._gathered(ends), info=info)

    def render(self, size: int = 128, rows: Sequence[int] | None = None) -> Tensor:
        """(len(rows), size, size, 3) uint8, all rows by default."""
        chosen = list(range(self.num_envs) if rows is None else rows)
        return torch.cat([pictures(self.worlds[int(self.task[row])], [row], size) for row in chosen])

    def state_dict(self) -> dict[str, Any]:
        worlds = {str(k): Wrapper(world).state_dict() for k, world in enumerate(self.worlds)}
        return {**self._clock.state_dict(), "task": self.task.clone(), "worlds": worlds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self.task = state["task"].to(self.device, copy=True)
        for k, world in enumerate(self.worlds):
            Wrapper(world).load_state_dict(state["worlds"][str(k)])

    def _gathered(self, each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Of each row what the world of its task says."""
        found = dict(each[0])
        for k, one in enumerate(each[1:], 1):
            found = tree.where(self.task == k, one, found)
        return found


class MultiTaskExpert:
    """In each row the expert of its task."""

    def __init__(self, env: MultiTask, experts: Sequence[Controller]) -> None:
        self._env, self._experts = env, list(experts)

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        for k, expert in enumerate(self._experts):
            expert.reset(mask & (self._env.task == k).to(mask.device), seeds)

    def peek(self, obs: Obs) -> Tensor:
        return self._chosen([expert.peek(obs) for expert in self._experts])

    def step(self, obs: Obs) -> Tensor:
        return self._chosen([expert.step(obs) for expert in self._experts])

    def _chosen(self, actions: list[Tensor]) -> Tensor:
        return torch.stack(actions)[self._env.task, torch.arange(self._env.num_envs, device=self._env.device)]

    def state_dict(self) -> dict[str, Any]:
        return {str(k): expert.state_dict() for k, expert in enumerate(self._experts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for k, expert in enumerate(self._experts):
            expert.load_state_dict(state[str(k)])
