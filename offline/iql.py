"""IQL: learn what the best actions of the data are worth without ever asking about others, then imitate those.

Kostrikov et al. 2021 (arXiv 2110.06169): V by expectile regression on Q (equation 5), Q on r + gamma V (equation 6),
the policy by imitation weighted with min(exp(beta (Q - V)), cap) (equation 7). ``best_of_n`` instead imitates without
weights and, when acting, takes the best of N draws under Q: Hansen-Estruch et al. 2023 (IDQL, arXiv 2304.10573); with
``actor_lr=0`` the policy that is given stays as it is, and only what chooses among its draws is learnt.

Order. All three losses are taken at the parameters before the update and stepped together: Q regresses on the V of
before, and the advantage in the weight is that of the V of before; then the target critic follows. The three share no
parameters, so one backward pass and one Adam do what three would.

**Departures.** The policy is any imitator: a Gaussian whose *mean* is bounded by tanh (a squashed distribution is a
known cause of failure), a flow, a diffusion policy. Losses of imitation are means over coordinates, not sums. Rows
whose chunk a truncation cut short train no critic, value or weighted imitation, because nobody knows what the unplayed
rest would have done; unweighted imitation uses what was played of them. A chunk is imitated with all its positions, as
far as the data goes on (``imitation_chunk``), and weighted by what its executed part is worth. The decay of the
policy's learning rate is off unless ``decay_steps`` says how long it lasts (published: all updates), and the rate stays
at 0 behind its end. There is no dropout (.1 for hands). ``expectile`` and ``beta`` are those of locomotion; antmaze has
.9 and 10, hands and kitchen .7 and .5. ``best_of_n`` keeps the critics of IQL; with a flow (IFQL) .9, four layers of
512 with GELU and layer norm are published, for critics, value and flow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..policies.compose import BestOf
from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.ranges import check_ranges, require_usual
from ..policies.core.seed import derive
from ..policies.core.types import Metrics, Obs, Source
from ..policies.flow import FlowConfig
from ..policies.gaussian import GaussianConfig
from ..policies.nets.critic import CriticConfig, ValueConfig, ValueNet
from ..policies.nets.mlp import Activation
from .actors import PolicyActor, trainable_imitator
from .critics import adopt_normalizers, explained_variance, spread
from .descent import descend
from .imitation import imitation_chunk
from .learner import JointLearner
from .td import advantage_weight, expectile, pessimistic, row_mean, row_weight, td_target


class Extraction(Enum):
    """The ways to get a policy from the critics: weighted imitation, or the best of several draws."""

    awr = "awr"  # advantage-weighted regression
    best_of_n = "best_of_n"


def regression_policy(**changes: Any) -> GaussianConfig:
    """The published actor of IQL: tanh of the mean, and one spread for all states that begins at 1."""
    usual = GaussianConfig(hidden=[256, 256], activation=Activation.relu, tanh_mean=True, init_std=1.0)
    return replace(usual, **{"log_std_bounds": [-5.0, 2.0], **changes})


@dataclass
class IQLConfig:
    """Settings of IQL: the expectile, the way of extraction, and the networks."""

    expectile: float = 0.7  # expectile of the value: 0.5 is the mean of the data; towards 1, its best
    # way to a policy: awr, weighted imitation; best_of_n, the best of count draws by the critic
    extraction: Extraction = Extraction.awr
    beta: float = 3.0  # inverse temperature of the weights
    weight_cap: float = 100.0  # largest weight of a row in awr
    count: int = 32  # draws of which the best is taken, with best_of_n
    lr: float = 3e-4  # learning rate of critic and value
    actor_lr: float = 3e-4  # learning rate of the policy; 0, with best_of_n: the policy that is given stays as it is
    decay_steps: int = 0  # updates in which half a cosine takes actor_lr to 0; 0: constant
    tau: float = 0.005  # share by which target networks follow, at every update
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(layer_norm=False))  # the Q network
    value: ValueConfig = field(default_factory=lambda: ValueConfig(activation=Activation.relu))  # the value network
    gaussian: GaussianConfig = field(default_factory=regression_policy)  # policy that awr trains where none is given
    flow: FlowConfig = field(default_factory=FlowConfig)  # policy that best_of_n trains where none is given
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, 1); 0.7 to 0.9 is usual": "expectile", "[0, inf)": "beta decay_steps"})
        if not (self.actor_lr > 0 or self.frozen):
            raise BurnishError(f"actor_lr={self.actor_lr} must be a positive number, or 0 with extraction=best_of_n")
        check_ranges(self, {"(0, inf)": "lr", "(0, 1]": "tau", "[1, inf)": "count weight_cap"})
        unread = "beta weight_cap" if self.extraction is Extraction.best_of_n else "count"
        way = f"with extraction={self.extraction.value} and actor_lr={self.actor_lr}"
        require_usual(self, IQLConfig, f"{unread} decay_steps" if self.frozen else unread, way, "")

    @property
    def frozen(self) -> bool:
        return self.actor_lr == 0 and self.extraction is Extraction.best_of_n

    @property
    def policy(self) -> GaussianConfig | FlowConfig:
        if self.frozen:
            raise BurnishError(
                "actor_lr=0 keeps a policy that is given; give one with policy=checkpoint policy.path=..."
            )
        return self.gaussian if self.extraction is Extraction.awr else self.flow


def decayed(rate: float, update: int, steps: int) -> float:
    """Half a cosine down to 0, where it stays."""
    return rate if steps == 0 else rate * 0.5 * (1 + math.cos(math.pi * min(1.0, update / steps)))


class IQL(JointLearner):
    """``imitator`` is what is trained; what is deployed is it, or the best of its draws."""

    saved = ("imitator", "critic", "value", "optimizer", "noise")

    def __init__(self, imitator: Any, config: IQLConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(imitator.spec, config, seed=seed, device=device)
        self.imitator = imitator.to(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "value"))
            self.value = ValueNet(imitator.spec, config.value).to(device)
        for module in (self.critic, self.value):
            adopt_normalizers(module, imitator)
        chosen = config.extraction is Extraction.best_of_n
        self.policy = BestOf(imitator, self.critic.online, config.count) if chosen else imitator
        self.actor = executed_actor(PolicyActor(self.policy), config.execution, device)
        self.rate = torch.tensor(config.actor_lr, device=device)  # a tensor, because a recorded graph keeps numbers
        trained = [] if config.frozen else [p for p in imitator.parameters() if p.requires_grad]
        judges = [*self.critic.online.parameters(), *self.value.parameters()]
        groups = [{"params": judges, "lr": config.lr}, {"params": trained, "lr": self.rate}]
        graphed = config.execution is Execution.cudagraph
        self.optimizer = torch.optim.Adam(groups, fused=True, capturable=graphed)

    def update(self, source: Source) -> Metrics:
        self.rate.fill_(decayed(self.config.actor_lr, self.updates, self.config.decay_steps))
        return super().update(source)

    def _descend(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor], around: dict[str, Tensor]) -> Metrics:
        config, spec, online = self.config, self.imitator.spec, self.critic.online
        action, steps = columns["action"], columns["steps"]
        mask = row_weight(columns, spec.execute)  # rows of which Q(s, a) is known
        with torch.no_grad():
            q_data = pessimistic(self.critic.target(obs, action))
            target = td_target(columns["reward"], columns["discount"], self.value(next_obs))
        value = self.value(obs)
        advantage = q_data - value
        value_loss = row_mean(expectile(advantage, config.expectile), mask)
        critic_loss, q = online.loss(online.encode(obs), action, target, mask)
        weight, policy_loss = torch.ones_like(advantage), torch.zeros_like(value_loss)
        if not config.frozen:
            chunk, real = imitation_chunk(spec, action, steps, around)
            policy_loss = self.imitator.bc_loss(obs, chunk, mask=real, generator=self.noise)
            if config.extraction is Extraction.awr:
                weight = advantage_weight(advantage, config.beta, config.weight_cap)
                policy_loss = row_mean(weight * policy_loss, mask)
            policy_loss = policy_loss.mean()
        descend(self.optimizer, value_loss + critic_loss + policy_loss)
        self.critic.follow(config.tau)
        return {
            "value_loss": value_loss.detach(),
            "critic_loss": critic_loss.detach(),
            "policy_loss": policy_loss.detach(),
            "q": q.detach().mean(),
            "q/spread": spread(q.detach()),
            "value": value.detach().mean(),
            "value/explained": explained_variance(value.detach(), q_data),
            "weight": weight.mean(),
            "weight/capped": (weight >= config.weight_cap * (1 - 1e-6)).float().mean(),
        }


def build(config: IQLConfig, policy: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> IQL:
    """The IQL learner of a policy that can imitate; a frozen one is only drawn from."""
    return IQL(trainable_imitator(policy, "IQL").train(not config.frozen), config, seed=seed, device=device)
