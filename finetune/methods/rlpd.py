"""RLPD: an off-policy agent with recordings in half of every batch, from scratch or from an imitating Gaussian; and
without recordings, SAC or TD3.

Ball et al. 2023 (RLPD, arXiv 2302.02948), algorithm 1: symmetric sampling, ten critics with layer norm, the minimum
over a random pair of them in the target, their mean for the actor, 20 critic updates per decision and one of the actor,
an entropy target of -|A| / 2. ``algorithm=td3`` puts the same recipe on TD3. With ``execute`` > 1 actor and critic deal
in chunks: the RLPD of Q-chunking, Li et al. 2025 (arXiv 2507.07969), whose n-step backup is unbiased. A
``GaussianPolicy`` as the base is where the actor starts, and what is played during the warm-up.

Recordings are optional. ``method=sac`` and ``method=td3`` are this method without what RLPD adds: two critics without
layer norm, one update per decision, SAC's entropy target of -|A|.

An actor from scratch begins without data that would say how observations lie. With ``normalize`` it scales them by the
mean and deviation of recordings, if there are any, and of all that it acted on: a coordinate in millimetres counts as
much as one in metres. Stored rows stay raw, so old and new decisions are scaled alike.

**Departures.** Every update draws its own rows, where the published code draws 20 batches at once and splits them: the
same distribution. The chunked variant's small weight of imitation (.01) is left out. Critics have two layers of 256,
and the target pays the entropy, as published for locomotion; antmaze and hands have three (``sac.critic.hidden``) and
``sac.backup_entropy=false``, antmaze ``sac.subset=1``. The spread of the actor stays above e^-5 (e^-20). The published
code, like SAC and TD3, takes observations as they are (``normalize=false``); an actor from a base sees them as its base
does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...offline.actor_critic import Algorithm
from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount
from ...offline.sac import SAC, SACConfig
from ...offline.td3 import TD3, TD3Config
from ...policies.build import build_policy
from ...policies.core.chunk import ChunkEnv
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.spec import agent_spec, check_compatible
from ...policies.core.types import Obs, VecEnv
from ...policies.gaussian import GaussianPolicy
from ...policies.nets.critic import CriticConfig
from ..loops import Assembly, OffPolicyConfig


def _sac() -> SACConfig:
    return SACConfig(entropy_per_dim=-0.5, subset=2, actor_mean=True, actor_every=20, critic=CriticConfig(members=10))


def _td3() -> TD3Config:
    return TD3Config(subset=2, actor_mean=True, actor_every=20, delay_targets=False, critic=CriticConfig(members=10))


@dataclass
class RLPDConfig:
    """Settings of RLPD: the learner, and the chunk and history of an actor from scratch."""

    algorithm: Algorithm = Algorithm.sac  # learner: sac or td3
    execute: int = 1  # actions per decision of an actor from scratch; a base brings its own, and its history
    history: int = 1  # observations that are stacked, the newest among them
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    # amounts that are played, stored and learnt
    loop: OffPolicyConfig = field(default_factory=lambda: OffPolicyConfig(warmup=5000, updates_per_decision=20))
    sac: SACConfig = field(default_factory=_sac)  # the SAC that learns, with algorithm=sac
    td3: TD3Config = field(default_factory=_td3)  # the TD3 that learns, with algorithm=td3
    # observations of an actor from scratch are scaled by all that it saw; one from a base scales as its base does
    normalize: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "execute history"})


def starting_from(base: Any) -> GaussianPolicy:
    """A copy of ``base`` that may be trained."""
    if not isinstance(base, GaussianPolicy) or not base.config.squash:
        raise BurnishError(
            f"rlpd starts from nothing or from a Gaussian policy with squash=true, not from a {type(base).__name__}; "
            "to refine another policy use expo, residual_td3 or dsrl"
        )
    agent = copy.deepcopy(base).train().requires_grad_(True)
    agent.raw_std.requires_grad_(not base.config.state_dependent_std)  # else the head learns the spread
    return agent


def build(
    config: RLPDConfig, base: GaussianPolicy | None, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Assembly:
    """Recordings come to the loop as its ``prior``, made by ``finetune.build.prior_data``."""
    chosen = config.sac if config.algorithm is Algorithm.sac else config.td3
    if base is None:
        spec = agent_spec(env.spec, config.execute, config.history)
        agent: GaussianPolicy = build_policy(chosen.agent, spec, seed=derive(seed, "agent"), device=device)
    else:
        agent = starting_from(base)
        check_compatible(agent.spec, env.spec)

    def drawn(obs: Obs, generator: torch.Generator) -> Tensor:
        """The warm-up of an agent from a base plays draws of the agent itself."""
        return agent.spec.executed(agent.draw(obs, generator=generator).action)

    options: dict[str, Any] = {"warm": None if base is None else drawn, "seed": seed, "device": device}
    options["normalize"] = config.normalize and base is None
    if config.algorithm is Algorithm.sac:
        learner: SAC | TD3 = SAC(agent, config.sac, **options)
    else:
        learner = TD3(agent, config.td3, **options)
    adopt_normalizers(learner.critic, base)
    execute = agent.spec.execute
    return Assembly(ChunkEnv(env, execute, config.discount.per_step(execute)), learner)
