"""PPO on a Gaussian policy: the control that every method for generative policies is compared with.

Schulman et al. 2017 (arXiv 1707.06347), on the chunks of a ``GaussianPolicy`` that was trained by imitation, or on a
fresh one. The entropy bonus is that of equation 9. With ``normalize`` a fresh one scales observations by the mean and
deviation of all rollouts so far, as most implementations do; a base keeps its own scaling.

**Departures.** The paper does not scale observations. Ours changes the scaling only between two updates, where the
usual wrapper changes it at every step: a likelihood is then evaluated under the scaling it was drawn with. Of a
squashed policy the entropy is that of the Gaussian before the tanh, which has a closed form; it pushes the spread
alike. The copy acts as the base does: by its mean if it was fitted by least squares, by draws otherwise, and by its
mean in either case when asked to be greedy. A base that acts by tokens (`policies/vla/bins.py`) has a density of its
own too: VLA-RL (Lu et al. 2025, arXiv 2505.18719) is this, with a temperature of 1.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount
from ...policies.build import build_policy
from ...policies.core.chunk import ChunkEnv
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges, require_usual
from ...policies.core.spec import agent_spec, check_compatible
from ...policies.core.types import Obs, VecEnv
from ...policies.gaussian import GaussianConfig, GaussianPolicy
from ...policies.trainable import TrainableConfig, shared, trainable
from ...policies.vla.bins import BinsPolicy, Factor
from ..diagnostics import distance_to_base, sampled
from ..loops import Assembly, OnPolicyConfig
from ..ppo import PPO, PPOConfig


@dataclass
class GaussianPPOConfig:
    """Settings of PPO on a Gaussian policy, fresh or given."""

    # network of a fresh policy
    agent: GaussianConfig = field(default_factory=lambda: GaussianConfig(hidden=[256, 256]))
    execute: int = 1  # actions per decision of a fresh policy; a base keeps its own
    std: float | None = None  # deviation at which the exploration of a base starts; null: the spread that it has
    # temperature at which a base of tokens is drawn from while it is trained; null: its own
    temperature: float | None = None
    factor: Factor = Factor.chunk  # tokens of such a base that share a likelihood ratio: chunk, or action
    entropy_coef: float = 0.0  # weight of the entropy bonus
    ppo: PPOConfig = field(default_factory=PPOConfig)  # the PPO that updates it
    loop: OnPolicyConfig = field(default_factory=OnPolicyConfig)  # amounts that are played, stored and learnt
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    normalize: bool = True  # observations of a fresh policy are scaled by all that it saw; a base keeps its own scaling

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf); a decision needs an action": "execute", "(0, inf)": "temperature"})
        spread = {"(0, inf); leave it out to keep the spread of the base": "std"}
        check_ranges(self, {"[0, inf); it rewards spread": "entropy_coef", **spread})


def entropy(actor: GaussianPolicy | BinsPolicy, obs: Obs) -> Tensor:
    """(B,): of the executed actions, before any squashing."""
    if isinstance(actor, BinsPolicy):
        shares = actor.log_shares(obs)
        return -actor.spec.executed((shares.exp() * shares).sum(-1)).sum((1, 2))
    law = actor.law(obs)
    each = torch.log(law.std.expand_as(law.mean)) + 0.5 * math.log(2 * math.pi * math.e)
    return actor.spec.executed(each).sum((1, 2))


def explore_from(actor: GaussianPolicy, std: float) -> None:
    """Widen or narrow a policy in place; its mean stays as it is."""
    if actor.config.state_dependent_std:
        raise BurnishError(f"std={std} cannot be set for a base whose spread depends on its state; leave std out")
    actor.config = replace(actor.config, init_std=std)
    torch.nn.init.zeros_(actor.raw_std)


def build(
    config: GaussianPPOConfig, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Assembly:
    """The PPO of a Gaussian policy, fresh where no base is given; another kind of base is refused."""
    tokens = isinstance(base, BinsPolicy)
    if base is None or tokens:
        require_usual(config, GaussianPPOConfig(), "std", "unless a Gaussian base is refined")
    if not tokens:
        require_usual(config, GaussianPPOConfig(), "temperature factor", "unless a base of tokens is refined")
    if base is None:
        actor = build_policy(config.agent, agent_spec(env.spec, config.execute), seed=seed, device=device)
    elif isinstance(base, GaussianPolicy):
        check_compatible(base.spec, env.spec)
        actor = trainable(base, TrainableConfig()).to(device).train(base.training)
        actor.raw_std.requires_grad_(not actor.config.state_dependent_std)  # else the head has a bias for it
        if config.std is not None:
            explore_from(actor, config.std)
    elif tokens:
        check_compatible(base.spec, env.spec)
        actor = trainable(base, TrainableConfig()).to(device)
        temperature = base.config.temperature if config.temperature is None else config.temperature
        actor.config = replace(base.config, temperature=temperature, factor=config.factor)
    else:
        raise BurnishError(
            f"method=gaussian_ppo trains a Gaussian policy, or a fresh one without a base, but the base is a "
            f"{type(base).__name__}; try method=residual_ppo or rpd with any base, dppo or reinflow with a chain"
        )
    execute = actor.spec.execute
    auxiliary = {}
    if config.entropy_coef > 0:
        auxiliary["entropy_loss"] = (config.entropy_coef, lambda obs, rows: -entropy(actor, obs))
    options: dict[str, Any] = {"normalize": config.normalize and base is None}
    policy = actor
    if base is not None:
        frozen = shared(base).to(device)
        if tokens:
            policy = shared(actor)
            policy.config = base.config  # deployed at its own temperature
        else:  # with the spread that exploration begins with
            frozen.config, frozen.raw_std = actor.config, torch.nn.Parameter(actor.raw_std.detach().clone())
        options["watch"] = lambda rows: {"base_distance": distance_to_base(policy, frozen, sampled(rows["obs"]))}
    learner = PPO(
        actor, policy, config.ppo, num_envs=env.num_envs, auxiliary=auxiliary, seed=seed, device=device, **options
    )
    adopt_normalizers(learner.value, actor)
    return Assembly(ChunkEnv(env, execute, config.discount.per_step(execute)), learner)
