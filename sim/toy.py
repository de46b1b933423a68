"""Worlds with answers known in closed form, in pure torch: PointReach, LQR, ConstantReward.

Each is a ``VecEnv``: it never resets itself, rows outside ``mask`` or ``active`` keep their state bit for bit, and
world i is a function of its seed and its actions alone. ``dtype=torch.float64`` is for tests of formulae; policies need
float32. A tick that reaches both an end and the time limit is terminated, not truncated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.errors import BurnishError
from ..policies.core.seed import normal
from ..policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ..policies.core.types import Obs, Step
from .torch_world import Clock, distance, dot, linear, paint, pixel_distance, restored


class Order(enum.Enum):
    """What an action commands. Names are lower case: configuration reads them by name."""

    velocity = "velocity"  # m/s; the state is the position
    acceleration = "acceleration"  # m/s^2; the state is position and velocity


class Reward(enum.Enum):
    distance = "distance"  # minus the distance to the goal in metres
    dense = "dense"  # in (0, 1], one half at 0.2 m from the goal
    sparse = "sparse"  # 1 at the goal, else 0


@dataclass
class PointReachConfig:
    dim: int = 2
    order: Order = Order.velocity
    reward: Reward = Reward.distance
    terminate: bool = True  # an episode ends at its goal
    goal_in_state: bool = False  # the goal is part of ``state``, and there is no key ``goal``
    image: bool = False  # adds ``image.top`` (3, 16, 16): the point in red, the goal in green
    radius: float = 0.08  # m, closer than that is at the goal
    noise: float = 0.0  # standard deviation of a disturbance of the action, in its units
    control_hz: float = 20.0
    max_steps: int = 60

    def __post_init__(self) -> None:
        if self.dim < 1 or self.max_steps < 1 or self.radius <= 0 or self.noise < 0 or self.control_hz <= 0:
            raise BurnishError(
                "point_reach needs dim, max_steps, radius and control_hz above 0, and noise of at least 0"
            )
        if self.image and self.dim != 2:
            raise BurnishError(f"point_reach draws its image in a plane, but dim={self.dim}; use dim=2 or image=false")
        if self.reward is Reward.dense and self.terminate:
            raise BurnishError(
                "point_reach with reward=dense pays for every step, so with terminate=true it would teach the point to "
                "wait outside the goal; use terminate=false or reward=distance"
            )


class PointReach:
    """A point in the box [-1, 1]^dim (m) goes to a goal that is drawn per episode. Many decisions per episode."""

    def __init__(
        self,
        num_envs: int,
        config: PointReachConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config = config or PointReachConfig()
        self.num_envs, self.device, self.dtype = num_envs, torch.device(device), dtype
        parts = 1 + (config.order is Order.acceleration) + config.goal_in_state
        shapes: dict[str, tuple[int, ...]] = {"state": (parts * config.dim,)}
        if not config.goal_in_state:
            shapes["goal"] = (config.dim,)
        if config.image:
            shapes["image.top"] = (3, 16, 16)
        self.limit = 1.0 if config.order is Order.velocity else 4.0
        action = ActionSpec((-self.limit,) * config.dim, (self.limit,) * config.dim)
        self.spec = EnvSpec(ObsSpec(shapes), action, config.control_hz, config.order.value, config.max_steps)
        self._clock = Clock(num_envs, seed, device)
        zero = torch.zeros(num_envs, config.dim, device=self.device, dtype=dtype)
        self._state = {"position": zero, "velocity": zero, "goal": zero}

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
        force = executed
        if config.noise > 0:
            source = self._clock.noise("dynamics")
            force = force + config.noise * normal(force.shape, source, device=self.device, dtype=self.dtype)
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
        picture = torch.full((self.num_envs, size, size, 3), 255, dtype=torch.uint8, device=self.device)
        goal = pixel_distance(self._state["goal"], size, 1.0) <= self.config.radius
        point = pixel_distance(self._state["position"], size, 1.0) <= 0.04
        return paint(paint(picture, goal, (120, 200, 120)), point, (200, 60, 40))

    def state_dict(self) -> dict[str, Any]:
        return {**self._clock.state_dict(), **tree.map_tree(torch.clone, self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self._state = restored(self._state, state)


@dataclass
class LQRConfig:
    """A mass per axis, pushed by a force: position (m) and velocity (m/s) are the state, acceleration the action."""

    axes: int = 1
    position_cost: float = 1.0
    velocity_cost: float = 0.1
    action_cost: float = 0.1
    noise: float = 0.02  # standard deviation added to every coordinate of the state in every step
    limit: float = 20.0  # m/s^2; so wide that the optimal gain does not reach it, as the closed form knows no limits
    control_hz: float = 10.0
    max_steps: int = 100

    def __post_init__(self) -> None:
        if self.axes < 1 or self.max_steps < 1 or min(self.action_cost, self.limit, self.control_hz) <= 0:
            raise BurnishError("lqr needs axes, max_steps, action_cost, limit and control_hz above 0")
        if min(self.position_cost, self.velocity_cost, self.noise) < 0:
            raise BurnishError("lqr needs position_cost, velocity_cost and noise of at least 0")


class LQR:
    """x' = A x + B u + noise, reward -(x' Q x + u' R u) at the x from which u was chosen; never terminates.

    Its value is known: ``solve`` gives P and K of the discounted Riccati equation, u = -K x is optimal, and ``value``
    includes what the noise costs.
    """

    def __init__(
        self,
        num_envs: int,
        config: LQRConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config = config or LQRConfig()
        self.num_envs, self.device, self.dtype = num_envs, torch.device(device), dtype
        action = ActionSpec((-config.limit,) * config.axes, (config.limit,) * config.axes)
        obs = ObsSpec({"state": (2 * config.axes,)})
        self.spec = EnvSpec(obs, action, config.control_hz, "acceleration", config.max_steps)
        self._a, self._b, self._q, self._r = (m.to(device=self.device, dtype=dtype) for m in lqr_matrices(config))
        self._clock = Clock(num_envs, seed, device)
        self._state = {"x": torch.zeros(num_envs, 2 * config.axes, device=self.device, dtype=dtype)}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        drawn = self._clock.noise("reset").uniform(self._state["x"].shape).to(self.dtype) * 2 - 1
        self._state = tree.where(mask, {"x": drawn}, self._state)
        return {"state": self._state["x"]}

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        x = self._state["x"]
        tree.check(action, f"{self.num_envs} {self.config.axes}")
        u = action.to(self.dtype).clamp(-self.config.limit, self.config.limit)
        reward = -(dot(x, linear(self._q, x)) + dot(u, linear(self._r, u)))
        new = linear(self._a, x) + linear(self._b, u)
        if self.config.noise > 0:
            source = self._clock.noise("dynamics")
            new = new + self.config.noise * normal(x.shape, source, device=self.device, dtype=self.dtype)
        active = self._clock.advance(active)
        self._state = tree.where(active, {"x": new}, self._state)
        truncated = self._clock.tick >= self.config.max_steps
        return Step({"state": self._state["x"]}, reward, torch.zeros_like(truncated), truncated, {"executed": u})

    def solve(self, gamma: float) -> tuple[Tensor, Tensor]:
        return lqr_solve(self.config, gamma)

    def value(self, state: Tensor, gamma: float) -> Tensor:
        """(B, 2 axes) -> (B,) float64: the discounted return of the optimal gain, over an infinite horizon."""
        p, _ = self.solve(gamma)
        state = state.to(device="cpu", dtype=torch.float64)
        return -dot(state, linear(p, state)) - gamma / (1 - gamma) * self.config.noise**2 * p.trace()

    def state_dict(self) -> dict[str, Any]:
        return {**self._clock.state_dict(), **tree.map_tree(torch.clone, self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self._state = restored(self._state, state)


def lqr_matrices(config: LQRConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B, Q, R in float64; the state is all positions, then all velocities."""
    dt, eye = 1 / config.control_hz, torch.eye(config.axes, dtype=torch.float64)
    a = torch.kron(torch.tensor([[1.0, dt], [0.0, 1.0]], dtype=torch.float64), eye)
    b = torch.kron(torch.tensor([[dt * dt / 2], [dt]], dtype=torch.float64), eye)
    cost = torch.tensor([config.position_cost, config.velocity_cost], dtype=torch.float64)
    return a, b, torch.kron(torch.diag(cost), eye), config.action_cost * eye


