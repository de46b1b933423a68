"""TD3+BC: climb the critic, but stay with the data; one number weighs the two.

Fujimoto and Gu 2021 (arXiv 2106.06860): the actor of TD3 minimises -lambda Q(s, pi(s)) + (pi(s) - a)^2 with lambda =
alpha / mean |Q| over the batch. Critics, smoothed targets and delays are those of TD3 (Fujimoto et al. 2018, arXiv
1802.09477). Standardised observations are part of the method: ``build`` fits them to the data.

**Departures.** lambda is taken from |Q| of the policy's own actions, as the authors' code does. On chunks the squared
error is the mean over the executed actions that were played, so that Q is weighed as published; the positions of the
chunk that are not executed follow what the data did there (``imitation_chunk``), each with the same weight. Rows whose
chunk a truncation cut short do not train the critic (``td.chunk_weight``).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..policies.core.execute import Execution, execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.ranges import check_ranges
from ..policies.core.types import Metrics, Obs, Source
from ..policies.gaussian import GaussianConfig, GaussianPolicy
from ..policies.nets.critic import CriticConfig
from .actors import PolicyActor, trainable_tanh_gaussian
from .critics import adopt_normalizers, spread
from .descent import adam, descend
from .imitation import imitation_chunk, neighbours, played_around
from .learner import CriticLearner, columns_of
from .soft import polyak, q_scale
from .td import row_weight
from .td3 import TD3Actor, deterministic_agent, smoothed_target


@dataclass
class TD3BCConfig:
    """Settings of TD3+BC: the weight of Q, and those of TD3."""

    alpha: float = 2.5  # weight of Q, whose scale is divided out; 0 imitates
    lr: float = 3e-4  # learning rate of the critic
    actor_lr: float = 3e-4  # learning rate of the policy
    tau: float = 0.005  # share by which target networks follow, at every update of the actor
    target_std: float = 0.2  # deviation of the noise on target actions
    target_clip: float = 0.5  # limit of that noise
    explore_std: float = 0.1  # deviation of the noise that is played when learning goes on in the world
    actor_every: int = 2  # critic updates per update of the actor and of both targets
    agent: GaussianConfig = field(default_factory=deterministic_agent)  # the policy where none is given
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(layer_norm=False))  # the Q network
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        least = {"[0, inf)": "alpha target_std target_clip explore_std", "[1, inf)": "actor_every"}
        check_ranges(self, {"(0, inf)": "lr actor_lr", "(0, 1]": "tau", **least})

    @property
    def policy(self) -> GaussianConfig:
        """The policy where none is given."""
        return self.agent


class TD3BC(CriticLearner):
    """The learner of TD3+BC: a deterministic policy, its critics and the targets of both."""

    saved = ("policy", "target_policy", "critic", "critic_optimizer", "actor_optimizer", "noise")

    def __init__(
        self, policy: GaussianPolicy, config: TD3BCConfig, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(policy.spec, config, seed=seed, device=device)
        self.policy = policy.to(device)
        self.target_policy = copy.deepcopy(policy).requires_grad_(False)
        adopt_normalizers(self.critic, policy)
        self.around = neighbours(policy.spec)
        actor = TD3Actor(policy, config.explore_std, PolicyActor(policy).play)
        self.actor = executed_actor(actor, config.execution, device)
        self.trained = [p for p in policy.parameters() if p.requires_grad]
        self.critic_optimizer = adam(self.critic.online.parameters(), config.lr, config.execution)
        self.actor_optimizer = adam(self.trained, config.actor_lr, config.execution)
        self._step_critic = execution(self._critic_step, config.execution, device=device, generators=[self.noise])
        self._step_actor = execution(self._actor_step, config.execution, device=device)

    def update(self, source: Source) -> Metrics:
        batch = source.sample(around=self.around)
        self.updates += 1
        columns = columns_of(batch)
        metrics = self._step_critic(batch["obs"], batch["next_obs"], columns)
        if self.updates % self.config.actor_every == 0:
            metrics |= self._step_actor(batch["obs"], columns["action"], columns["steps"], played_around(batch))
            polyak(self.target_policy.parameters(), self.policy.parameters(), self.config.tau)
            self.critic.follow(self.config.tau)
        return metrics

    def _target(self, next_obs: Obs, columns: dict[str, Tensor]) -> Tensor:
        return smoothed_target(self.target_policy, self.critic.target, next_obs, columns, self.config, self.noise)

    def _critic_step(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> Metrics:
        target = self._target(next_obs, columns)
        online = self.critic.online
        mask = row_weight(columns, self.policy.spec.execute)
        loss, q = online.loss(online.encode(obs), columns["action"], target, mask)
        descend(self.critic_optimizer, loss)
        q = q.detach()
        return {"critic_loss": loss.detach(), "q": q.mean(), "q/spread": spread(q), "target": target.mean()}

    def _actor_step(self, obs: Obs, action: Tensor, steps: Tensor, around: dict[str, Tensor]) -> Metrics:
        spec = self.policy.spec
        chosen = self.policy.act(obs, greedy=True)
        q = self.critic.online(obs, spec.executed(chosen))[0]
        chunk, real = imitation_chunk(spec, action, steps, around)
        # Over the executed actions a mean, which Q is weighed against; each further position weighs as much as those.
        away = (((chosen - chunk).square().mean(2) * real).sum(1) / steps.clamp(min=1)).mean()
        loss = away - self.config.alpha * q_scale(q) * q.mean()
        descend(self.actor_optimizer, loss)
        return {"actor_loss": loss.detach(), "actor/q": q.detach().mean(), "actor/away": away.detach()}


def build(config: TD3BCConfig, policy: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> TD3BC:
    """The TD3+BC learner of a policy with a bounded mean; another kind is refused."""
    return TD3BC(trainable_tanh_gaussian(policy, "TD3+BC"), config, seed=seed, device=device)
