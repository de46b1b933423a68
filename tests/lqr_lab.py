"""LQR as a place to learn: worlds, bases of known weakness, and what a policy costs beside the optimum."""

from __future__ import annotations

from typing import Any

import torch

from burnish.policies.controllers import controller_for
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.policies.external.policy import CallablePolicy
from burnish.sim.build import make_env
from burnish.sim.experts.toy import FeedbackExpert, lqr_law
from burnish.sim.toy import LQRConfig
from negative_controls import NegativeControl
from training_lab import run_on_policy

CONFIG = LQRConfig(limit=5.0, max_steps=20, noise=0.05)
GAMMA = 0.9


def worlds(count=32, seed=0):
    return ScaledEnv(make_env(CONFIG, count, seed=seed))


def weak(share, execute=1):
    """A base that applies ``share`` of the optimal gain, held for a whole chunk."""
    law = lqr_law(CONFIG, GAMMA)
    spec = agent_spec(worlds(1).spec, execute)
    return CallablePolicy(lambda obs: share * law(obs)[:, None].expand(-1, execute, -1), spec)


def cost(controller, count=256):
    """Mean discounted cost of a controller of ``count`` worlds, over episodes that are the same for all."""
    env, everyone = worlds(count), torch.ones(count, dtype=torch.bool)
    obs = env.reset(seeds=range(count))
    controller.reset(everyone, range(count))
    total = torch.zeros(count)
    for tick in range(60):  # 0.9^60 is 0.2 %
        with torch.no_grad():
            step = env.step(controller.step(obs))
        total, obs = total - GAMMA**tick * step.reward, step.obs
    return float(total.mean())


def excess(policy):
    """How many times the cost of the optimal gain this policy costs, played greedily; 1 is optimal."""
    best = FeedbackExpert(lqr_law(CONFIG, GAMMA), 256)
    return cost(controller_for(policy, 256, greedy=True)) / cost(best)


def assembled(method: Any, *arguments: Any, **options: Any) -> Any:
    """What the ``build`` of a method returns, open to tests that look into it."""
    return method.build(*arguments, **options)


def learnt(build, config, base, *, seed, updates, noise=False, count=32):
    world = NegativeControl(worlds(count, seed), seed) if noise else worlds(count, seed)
    env, learner = build(config, base, world, seed=seed)
    length = config.loop.decisions_per_update
    run_on_policy(learner, env, decisions_per_update=length, total=updates * length * count, seed=seed)
    return excess(learner.policy)
