"""Worlds with answers known in closed form, in pure torch: LQR and ConstantReward.

Each is a ``VecEnv``: it never resets itself, rows outside ``mask`` or ``active`` keep their state bit for bit, and
world i is a function of its seed and its actions alone. A tick that reaches both an end and the time limit is
terminated, not truncated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.errors import BurnishError
from ..policies.core.ranges import check_ranges
from ..policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ..policies.core.types import Obs, Step
from .torch_world import TorchWorld, dot, linear


@dataclass
class LQRConfig:
    """A mass per axis, pushed by a force: position (m) and velocity (m/s) are the state, acceleration the action."""

    axes: int = 1  # independent axes
    position_cost: float = 1.0  # cost of the squared distance
    velocity_cost: float = 0.1  # cost of the squared velocity
    action_cost: float = 0.1  # cost of the squared action
    noise: float = 0.02  # standard deviation added to every coordinate of the state in every step
    # limit of the action, in m/s^2; so wide that the optimal gain does not reach it, as the closed form knows no limits
    limit: float = 20.0
    control_hz: float = 10.0  # control ticks per second
    max_steps: int = 100  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        positive, least_0 = "action_cost limit control_hz", "position_cost velocity_cost noise"
        check_ranges(self, {"[1, inf)": "axes max_steps", "(0, inf)": positive, "[0, inf)": least_0}, "lqr.")


class LQR(TorchWorld[LQRConfig]):
    """x' = A x + B u + noise, reward -(x' Q x + u' R u) at the x from which u was chosen; never terminates.

    Its value is known: ``solve`` gives P and K of the discounted Riccati equation, u = -K x is optimal, and ``value``
    includes what the noise costs.
    """

    Settings = LQRConfig

    def _set_up(self) -> tuple[EnvSpec, dict[str, Tensor]]:
        config = self.config
        action = ActionSpec((-config.limit,) * config.axes, (config.limit,) * config.axes)
        obs = ObsSpec({"state": (2 * config.axes,)})
        matrices = (m.to(device=self.device, dtype=self.dtype) for m in lqr_matrices(config))
        self._a, self._b, self._q, self._r = matrices
        x = torch.zeros(self.num_envs, 2 * config.axes, device=self.device, dtype=self.dtype)
        return EnvSpec(obs, action, config.control_hz, "acceleration", config.max_steps), {"x": x}

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
        new = self._disturbed(linear(self._a, x) + linear(self._b, u), self.config.noise)
        active = self._clock.advance(active)
        self._state = tree.where(active, {"x": new}, self._state)
        truncated = self._clock.tick >= self.config.max_steps
        return Step({"state": self._state["x"]}, reward, torch.zeros_like(truncated), truncated, {"executed": u})

    def known_dynamics(self, obs: Obs, action: Tensor) -> Obs:
        """Without the noise."""
        u = action.to(self.dtype).clamp(-self.config.limit, self.config.limit)
        return {"state": linear(self._a, obs["state"].to(self.dtype)) + linear(self._b, u)}

    def solve(self, gamma: float) -> tuple[Tensor, Tensor]:
        return lqr_solve(self.config, gamma)

    def value(self, state: Tensor, gamma: float) -> Tensor:
        """(B, 2 axes) -> (B,) float64: the discounted return of the optimal gain, over an infinite horizon."""
        p, _ = self.solve(gamma)
        state = state.to(device="cpu", dtype=torch.float64)
        return -dot(state, linear(p, state)) - gamma / (1 - gamma) * self.config.noise**2 * p.trace()


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
    """The ways in which an episode of constant reward ends, each with its value function V."""

    truncate = "truncate"  # V = 1 / (1 - gamma), everywhere
    terminate = "terminate"  # V = (1 - gamma^(max_steps - t)) / (1 - gamma)


@dataclass
class ConstantRewardConfig:
    """Settings of env=constant_reward: how episodes end and how long they are."""

    end: End = End.truncate  # way in which episodes end
    observe_time: bool = False  # adds t / max_steps to ``state``; without it every state looks the same
    control_hz: float = 10.0  # control ticks per second
    max_steps: int = 10  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "max_steps", "(0, inf)": "control_hz"}, "constant_reward.")


class ConstantReward(TorchWorld[ConstantRewardConfig]):
    """Reward 1 in every step, whatever the action: a critic that mistakes a truncation for an end is found out."""

    Settings = ConstantRewardConfig

    def _set_up(self) -> tuple[EnvSpec, dict[str, Tensor]]:
        config = self.config
        obs = ObsSpec({"state": (1 + config.observe_time,)})
        return EnvSpec(obs, ActionSpec((-1.0,), (1.0,)), config.control_hz, "none", config.max_steps), {}

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
