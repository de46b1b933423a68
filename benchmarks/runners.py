"""Recordings of mixed quality of a running robot: what a policy did while it was learning to run.

A Gaussian learns by PPO from nothing; at each of `STAGES` as many episodes are recorded, with the spread that it
explores with. Imitating all of them together gives a base that runs, but not far and not the same way twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from burnish.finetune.build import prepare
from burnish.finetune.loops import OnPolicy, OnPolicyConfig
from burnish.finetune.methods.gaussian_ppo import GaussianPPOConfig
from burnish.finetune.ppo import PPOConfig
from burnish.offline.returns import Discount
from burnish.policies.controllers import ChunkController
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import derive
from burnish.policies.data.episodes import Episodes
from burnish.sim.build import make_env
from burnish.sim.collect import collect

WORLDS = 50
# Control steps. A robot with two legs learns to run later than one with one.
STAGES = {
    "hopper": (200_000, 400_000, 800_000, 1_600_000),
    "walker2d": (2_000_000, 3_000_000, 4_000_000, 5_000_000),
}
# Steps of imitation where those of the arm's tasks are too few: a fifth of the expert's return is the least of a base.
IMITATION = {"walker2d": 12_000}


def recordings(config: Any, stages: Sequence[int], episodes: int, seed: int) -> Episodes:
    """``episodes`` in all, in the order of the stages."""
    method = GaussianPPOConfig(
        discount=Discount(0.99),
        loop=OnPolicyConfig(64),
        ppo=PPOConfig(scale_reward=True, minibatch=320, epochs=10, target_kl=0.05),
    )
    loop = prepare(method, None, ScaledEnv(make_env(config, WORLDS, seed)), seed=seed)
    assert isinstance(loop, OnPolicy)
    found: list[Any] = []
    for stage in stages:
        while int(loop.statistics.ticks) < stage:
            loop.iterate()
        env = make_env(config, WORLDS)
        seeds = [derive(seed, "runners", stage, i) for i in range(episodes // len(stages))]
        found += collect(env, ChunkController(loop.learner.policy, WORLDS), seeds)
    return Episodes(found, env.spec, {})
