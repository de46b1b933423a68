"""ResiP: a small closed-loop correction of a frozen chunked policy, learnt by PPO.

Ankile et al. 2024, "From Imitation to Refinement" (arXiv 2407.16677). The base plays its chunks as ever; at every
control step a Gaussian network sees the state and the base's next action, with ``observe=[phase,queue]`` also where the
base is in its chunk and what is left of it, and what is executed is base + bound * correction. It starts at a mean of
exactly 0, so refinement starts at the base's own success. The likelihood is that of the unscaled correction, so the
bound does not change a ratio. With ``offset.half_life`` it moves an offset that lasts, which is for absolute targets
(`core/offset.py`).

**Departures.** The correction is clipped to [-1, 1] before it is scaled, so that the bound is one (published: soft, but
at a deviation of exp(-1) only 0.7 % of the draws reach it). Truncations bootstrap, from an observation with the base
action that would have followed; the queue of the base belongs to each world, and looking at it pops nothing.
Observations are scaled as the base scales them, without the clip at 3 deviations. The last layer keeps its bias, which
starts at 0 like its weights; the critic's last layer has the usual weights beside the published bias. Published are
1024 worlds of 700 steps that begin anew in each iteration, up to 50 epochs on all rows at once, and a critic rate of
5e-3 with a cosine; for some dozens of worlds the defaults here take 10 epochs of minibatches of 1024 and 1e-3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ...offline.critics import adopt_normalizers, saturation
from ...offline.returns import Discount
from ...offline.soft import ActionTransform
from ...policies.build import build_policy
from ...policies.controllers import controller_for
from ...policies.core.chunk import ChunkEnv
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.offset import OffsetConfig
from ...policies.core.ranges import check_ranges
from ...policies.core.spec import agent_spec, check_compatible
from ...policies.core.types import Metrics, VecEnv
from ...policies.core.views import Hidden, ResidualEnv
from ...policies.gaussian import GaussianConfig, GaussianPolicy
from ...policies.nets.critic import ValueConfig
from ...policies.nets.mlp import Activation
from ..diagnostics import distance, sampled
from ..feature_env import looked_at
from ..loops import Assembly, OnPolicyConfig
from ..ppo import PPO, Auxiliary, PPOConfig, Watch
from .residual_td3 import executed_by


def _agent() -> GaussianConfig:
    return GaussianConfig(hidden=[256, 256], activation=Activation.relu, init_std=math.exp(-1), zero_last=True)


def _ppo() -> PPOConfig:
    return PPOConfig(
        epochs=10,
        minibatch=1024,
        target_kl=0.1,
        value_coef=1.0,
        scale_reward=True,
        reward_clip=5.0,
        value=ValueConfig(activation=Activation.relu, bias=0.25),
    )


@dataclass
class ResidualPPOConfig:
    """Settings of residual PPO: the bound and price of the correction, its network, and the PPO."""

    bound: float = 0.1  # bound of the correction, in units of the action range [-1, 1]
    # facts about the base's chunk that are observed too: [phase,queue]
    observe: list[Hidden] = field(default_factory=list, metadata=LATER)
    # the agent sees the features of the base, a frozen vision-language model, instead of its pictures
    features: bool = field(default=False, metadata=LATER)
    # corrections that last, for absolute targets
    offset: OffsetConfig = field(default_factory=OffsetConfig, metadata=LATER)
    agent: GaussianConfig = field(default_factory=_agent)  # the network that corrects
    learn_std: bool = False  # the deviation of the exploration is learnt
    l1: float = 0.0  # price of the mean correction, per coordinate, before the bound scales it
    l2: float = 0.0  # price of the squared correction, in the same way
    ppo: PPOConfig = field(default_factory=_ppo)  # the PPO that updates it
    # amounts that are played, stored and learnt
    loop: OnPolicyConfig = field(default_factory=lambda: OnPolicyConfig(decisions_per_update=256))
    discount: Discount = field(default_factory=lambda: Discount(0.999))  # discount of later rewards

    def __post_init__(self) -> None:
        price = {"[0, inf); it is the price of a correction": "l1 l2"}
        check_ranges(self, {"(0, 2]; at 2 the correction can turn any action into any other": "bound", **price})


def penalty(actor: GaussianPolicy, power: int) -> Auxiliary:
    """(B,): mean |m|^power of the mean correction."""
    return lambda obs, rows: actor.law(obs).mean.abs().pow(power).mean((1, 2))


def watched(actor: GaussianPolicy, executed: ActionTransform) -> Watch:
    """The share of drawn corrections at their bound, and the distance of the deployed mean from the base."""

    @torch.no_grad()
    def watch(rows: dict[str, Any]) -> Metrics:
        obs = sampled(rows["obs"])
        played = executed(obs, actor.act(obs, greedy=True))
        far = distance(played, obs["base_action"][:, None])
        return {"saturation": saturation(rows["action"]), "base_distance": far}

    return watch


def build(
    config: ResidualPPOConfig, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Assembly:
    """``base`` is a policy, or a controller that is ready to drive the worlds of ``env``."""
    from ...policies.compose import Residual

    if hasattr(base, "peek"):
        controller, policy = base, getattr(base, "policy", None)
    elif hasattr(base, "act"):
        controller, policy = controller_for(base, env.num_envs, seed=seed, device=env.device), base
    else:
        raise BurnishError(
            f"method=residual_ppo corrects a base, but got {type(base).__name__}; give policy=checkpoint, anything "
            "that can act, or a controller; without a base use method=gaussian_ppo"
        )
    history = 1
    if policy is not None:
        check_compatible(policy.spec, env.spec)
        history = policy.spec.history
    env, unseen = looked_at(env, policy, config.features)
    corrected = ResidualEnv(env, controller, config.bound, config.observe, config.offset, unseen)
    view = ChunkEnv(corrected, 1, config.discount.per_step(1))
    actor = build_policy(config.agent, agent_spec(view.spec, 1, history), seed=seed, device=device)
    actor.raw_std.requires_grad_(config.learn_std)
    prices = {"l1": (config.l1, penalty(actor, 1)), "l2": (config.l2, penalty(actor, 2))}
    learner = PPO(
        actor,
        # A controller that has no policy to take along leaves the correction alone, which acts on the same view.
        actor if policy is None else Residual(policy, actor, config.bound, "step", config.offset),
        config.ppo,
        num_envs=env.num_envs,
        auxiliary={name: price for name, price in prices.items() if price[0] > 0},
        watch=watched(actor, executed_by(config.bound, corrected.offset)),
        seed=seed,
        device=device,
    )
    for module in (actor, learner.value):
        adopt_normalizers(module, policy)
    return Assembly(view, learner)
