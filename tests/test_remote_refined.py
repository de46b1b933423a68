"""A served base is the base: refined with one seed, in process and over the wire, it comes to the same result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from aim_lab import Aim, aim_error
from burnish.finetune.loops import OffPolicyConfig
from burnish.finetune.methods.dsrl import build as build_dsrl
from burnish.finetune.methods.residual_td3 import ResidualTD3Config
from burnish.finetune.methods.residual_td3 import build as build_residual
from burnish.offline.td3 import TD3Config, deterministic_agent
from burnish.policies.core.scale import Scale
from burnish.policies.core.spec import ActionSpec
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.external.remote import RemoteConfig, RemotePolicy
from burnish.policies.nets.critic import CriticConfig
from latent_lab import dsrl, tanh_base
from latent_lab import learnt as learnt_latent
from openpi_lab import openpi
from refine_lab import ON_LINE, learnt, line, mean_return


def wrong_by_a_bit(state):
    """Comes to rest 0.4 m beside the goal. (..., 2) -> (..., 1)"""
    return np.clip(2.5 * (state[..., 1:] + 0.4 - state[..., :1]), -1, 1)


def small_residual():
    critic = CriticConfig(members=4, hidden=[64, 64])
    td3 = TD3Config(lr=1e-3, actor_lr=1e-3, tau=0.02, subset=2, actor_mean=True, actor_every=2, critic=critic)
    td3.explore_std, td3.delay_targets, td3.agent = 0.3, False, deterministic_agent(hidden=[32, 32], zero_last=True)
    loop = OffPolicyConfig(20_000, warmup=400, initial_updates=100, updates_per_decision=0.5, batch=64, n_step=3)
    return ResidualTD3Config(bound=1.0, warm_noise=1.0, loop=loop, td3=td3)


def corrected(seed):
    """The mean return of a correction, learnt on the base in process and on the same one served, with one seed. The
    server is a plain one, asked row by row, and its actuators have another scale than our actions."""
    limits, config = ActionSpec((-3.0,), (1.0,)), small_residual()
    to_units = Scale(limits).to_actuator

    def local(obs):
        return torch.as_tensor(wrong_by_a_bit(obs["state"].numpy()))[:, None].expand(-1, 2, -1)

    def at_a_distance(message):
        return to_units(torch.as_tensor(wrong_by_a_bit(message["state"]))).expand(2, 1).numpy()

    with openpi(at_a_distance) as server:
        served = RemotePolicy(RemoteConfig(server.url), replace(line(1).spec, action=limits), line(1).reset())
        bases = CallablePolicy(local, ON_LINE), served
        levels = [learnt(build_residual(config, x, line(16, seed=seed), seed=seed), config, 1500, seed) for x in bases]
        return *levels, *map(mean_return, bases)


def steered(seed):
    """The error of a base whose noise was chosen, in process and served; before learning it is 0.59."""
    limits = ActionSpec((-0.25,), (0.75,))
    to_units, config = Scale(limits).to_actuator, dsrl()

    def at_a_distance(message):
        noise = message.get("noise", np.zeros((2, 1), np.float32))
        return to_units(0.8 * torch.tanh(torch.tensor(noise))).numpy()

    with openpi(at_a_distance, {"extensions": ["noise", "batch"]}) as server:
        served = RemotePolicy(RemoteConfig(server.url), replace(Aim(1).spec, action=limits))
        assert served.spec.noise_shape == (2, 1)
        return [
            aim_error(learnt_latent(build_dsrl, config, x, seed=seed, iterations=60)) for x in (tanh_base(), served)
        ]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_served_base_is_corrected_to_the_same_result(seed):
    """Only the last bits of its actions differ, and training makes something of that. Recorded on 20 seeds: -1.147 to
    -1.092 from -2.745, the two of a seed at most 0.0075 apart."""
    local, served, before, before_served = corrected(seed)
    assert before_served == pytest.approx(before, abs=1e-4)
    assert min(local, served) > -1.3 > before + 1
    assert abs(local - served) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_served_base_is_steered_to_the_same_result(seed):
    """Recorded on 20 seeds: errors of 0.047 to 0.135 from 0.59, the two of a seed at most 0.0048 apart."""
    local, served = steered(seed)
    assert max(local, served) < 0.2
    assert abs(local - served) < 0.02