def lqr_solve(config: LQRConfig, gamma: float) -> tuple[Tensor, Tensor]:
    """(P, K) in float64, by iterating P <- Q + gamma A' P (A - B K), K = gamma (R + gamma B' P B)^-1 B' P A."""
    if not 0 < gamma < 1:
        raise BurnishError(f"the discount must lie in (0, 1), got {gamma}")
    a, b, q, r = lqr_matrices(config)
    p = q
    for _ in range(10_000):
        k = torch.linalg.solve(r + gamma * b.T @ p @ b, gamma * b.T @ p @ a)
        updated = q + gamma * a.T @ p @ (a - b @ k)
        converged = bool((updated - p).abs().max() <= 1e-13 * updated.abs().max())
        p = updated
        if converged:
            return p, k
    raise BurnishError("the Riccati iteration did not converge; use a smaller discount or a larger position_cost")


class End(enum.Enum):
    truncate = "truncate"  # V = 1 / (1 - gamma), everywhere
    terminate = "terminate"  # V = (1 - gamma^(max_steps - t)) / (1 - gamma)


@dataclass
class ConstantRewardConfig:
    end: End = End.truncate
    observe_time: bool = False  # adds t / max_steps to ``state``; without it every state looks the same
    control_hz: float = 10.0
    max_steps: int = 10

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.control_hz <= 0:
            raise BurnishError("constant_reward needs max_steps and control_hz above 0")


class ConstantReward:
    """Reward 1 in every step, whatever the action: a critic that mistakes a truncation for an end is found out."""

    def __init__(
        self,
        num_envs: int,
        config: ConstantRewardConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config = config or ConstantRewardConfig()
        self.num_envs, self.device, self.dtype = num_envs, torch.device(device), dtype
        obs = ObsSpec({"state": (1 + config.observe_time,)})
        self.spec = EnvSpec(obs, ActionSpec((-1.0,), (1.0,)), config.control_hz, "none", config.max_steps)
        self._clock = Clock(num_envs, seed, device)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        self._clock.begin(mask, seeds)
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        tree.check(action, f"{self.num_envs} 1")
        self._clock.advance(active)
        last = self._clock.tick >= self.config.max_steps
        terminated = last & (self.config.end is End.terminate)
        reward = torch.ones(self.num_envs, device=self.device, dtype=self.dtype)
        executed = action.to(self.dtype).clamp(-1, 1)
        return Step(self._observe(), reward, terminated, last & ~terminated, {"executed": executed})

    def _observe(self) -> Obs:
        columns = [torch.ones(self.num_envs, device=self.device, dtype=self.dtype)]
        if self.config.observe_time:
            columns.append(self._clock.tick.to(self.dtype) / self.config.max_steps)
        return {"state": torch.stack(columns, dim=-1)}

    def state_dict(self) -> dict[str, Any]:
        return self._clock.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
