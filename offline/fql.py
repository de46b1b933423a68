"""FQL: a flow learns what the data does, a one-step policy learns to do that and to climb a critic; it is deployed.

Park, Li and Levine 2025 (arXiv 2502.02538): a critic bootstrapped at the one-step policy; a flow by matching; a
one-step policy mu(s, z) that minimises alpha |mu(s, z) - ODE(s, z)|^2 - Q(s, mu(s, z)), where the ODE is that of the
flow from the same noise z, without gradient. One Adam steps the sum of the three losses.

**Departures.** ``normalize_q`` is on, as the authors advise for new tasks: with 1 / mean |Q| in front of Q, alpha
between 0.03 and 10 fits what otherwise needs 3 to 30000; ``normalize_q=false, alpha=10`` is the paper. On chunks the
whole chunk of H positions is imitated, as far as the data goes on (``imitation_chunk``), and distilled, and the
executed n are judged: the distillation is a mean over H, so of ``alpha`` n / H is left for what is executed. Rows whose
chunk a truncation cut short do not train the critic (``td.chunk_weight``). The flow may be any imitator whose noise has
the shape of its chunk; a fresh one scales its observations as they lie in the data (published: as they are) and sees
its time through sinusoids (a plain number). ``heads=min`` is published for the large antmazes and for hands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..policies.build import build_policy
from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.ranges import check_ranges
from ..policies.core.seed import derive, normal
from ..policies.core.types import Metrics, Obs
from ..policies.flow import FlowConfig
from ..policies.nets.critic import CriticConfig
from ..policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from ..policies.nets.mlp import Activation
from ..policies.one_step import OneStepConfig, OneStepPolicy
from .actors import PolicyActor, trainable_imitator
from .critics import adopt_normalizers, spread
from .descent import adam, descend
from .imitation import imitation_chunk
from .learner import JointLearner
from .soft import q_scale
from .td import row_weight, td_target


class Heads(Enum):
    """How target critics are joined: the paper's mean, or the minimum that some tasks need."""

    mean = "mean"
    min = "min"

    def __call__(self, q: Tensor) -> Tensor:
        return q.mean(0) if self is Heads.mean else q.amin(0)


def large_flow() -> FlowConfig:
    """The published flow is as large, and as plain, as the policy that is distilled from it."""
    body = MlpBodyConfig(hidden=[512, 512, 512, 512], activation=Activation.gelu, layer_norm=False, residual=False)
    return FlowConfig(net=DenoiserConfig(mlp=body))


def large_critic() -> CriticConfig:
    """The critic of the published FQL: four layers of 512 with GELU."""
    return CriticConfig(hidden=[512, 512, 512, 512], activation=Activation.gelu)


@dataclass
class FQLConfig:
    """Settings of FQL: the weight of distillation, the flow, the one-step policy and the critic."""

    alpha: float = 1.0  # weight of the distillation against Q
    normalize_q: bool = True  # divide Q by its mean size in the loss of the policy
    heads: Heads = Heads.mean  # value that targets take of the critic's members
    lr: float = 3e-4  # learning rate of everything
    tau: float = 0.005  # share by which target networks follow, at every update
    flow: FlowConfig = field(default_factory=large_flow)  # the flow that imitates
    one_step: OneStepConfig = field(default_factory=OneStepConfig)  # the one-step policy that is deployed
    critic: CriticConfig = field(default_factory=large_critic)  # the Q network
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        keeps = {"[0, inf); it keeps the policy at the data": "alpha"}
        check_ranges(self, {"(0, inf)": "lr", "(0, 1]": "tau", **keeps})

    @property
    def policy(self) -> FlowConfig:
        """The policy where none is given."""
        return self.flow


class FQL(JointLearner):
    """``flow`` imitates, ``policy`` acts."""

    saved = ("flow", "policy", "critic", "optimizer", "noise")

    def __init__(self, flow: Any, config: FQLConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(flow.spec, config, seed=seed, device=device)
        self.flow = flow.to(device)
        self.policy: OneStepPolicy = build_policy(
            config.one_step, flow.spec, seed=derive(seed, "one step"), device=device
        )
        for module in (self.policy, self.critic):
            adopt_normalizers(module, flow)
        self.actor = executed_actor(PolicyActor(self.policy), config.execution, device)
        parts = (self.critic.online, flow, self.policy)
        trained = [p for part in parts for p in part.parameters() if p.requires_grad]
        self.optimizer = adam(trained, config.lr, config.execution)

    def critic_loss(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(loss, Q of the data (E, B))."""
        spec, online = self.policy.spec, self.critic.online
        with torch.no_grad():
            action = spec.executed(self.policy.act(next_obs, generator=self.noise))
            value = self.config.heads(self.critic.target(next_obs, action))
            target = td_target(columns["reward"], columns["discount"], value)
        mask = row_weight(columns, spec.execute)
        return online.loss(online.encode(obs), columns["action"], target, mask)

    def flow_loss(self, obs: Obs, action: Tensor, steps: Tensor, around: dict[str, Tensor] | None = None) -> Tensor:
        chunk, real = imitation_chunk(self.flow.spec, action, steps, around)
        return self.flow.bc_loss(obs, chunk, mask=real, generator=self.noise).mean()

    def policy_losses(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """(distillation, -Q): neither moves the flow, the second does not move the critic."""
        spec, online = self.policy.spec, self.critic.online
        like = next(iter(obs.values()))
        z = normal((len(like), *spec.chunk_shape), self.noise, device=like.device)
        with torch.no_grad():
            copied = self.flow.act(obs, noise=z)
        chunk = self.policy(obs, z)
        distillation = (chunk - copied).square().mean()
        online.requires_grad_(False)
        q = online(obs, spec.executed(chunk.clamp(-1, 1))).mean(0)
        online.requires_grad_(True)
        return distillation, -(q_scale(q) * q if self.config.normalize_q else q).mean()

    def _descend(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor], around: dict[str, Tensor]) -> Metrics:
        critic, q = self.critic_loss(obs, next_obs, columns)
        flow = self.flow_loss(obs, columns["action"], columns["steps"], around)
        distillation, climb = self.policy_losses(obs)
        descend(self.optimizer, critic + flow + self.config.alpha * distillation + climb)
        self.critic.follow(self.config.tau)
        q = q.detach()
        return {
            "critic_loss": critic.detach(),
            "flow_loss": flow.detach(),
            "distillation": distillation.detach(),
            "policy/-q": climb.detach(),
            "q": q.mean(),
            "q/spread": spread(q),
        }


def build(config: FQLConfig, policy: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> FQL:
    """The FQL learner of a flow policy whose noise has the shape of the chunk; another kind is refused."""
    flow = trainable_imitator(policy, "FQL")
    if flow.spec.noise_shape != flow.spec.chunk_shape:
        raise BurnishError(
            f"FQL distils the map from noise to chunk, so noise_shape={flow.spec.noise_shape} must be the shape of the "
            f"chunk {flow.spec.chunk_shape}; take a flow policy"
        )
    return FQL(flow, config, seed=seed, device=device)
