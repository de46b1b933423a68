"""What the tests of offline methods share: small learners, batches with ends of every kind, and training on the MDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import mdp
from burnish.finetune.method import Phase, resolved
from burnish.finetune.methods.offline_to_online import offline_learner
from burnish.finetune.table import method_of
from burnish.offline.cql import CQLConfig
from burnish.offline.dataset import BehindCut, decisions
from burnish.offline.fql import FQLConfig
from burnish.offline.iql import Extraction, IQLConfig, regression_policy
from burnish.offline.q_chunking import QChunkingConfig
from burnish.offline.replay import Replay
from burnish.offline.sac import soft_agent
from burnish.offline.td3 import deterministic_agent
from burnish.offline.td3_bc import TD3BCConfig
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.critic import CriticConfig, ValueConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.one_step import OneStepConfig
from training_lab import train_offline

# Five actions are imitated, three of them executed, beginning with the second.
CHUNKED = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1.0, -1.0), (1.0, 1.0)), horizon=5, execute=3, start=1)
SINGLE = replace(CHUNKED, horizon=1, execute=1, start=0)

WIDTH = [64, 64]
FLOW = FlowConfig(steps=5, net=DenoiserConfig(mlp=MlpBodyConfig(hidden=WIDTH, time_dim=16)))
_FAST: dict[str, Any] = {"lr": 3e-3, "tau": 0.1, "critic": CriticConfig(hidden=WIDTH)}
CONFIGS: dict[str, Any] = {
    "iql": IQLConfig(
        expectile=0.9,
        beta=1.0,
        actor_lr=3e-3,
        gaussian=regression_policy(hidden=WIDTH),
        value=ValueConfig(hidden=WIDTH),
        **_FAST,
    ),
    "iql_best": IQLConfig(
        expectile=0.9,
        extraction=Extraction.best_of_n,
        actor_lr=3e-3,
        flow=FLOW,
        value=ValueConfig(hidden=WIDTH),
        **_FAST,
    ),
    "td3_bc": TD3BCConfig(alpha=5.0, actor_lr=3e-3, agent=deterministic_agent(hidden=WIDTH), **_FAST),
    "fql": FQLConfig(alpha=0.05, flow=FLOW, one_step=OneStepConfig(hidden=WIDTH), **_FAST),
    "q_chunking": QChunkingConfig(count=8, flow=FLOW, **_FAST),
    "cql": CQLConfig(weight=1.0, count=4, actor_lr=3e-3, agent=soft_agent(hidden=WIDTH), **_FAST),
    "cal_ql": CQLConfig(weight=1.0, count=4, calibrate=True, actor_lr=3e-3, agent=soft_agent(hidden=WIDTH), **_FAST),
}


def build(config: Any, policy: Any, spec: PolicySpec, **options: Any) -> Any:
    """The learner of the table, as `burnish offline` makes it."""
    return offline_learner(resolved(method_of(config, Phase.offline).learner), config, policy, spec, **options)


def made(name: str, spec: PolicySpec = SINGLE, seed: int = 0, **changes: Any) -> Any:
    return build(replace(CONFIGS[name], **changes), None, spec, seed=seed)


def a_batch(spec: PolicySpec = SINGLE, rows: int = 12, seed: int = 0) -> dict[str, Any]:
    """Rows in turn: played in full; terminated in full; cut short by a termination; cut short by a truncation."""
    make = torch.Generator().manual_seed(seed)
    kind = torch.arange(rows) % 4
    short = (kind >= 2) if spec.execute > 1 else torch.zeros(rows, dtype=torch.bool)
    terminated = (kind == 1) | (kind == 2)
    steps = torch.where(short, spec.execute - 1, spec.execute)
    action = 2 * torch.rand(rows, spec.execute, spec.action.dim, generator=make) - 1
    action = action * (torch.arange(spec.execute) < steps[:, None])[:, :, None]
    return {
        "obs": {"state": torch.randn(rows, 3, generator=make)},
        "next_obs": {"state": torch.randn(rows, 3, generator=make)},
        "action": action,
        "reward": torch.randn(rows, generator=make),
        "discount": 0.9**steps * ~terminated,
        "ended": terminated | (kind == 3),
        "terminated": terminated,
        "steps": steps,
        "return_to_go": torch.randn(rows, generator=make),
    }


def recorded(seed: int, *, cut_is_end: bool = False) -> Replay:
    """``cut_is_end`` is the classic mistake: a truncation is taken for a termination."""
    episodes = mdp.recorded(seed)
    for episode in episodes if cut_is_end else []:
        episode.terminated = True
    return decisions(episodes, mdp.SPEC, mdp.GAMMA, returns=BehindCut.worst, seed=seed)


def trained(name: str, seed: int, updates: int, *, cut_is_end: bool = False, **changes: Any) -> Any:
    data = recorded(seed, cut_is_end=cut_is_end)
    learner = build(replace(CONFIGS[name], **changes), None, mdp.SPEC, data=data, seed=seed)
    train_offline(learner, data, batch=256, total=updates)
    return learner


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
