"""Bases with closed forms, and small settings, for the tests of latent methods. Episodes of `Aim` are one decision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aim_lab import Aim
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.methods.dsrl import DSRLConfig, latent_sac
from burnish.offline.replay import Replay
from burnish.offline.sac import soft_agent
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.types import Obs
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.nets.critic import CriticConfig
from negative_controls import NegativeControl

SPEC = PolicySpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,), (1.0,)), 2, 2, noise_shape=(2, 1))
SMALL = {"agent": soft_agent(hidden=[32, 32]), "critic": CriticConfig(hidden=[32, 32]), "lr": 1e-2, "actor_lr": 1e-2}
LOOP = OffPolicyConfig(capacity=10_000, warmup=128, initial_updates=50, updates_per_decision=0.3, batch=64)


def tanh_base(scale: float = 0.8) -> CallablePolicy:
    """f(s, w) = scale * tanh(w), whatever the state: within +-bound it reaches +-scale * tanh(bound)."""
    return CallablePolicy(lambda obs, noise: scale * torch.tanh(noise), SPEC)


class Strict:
    """A server that counts its calls and rows, and refuses the same question twice."""

    def __init__(self) -> None:
        self.calls, self.rows = 0, 0
        self.asked: set[bytes] = set()

    def __call__(self, obs: Obs, noise: Tensor) -> Tensor:
        for row, z in zip(obs["state"], noise, strict=True):
            question = row.numpy().tobytes() + z.numpy().tobytes()
            assert question not in self.asked, "the base was asked the same twice"
            self.asked.add(question)
        self.calls, self.rows = self.calls + 1, self.rows + len(noise)
        return 0.8 * torch.tanh(noise)


def dsrl(**changes: Any) -> DSRLConfig:
    return DSRLConfig(**({"sac": latent_sac(**SMALL), "loop": LOOP} | changes))


def loop_of(assembly: Any, config: Any, seed: int = 0, prior: Replay | None = None) -> OffPolicy[Any]:
    replay = Replay(config.loop.capacity, assembly.env.num_envs, seed=seed)
    return OffPolicy(assembly.learner, assembly.env, replay, config.loop, prior=prior, seed=seed)


def learnt(build: Any, config: Any, base: Any, *, seed: int, iterations: int, noise: bool = False) -> Any:
    """What is deployed after so many decisions of 16 worlds."""
    world = NegativeControl(Aim(16, seed=seed), seed, 0.4) if noise else Aim(16, seed=seed)
    assembly = build(config, base, world, seed=seed)
    loop = loop_of(assembly, config, seed)
    for _ in range(iterations):
        loop.iterate()
    return assembly.learner.policy
