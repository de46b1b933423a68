"""A maze with a trap, for tests of searches: a point begins in a cup, and the goal lies behind its bottom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from burnish.finetune.build import prepare
from burnish.finetune.methods.serene import SereneConfig
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.core.types import Obs, Step
from burnish.policies.gaussian import GaussianConfig
from burnish.sim.torch_world import TorchWorld

# A cup, open below: the point begins inside it, and the goal is right above its bottom.
WALLS = torch.tensor([[0.2, 0.3, 0.28, 0.7], [0.72, 0.3, 0.8, 0.7], [0.2, 0.62, 0.8, 0.7]])
BEGIN, GOAL = (0.5, 0.45), (0.5, 0.8)
TRAP = 0.82  # score of the best place inside the cup: it ends 0.18 below the goal


@dataclass
class MazeConfig:
    max_steps: int = 40


class Maze(TorchWorld[MazeConfig]):
    """A point in the unit square, which sees where it is; its last tick pays 1 - the distance to the goal."""

    Settings = MazeConfig

    def _set_up(self) -> Any:
        spec = EnvSpec(ObsSpec({"state": (2,)}), ActionSpec((-0.05,) * 2, (0.05,) * 2), 10.0, "velocity", 40)
        return spec, {"x": torch.tensor(BEGIN).repeat(self.num_envs, 1)}

    def _observe(self) -> Obs:
        return {"state": 4 * self._state["x"] - 2}

    def reset(self, mask: Any = None, seeds: Any = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        self._state = {"x": torch.where(mask[:, None], torch.tensor(BEGIN), self._state["x"])}
        return self._observe()

    def step(self, action: Any, active: Any = None) -> Step:
        x, active = self._state["x"], self._clock.advance(active)
        for axis in range(2):  # it slides along walls
            moved = x.clone()
            moved[:, axis] = (x[:, axis] + action[:, axis].clamp(-0.05, 0.05)).clamp(0, 1)
            within = (moved[:, None] > WALLS[None, :, :2]) & (moved[:, None] < WALLS[None, :, 2:])
            x = torch.where(within.all(2).any(1)[:, None], x, moved)
        self._state = {"x": torch.where(active[:, None], x, self._state["x"])}
        late = self._clock.tick >= self.config.max_steps
        score = torch.where(late, 1 - (self._state["x"] - torch.tensor(GOAL)).norm(dim=1), 0.0)
        return Step(self._observe(), score, torch.zeros_like(late), late, {})


def maze(num_envs: int = 40) -> ScaledEnv:
    return ScaledEnv(Maze(num_envs))


class ShownMaze(Maze):
    """It shows a picture of where the point is too, of 10 x 10 numbers."""

    def _set_up(self) -> Any:
        spec, state = super()._set_up()
        return replace(spec, obs=ObsSpec({"picture": (100,), "state": (2,)})), state

    def _observe(self) -> Obs:
        return {"picture": picture(self._state["x"]), **super()._observe()}


def picture(place: torch.Tensor) -> torch.Tensor:
    """(N, 2) -> (N, 100): a spot where it is."""
    near = torch.exp(-(((place[:, :, None] - torch.linspace(0.05, 0.95, 10)) / 0.06) ** 2) / 2)
    return (near[:, 0, :, None] * near[:, 1, None]).flatten(1)


SMALL = SereneConfig(
    agent=GaussianConfig(hidden=[8], squash=True), rewarding=0.85, population=20, sigma=0.1, period=400
)


class Seen(ScaledEnv):
    """Where episodes ended, on a grid of 10 x 10."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.cells: set[tuple[int, int]] = set()

    def step(self, action: Any, active: Any = None) -> Step:
        step = super().step(action, active)
        place = ((step.obs["state"] + 2) / 4 * 9.999).long()
        self.cells |= {tuple(x) for x in place[step.truncated].tolist()}
        return step


def searched(config: SereneConfig, seed: int, episodes: int, world: type[Maze] = Maze) -> tuple[float, int]:
    """The best score, and how many cells episodes ended in."""
    env = Seen(world(40))
    loop: Any = prepare(config, None, env, seed=seed)
    for _ in range(episodes // 40):
        loop.iterate()
    return loop.best, len(env.cells)
