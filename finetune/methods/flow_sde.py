"""Flow-SDE: PPO on a flow policy made stochastic by a noise in closed form, one random step per draw.

Chen et al. 2025 (pi_RL, arXiv 2510.25889); the defaults are theirs, but for the learning rate of the flow. Published is
5e-6, for a vision-language-action model (pi0 on LIBERO; 7.9e-6 elsewhere), with 1e-4 for its value head; a small policy
learns too slowly with that. After 15,000 decisions on ``insert`` (minibatches of 500), a base of .39 succeeded in .68
of 200 episodes with 5e-6, .86 with 5e-5 and .99 with 1.5e-4, one seed each. Default is 1e-4; take ``ppo.lr=5e-6`` for a
large model. Nothing is learnt but the flow, which is deployed as it is.

**Departures.** The value has a network of its own with its own optimiser; theirs is a head on features of the policy,
with the Huber loss. Terms of a likelihood: see ``actors/sde_flow.py``. The random step is drawn for each row; theirs
is one for all worlds. Their other noise, flow-CPS, is left out: its last step has none, and so no likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount, Per
from ...policies.core.chunk import ChunkEnv
from ...policies.core.config import LATER
from ...policies.core.seed import derive
from ...policies.core.spec import check_compatible
from ...policies.core.types import VecEnv
from ...policies.trainable import TrainableConfig, shared
from ..actors.sde_flow import SDEConfig, SDEFlowActor
from ..diagnostics import distance_to_base, sampled
from ..feature_env import feature_view
from ..loops import Assembly, OnPolicyConfig
from ..ppo import PPO, PPOConfig
from ..sharded_actor import home


def _ppo() -> PPOConfig:
    return PPOConfig(epochs=4, minibatch=2048, clip=0.2, lr=1e-4, critic_lr=1e-4, value_clip=0.2)


@dataclass
class FlowSDEConfig:
    """Settings of Flow-SDE: the noise of the generation, the trained part, and the PPO."""

    noise: SDEConfig = field(default_factory=SDEConfig)  # noise of the generation while it is trained
    train: TrainableConfig = field(default_factory=TrainableConfig, metadata=LATER)  # part of the base that is trained
    discount: Discount = field(default_factory=lambda: Discount(0.99, Per.chunk))  # discount of later rewards
    ppo: PPOConfig = field(default_factory=_ppo)  # the PPO that updates it
    loop: OnPolicyConfig = field(default_factory=OnPolicyConfig)  # amounts that are played, stored and learnt


def build(
    config: FlowSDEConfig, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Assembly:
    """The learner of Flow-SDE on a flow policy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "lora"))
        actor = SDEFlowActor(base, config.noise, config.train).to(home(config, device))
    check_compatible(actor.spec, env.spec)
    chunks = ChunkEnv(env, actor.spec.execute, config.discount.per_step(actor.spec.execute))
    view, observed = feature_view(chunks, base, config)
    frozen = shared(base).to(home(config, device))
    learner = PPO(
        actor,
        actor.flow,
        config.ppo,
        num_envs=env.num_envs,
        observed=observed,
        watch=lambda rows: {"base_distance": distance_to_base(actor.flow, frozen, sampled(rows["obs"]))},
        seed=seed,
        device=device,
    )
    adopt_normalizers(learner.value, base)
    return Assembly(view, learner)
