"""A bounded correction of a frozen base at every control tick, learnt off-policy; the base may be a black box.

Ankile et al. 2025 (ResFiT, arXiv 2509.19301): TD3 on a residual, with the recipe of RLPD (Ball et al. 2023, arXiv
2302.02948): critics with layer norm whose losses are averaged, a minimum over them in the target, their mean for the
actor, several critic updates per actor update, half of each batch from recordings
(``offline.recorded.label_with_base``). The base plays its chunks open loop and is never differentiated; the agent sees
its action of the tick, and with ``observe=[phase,queue]`` where the base is in its chunk and what is left of it
(without them the problem is not quite Markov, `views.py`). It begins as a correction of exactly zero. ``algorithm=sac``
learns the same correction with SAC.

    executed = clip(base_action + bound * action, -1, 1)        the critic sees Q(obs, executed)

Where actions are absolute targets, ``offset.half_life`` lets corrections last (`core/offset.py`): then the action moves
an offset, which is observed, and which is added in its place.

One formula for what is played, what is valued and what the target is, clip included. Training begins with the base and
uniform noise around it, then with updates of the critic alone (``loop.initial_updates``).

There are two presets, and a setting that is given wins over both. ``method=residual_td3_cpu``, which is also
``method=residual_td3``, is for a CPU, which finishes 100,000 steps in minutes; ``method=residual_td3_published`` is
ResFiT's, which takes a GPU (days on a CPU):

                                                cpu              published
    hidden layers of actor and critics          256, 256         1024, 1024, the actor's with layer norm too
    critics; of which the target's minimum      2; both          10; a random pair
    learning rate of critics, of the actor      3e-4, 3e-4       1e-4, 1e-6 (sac: 1e-4)
    critic updates per step, per actor update   0.05, 2 (sac 1)  4, 4
    warm-up, then updates of the critic alone   4000, 1000       10,000, 10,000

**Departures.** The published agent explores, and smooths its targets, with noise in units of the action range that may
carry it beyond its bound; here noise is in units of the agent's action (the defaults are the published .05 and .3 at
bound .1) and the sum stays within the bound. Only the uniform noise of the warm-up, and recordings, may lie further
from the base than the agent can go. The agent looks through its own encoder instead of the critic's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...offline.actor_critic import Algorithm
from ...offline.critics import adopt_normalizers
from ...offline.learner import Wrapping
from ...offline.returns import Discount
from ...offline.sac import SAC, SACConfig, soft_agent
from ...offline.soft import ActionTransform, Warm
from ...offline.td3 import TD3, TD3Config, deterministic_agent
from ...policies.build import build_policy
from ...policies.compose import Residual
from ...policies.controllers import controller_for
from ...policies.core.chunk import ChunkEnv
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.offset import OFFSET, Offset, OffsetConfig
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.spec import agent_spec
from ...policies.core.types import Metrics, Obs, VecEnv
from ...policies.core.views import Hidden, ResidualEnv
from ...policies.gaussian import GaussianPolicy
from ...policies.nets.critic import CriticConfig
from ..diagnostics import distance
from ..feature_env import looked_at
from ..loops import Assembly, OffPolicyConfig


def _td3() -> TD3Config:
    return TD3Config(
        explore_std=0.5,
        target_std=0.5,
        target_clip=3.0,
        actor_mean=True,
        delay_targets=False,
        max_grad_norm=1.0,
        agent=deterministic_agent(zero_last=True),
        critic=CriticConfig(average=True),
    )


def _sac() -> SACConfig:
    return SACConfig(
        alpha=0.1,
        entropy_per_dim=-0.5,
        backup_entropy=False,
        actor_mean=True,
        max_grad_norm=1.0,
        agent=soft_agent(zero_last=True),
        critic=CriticConfig(average=True),
    )


@dataclass
class ResidualTD3Config:
    """Settings of off-policy residuals: the learner, the bound of the correction, and exploration."""

    algorithm: Algorithm = Algorithm.td3  # learner: sac or td3
    bound: float = 0.1  # bound of the correction, in units of the action range [-1, 1]
    warm_noise: float = 0.2  # bound of uniform noise around the base during the warm-up, in the same units
    # facts about the base's chunk that are observed too: [phase,queue]
    observe: list[Hidden] = field(default_factory=list, metadata=LATER)
    # the agent sees the features of the base, a frozen vision-language model, instead of its pictures
    features: bool = field(default=False, metadata=LATER)
    # corrections that last, for absolute targets
    offset: OffsetConfig = field(default_factory=OffsetConfig, metadata=LATER)
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    # amounts that are played, stored and learnt
    loop: OffPolicyConfig = field(
        default_factory=lambda: OffPolicyConfig(
            capacity=300_000, warmup=4000, initial_updates=1000, updates_per_decision=0.05, n_step=3
        )
    )
    td3: TD3Config = field(default_factory=_td3)  # the TD3 that learns, with algorithm=td3
    sac: SACConfig = field(default_factory=_sac)  # the SAC that learns, with algorithm=sac

    def __post_init__(self) -> None:
        warm = {"[0, inf); 0 warms up with the base alone": "warm_noise"}
        check_ranges(self, {"(0, 2]; it limits the correction, and 2 is the whole action range": "bound", **warm})


def executed_by(bound: float, offset: Offset | None) -> ActionTransform:
    """The executed action of a correction (B, 1, A), by the very operations of ``ResidualEnv``."""

    def executed(obs: Obs, action: Tensor) -> Tensor:
        action = offset.after(obs[OFFSET][:, None], action) if offset else action
        return (obs["base_action"][:, None] + bound * action).clamp(-1, 1)

    return executed


def around_base(noise: float, bound: float) -> Warm:
    """Corrections such that what is played is uniform within ``noise`` of the base; an offset wanders within its bound,
    and the faster the more ``noise``."""

    def play(obs: Obs, generator: torch.Generator) -> Tensor:
        base = obs["base_action"][:, None]
        u = torch.rand(base.shape, generator=generator, device=generator.device, dtype=base.dtype)
        return (2 * u - 1) * (noise / bound)

    return play


class ResidualLearner(Wrapping):
    """TD3 or SAC on the correction; it adds how far the refined policy is from its base."""

    def __init__(self, inner: TD3 | SAC) -> None:
        super().__init__(inner)
        self.agent, self.transform = inner.agent, inner.transform

    @torch.no_grad()
    def extra_metrics(self, batch: Mapping[str, Any], metrics: Mapping[str, Any]) -> Metrics:
        if "actor_loss" not in metrics:
            return {}
        obs = batch["obs"]
        played = self.transform(obs, self.agent.act(obs, greedy=True))
        return {"base_distance": distance(played, obs["base_action"][:, None])}


def build(
    config: ResidualTD3Config, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Assembly:
    """``base`` is any policy, or a controller that is ready to play (then what is saved is the correction alone, unless
    the controller names its ``policy``)."""
    if hasattr(base, "act"):
        policy: Any = base
        controller: Any = controller_for(base, env.num_envs, seed=derive(seed, "base"), device=env.device)
    elif hasattr(base, "peek"):
        policy, controller = getattr(base, "policy", None), base
    else:
        raise BurnishError(
            f"a residual corrects a policy or a controller, but the base is a {type(base).__name__}; "
            "wrap a function in CallablePolicy"
        )
    env, unseen = looked_at(env, policy, config.features)
    corrected = ResidualEnv(env, controller, config.bound, config.observe, config.offset, unseen)
    view = ChunkEnv(corrected, 1, config.discount.per_step(1))
    spec = agent_spec(view.spec, history=1 if policy is None else policy.spec.history)
    inner = config.td3 if config.algorithm is Algorithm.td3 else config.sac
    agent: GaussianPolicy = build_policy(inner.agent, spec, seed=derive(seed, "agent"), device=device)
    adopt_normalizers(agent, policy)
    deployed = agent if policy is None else Residual(policy, agent, config.bound, "step", config.offset)
    options: dict[str, Any] = {
        "policy": deployed,
        "transform": executed_by(config.bound, corrected.offset),
        "warm": around_base(config.warm_noise, config.bound),
        "seed": seed,
        "device": device,
    }
    # The updates at the end of the warm-up are for the critic: a correction that follows a fresh one runs astray.
    alone = max(inner.critic_warmup, config.loop.initial_updates)
    if config.algorithm is Algorithm.td3:
        learner: TD3 | SAC = TD3(agent, replace(config.td3, critic_warmup=alone), **options)
    else:
        learner = SAC(agent, replace(config.sac, critic_warmup=alone), **options)
    adopt_normalizers(learner.critic, policy)
    return Assembly(view, ResidualLearner(learner))
