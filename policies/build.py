"""The table of policies: name -> configuration, builder, one line of documentation; and their checkpoints.

A policy's checkpoint is a folder that holds everything needed to act: which policy, its settings, its specification,
its weights and normalisers. Nothing in it can run code: the name must be in the table, the settings must fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .core.checkpoint import Checkpoint
from .core.config import from_data, to_data
from .core.errors import BurnishError, did_you_mean
from .core.run import find_policy
from .core.seed import derive
from .core.spec import PolicySpec
from .diffusion import DiffusionConfig
from .flow import FlowConfig
from .gaussian import GaussianConfig


class PolicyKind(NamedTuple):
    config: type
    build: str  # "module:class", relative to this package; imported when needed
    doc: str


POLICIES: dict[str, PolicyKind] = {
    "flow": PolicyKind(FlowConfig, ".flow:FlowPolicy", "flow matching; with shortcut=true also in 1, 2 or 4 steps"),
    "diffusion": PolicyKind(
        DiffusionConfig, ".diffusion:DiffusionPolicy", "DDPM training; DDPM, DDIM, Heun or DPM sampling"
    ),
    "gaussian": PolicyKind(
        GaussianConfig, ".gaussian:GaussianPolicy", "one Gaussian, plain or tanh; least squares or likelihood"
    ),
}


@dataclass
class CheckpointConfig:
    """``policy=checkpoint policy.path=...``: a policy that was saved before, and how it shall act."""

    path: str
    steps: int | None = None  # another number of generation steps than it was saved with
    guidance: float | None = None  # another weight of the goal


def policy_name(config: Any) -> str:
    for name, kind in POLICIES.items():
        if type(config) is kind.config:
            return name
    raise BurnishError(f"{type(config).__name__} is not the configuration of a policy; {did_you_mean('', POLICIES)}")


def build_policy(config: Any, spec: PolicySpec, *, seed: int = 0, device: torch.device | str = "cpu") -> Any:
    """A fresh policy; the same seed gives the same weights on every device."""
    kind = POLICIES[policy_name(config)]
    module, _, name = kind.build.partition(":")
    make = getattr(import_module(module, __package__), name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "weights"))
        policy: nn.Module = make(spec, config)
    return policy.to(device)


def describe(policy: Any, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the config.yaml of a policy's checkpoint says; ``origin`` is where it was trained (world, data)."""
    return {
        "policy": policy_name(policy.config),
        "config": to_data(policy.config),
        "spec": to_data(policy.spec.to_dict()),
        "origin": to_data(dict(origin or {})),
    }


def restore_policy(
    saved: Checkpoint,
    device: torch.device | str = "cpu",
    *,
    steps: int | None = None,
    guidance: float | None = None,
) -> Any:
    config = saved.config
    if not isinstance(config.get("policy"), str) or config["policy"] not in POLICIES:
        raise BurnishError(
            f"{saved.path} holds no policy that this version knows: policy={config.get('policy')!r}; "
            f"{did_you_mean(str(config.get('policy')), POLICIES)}"
        )
    kind = POLICIES[config["policy"]]
    settings = _adapted(from_data(kind.config, config.get("config", {}), "policy"), steps, guidance)
    policy = build_policy(settings, PolicySpec.from_dict(config.get("spec", {})))
    try:
        policy.load_state_dict(saved.state)
    except RuntimeError as error:
        raise BurnishError(f"the weights in {saved.path} do not fit its config.yaml: {error}".split("\n")[0]) from error
    return policy.to(device).eval()


def load_policy(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    steps: int | None = None,
    guidance: float | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The policy saved at ``path``, and its origin. ``steps`` and ``guidance`` change how it acts."""
    saved = find_policy(path)
    return restore_policy(saved, device, steps=steps, guidance=guidance), saved.config.get("origin", {})


def _adapted(settings: Any, steps: int | None, guidance: float | None) -> Any:
    """Other settings, checked like all others, and remembered when the policy is saved again."""
    name = policy_name(settings)
    if steps is not None:
        if not hasattr(settings, "steps"):
            raise BurnishError(f"steps={steps}: a {name} policy acts in a single step")
        settings = replace(settings, steps=steps)
    if guidance is not None:
        if not hasattr(settings, "net"):
            raise BurnishError(f"guidance={guidance}: a {name} policy has no guidance")
        settings = replace(settings, net=replace(settings.net, guidance=guidance))
    return settings
