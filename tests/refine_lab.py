"""A line to walk along, and what the tests of off-policy refinement do with it."""

from __future__ import annotations

from typing import Any

from burnish.finetune.loops import Assembly
from burnish.offline.replay import Replay
from burnish.policies.controllers import controller_for
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.types import VecEnv
from burnish.policies.measure.evaluate import evaluate
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from negative_controls import NegativeControl
from training_lab import run_off_policy

EXECUTE = 2
ON_LINE = PolicySpec(ObsSpec({"state": (2,)}), ActionSpec((-1.0,), (1.0,)), EXECUTE, EXECUTE)
LINE = PointReachConfig(dim=1, goal_in_state=True, control_hz=5.0, max_steps=8)


def line(num_envs: int, *, seed: int = 0, negative_control: bool = False) -> VecEnv:
    env = ScaledEnv(make_env(LINE, num_envs, seed=seed))
    return NegativeControl(env, seed) if negative_control else env


def mean_return(policy: Any, episodes: int = 64) -> float:
    controller = controller_for(policy, episodes, seed=1)
    return evaluate(line(episodes), controller, list(range(episodes))).summary()["return_mean"]


def learnt(assembly: Assembly, config: Any, total: int, seed: int, prior: Replay | None = None) -> float:
    """The mean return of what is deployed after ``total`` decisions."""
    env = assembly.env
    replay = Replay(config.loop.capacity, env.num_envs, seed=seed)
    run_off_policy(assembly.learner, env, replay, config.loop, total=total, prior=prior, seed=seed)
    return mean_return(assembly.learner.policy)
