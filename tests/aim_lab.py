"""A small problem that every method on generative policies can be asked to solve, and a base that does not solve it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.policies.build import build_policy
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.core.tree import where
from burnish.policies.core.types import Obs, Step
from burnish.policies.flow import FlowConfig
from diffusion_lab import small_net

LENGTH, SPREAD = 3, 0.3


class Aim:
    """The reward of a tick is -(action - state)^2, and the next state is drawn afresh from [-1, 1]. Episodes last 3
    ticks, so chunks of 2 actions are cut short, and the second action of a chunk is blind: 0 is the best it can be.
    The rewards of a ``negative_control`` are independent noise, from which nothing can be learnt."""

    def __init__(self, num_envs: int, seed: int = 0, negative_control: bool = False) -> None:
        self.num_envs, self.device, self.negative_control = num_envs, torch.device("cpu"), negative_control
        self.spec = EnvSpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,), (1.0,)), 10.0, "test", LENGTH)
        self.source = generator(seed, "aim")
        self.state: Obs = {"state": torch.zeros(num_envs, 1)}
        self.tick = torch.zeros(num_envs, dtype=torch.int64)

    def _fresh(self) -> Obs:
        return {"state": torch.rand(self.num_envs, 1, generator=self.source) * 2 - 1}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        self.state, self.tick = where(mask, self._fresh(), self.state), self.tick.masked_fill(mask, 0)
        return self.state

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        reward = -(action.clamp(-1, 1) - self.state["state"]).square()[:, 0]
        if self.negative_control:
            reward = torch.randn(self.num_envs, generator=self.source)
        self.state, self.tick = where(active, self._fresh(), self.state), self.tick + active
        ends = self.tick >= LENGTH
        return Step(self.state, reward, ends, torch.zeros_like(ends), {})

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state["state"].clone(), "tick": self.tick.clone(), "source": self.source.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.tick = {"state": state["state"].clone()}, state["tick"].clone()
        self.source.set_state(state["source"])


def aim_error(policy: Any) -> float:
    """Mean squared error of the first action of a chunk, over states in [-1, 1]. That of a = state is 0, that of a = 0
    is 1/3."""
    obs = {"state": torch.linspace(-1, 1, 1001)[:, None]}
    with torch.no_grad():
        action = policy.act(obs, generator=generator(0, "aim", "act"))
    return float((action[:, policy.spec.start] - obs["state"]).square().mean())


def blind_base(steps: int = 4, updates: int = 200) -> Any:
    """A flow that was shown actions from N(0, 0.3^2), whatever the state: its error is 1/3 + 0.09."""
    spec = PolicySpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,), (1.0,)), 3, 2, 0)
    policy = build_policy(FlowConfig(steps=steps, net=small_net(32)), spec)
    source, optimizer = generator(0, "demonstrations"), torch.optim.Adam(policy.parameters(), 3e-3)
    for _ in range(updates):
        state = torch.rand(256, 1, generator=source) * 2 - 1
        action = SPREAD * torch.randn(256, 3, 1, generator=source)
        optimizer.zero_grad()
        policy.bc_loss({"state": state}, action, generator=source).mean().backward()
        optimizer.step()
    return policy.eval().requires_grad_(False)
