"""PointReach: a point goes to a goal that is drawn per episode; many decisions per episode. In pure torch.

It keeps the promises of the closed-form worlds in `toy.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.errors import BurnishError
from ..policies.core.ranges import check_ranges
from ..policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ..policies.core.types import Obs, Step
from .torch_world import TorchWorld, distance, paint, pixel_distance


class Order(enum.Enum):
    """The quantity that an action commands. Names are lower case: configuration reads them by name."""

    velocity = "velocity"  # m/s; the state is the position
    acceleration = "acceleration"  # m/s^2; the state is position and velocity


class Reward(enum.Enum):
    """The rewards of point_reach."""

    distance = "distance"  # minus the distance to the goal in metres
    dense = "dense"  # in (0, 1], one half at 0.2 m from the goal
    sparse = "sparse"  # 1 at the goal, else 0


@dataclass
class PointReachConfig:
    """Settings of env=point_reach: dimension, kind of action, reward, observations and end."""

    dim: int = 2  # dimensions of the space
    order: Order = Order.velocity  # quantity that an action commands
    reward: Reward = Reward.distance  # reward that the world pays
    terminate: bool = True  # an episode ends at its goal
    goal_in_state: bool = False  # the goal is part of ``state``, and there is no key ``goal``
    image: bool = False  # adds ``image.top`` (3, 16, 16): the point in red, the goal in green
    radius: float = 0.08  # distance to the goal, in m, below which the point is at it
    noise: float = 0.0  # standard deviation of a disturbance of the action, in its units
    control_hz: float = 20.0  # control ticks per second
    max_steps: int = 60  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        check_ranges(
            self, {"[1, inf)": "dim max_steps", "(0, inf)": "radius control_hz", "[0, inf)": "noise"}, "point_reach."
        )
        if self.image and self.dim != 2:
            raise BurnishError(f"point_reach draws its image in a plane, but dim={self.dim}; use dim=2 or image=false")
        if self.reward is Reward.dense and self.terminate:
            raise BurnishError(
                "point_reach with reward=dense pays for every step, so with terminate=true it would teach the point to "
                "wait outside the goal; use terminate=false or reward=distance"
            )


class PointReach(TorchWorld[PointReachConfig]):
    """A point in the box [-1, 1]^dim (m) goes to a goal that is drawn per episode. Many decisions per episode."""

    Settings = PointReachConfig

    def _set_up(self) -> tuple[EnvSpec, dict[str, Tensor]]:
        config = self.config
        parts = 1 + (config.order is Order.acceleration) + config.goal_in_state
        shapes: dict[str, tuple[int, ...]] = {"state": (parts * config.dim,)}
        if not config.goal_in_state:
            shapes["goal"] = (config.dim,)
        if config.image:
            shapes["image.top"] = (3, 16, 16)
        self.limit = 1.0 if config.order is Order.velocity else 4.0
        action = ActionSpec((-self.limit,) * config.dim, (self.limit,) * config.dim)
        spec = EnvSpec(ObsSpec(shapes), action, config.control_hz, config.order.value, config.max_steps)
        zero = torch.zeros(self.num_envs, config.dim, device=self.device, dtype=self.dtype)
        return spec, {"position": zero, "velocity": zero, "goal": zero}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        drawn = self._clock.noise("reset").uniform((self.num_envs, 2, self.config.dim)).to(self.dtype) * 1.8 - 0.9
        fresh = {"position": drawn[:, 0], "velocity": torch.zeros_like(drawn[:, 0]), "goal": drawn[:, 1]}
        self._state = tree.where(mask, fresh, self._state)
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        config, old = self.config, self._state
        tree.check(action, f"{self.num_envs} {config.dim}")
        executed = action.to(self.dtype).clamp(-self.limit, self.limit)
        force = self._disturbed(executed, config.noise)
        dt = 1 / config.control_hz
        velocity = force if config.order is Order.velocity else old["velocity"] + dt * force
        position = (old["position"] + dt * velocity.clamp(-1, 1)).clamp(-1, 1)
        # The velocity that really happened, so that a wall or the speed limit stops the point.
        new = {"position": position, "velocity": (position - old["position"]) / dt, "goal": old["goal"]}
        active = self._clock.advance(active)
        self._state = tree.where(active, new, old)

        away = distance(position, old["goal"])
        success = away <= config.radius
        if config.reward is Reward.distance:
            reward = -away
        elif config.reward is Reward.dense:
            reward = 1 / (1 + (away / 0.2).square())
        else:
            reward = success.to(self.dtype)
        terminated = success & config.terminate
        truncated = (self._clock.tick >= config.max_steps) & ~terminated
        return Step(self._observe(), reward, terminated, truncated, {"success": success, "executed": executed})

    def _observe(self) -> Obs:
        state, config = self._state, self.config
        parts = [state["position"]]
        if config.order is Order.acceleration:
            parts.append(state["velocity"])
        if config.goal_in_state:
            parts.append(state["goal"])
        obs = {"state": torch.cat(parts, dim=-1)}
        if not config.goal_in_state:
            obs["goal"] = state["goal"]
        if config.image:
            # A cone of 0.3 m around each, so that its brightness tells the place to much less than a pixel.
            cones = [1 - pixel_distance(state[key], 16, 1.0) / 0.3 for key in ("position", "goal")]
            channels = torch.stack([*cones, torch.zeros_like(cones[0])], dim=1)
            obs["image.top"] = (255 * channels.clamp(0, 1)).to(torch.uint8)
        return obs

    def render(self, size: int = 128) -> Tensor:
        """(N, size, size, 3) uint8, on the world's device."""
        if self.config.dim != 2:
            raise BurnishError(f"point_reach can be drawn in a plane only, but dim={self.config.dim}")
        return self._drawn(self._state["position"], self._state["goal"], size)

    @property
    def pictures_of(self) -> Callable[[Obs], Tensor] | None:
        def drawn(obs: Obs) -> Tensor:
            state = obs["state"]
            return self._drawn(state[:, :2], state[:, -2:] if self.config.goal_in_state else obs["goal"], 128)

        return drawn if self.config.dim == 2 else None

    def _drawn(self, position: Tensor, goal: Tensor, size: int) -> Tensor:
        picture = torch.full((len(position), size, size, 3), 255, dtype=torch.uint8, device=position.device)
        around = pixel_distance(goal, size, 1.0) <= self.config.radius
        point = pixel_distance(position, size, 1.0) <= 0.04
        return paint(paint(picture, around, (120, 200, 120)), point, (200, 60, 40))
