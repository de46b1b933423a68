"""Experts for the toy worlds: proportional control, the optimal gain, and one of two ways around an obstacle.

All are ``Controller``s that speak [-1, 1]. ``noise`` is the standard deviation of an error of the hand, in those units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...policies.core import tree
from ...policies.core.clock import Clock, Clocked
from ...policies.core.seed import normal
from ...policies.core.types import Obs
from ..point_reach import Order, PointReachConfig
from ..torch_world import linear
from ..toy import LQRConfig, lqr_solve
from ..two_mode import GOAL, TwoModeConfig


class FeedbackExpert(Clocked):
    """A fixed law from observation to action, with the errors of a hand. ``law`` gives (N, A) in [-1, 1] units."""

    def __init__(
        self,
        law: Callable[[Obs], Tensor],
        num_envs: int,
        *,
        noise: float = 0.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.law, self.noise = law, noise
        self._clock, self._state = Clock(num_envs, seed, device), {}

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        self._clock.begin(mask, seeds)

    def peek(self, obs: Obs) -> Tensor:
        return with_error(self.law(obs), self.noise, self._clock)

    def step(self, obs: Obs) -> Tensor:
        action = self.peek(obs)
        self._clock.advance()
        return action


def with_error(action: Tensor, noise: float, clock: Clock) -> Tensor:
    """The action with Gaussian noise of deviation ``noise`` of each world's own, clipped to [-1, 1]."""
    if noise > 0:
        drawn = normal(action.shape, clock.noise("expert"), device=action.device, dtype=action.dtype)
        action = action + noise * drawn
    return action.clamp(-1, 1)


def point_reach_law(config: PointReachConfig) -> Callable[[Obs], Tensor]:
    """Towards the goal, slowing down in the last decimetres; for accelerations with critical damping."""

    def law(obs: Obs) -> Tensor:
        state = obs["state"]
        goal = state[:, -config.dim :] if config.goal_in_state else obs["goal"]
        away = goal - state[:, : config.dim]
        if config.order is Order.velocity:
            return (5.0 * away).clamp(-1, 1)  # 1/s, and the limit is 1 m/s
        velocity = state[:, config.dim : 2 * config.dim]
        return (9.0 * away - 6.0 * velocity).clamp(-4, 4) / 4.0  # 1/s^2, 1/s, and the limit is 4 m/s^2

    return law


def lqr_law(config: LQRConfig, gamma: float = 0.99) -> Callable[[Obs], Tensor]:
    """u = -K x with the optimal gain."""
    _, gain = lqr_solve(config, gamma)

    def law(obs: Obs) -> Tensor:
        state = obs["state"]
        return -linear(gain.to(state), state) / config.limit

    return law


@dataclass
class TwoModeWay:
    """The way in which a demonstrator of TwoMode passes the obstacle."""

    upper_share: float = 0.5  # of the episodes pass above
    height_low: float = 0.56  # m, the height beside the obstacle is uniform between these
    height_high: float = 0.69
    speed: float = 0.8  # m/s along x
    climb: float = 0.95  # m/s along y at most
    noise: float = 0.0


class TwoModeExpert(FeedbackExpert):
    """Chooses its side and height per episode, climbs at once, keeps its height beside the obstacle, comes back."""

    def __init__(
        self,
        num_envs: int,
        way: TwoModeWay | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.way = way or TwoModeWay()
        self._clock = Clock(num_envs, seed, device)
        self._state = {"height": torch.zeros(num_envs, dtype=torch.float64, device=device)}

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        way = self.way
        mask = self._clock.begin(mask, seeds)
        side, share = self._clock.noise("two_mode_way").uniform((len(mask), 2)).unbind(-1)
        height = way.height_low + (way.height_high - way.height_low) * share
        height = torch.where(side < way.upper_share, height, -height)
        self._state = tree.where(mask, {"height": height}, self._state)

    def peek(self, obs: Obs) -> Tensor:
        way, (x, y) = self.way, obs["state"].unbind(-1)
        height = self._state["height"].to(x)
        # The height that still leaves room to descend to the goal; 8/s closes a gap in a few ticks.
        room = ((GOAL[0] - x) * way.climb / way.speed).clamp(min=0)
        target = height.sign() * torch.minimum(height.abs(), room)
        climb = (8.0 * (target - y)).clamp(-way.climb, way.climb)
        return with_error(torch.stack([torch.full_like(x, way.speed), climb], dim=-1), way.noise, self._clock)


Device = torch.device | str


def point_reach(
    config: PointReachConfig, num_envs: int, *, noise: float = 0.0, seed: int = 0, device: Device = "cpu"
) -> FeedbackExpert:
    """The expert of point_reach: proportional control of the point to its goal."""
    return FeedbackExpert(point_reach_law(config), num_envs, noise=noise, seed=seed, device=device)


def lqr(
    config: LQRConfig, num_envs: int, *, noise: float = 0.0, seed: int = 0, device: Device = "cpu"
) -> FeedbackExpert:
    """The expert of lqr: the optimal linear feedback."""
    return FeedbackExpert(lqr_law(config), num_envs, noise=noise, seed=seed, device=device)


def two_mode(
    config: TwoModeConfig, num_envs: int, *, noise: float = 0.0, seed: int = 0, device: Device = "cpu"
) -> TwoModeExpert:
    """The expert of two_mode: one of the two ways around the obstacle, drawn per episode."""
    return TwoModeExpert(num_envs, TwoModeWay(noise=noise), seed=seed, device=device)
