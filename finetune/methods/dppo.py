"""DPPO: PPO through the generation chain of a diffusion or flow policy.

Ren et al. 2024 (arXiv 2409.00588), section 4. Every trained step of the chain is a factor of the likelihood with a
ratio of its own. All factors of a decision share its advantage, discounted towards the noisy steps: weight_j =
gamma_denoising^(K' - 1 - j). The clip may grow from ``clip_base`` at the noisiest trained step to ``ppo.clip`` at the
last. ``bc_coef`` adds imitation of the frozen base: chains drawn from it shall stay likely.

The defaults are those of the published Gym experiments: a clip of 0.01 on the log-ratio per coordinate, which is 0.12
on the whole of a factor of 12 coordinates (`PPO.describe` says it), 40 worlds of 500 decisions, and 50 000 pairs of a
decision and a step per minibatch, which are 5000 rows here.

**Departures.** Those of `actors/denoising.py` and `ppo.py`, among them: truncations bootstrap, unexecuted coordinates
earn no credit, all factors of a row are in the same minibatch. A discount says what it counts: here, as published,
chunks. ``target_kl`` is off: the published 1 on a mean over coordinates never stopped anything, and asking costs a wait
for the device. The deployed policy uses the base's own sampler, without floor or ``eta``; neither of them is learnt or
annealed, which is why there is no entropy bonus. Rewards are discounted within a chunk too (published: only between).
For pixels ``ppo.image_shift=0.04`` shifts images once per update, as published; its clamp of advantages is
``ppo.advantage_quantiles``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount, Per
from ...policies.core.chunk import ChunkEnv
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution
from ...policies.core.ranges import check_ranges, require_usual
from ...policies.core.seed import Noise, derive
from ...policies.core.types import ChainPolicy, Obs, VecEnv
from ...policies.nets.critic import ValueConfig
from ...policies.nets.mlp import Activation
from ...policies.trainable import TrainableConfig
from ..actors.denoising import DenoisingActor, sampled_by_ddim
from ..diagnostics import distance_to_base, sampled
from ..feature_env import feature_view
from ..loops import Assembly, OnPolicyConfig
from ..ppo import PPO, PPOConfig
from ..sharded_actor import home
from ..surrogate import Reduction, clip_schedule, denoising_weight


def published_ppo() -> PPOConfig:
    """The PPO settings that DPPO was published with."""
    return PPOConfig(
        epochs=5,
        minibatch=5000,
        clip=0.01,
        reduction=Reduction.mean_dim,
        lr=1e-4,
        critic_lr=1e-3,
        scale_reward=True,
        value=ValueConfig(hidden=[256, 256, 256], activation=Activation.mish),
    )


@dataclass
class DPPOConfig:
    """Settings of DPPO: the trained steps of the chain, their noise and clipping, and the PPO."""

    trained_steps: int = 10  # K', the last steps of the chain
    gamma_denoising: float = 0.99  # discount of the advantage for each step before the last
    clip_base: float | None = None  # clip of the noisiest trained step; null: ppo.clip for all steps
    clip_growth: float = 3.0  # steepness with which the clip grows from step to step, with clip_base
    min_std: float = 0.1  # least deviation of every trained transition
    min_logprob_std: float | None = None  # another floor for the density; null: the same
    eta: float = 1.0  # share of the DDPM noise that a DDIM base injects while it is trained
    noise_clip: float | None = None  # limit of the noise that is drawn, in standard deviations; null: none
    density_clamp: list[float] | None = None  # limits of a coordinate's log-density
    bc_coef: float = 0.0  # weight of imitating the base's own draws
    train: TrainableConfig = field(default_factory=TrainableConfig, metadata=LATER)  # part of the base that is trained
    discount: Discount = field(default_factory=lambda: Discount(0.99, Per.chunk))  # discount of later rewards
    ppo: PPOConfig = field(default_factory=published_ppo)  # the PPO that updates it
    # amounts that are played, stored and learnt
    loop: OnPolicyConfig = field(default_factory=lambda: OnPolicyConfig(500))

    def __post_init__(self) -> None:
        positive = "clip_base clip_growth min_std min_logprob_std noise_clip"
        check_ranges(self, {"[1, inf); the last step of the chain is trained at least": "trained_steps"})
        check_ranges(self, {"[0, 1]": "gamma_denoising eta", "(0, inf)": positive, "[0, inf)": "bc_coef"})
        limits = self.density_clamp
        if limits is not None and (len(limits) != 2 or not limits[0] < limits[1]):
            raise BurnishError(f"density_clamp={limits} must be two numbers, the lower first, or null")
        if self.bc_coef > 0 and self.ppo.execution is Execution.cudagraph:
            raise BurnishError(
                f"bc_coef={self.bc_coef} draws fresh chains in every update, which ppo.execution=cudagraph cannot "
                "replay; use ppo.execution=eager or bc_coef=0"
            )


def imitation_loss(
    actor: DenoisingActor, base: ChainPolicy, source: Noise, obs: Obs, rows: dict[str, Any] | None = None
) -> Tensor:
    """(B,): minus the log-likelihood per coordinate, under the trained chain, of chains drawn from the frozen one."""
    trace = actor.draw(obs, generator=source, last=base).trace
    steps = torch.full((len(trace),), actor.spec.execute, device=trace.device)
    return -(actor.log_prob(obs, trace, steps) / actor.coordinates).mean(1)


def build(config: DPPOConfig, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu") -> Assembly:
    """``base`` is a chain policy: flow, or diffusion sampled by ddpm or ddim. It is left alone."""
    if not sampled_by_ddim(base):
        require_usual(config, DPPOConfig(), "eta", "unless the base is a diffusion that is sampled by ddim")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "lora"))
        actor = DenoisingActor(
            base,
            config.trained_steps,
            min_std=config.min_std,
            min_logprob_std=config.min_logprob_std,
            eta=config.eta,
            noise_clip=config.noise_clip,
            density_clamp=config.density_clamp,
            train=config.train,
        ).to(home(config, device))
    execute, count, top = base.spec.execute, config.trained_steps, config.ppo.clip
    view, observed = feature_view(ChunkEnv(env, execute, config.discount.per_step(execute)), base, config)
    learner = PPO(
        actor,
        actor.deployed(),
        config.ppo,
        num_envs=env.num_envs,
        observed=observed,
        weight=denoising_weight(count, config.gamma_denoising),
        clip=clip_schedule(count, config.clip_base or top, top, config.clip_growth),
        watch=lambda rows: {"base_distance": distance_to_base(learner.policy, actor.frozen, sampled(rows["obs"]))},
        seed=seed,
        device=device,
    )
    adopt_normalizers(learner.value, base)
    if config.bc_coef > 0:
        if learner.ranks.size > 1:
            raise BurnishError(
                f"method.bc_coef={config.bc_coef} draws chains in every update, which several ranks would draw "
                "otherwise than one process; take method.bc_coef=0, or start it without torchrun"
            )
        # The generator of the minibatches draws these chains too, because it is part of the learner's state.
        learner.auxiliary["bc"] = config.bc_coef, partial(imitation_loss, actor, actor.noisy_base(), learner.rows)
    return Assembly(view, learner)
