"""ReinFlow: PPO on a flow policy with learned noise; also pi_RL's Flow-Noise, which is the same with other numbers.

Zhang et al. 2025 (ReinFlow, arXiv 2505.22094), algorithm 1; the defaults are those of its tasks hopper and walker, but
for the departures below. The chain of Euler steps is one draw with one joint likelihood, an entropy bonus keeps the
noise up, and optionally the deployed actions are held near those of the base from the same noise. The upper bound of
the noise stays for 35 % of the run's updates, then follows half a cosine down to 70 % of its way above the lower one
(``noise.decay``, ``hold``, ``floor``). For Flow-Noise (Chen et al. 2025, arXiv 2510.25889) set ``noise.min_std=0.08
noise.max_std=0.16 noise.hidden=[128,64] noise.decay=0 entropy=0.005 ppo.clip=0.2 ppo.epochs=4
ppo.reduction=mean_step``: it averages over transitions only, so that with ReinFlow's reduction 0.2 would be no clip.

**Departures.** The published regulariser compares trained and frozen actions from the noise 0; here from the noise x_0
that the draw itself began with, which is N(0, I). Minibatches are a tenth of the published 50 000 because rows are not
repeated tenfold: as many gradient steps per iteration, a tenth of the work. The learning rate follows one half cosine
instead of restarting every 100 iterations, and its limit on the divergence (1.0 of the averaged log-ratio, which is not
reached) is left out; for pixels it is ``ppo.target_kl=0.01``, with ``noise.time_dim=0 noise.decay=0``. The averaged
log-density is not clamped to [-1, 1]: where that acted, it would silence the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...offline.critics import adopt_normalizers
from ...offline.learner import Wrapping
from ...offline.returns import Discount, Per
from ...policies.chain import sample_chain
from ...policies.core.chunk import ChunkEnv
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.spec import check_compatible
from ...policies.core.types import Metrics, Obs, Source, VecEnv
from ...policies.flow import FlowPolicy
from ...policies.nets.critic import ValueConfig
from ...policies.nets.mlp import Activation
from ...policies.trainable import TrainableConfig, shared
from ..actors.noisy_flow import NoiseConfig, NoiseNet, NoisyFlowActor
from ..diagnostics import distance_to_base, sampled
from ..feature_env import feature_view
from ..loops import Assembly, OnPolicyConfig
from ..ppo import PPO, Auxiliary, PPOConfig
from ..sharded_actor import divides, home
from ..surrogate import Reduction


def _ppo() -> PPOConfig:
    return PPOConfig(
        epochs=5,
        minibatch=5000,
        clip=0.01,
        reduction=Reduction.mean_dim_and_step,
        lr=4.5e-5,
        critic_lr=6.5e-4,
        lr_decay=100,
        min_lr_ratio=0.45,
        critic_weight_decay=1e-5,
        scale_reward=True,
        value=ValueConfig(hidden=[256, 256, 256], activation=Activation.mish),
    )


@dataclass
class ReinFlowConfig:
    """Settings of ReinFlow: the learned noise, entropy, anchor to the base, and the PPO."""

    noise: NoiseConfig = field(default_factory=NoiseConfig)  # noise of the generation while it is trained
    entropy: float = 0.03  # weight of the entropy per term of the likelihood
    anchor: float = 0.0  # weight of the squared distance to the base's actions from the same noise
    train: TrainableConfig = field(default_factory=TrainableConfig, metadata=LATER)  # part of the base that is trained
    discount: Discount = field(default_factory=lambda: Discount(0.99, Per.chunk))  # discount of later rewards
    ppo: PPOConfig = field(default_factory=_ppo)  # the PPO that updates it
    # amounts that are played, stored and learnt
    loop: OnPolicyConfig = field(default_factory=lambda: OnPolicyConfig(500))

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf); 0 leaves it out": "entropy anchor"}, "method.")


def anchored(flow: FlowPolicy, base: FlowPolicy) -> Auxiliary:
    """Mean squared distance per coordinate of what both make of one noise: the cost of this coupling, and so a bound
    on the squared Wasserstein-2 distance of their actions."""

    def distance(obs: Obs, rows: Mapping[str, Any]) -> Tensor:
        x_0 = rows["trace"][:, 0]
        with torch.no_grad():
            wanted = sample_chain(base, x_0, base.encode(obs), inject=False)[-1]
        made = sample_chain(flow, x_0, flow.encode(obs), inject=False)[-1]
        return (made - wanted).square().mean((1, 2))

    return distance


class ReinFlow(Wrapping):
    """PPO, and a bound of the noise that moves on after each update."""

    def __init__(self, ppo: PPO, noise: NoiseNet) -> None:
        super().__init__(ppo)
        self.ppo, self.noise = ppo, noise

    def plan(self, updates: int) -> None:
        """The bound comes down over the updates of the whole run unless a number was given."""
        if self.noise.config.decay is None:
            self.noise.decay = updates

    def update(self, source: Source) -> Metrics:
        bound = self.noise.log_max.exp()
        metrics = self.ppo.update(source)
        self.noise.advance()
        return {**metrics, "noise/max_std": bound}


def build(
    config: ReinFlowConfig, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Assembly:
    """The learner of ReinFlow on a flow policy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "noise net"))
        actor = NoisyFlowActor(base, config.noise, config.train).to(home(config, device))
    check_compatible(actor.spec, env.spec)
    chunks = ChunkEnv(env, actor.spec.execute, config.discount.per_step(actor.spec.execute))
    view, observed = feature_view(chunks, base, config)
    frozen = shared(base).to(home(config, device))
    auxiliary: dict[str, tuple[float, Auxiliary]] = {}
    if config.entropy:
        auxiliary["entropy"] = (-config.entropy, lambda obs, rows: actor.entropy_rate(obs))
    if config.anchor:
        if divides(config.ppo):
            raise BurnishError(
                f"method.anchor={config.anchor} asks the whole base in every update, of which ppo.shard=true leaves "
                "shares; leave one of them out"
            )
        auxiliary["anchor"] = (config.anchor, anchored(actor.flow, frozen))
    ppo = PPO(
        actor,
        actor.flow,
        config.ppo,
        num_envs=env.num_envs,
        observed=observed,
        auxiliary=auxiliary,
        watch=lambda rows: {"base_distance": distance_to_base(actor.flow, frozen, sampled(rows["obs"]))},
        seed=seed,
        device=device,
    )
    adopt_normalizers(ppo.value, base)
    return Assembly(view, ReinFlow(ppo, actor.noise))
