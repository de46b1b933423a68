"""Q-chunking: a chunk is one action. A flow imitates the chunks, and the best of its draws by the critic is played.

Li et al. 2025 (Q-chunking, arXiv 2507.07969), "QC": the critic regresses Q(s, a_1..h) on the discounted sum of the h
rewards and gamma^h times the target critic of the best of ``count`` draws of the flow at s'. Since the chunk was played
as a whole, this backup over h steps is unbiased without any correction for another policy. The flow is trained by
imitation alone; no gradient of the critic reaches it. The deployed action is the best of ``count`` draws. The same with
FQL's one-step policy in place of the best draw, "QC-FQL", is ``method=fql`` with a chunk; with a chunk of one action
this is the best of n (BFN).

Order. Both losses are taken at the parameters before the update and stepped together; then the target critic follows.

As published, targets take the mean of the two target critics (the minimum for some tasks: ``heads``), and critics have
layer norm and four layers of 512 with GELU.

**Departures.** The best draw at s' is chosen by the members' minimum, as the deployed policy chooses. Rows whose chunk
a truncation cut short train no critic, and the flow by what was played of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..policies.compose import BestOf, picked
from ..policies.core.execute import Execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.ranges import check_ranges
from ..policies.core.types import Metrics, Obs
from ..policies.flow import FlowConfig
from ..policies.nets.critic import CriticConfig
from .actors import PolicyActor, trainable_imitator
from .critics import adopt_normalizers, spread
from .descent import adam, descend
from .fql import Heads, large_critic, large_flow
from .imitation import imitation_chunk
from .learner import JointLearner
from .td import row_weight, td_target


@dataclass
class QChunkingConfig:
    """Settings of Q-chunking: the number of draws, the flow and the critic."""

    count: int = 32  # draws of which the best is played, and backed up
    heads: Heads = Heads.mean  # value that targets take of the critic's members
    lr: float = 3e-4  # learning rate of everything
    tau: float = 0.005  # share by which target networks follow, at every update
    flow: FlowConfig = field(default_factory=large_flow)  # the flow that imitates
    critic: CriticConfig = field(default_factory=large_critic)  # the Q network
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "count", "(0, inf)": "lr", "(0, 1]": "tau"})

    @property
    def policy(self) -> FlowConfig:
        """The policy where none is given."""
        return self.flow


class QChunking(JointLearner):
    """``flow`` imitates; ``policy`` is the best of its draws."""

    saved = ("flow", "critic", "optimizer", "noise")

    def __init__(
        self, flow: Any, config: QChunkingConfig, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(flow.spec, config, seed=seed, device=device)
        self.flow = flow.to(device)
        adopt_normalizers(self.critic, flow)
        self.policy = BestOf(flow, self.critic.online, config.count)
        self.actor = executed_actor(PolicyActor(self.policy), config.execution, device)
        trained = [p for part in (self.critic.online, flow) for p in part.parameters() if p.requires_grad]
        self.optimizer = adam(trained, config.lr, config.execution)

    @torch.no_grad()
    def target(self, next_obs: Obs, columns: dict[str, Tensor]) -> Tensor:
        """(B,): reward + discount * target critic of the best draw at ``next_obs``."""
        draws = self.policy.candidates(next_obs, generator=self.noise)  # (B, M, H, A)
        chosen = self.flow.spec.executed(picked(draws, self.policy.best(next_obs, draws)))
        value = self.config.heads(self.critic.target(next_obs, chosen))
        return td_target(columns["reward"], columns["discount"], value)

    def _descend(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor], around: dict[str, Tensor]) -> Metrics:
        spec, online, action = self.flow.spec, self.critic.online, columns["action"]
        target = self.target(next_obs, columns)
        mask = row_weight(columns, spec.execute)
        critic_loss, q = online.loss(online.encode(obs), action, target, mask)
        chunk, real = imitation_chunk(spec, action, columns["steps"], around)
        flow_loss = self.flow.bc_loss(obs, chunk, mask=real, generator=self.noise).mean()
        descend(self.optimizer, critic_loss + flow_loss)
        self.critic.follow(self.config.tau)
        q = q.detach()
        return {
            "critic_loss": critic_loss.detach(),
            "flow_loss": flow_loss.detach(),
            "target": target.mean(),
            "q": q.mean(),
            "q/spread": spread(q),
        }


def build(config: QChunkingConfig, policy: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> QChunking:
    """The Q-chunking learner of a policy that can imitate."""
    return QChunking(trainable_imitator(policy, "Q-chunking"), config, seed=seed, device=device)
