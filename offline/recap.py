"""RECAP: imitate everything, good and bad, told which it was; then act as told that it is good.

Physical Intelligence 2025 (pi*0.6, arXiv 2511.14759): a value V(s) of what was played, the advantage of a decision

    A = r_0 + ... + gamma' r_{N-1} + gamma'' V(s_N) - V(s_0)

over ``lookahead`` decisions, and its sign as one more condition of the policy (`policies/advised.py`): positive for the
best ``share`` of a batch, negative for the rest, hidden in a share ``drop`` of rows. There is no likelihood and no
critic of actions, so every imitator can be trained so. In the world it plays as told "positive", what came of it is
imitated beside the recordings, and V follows, which raises what counts as better than usual.

With ``worse=left_out`` the policy is told nothing, and the rest is not imitated: the filter of GR-RL (ByteDance 2025,
arXiv 2512.01801), which drops what lost progress. It can learn from its failures no longer, but stays as it is.

**Departures.** V regresses on the same sum, with a slowly following copy behind it (published: 201 bins of the
Monte-Carlo return), which needs no range of returns and no complete episodes. V and the policy are trained together
after ``head_start`` updates of V alone, and the threshold is the quantile of each batch (published: V first, then one
threshold for each task). Actions of a person are judged like all others (published: always positive).
"""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..policies.advised import advised
from ..policies.core.config import LATER
from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution, execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.ranges import check_ranges
from ..policies.core.seed import derive
from ..policies.core.seed import generator as named_generator
from ..policies.core.types import Learner, Metrics, Obs, Source
from ..policies.flow import FlowConfig
from ..policies.nets.critic import ValueConfig, ValueNet
from ..policies.nets.encoder import ADVANTAGE
from ..policies.runs.module_state import restore, state_of
from .actors import PolicyActor, trainable_imitator
from .critics import adopt_normalizers, explained_variance
from .descent import adam, descend
from .imitation import imitation_chunk, neighbours, played_around
from .learner import columns_of
from .soft import polyak
from .td import row_mean, td_target


class Worse(enum.Enum):
    """Uses of the decisions that are not among the best."""

    labelled = "labelled"  # they are imitated, and the policy is told that they are worse
    left_out = "left_out"  # they are not imitated, and the policy is told nothing


@dataclass
class RecapConfig:
    """Settings of RECAP: which decisions count as good, how the policy is told, and the value."""

    share: float = 0.3  # share of each batch that counts as better than usual
    worse: Worse = Worse.labelled  # use of the rest: labelled or left_out
    drop: float = 0.2  # share of rows that are told nothing
    guidance: float = 1.0  # weight of what is told when acting; more than 1 exaggerates it, in flows and diffusion
    lookahead: int = 10  # decisions whose rewards an advantage sums up
    head_start: int = 500  # updates of the value before the policy learns
    lr: float = 3e-4  # learning rate of the value
    actor_lr: float = 3e-4  # learning rate of the policy
    tau: float = 0.005  # share by which the copy of the value follows, at every update
    flow: FlowConfig = field(default_factory=FlowConfig)  # the policy where none is given
    value: ValueConfig = field(default_factory=lambda: ValueConfig(layer_norm=True))  # the value
    # execution of an update: eager, or compiled, or CUDA graphs
    execution: Execution = field(default=Execution.eager, metadata=LATER)

    def __post_init__(self) -> None:
        ranges = {"(0, 1)": "share", "[0, 1)": "drop", "[1, inf)": "lookahead", "[0, inf)": "head_start guidance"}
        check_ranges(self, {**ranges, "(0, inf)": "lr actor_lr", "(0, 1]": "tau"})
        if self.guidance != 1 and (self.drop == 0 or self.worse is Worse.left_out):
            raise BurnishError(
                f"method.guidance={self.guidance} goes from what the policy does when told nothing to what it does "
                "when told, so it learns both: take method.drop above 0 and method.worse=labelled, or guidance=1"
            )

    @property
    def policy(self) -> FlowConfig:
        """The policy where none is given."""
        return self.flow


