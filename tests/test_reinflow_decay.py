"""ReinFlow's bound of the noise over a run: it holds, comes down as published, and resumes exactly."""

from __future__ import annotations

import copy
import math

import pytest

from burnish.finetune.actors.noisy_flow import NoiseConfig
from burnish.finetune.loops import OnPolicy, OnPolicyConfig, planned
from burnish.finetune.methods import reinflow
from burnish.finetune.methods.reinflow import ReinFlowConfig
from burnish.finetune.ppo import PPOConfig
from burnish.finetune.refinement import FinetuneConfig, refinement
from burnish.policies.build import build_policy
from burnish.policies.core.spec import agent_spec
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from scripted import TERMINATED, TRUNCATED, ScriptedWorld
from training_lab import run_on_policy


def world():
    return ScriptedWorld([[(3, TERMINATED), (5, TRUNCATED)]] * 4)


def base():
    net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[16], time_dim=8))
    return build_policy(FlowConfig(steps=2, net=net), agent_spec(world().spec, 2))


def small(**settings):
    ppo = PPOConfig(epochs=1, minibatch=32, clip=0.2, value=ValueConfig(hidden=[8]))
    return ReinFlowConfig(ppo=ppo, loop=OnPolicyConfig(8), **settings)


@pytest.mark.slow
def test_the_noise_decays_over_the_run_as_published_for_states_and_resumes():
    """Constant for 35 % of the updates, then half a cosine down to smin + 0.7 (smax - smin); hopper: 0.10 to 0.24."""
    steps = 20

    def bounds(settings, stop=None, state=None):
        env, learner = reinflow.build(settings, base(), world())
        loop = OnPolicy(learner, env, decisions_per_update=8)
        assert planned(loop, steps * 8 * env.num_envs) == steps
        if state is not None:
            loop.load_state_dict(copy.deepcopy(state))
        found = [float(loop.iterate()["noise/max_std"]) for _ in range(steps if stop is None else stop)]
        return found, loop.state_dict()

    config = small()
    found, _ = bounds(config)
    share = [min(max((i / steps - 0.35) / 0.65, 0), 1) for i in range(steps)]
    assert found == pytest.approx([0.1 + 0.14 * (0.85 + 0.15 * math.cos(math.pi * x)) for x in share], rel=1e-5)
    assert found[7] == pytest.approx(0.24) and found[8] < 0.2399 and found[-1] < 0.2
    first, state = bounds(config, stop=12)
    second, _ = bounds(config, stop=8, state=state)
    assert first + second == found
    kept, _ = bounds(small(noise=NoiseConfig(decay=0)))
    assert kept == pytest.approx([0.24] * steps)


def test_whoever_runs_the_loop_tells_how_long_it_is():
    env, learner = reinflow.build(small(), base(), world())
    run_on_policy(learner, env, decisions_per_update=8, total=2 * 8 * env.num_envs)
    assert learner.ppo.network.noise.decay == 2
    config = FinetuneConfig(method=small(), total=5 * 8 * 4, worlds=4)
    _, loop = refinement(config, base(), world())
    assert loop.learner.ppo.network.noise.decay == 5
