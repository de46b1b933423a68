"""The table of offline methods: name -> configuration, builder, one line of documentation."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..policies.build import build_policy
from ..policies.core.errors import BurnishError, did_you_mean
from ..policies.core.normalize import Scaling
from ..policies.core.spec import PolicySpec
from .cql import CQLConfig
from .dataset import fit_normalizers
from .fql import FQLConfig
from .iql import IQLConfig
from .replay import Replay
from .td3_bc import TD3BCConfig


class Method(NamedTuple):
    config: type
    build: str  # "module:function", relative to this package; imported when needed
    doc: str


OFFLINE: dict[str, Method] = {
    "iql": Method(IQLConfig, ".iql:build", "expectile values; weighted imitation, or the best of n draws of a flow"),
    "cql": Method(CQLConfig, ".cql:build", "conservative SAC; with calibrate=true Cal-QL"),
    "td3_bc": Method(TD3BCConfig, ".td3_bc:build", "TD3 that stays near the data; the simplest"),
    "fql": Method(FQLConfig, ".fql:build", "a flow imitates, a one-step policy distils it and climbs the critic"),
}


def method_name(config: Any) -> str:
    for name, method in OFFLINE.items():
        if type(config) is method.config:
            return name
    raise BurnishError(
        f"{type(config).__name__} is not the configuration of an offline method; {did_you_mean('', OFFLINE)}"
    )


def build(
    config: Any,
    policy: Any | None,
    spec: PolicySpec,
    *,
    data: Replay | None = None,
    normalize: Scaling = Scaling.standard,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Any:
    """A learner that trains a copy of ``policy``, or a fresh ``config.policy`` where None is given.

    All networks of a learner scale observations as its policy does. A fresh one is fitted to ``data``; without data it
    takes observations as they are.
    """
    make, _, name = OFFLINE[method_name(config)].build.partition(":")
    if policy is None:
        if getattr(config, "frozen", False):
            raise BurnishError(
                "actor_lr=0 keeps a policy that is given; give one with policy=checkpoint policy.path=..."
            )
        fresh = policy = build_policy(config.policy, spec, seed=seed)
        if data is not None:
            fit_normalizers(fresh, data, normalize)
    elif (policy.spec.execute, policy.spec.action.dim) != (spec.execute, spec.action.dim):
        raise BurnishError(
            f"the policy executes {policy.spec.execute} actions of {policy.spec.action.dim} numbers, but the data was "
            f"cut for {spec.execute} of {spec.action.dim}; make the data with the spec of the policy"
        )
    return getattr(import_module(make, __package__), name)(config, policy, seed=seed, device=device)
