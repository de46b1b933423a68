"""SAC, with the options that RLPD, REDQ and the latent and residual methods add: ensembles, subsets, update ratios.

Haarnoja et al. 2018 (arXiv 1801.01290, 1812.05905). Minimum over a random subset of the target members: REDQ, Chen et
al. 2021 (arXiv 2101.05982). The actor on the mean of all members, layer norm, no entropy in the target: RLPD, Ball et
al. 2023 (arXiv 2302.02948). On chunks of n actions this is the chunked critic of Q-chunking, Li et al. 2025 (arXiv
2507.07969), whose n-step backup is exact because a chunk is played open loop.

**Departures.** The temperature is stepped with the actor, by the same optimiser, from the entropy before the step. The
density of tanh is exact, without the usual 1e-6. Rows whose chunk was cut short by a truncation do not train a critic
of chunks (``td.chunk_weight``). A target that sums several
decisions holds the entropy of where it ends, not of the decisions between. Layer norm is on (``critic.layer_norm``),
which SAC does not have, because the methods built on it do; the spread of the actor stays above e^-5 (e^-20).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution
from ..policies.core.ranges import check_ranges
from ..policies.core.types import Metrics, Obs
from ..policies.gaussian import GaussianConfig, GaussianPolicy
from ..policies.nets.critic import CriticConfig
from ..policies.nets.encoder import require_shift
from ..policies.nets.mlp import Activation
from .actor_critic import ActorCritic, AgentActor
from .critics import saturation
from .soft import Temperature, Warm, soft_losses, soft_value
from .td import pessimistic, td_target


def soft_agent(**changes: Any) -> GaussianConfig:
    """The usual actor of SAC: a squashed Gaussian with a spread per state."""
    usual = GaussianConfig(hidden=[256, 256], activation=Activation.relu, squash=True, state_dependent_std=True)
    return replace(usual, **{"init_std": 1.0, "log_std_bounds": [-5.0, 2.0], **changes})


@dataclass
class SACConfig:
    """Settings of SAC: learning rates, temperature, critic ensemble, and ratio of updates."""

    lr: float = 3e-4  # learning rate of the critic
    actor_lr: float = 3e-4  # learning rate of the actor and of the temperature
    tau: float = 0.005  # share by which target networks follow, at every update
    alpha: float = 1.0  # temperature at the start
    tune_alpha: bool = True  # the temperature follows the target entropy; false: it stays at alpha
    target_entropy: float | None = None  # target entropy in nats; null: entropy_per_dim times the size of the action
    entropy_per_dim: float = -1.0  # target entropy for each coordinate of the action, in nats
    backup_entropy: bool = True  # targets contain the entropy bonus
    subset: int = 0  # target members of which the minimum is taken; 0: all
    actor_mean: bool = False  # the actor climbs the mean of the members instead of their minimum
    actor_every: int = 1  # critic updates per actor update
    critic_warmup: int = 0  # first updates that train the critic alone
    max_grad_norm: float | None = None  # gradients are clipped to this norm; null: not clipped
    image_shift: float = 0.05  # largest random shift of each row's images in an update, as a share of their side
    agent: GaussianConfig = field(default_factory=soft_agent)  # the network that acts
    critic: CriticConfig = field(default_factory=CriticConfig)  # the Q network
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        require_shift("image_shift", self.image_shift)
        if not self.agent.squash:
            raise BurnishError("agent.squash=false: SAC needs an actor that is bounded by tanh")
        least = {"[1, inf)": "actor_every", "[0, inf)": "critic_warmup subset"}
        check_ranges(self, {"(0, inf)": "lr actor_lr alpha tau", **least})


class SACActor(AgentActor):
    """The actor of SAC: draws of the agent."""

    def explore(self, obs: Obs, generator: torch.Generator) -> Tensor:
        return self.agent.spec.executed(self.agent.draw(obs, generator=generator).action)


class SAC(ActorCritic):
    """The SAC learner of a tanh-Gaussian agent."""

    def __init__(
        self,
        agent: GaussianPolicy,
        config: SACConfig,
        *,
        warm: Warm | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        agent = agent.to(device)
        size = agent.spec.execute * agent.spec.action.dim
        target = config.entropy_per_dim * size if config.target_entropy is None else config.target_entropy
        self.temperature = Temperature(config.alpha, target if config.tune_alpha else None).to(device)
        super().__init__(agent, config, SACActor(agent, warm), ("temperature",), device=device, **options)
        if config.backup_entropy:
            self.entropy_bonus = self._entropy_bonus

    def _entropy_bonus(self, obs: Obs) -> float:
        generator = torch.Generator(next(iter(obs.values())).device).manual_seed(0)
        return float(self.temperature() * -self.agent.draw(obs, generator=generator).log_prob.mean())

    def _target(self, next_obs: Obs, columns: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            draw = self.agent.draw(next_obs, generator=self.noise)
            action = self.transform(next_obs, self.agent.spec.executed(draw.action))
            value = pessimistic(self.critic.target(next_obs, action), self.config.subset, self.noise)
            if self.config.backup_entropy:
                value = soft_value(value, draw.log_prob[:, 0], self.temperature())
            return td_target(columns["reward"], columns["discount"], value)

    def _critic_step(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> Metrics:
        metrics = super()._critic_step(obs, next_obs, columns)
        self.critic.follow(self.config.tau)
        return metrics

    def _actor_loss(self, obs: Obs) -> tuple[Tensor, Metrics]:
        draw = self.agent.draw(obs, generator=self.noise)
        action, log_prob = self.agent.spec.executed(draw.action), draw.log_prob[:, 0]
        q = self.critic.online(obs, self.transform(obs, action))
        q = q.mean(0) if self.config.actor_mean else q.amin(0)
        loss, metrics = soft_losses(q, log_prob, self.temperature)
        return loss, {**metrics, "saturation": saturation(action.detach())}
