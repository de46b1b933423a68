"""TD3: a deterministic actor that climbs pessimistic critics, with smoothed targets and delayed updates.

Fujimoto et al. 2018 (arXiv 1802.09477): clipped double Q (equation 10), target policy smoothing (equations 14 and 15),
delayed updates of actor and targets (algorithm 1). Residual methods (Ankile et al. 2025, ResFiT, arXiv 2509.19301) ask
for more, as options: ten members with the minimum over a random pair in the target and the mean for the actor, a start
that trains the critic alone, targets of critics that follow at every update, a clip of gradients. Sums over several
decisions come from the loop.

**Departures.** The actor is a ``GaussianPolicy``, of which only tanh(mean) is used. Noise is in the units of the
agent's own action, and ``transform`` is applied behind the clip to [-1, 1]: what the target values is what would be
executed. Rows whose chunk was cut short by a truncation do not train a critic of chunks (``td.chunk_weight``).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution
from ..policies.core.ranges import check_ranges
from ..policies.core.seed import normal
from ..policies.core.types import Metrics, Obs
from ..policies.gaussian import GaussianConfig, GaussianLoss, GaussianPolicy
from ..policies.nets.critic import CriticConfig, QEnsemble
from ..policies.nets.encoder import require_shift
from ..policies.nets.mlp import Activation
from .actor_critic import ActorCritic, AgentActor
from .critics import saturation
from .soft import ActionTransform, Warm, polyak, smoothed, unchanged
from .td import pessimistic, td_target


def deterministic_agent(**changes: Any) -> GaussianConfig:
    """The usual actor of TD3: tanh of a mean, and no spread."""
    usual = GaussianConfig(hidden=[256, 256], activation=Activation.relu, squash=True)
    return replace(usual, **{"loss": GaussianLoss.least_squares, **changes})


@dataclass
class TD3Config:
    """Settings of TD3: learning rates, noise of exploration and of targets, and delay of the actor."""

    lr: float = 3e-4  # learning rate of the critic
    actor_lr: float = 3e-4  # learning rate of the actor
    tau: float = 0.005  # share by which target networks follow, each time that they do (delay_targets)
    explore_std: float = 0.1  # deviation of the noise that is played, in units of the agent's action
    target_std: float = 0.2  # deviation of the noise on target actions
    target_clip: float = 0.5  # limit of that noise
    subset: int = 0  # target members of which the minimum is taken; 0: all
    actor_mean: bool = False  # the actor climbs the mean of the members instead of the first
    actor_every: int = 2  # critic updates per actor update
    delay_targets: bool = True  # targets follow together with the actor; false: those of critics at every update
    critic_warmup: int = 0  # first updates that train the critic alone
    max_grad_norm: float | None = None  # gradients are clipped to this norm; null: not clipped
    image_shift: float = 0.05  # largest random shift of each row's images in an update, as a share of their side
    agent: GaussianConfig = field(default_factory=deterministic_agent)  # the network that acts
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(layer_norm=False))  # the Q network
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        require_shift("image_shift", self.image_shift)
        if not self.agent.squash:
            raise BurnishError("agent.squash=false: TD3 needs an actor that is bounded by tanh")
        least = {"[0, inf)": "explore_std target_std target_clip subset critic_warmup", "[1, inf)": "actor_every"}
        check_ranges(self, {"(0, inf)": "lr actor_lr", "(0, 1]": "tau", **least})


@torch.no_grad()
def smoothed_target(
    agent: GaussianPolicy,
    critic: QEnsemble,
    next_obs: Obs,
    columns: dict[str, Tensor],
    config: Any,
    generator: torch.Generator,
    subset: int = 0,
    transform: ActionTransform = unchanged,
) -> Tensor:
    """(B,): reward + discount * the pessimistic value of the agent's action with clipped noise, both of the targets."""
    action = agent.spec.executed(agent.act(next_obs, greedy=True))
    noise = normal(action.shape, generator, device=action.device, dtype=action.dtype)
    action = smoothed(action, noise, config.target_std, config.target_clip)
    value = pessimistic(critic(next_obs, transform(next_obs, action)), subset, generator)
    return td_target(columns["reward"], columns["discount"], value)


class TD3Actor(AgentActor):
    """The actor of TD3: the agent's action with Gaussian noise of ``explore_std``."""

    def __init__(self, agent: GaussianPolicy, explore_std: float, warm: Warm | None) -> None:
        super().__init__(agent, warm)
        self.explore_std = explore_std

    def explore(self, obs: Obs, generator: torch.Generator) -> Tensor:
        action = self.agent.spec.executed(self.agent.act(obs, greedy=True))
        noise = normal(action.shape, generator, device=action.device, dtype=action.dtype)
        return (action + self.explore_std * noise).clamp(-1, 1)


class TD3(ActorCritic):
    """The TD3 learner of a deterministic agent."""

    def __init__(
        self,
        agent: GaussianPolicy,
        config: TD3Config,
        *,
        warm: Warm | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        agent = agent.to(device)
        self.target_agent = copy.deepcopy(agent).requires_grad_(False)
        own, actor = ("target_agent",), TD3Actor(agent, config.explore_std, warm)
        super().__init__(agent, config, actor, own, scaled=(self.target_agent,), device=device, **options)

    def _follow(self, due: bool, moved: bool) -> None:
        if moved:
            polyak(self.target_agent.parameters(), self.agent.parameters(), self.config.tau)
        if due or not self.config.delay_targets:
            self.critic.follow(self.config.tau)

    def _target(self, next_obs: Obs, columns: dict[str, Tensor]) -> Tensor:
        options = self.config, self.noise, self.config.subset, self.transform
        return smoothed_target(self.target_agent, self.critic.target, next_obs, columns, *options)

    def _actor_loss(self, obs: Obs) -> tuple[Tensor, Metrics]:
        action = self.agent.spec.executed(self.agent.act(obs, greedy=True))
        q = self.critic.online(obs, self.transform(obs, action))
        loss = -(q.mean(0) if self.config.actor_mean else q[0]).mean()
        return loss, {"actor_loss": loss.detach(), "saturation": saturation(action.detach())}
