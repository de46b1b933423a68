"""Offline methods in the world: IQL, CQL and Cal-QL, TD3+BC, FQL, Q-chunking, RECAP go on learning from what they play.

    burnish finetune method=fql data=recordings env=insert pretrain_updates=20000 total=20000

First ``pretrain_updates`` updates from the recordings alone, then the same learner, with its critics and optimisers,
acts and learns. ``loop.prior_share`` says what becomes of the recordings: null draws from both as if they lay in one
replay (IQL, FQL: arXiv 2502.02538), a number is the share of each batch (RLPD: 2302.02948; Cal-QL: 2303.05479), and 0
leaves them behind after pretraining, so that what the policy plays during the warm-up takes their place (WSRL:
2412.07762). A policy that is given is where it starts, with a fresh critic, or with that of the run that made it
(``critic_from=RUN``); without recordings that is all it has.

Rewards are scaled and shifted in the world as in the recordings (``rewards``). Observations are scaled as they lie in
the recordings, and stay so.

**Departures.** Every update follows one decision (``loop.updates_per_decision``), also where the published code trains
in turns of whole episodes. Exploration is that of each method's policy: its draws, and for TD3+BC a Gaussian noise of
``explore_std``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...offline.cql import CQLConfig
from ...offline.dataset import fit_normalizers
from ...offline.fql import FQLConfig
from ...offline.iql import IQLConfig
from ...offline.q_chunking import QChunkingConfig
from ...offline.recap import RecapConfig, require_single_steps
from ...offline.replay import Replay
from ...offline.returns import Discount
from ...offline.td3_bc import TD3BCConfig
from ...policies.build import build_policy
from ...policies.core.chunk import ChunkEnv
from ...policies.core.errors import BurnishError
from ...policies.core.normalize import Scaling
from ...policies.core.spec import ActionSpec, ChunkConfig, PolicySpec, check_compatible, chunk_spec
from ...policies.core.types import VecEnv
from ..loops import Assembly, OffPolicyConfig


def union() -> OffPolicyConfig:
    """The loop that draws batches from recordings and new decisions together, in proportion to their number."""
    return OffPolicyConfig(warmup=1000, prior_share=None)


def single_steps() -> ChunkConfig:
    """The chunk of methods that act at each tick: one action."""
    return ChunkConfig(horizon=1, execute=1)


def chunks_of_five() -> ChunkConfig:
    """The chunk of Q-chunking as published: five actions, all played."""
    return ChunkConfig(horizon=5, execute=5)


@dataclass
class Online:
    """The settings that an offline method has in the world beside its own."""

    loop: OffPolicyConfig = field(default_factory=union)  # amounts that are played, stored and learnt
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    chunk: ChunkConfig = field(default_factory=single_steps)  # chunk of a fresh policy; one that is given keeps its own
    normalize: Scaling = Scaling.standard  # scaling of the observations of a fresh policy, by the recordings


@dataclass
class OnlineIQL(IQLConfig, Online):
    """IQL in the world."""


@dataclass
class OnlineCQL(CQLConfig, Online):
    """CQL in the world, and Cal-QL, which keeps calibrating: a return counts from the end of its episode on."""

    # amounts that are played, stored and learnt; half of a batch is recordings
    loop: OffPolicyConfig = field(default_factory=lambda: OffPolicyConfig(warmup=1000))

    def discount_of(self, execute: int) -> float:
        return self.discount.per_step(execute) ** execute


@dataclass
class OnlineTD3BC(TD3BCConfig, Online):
    """TD3+BC in the world."""


@dataclass
class OnlineFQL(FQLConfig, Online):
    """FQL in the world; with chunk.horizon=5 and chunk.execute=5 it is QC-FQL."""


@dataclass
class OnlineQChunking(QChunkingConfig, Online):
    """Q-chunking in the world."""

    # chunk of a fresh policy; one that is given keeps its own
    chunk: ChunkConfig = field(default_factory=chunks_of_five)


@dataclass
class OnlineRecap(RecapConfig, Online):
    """RECAP in the world: what it plays is imitated beside the recordings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_single_steps(self.loop.n_step, "method.loop.n_step")


def offline_learner(
    make: Callable[..., Any],
    config: Any,
    policy: Any | None,
    spec: PolicySpec,
    *,
    data: Replay | None = None,
    normalize: Scaling = Scaling.standard,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Any:
    """The learner of ``make`` that trains a copy of ``policy``, or a fresh ``config.policy`` where None is given.

    All networks of a learner scale observations as its policy does. A fresh one is fitted to ``data``; without data it
    takes observations as they are.
    """
    if policy is None:
        fresh = policy = build_policy(config.policy, spec, seed=seed)
        if data is not None:
            fit_normalizers(fresh, data, normalize)
    elif (policy.spec.execute, policy.spec.action.dim) != (spec.execute, spec.action.dim):
        raise BurnishError(
            f"the policy executes {policy.spec.execute} actions of {policy.spec.action.dim} numbers, but the data was "
            f"cut for {spec.execute} of {spec.action.dim}; make the data with the spec of the policy"
        )
    return make(config, policy, seed=seed, device=device)


def build(
    make: Callable[..., Any],
    config: Any,
    base: Any,
    env: VecEnv,
    *,
    recordings: Replay | None = None,
    limits: ActionSpec | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Assembly:
    """The view and the learner of an offline method; ``make`` is that of its row in the table."""
    if base is None:
        spec = chunk_spec(env.spec, config.chunk, limits)
    else:
        spec = base.spec
        check_compatible(spec, env.spec)
    options: dict[str, Any] = {"normalize": config.normalize, "seed": seed, "device": device}
    learner = offline_learner(make, config, base, spec, data=recordings, **options)
    gamma = config.discount.per_step(spec.execute)
    return Assembly(ChunkEnv(env, spec.execute, gamma), learner)
