"""RLIF: an agent that learns to be left alone. The only reward is -1 where a person takes the robot over.

Luo et al. 2023 (RLIF, arXiv 2311.12996), algorithm 2: RLPD (``rlpd.py``) with reward -1 for the decision before an
intervention and 0 everywhere else; the task's own reward is never read. Nothing is imitated, so the agent may become
better than the people who intervene, as long as these know *when* to. Half of each batch is recordings, at reward 0,
and what the interveners played (``interventions.Demonstrations``). Critics are those of RLPD, without entropy in the
target; five updates per decision.

    who played       action that the critic is shown      reward
    policy           executed                             0, and -1 if a person takes over with the next decision
    policy, expert   the chunk that was asked for         -1: asked for this, a person stepped in
    expert           executed                             0

**Departures.** The published simulation judges the action that the policy is about to take and blames the one before;
here the tick that was played is judged, so that with ``late=0`` the blame falls on what caused it
(``interventions.py``). The published code also puts -1 on transitions within an intervention, the paper only before it,
and so do we. The reward of a chunk is not discounted inside it. **An end that is a failure must not look like peace**:
a termination ends all interventions, so the person must step in before a failure that terminates the episode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...offline.actor_critic import Algorithm
from ...offline.learner import Wrapping
from ...offline.returns import Discount
from ...offline.sac import SACConfig, soft_agent
from ...offline.sources import Mapped
from ...offline.td3 import TD3Config
from ...policies.core.errors import BurnishError
from ...policies.core.tree import rows
from ...policies.core.types import Controller, Decisions, Learner, Metrics, Source, VecEnv
from ...policies.gaussian import GaussianPolicy
from ...policies.nets.critic import CriticConfig
from ..loops import Assembly, OffPolicyConfig
from ..methods import rlpd
from ..methods.rlpd import RLPDConfig
from .interventions import Demonstrations, InterventionConfig, supervised


def _critic() -> CriticConfig:
    return CriticConfig(members=10, hidden=[256, 256, 256])


def _sac() -> SACConfig:
    hidden = soft_agent(hidden=[256, 256, 256])
    usual: dict[str, Any] = {"entropy_per_dim": -0.5, "subset": 2, "actor_mean": True, "backup_entropy": False}
    return SACConfig(**usual, actor_every=5, agent=hidden, critic=_critic())


def _td3() -> TD3Config:
    return TD3Config(subset=2, actor_mean=True, actor_every=5, delay_targets=False, critic=_critic())


@dataclass
class RLIFConfig:
    """Settings of RLIF: when the expert takes over, and the learner."""

    # rule by which a scripted expert takes over
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    algorithm: Algorithm = Algorithm.sac  # learner: sac or td3
    execute: int = 1  # actions per decision of an actor from scratch; a base brings its own, and its history
    history: int = 1  # observations that are stacked, the newest among them
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    # amounts that are played, stored and learnt
    loop: OffPolicyConfig = field(default_factory=lambda: OffPolicyConfig(warmup=1000, updates_per_decision=5))
    sac: SACConfig = field(default_factory=_sac)  # the SAC that learns, with algorithm=sac
    td3: TD3Config = field(default_factory=_td3)  # the TD3 that learns, with algorithm=td3
    normalize: bool = True  # observations of an actor from scratch are scaled as in rlpd

    def __post_init__(self) -> None:
        self.as_rlpd()  # which checks what it shares with it
        if self.loop.n_step != 1:
            raise BurnishError(
                f"loop.n_step={self.loop.n_step}: rlif pays single decisions, the one before an intervention; take 1"
            )

    def as_rlpd(self) -> RLPDConfig:
        return RLPDConfig(
            self.algorithm, self.execute, self.history, self.discount, self.loop, self.sac, self.td3, self.normalize
        )


def paid_for_peace(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as RLIF reads it, by the table above: without the reward of the task."""
    called: Tensor = batch["called"]
    asked, executed = batch["action"], batch["executed"]
    action = torch.where(rows(called, asked), asked, executed)
    return {**batch, "action": action, "reward": -called.to(batch["reward"].dtype)}


class RLIF(Wrapping):
    """SAC or TD3 on what people let pass."""

    def __init__(self, inner: Learner, seed: int = 0) -> None:
        super().__init__(inner)
        self.columns = ("executed", "intervened", "called")
        self._seed, self._demonstrations = seed, None

    def prior(self, replay: Decisions, recordings: Decisions | None) -> Demonstrations:
        self.inner.prior(replay, recordings)
        self._demonstrations = Demonstrations(replay, recordings, seed=self._seed)
        return self._demonstrations

    def update(self, source: Source) -> Metrics:
        metrics = self.inner.update(Mapped(source, paid_for_peace))
        return metrics if self._demonstrations is None else {**metrics, "intervened": self._demonstrations.share}

    def q_values(self, batch: dict[str, Any]) -> None:
        """None: its critics expect interventions, which is not what the replay says of rewards."""


def build(
    config: RLIFConfig,
    base: GaussianPolicy | None,
    env: VecEnv,
    *,
    expert: Controller | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Assembly:
    """``expert`` takes over, in the units of ``env``, or the supervisor of the robot that ``env`` is; without either
    nobody does, and there is nothing to learn from."""
    learner = rlpd.build(config.as_rlpd(), base, env, seed=seed, device=device).learner
    spec = learner.policy.spec
    view = supervised(config, env, expert, execute=spec.execute, history=spec.history, seed=seed)
    return Assembly(view, RLIF(learner, seed))