def require_single_steps(n_step: int, name: str) -> None:
    """Refuse a number of steps that would not be read."""
    if n_step != 1:
        raise BurnishError(f"{name}={n_step} is not read by recap, which sums up method.lookahead decisions; set that")


class Recap(Learner):
    """``policy`` is trained in place."""

    def __init__(self, policy: Any, config: RecapConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.policy, self.config = policy.to(device), config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "value"))
            self.value = ValueNet(policy.spec, config.value).to(device)
        adopt_normalizers(self.value, policy)
        self.target = copy.deepcopy(self.value).requires_grad_(False)
        self.actor = executed_actor(PolicyActor(policy), config.execution, device)
        self.around = neighbours(policy.spec)
        self.noise = named_generator(seed, "noise", device=device)
        self.updates = 0
        trained = [p for p in policy.parameters() if p.requires_grad]
        self._parts = {
            "policy": policy,
            "value": self.value,
            "target": self.target,
            "value_optimizer": adam(self.value.parameters(), config.lr, config.execution),
            "policy_optimizer": adam(trained, config.actor_lr, config.execution),
            "noise": self.noise,
        }
        self._step_value = execution(self._judge, config.execution, device=device)
        self._step_policy = execution(self._imitate, config.execution, device=device, generators=[self.noise])

    def update(self, source: Source) -> Metrics:
        batch = source.sample(n_step=self.config.lookahead, around=self.around)
        self.updates += 1
        columns = {**columns_of(batch), "action": batch.get("executed", batch["action"])}
        advantage, metrics = self._step_value(batch["obs"], batch["next_obs"], columns)
        if self.updates > self.config.head_start:
            metrics |= self._step_policy(batch["obs"], columns, played_around(batch), advantage)
        return metrics

    def labels(self, advantage: Tensor) -> Tensor:
        """(B,) -> (B, 1): 1 for the best ``share``, -1 for the rest, 0 where nothing is told."""
        best = advantage > advantage.quantile(1 - self.config.share)
        if self.config.worse is Worse.left_out:
            return torch.where(best, 1.0, -1.0)[:, None]
        hidden = torch.rand(len(best), generator=self.noise, device=best.device) < self.config.drop
        return torch.where(hidden, 0.0, torch.where(best, 1.0, -1.0))[:, None]

    def _judge(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """The advantage (B,) of each decision, before V learns from it."""
        with torch.no_grad():
            earned = td_target(columns["reward"], columns["discount"], self.target(next_obs))
        value = self.value(obs)
        weight = columns.get("weight", torch.ones_like(earned))
        loss = row_mean((value - earned).square(), weight)
        descend(self._parts["value_optimizer"], loss)
        polyak(self.target.parameters(), self.value.parameters(), self.config.tau)
        advantage = (earned - value).detach()
        explained = explained_variance(value.detach(), earned)
        return advantage, {"value_loss": loss.detach(), "value": value.detach().mean(), "value/explained": explained}

    def _imitate(self, obs: Obs, columns: dict[str, Tensor], around: dict[str, Tensor], advantage: Tensor) -> Metrics:
        labels = self.labels(advantage)
        chunk, mask = imitation_chunk(self.policy.spec, columns["action"], columns["steps"], around)
        weight = columns.get("weight", torch.ones_like(advantage))
        if self.config.worse is Worse.left_out:
            weight = weight * (labels[:, 0] > 0)
        else:
            obs = {**obs, ADVANTAGE: labels}
        loss = row_mean(self.policy.bc_loss(obs, chunk, mask=mask, generator=self.noise), weight)
        descend(self._parts["policy_optimizer"], loss)
        good = (labels > 0).float().mean()
        return {"imitation_loss": loss.detach(), "advantage/std": advantage.std(), "advantage/positive": good}

    def state_dict(self) -> dict[str, Any]:
        return {**state_of(self._parts), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._parts, state)
        self.updates = int(state["updates"])


def build(config: RecapConfig, policy: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> Recap:
    """The RECAP learner of a policy that can imitate."""
    policy = trainable_imitator(policy, "RECAP")
    if config.worse is Worse.labelled:
        policy = advised(policy, config.guidance)
    return Recap(policy.train(), config, seed=seed, device=device)
