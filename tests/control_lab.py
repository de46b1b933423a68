"""A small LQR for off-policy learners, scored between doing nothing (0) and the optimal gain (1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.offline.replay import Replay
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import PolicySpec, agent_spec
from burnish.policies.core.types import Obs
from burnish.sim.experts.toy import lqr_law
from burnish.sim.toy import LQR, LQRConfig
from negative_controls import NegativeControl

GAMMA = 0.95
# Two axes, because one gain of either sign is soon guessed. The optimal gain seldom asks for more than 4 m/s^2.
CONFIG = LQRConfig(axes=2, limit=4.0, max_steps=25)


def world(num_envs: int, seed: int = 0, *, negative_control: bool = False) -> ChunkEnv:
    env = ScaledEnv(LQR(num_envs, CONFIG, seed=seed))
    return ChunkEnv(NegativeControl(env, seed) if negative_control else env, 1, GAMMA)


def spec() -> PolicySpec:
    return agent_spec(world(1).spec)


@torch.no_grad()
def discounted_return(act: Callable[[Obs], Tensor], num_envs: int = 64) -> float:
    """Mean over one episode of each world, the same episodes at every call."""
    env = world(num_envs, seed=123)
    obs, total, factor = env.reset(), torch.zeros(num_envs), torch.ones(num_envs)
    for _ in range(CONFIG.max_steps):
        outcome = env.step(act(obs))
        total += factor * outcome.reward
        factor *= outcome.discount
        obs = outcome.obs
    return float(total.mean())


def score(policy: Any) -> float:
    law = lqr_law(CONFIG, GAMMA)
    nothing = discounted_return(lambda obs: torch.zeros(len(obs["state"]), 1, CONFIG.axes))
    best = discounted_return(lambda obs: law(obs)[:, None])
    found = discounted_return(lambda obs: policy.spec.executed(policy.act(obs, greedy=True)))
    return (found - nothing) / (best - nothing)


def train(learner: Any, decisions: int, seed: int, *, negative_control: bool = False, num_envs: int = 8) -> float:
    env = world(num_envs, seed, negative_control=negative_control)
    config = OffPolicyConfig(capacity=decisions, warmup=decisions // 4, updates_per_decision=1.0, batch=64)
    loop = OffPolicy(learner, env, Replay(decisions, num_envs, seed=seed), config, seed=seed)
    for _ in range(decisions // num_envs):
        loop.iterate()
    return score(learner.policy)
