"""DSRL: a frozen base is steered by choosing the noise that it starts from.

Wagenmaker et al. 2025 (arXiv 2506.15799). The base is a map a = f(s, w); reinforcement learning acts in w, within
+-``bound``, and needs nothing of the base but answers. ``variant=sac`` is SAC on w. ``variant=aliased`` is their
DSRL-NA: noises that lead to the same action share what is learnt about it (`dsrl_aliased.py`). The target entropy is 0,
not minus the dimension, which keeps the noise spread like the prior; the warm-up plays w ~ N(0, I), which is the base
itself. ``repeat`` chooses one vector for all rows of the noise, as was done for pi0.

The discount is .99 per decision of n ticks, in both variants, as published; square took .999. (dsrl_pi0 counts ticks,
``discount.per=step``, so that a decision is discounted by gamma^n.)

**Departures.** Truncations bootstrap, and a chunk's reward is discounted inside, by gamma^(1/n) per tick (the published
code sums it). ``updates_per_decision`` is per stored decision: the published 20 per step of 4 worlds is the 5 here.
The published shift of rewards is ``rewards.shift=-1`` of the run: of every control tick that was played, discounted so.
Published networks have three layers of up to 2048; ours, of the same shape, have 256, which a CPU can train; take
``sac.agent.hidden`` and ``sac.critic.hidden`` larger on a GPU. In the published aliased variant the bound has no effect
(the actor is bounded by the action space); here it has, in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount, Per
from ...offline.sac import SAC, SACConfig, soft_agent
from ...policies.compose import Steered
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution
from ...policies.core.graphed_policy import require_network
from ...policies.core.ranges import check_ranges, require_usual
from ...policies.core.types import Obs, VecEnv
from ...policies.nets.critic import CriticConfig
from ...policies.nets.mlp import Activation
from ..loops import Assembly, OffPolicyConfig
from .dsrl_aliased import AliasedLearner
from .latent import LatentLearner, as_the_base, latent_agent, latent_view, steerable


class Variant(Enum):
    """The learners of DSRL: SAC on the noise, or noise aliasing (DSRL-NA)."""

    sac = "sac"
    aliased = "aliased"


def latent_sac(**changes: Any) -> SACConfig:
    """SAC as it is used on noise: layer norm, tanh, and an entropy that stays near the prior's."""
    hidden, tanh = [256, 256, 256], Activation.tanh
    agent = soft_agent(hidden=hidden, activation=tanh, layer_norm=True)
    usual = SACConfig(target_entropy=0.0, agent=agent, critic=CriticConfig(hidden=hidden, activation=tanh))
    return replace(usual, **changes)


def latent_loop() -> OffPolicyConfig:
    """The off-policy loop that methods on the base's noise begin with: warm-up and ratio of updates."""
    return OffPolicyConfig(warmup=6000, updates_per_decision=5.0)


@dataclass
class DSRLConfig:
    """Settings of DSRL: the learner, the bound of the noise, and the SAC."""

    variant: Variant = Variant.sac  # sac: a critic of noise; aliased: a critic of actions, distilled into one of noise
    bound: float = 1.5  # bound of each coordinate of the noise
    repeat: bool = False  # one vector of noise for the whole chunk
    # the agent and its critics see the features of the base, a frozen vision-language model, instead of its pictures
    features: bool = field(default=False, metadata=LATER)
    distil_every: int = 2  # aliased: critic updates per step of the latent critic
    discount: Discount = field(default_factory=lambda: Discount(0.99, Per.chunk))  # discount of later rewards
    loop: OffPolicyConfig = field(default_factory=latent_loop)  # amounts that are played, stored and learnt
    sac: SACConfig = field(default_factory=latent_sac)  # the SAC of the agent and its critics, with both variants

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "bound", "[1, inf)": "distil_every"})
        if self.variant is Variant.sac:
            require_usual(self, DSRLConfig, "distil_every", "by variant=sac, which distils nothing", "")
        if self.variant is Variant.aliased and self.features:
            raise BurnishError(
                "variant=aliased asks its base in every update, and features=true keeps nothing that the base could "
                "read; use variant=sac, or leave features out"
            )


def build(
    config: DSRLConfig,
    base: Any,
    env: VecEnv,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    samples: Obs | None = None,
) -> Assembly:
    """``base`` is any policy that takes noise. With ``samples``, a few observations, it is probed first."""
    if config.variant is Variant.aliased and config.sac.execution is Execution.cudagraph:
        require_network(base)  # it is asked in every update
    base, found = steerable(base, "method=dsrl", config.repeat, samples, config.bound)
    gamma = config.discount.per_step(base.spec.execute)
    view = latent_view(base, env, gamma, latent=config.bound, features=config.features, seed=seed)
    agent = latent_agent(config.sac.agent, view, seed=seed, device=device)
    options: dict[str, Any] = {
        "policy": Steered(base, agent, config.bound),
        "warm": as_the_base(view, config.bound),
        "seed": seed,
        "device": device,
    }
    if config.variant is Variant.sac:
        learner: SAC | AliasedLearner = SAC(agent, config.sac, **options)
        adopt_normalizers(learner.critic, base)
    else:
        learner = AliasedLearner(agent, base, config.sac, config.bound, config.distil_every, **options)
    return Assembly(view, LatentLearner(learner, view, found))
