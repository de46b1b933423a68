"""TwoMode: a point passes a round obstacle above or below, and the mean of the demonstrations goes straight into it.

The state is the position alone and tells the mode only after the first moves, so a policy must choose by its own noise.
A least-squares policy answers with the mean of both ways: it heads for the obstacle, and by the time its drift off the
centre line has grown it is too near to get around. A policy that makes one clean choice passes with room to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.errors import BurnishError
from ..policies.core.ranges import check_ranges
from ..policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ..policies.core.types import Obs, Step
from .torch_world import TorchWorld, distance, paint, pixel_distance

# Geometry in metres, x to the right; the obstacle stands at the origin.
START = (-0.76, 0.0)  # near enough that a late choice of side is too late
GOAL = (0.8, 0.0)
HALF_LENGTH = 1.0
EXTENT = 1.1  # of the picture

UNDECIDED, LOWER, UPPER = -1, 0, 1


@dataclass
class TwoModeConfig:
    """Settings of env=two_mode: the obstacle, the corridor, the starts and the disturbance."""

    obstacle_radius: float = 0.42  # radius of the obstacle, in m
    goal_radius: float = 0.2  # radius of the goal, in m
    half_width: float = 0.9  # half the width of the corridor, in m
    # Episodes differ by the disturbance, not by their start: a network can learn by heart which of 400 different
    # starts went up, and then even the mean has a side.
    start_spread: float = 0.0  # m, half the range of the start's y
    start_length: float = 0.0  # half the range of the start's x, in m
    noise: float = 0.05  # m/s, standard deviation of a disturbance of the velocity
    control_hz: float = 20.0  # control ticks per second
    max_steps: int = 60  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        positive, least_0 = "obstacle_radius goal_radius control_hz", "start_spread start_length noise"
        check_ranges(self, {"(0, inf)": positive, "[1, inf)": "max_steps", "[0, inf)": least_0}, "two_mode.")
        if self.obstacle_radius + self.start_length >= -START[0] or self.obstacle_radius >= self.half_width:
            raise BurnishError(
                f"two_mode with obstacle_radius={self.obstacle_radius} leaves no room to pass; "
                f"keep it under half_width={self.half_width} and off the start at x={START[0]}"
            )


class TwoMode(TorchWorld[TwoModeConfig]):
    """The reward is 1 at the goal and 0 elsewhere; the obstacle and the walls end an episode without it."""

    Settings = TwoModeConfig

    def _set_up(self) -> tuple[EnvSpec, dict[str, Tensor]]:
        config = self.config
        action = ActionSpec((-1.0, -1.0), (1.0, 1.0))
        spec = EnvSpec(ObsSpec({"state": (2,)}), action, config.control_hz, "velocity", config.max_steps)
        spread = (config.start_length, config.start_spread)
        self._start, self._goal, self._spread = (
            torch.tensor(p, device=self.device, dtype=self.dtype) for p in (START, GOAL, spread)
        )
        mode = torch.full((self.num_envs,), UNDECIDED, device=self.device)
        return spec, {"position": self._start.repeat(self.num_envs, 1), "mode": mode}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        drawn = self._clock.noise("reset").uniform((self.num_envs, 2)).to(self.dtype) * 2 - 1
        fresh = {
            "position": self._start + self._spread * drawn,
            "mode": torch.full_like(self._state["mode"], UNDECIDED),
        }
        self._state = tree.where(mask, fresh, self._state)
        return {"state": self._state["position"]}

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        config, old = self.config, self._state
        tree.check(action, f"{self.num_envs} 2")
        executed = action.to(self.dtype).clamp(-1, 1)
        position = old["position"] + self._disturbed(executed, config.noise) / config.control_hz
        x, y = position.unbind(-1)
        passed = (old["mode"] == UNDECIDED) & (x >= 0)
        mode = torch.where(passed, torch.where(y > 0, UPPER, LOWER), old["mode"])
        active = self._clock.advance(active)
        self._state = tree.where(active, {"position": position, "mode": mode}, old)

        crashed = distance(position, torch.zeros_like(self._goal)) <= config.obstacle_radius
        left = (x.abs() >= HALF_LENGTH) | (y.abs() >= config.half_width)
        success = (distance(position, self._goal) <= config.goal_radius) & ~crashed & ~left
        terminated = success | crashed | left
        truncated = (self._clock.tick >= config.max_steps) & ~terminated
        info = {"success": success, "mode": mode, "executed": executed}
        return Step({"state": self._state["position"]}, success.to(self.dtype), terminated, truncated, info)

    def render(self, size: int = 128) -> Tensor:
        """(N, size, size, 3) uint8, on the world's device."""
        place = self._state["position"]
        picture = torch.full((self.num_envs, size, size, 3), 255, dtype=torch.uint8, device=self.device)
        obstacle = pixel_distance(torch.zeros_like(place), size, EXTENT)
        line = ((torch.arange(size, device=self.device, dtype=self.dtype) + 0.5) * (2 / size) - 1).abs() * EXTENT
        wall = (line[:, None] >= self.config.half_width) | (line[None, :] >= HALF_LENGTH)
        picture = paint(picture, wall.expand(self.num_envs, -1, -1), (200, 200, 200))
        goal = pixel_distance(self._goal.expand_as(place), size, EXTENT) <= self.config.goal_radius
        picture = paint(picture, goal, (120, 200, 120))
        picture = paint(picture, obstacle <= self.config.obstacle_radius, (70, 70, 70))
        return paint(picture, pixel_distance(place, size, EXTENT) <= 0.04, (200, 60, 40))
