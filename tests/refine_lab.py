"""A line to walk along, and what the tests of off-policy refinement do with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from burnish.finetune.loops import Assembly, OffPolicy
from burnish.offline.replay import Replay
from burnish.policies.build import build_policy
from burnish.policies.controllers import controller_for
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.types import VecEnv
from burnish.policies.flow import FlowConfig
from burnish.policies.measure.evaluate import evaluate
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.runs.state_codec import encode
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


def flow_base() -> Any:
    """Its chunk is longer than what is executed of it."""
    net = DenoiserConfig(mlp=MlpBodyConfig([16]))
    return build_policy(FlowConfig(steps=2, net=net), replace(ON_LINE, horizon=4, start=1), seed=3)


def weights(module: Any) -> Tensor:
    return parameters_to_vector(module.parameters()).detach()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Two states are equal, bit for bit."""
    (shape, tensors), (other, others) = encode(a), encode(b)
    equal = all(torch.equal(x, others[key]) for key, x in tensors.items())
    return shape == other and tensors.keys() == others.keys() and equal


def run(loop: OffPolicy, decisions: int) -> dict[str, Any]:
    """The metrics of the last iteration, after so many decisions of all worlds together."""
    metrics: dict[str, Any] = {}
    for _ in range(decisions // loop.env.num_envs):
        metrics = loop.iterate()
    return metrics


def mean_return(policy: Any, episodes: int = 64) -> float:
    controller = controller_for(policy, episodes, seed=1)
    return evaluate(line(episodes), controller, list(range(episodes))).summary()["return_mean"]


def learnt(assembly: Assembly, config: Any, total: int, seed: int, prior: Replay | None = None) -> float:
    """The mean return of what is deployed after ``total`` decisions."""
    env = assembly.env
    replay = Replay(config.loop.capacity, env.num_envs, seed=seed)
    run_off_policy(assembly.learner, env, replay, config.loop, total=total, prior=prior, seed=seed)
    return mean_return(assembly.learner.policy)
