"""What the methods share that choose a base's noise: the view they learn on, their agent, and a prior that is the base.

``BaseEnv`` multiplies what an agent says by the bound, so an agent that says N(0, I) / bound plays the base exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..offline.critics import adopt_normalizers
from ..offline.soft import Warm
from ..policies.build import build_policy
from ..policies.compose import Repeated
from ..policies.core.chunk import ChunkEnv
from ..policies.core.errors import BurnishError
from ..policies.core.seed import derive
from ..policies.core.spec import agent_spec
from ..policies.core.types import Obs, Step, VecEnv
from ..policies.core.views import BaseEnv
from ..policies.core.wrapper import Wrapper
from ..policies.gaussian import GaussianConfig, GaussianPolicy
from .probe import require_noise, require_steerable


class RewardOffset(Wrapper):
    """Each control tick costs ``offset``: a sparse reward of 1 becomes -1 until success."""

    def __init__(self, env: VecEnv, offset: float) -> None:
        super().__init__(env)
        self.offset = offset

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        return step._replace(reward=step.reward - self.offset)


def steerable(base: Any, method: str, repeat: bool, samples: Obs | None, bound: float) -> Any:
    """The base as it will be steered, or a refusal. It is asked for ``samples`` alone, so not at all without them."""
    require_noise(base, method)
    base = Repeated(base) if repeat else base
    if samples is not None:
        require_steerable(base, samples, method=method, bound=bound)
    return base


def latent_view(
    base: Any,
    env: VecEnv,
    gamma: float,
    *,
    latent: float,
    residual: float | None = None,
    reward_offset: float = 0.0,
    seed: int = 0,
) -> BaseEnv:
    world = RewardOffset(env, reward_offset) if reward_offset else env
    chunked = ChunkEnv(world, base.spec.execute, gamma)
    return BaseEnv(chunked, base, latent=latent, residual=residual, seed=derive(seed, "base"))


def latent_agent(
    config: GaussianConfig, view: BaseEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> GaussianPolicy:
    spec = agent_spec(view.spec, history=view.base.spec.history)
    agent = build_policy(config, spec, seed=derive(seed, "agent"), device=device)
    adopt_normalizers(agent, view.base)
    return agent


def as_the_base(view: BaseEnv, bound: float) -> Warm:
    """The warm-up: noise from N(0, I) and no correction, which is exactly the base. Nothing is clipped: the replay
    holds, and the critic sees, actions beyond [-1, 1] that the agent itself cannot say."""

    def play(obs: Obs, generator: torch.Generator) -> Tensor:
        count = len(next(iter(obs.values())))
        out = torch.zeros(count, 1, view.action_dim, device=generator.device)
        w = torch.randn(count, view.latent_dim, generator=generator, device=generator.device)
        out[:, 0, : view.latent_dim] = w / bound
        return out

    return play


def require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise BurnishError(f"{name}={number} must be a positive number")
