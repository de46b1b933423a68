"""Policies to export, and a bundle made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from burnish.policies.build import build_policy
from burnish.policies.compose import BestOf, Repeated, Residual, SplitChain, Steered
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.diffusion import DiffusionConfig
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import CriticConfig, QEnsemble
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.mlp import Activation
from burnish.real_robot.export.bundle import Bundle, NoiseInput, Schema

H, EXECUTE, A = 4, 2, 2
SPEC = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-0.5, 0.0), (1.5, 4.0)), H, EXECUTE, start=1, control_hz=20.0)
GOALS = PolicySpec(
    ObsSpec({"state": (5,), "goal": (2,)}), ActionSpec((-2.0,) * 3, (1.0,) * 3), H, EXECUTE, start=1, history=2
)


def one_step_flow(obs: int = 48, horizon: int = 8, dim: int = 7, widths: tuple[int, ...] = (256, 256, 256)) -> Any:
    """The flow whose speed is measured: one Euler step through a Mish network without norms."""
    spec = PolicySpec(ObsSpec({"state": (obs,)}), ActionSpec((-1,) * dim, (1,) * dim), horizon, horizon)
    body = MlpBodyConfig(list(widths), activation=Activation.mish, layer_norm=False, residual=False)
    return alive(build_policy(FlowConfig(steps=1, shortcut=True, net=DenoiserConfig(mlp=body)), spec))


def alive(policy: Any, seed: int = 5) -> Any:
    """With normalisers that do something: those of a fresh policy are the identity."""
    source = torch.Generator().manual_seed(seed)
    for name, x in policy.named_buffers():
        if ".scalers." in name:
            x.copy_(torch.rand(x.shape, generator=source) + (0.5 if name.endswith("scale") else 0.0))
    return policy.eval()


def made(config: Any, spec: PolicySpec = SPEC, seed: int = 1) -> Any:
    return alive(build_policy(config, spec, seed=seed))


def small(steps: int = 3, seed: int = 1, spec: PolicySpec = SPEC, **changes: Any) -> Any:
    body = MlpBodyConfig([32, 32], 16)
    return made(FlowConfig(steps=steps, net=DenoiserConfig(mlp=body, **changes)), spec, seed)


def agent(shape: tuple[int, int], base_action: tuple[int, ...] | None = None, **changes: Any) -> Any:
    """What methods train beside a base: it chooses ``shape`` numbers."""
    seen = {"state": (3,)} | ({} if base_action is None else {"base_action": base_action})
    spec = PolicySpec(ObsSpec(seen), ActionSpec((-1,) * shape[1], (1,) * shape[1]), shape[0], shape[0])
    return made(GaussianConfig(**({"hidden": [16], "squash": True} | changes)), spec, 2)


def residual(every: str, base: Any = None) -> Residual:
    shape, seen = ((1, A), (A,)) if every == "step" else ((1, EXECUTE * A), (EXECUTE, A))
    return Residual(small() if base is None else base, agent(shape, seen), 0.5, every)


def steered(residual_bound: float | None = 0.25, base: Any = None, **changes: Any) -> Steered:
    base = small() if base is None else base
    size = int(np.prod(base.spec.noise_shape)) + (EXECUTE * A if residual_bound is not None else 0)
    return Steered(base, agent((1, size), **changes), 1.5, residual_bound)


def best_of(base: Any = None, edits: bool = False, **changes: Any) -> BestOf:
    edit = agent((EXECUTE, A), (EXECUTE, A)) if edits else None
    critic = QEnsemble(SPEC, CriticConfig(hidden=[16], **changes)).eval()
    return BestOf(small() if base is None else base, critic, 3, edit, 0.2 if edits else 0.0)


def ddim(**changes: Any) -> Any:
    return made(DiffusionConfig(**{"steps": 4, "net": DenoiserConfig(mlp=MlpBodyConfig([32, 32], 16)), **changes}))


def relay() -> SplitChain:
    return SplitChain(small(seed=1), small(seed=9), 2)


def repeated() -> Steered:
    return steered(None, Repeated(small()))


def by_hand(**changes: Any) -> Bundle:
    """action = clip(noise + W state): a chunk of 2 actions of 2 numbers, without any torch."""
    ops = [
        {"op": "linear", "in": ["obs.state", "noise.0"], "out": "sum", "width": 4, "weight": "w", "bias": "b"},
        {"op": "clip", "in": ["sum"], "out": "clipped", "low": -1.0, "high": 1.0},
        {"op": "pin", "in": ["clipped", "clipped"], "out": "chunk", "of_noise": 0.0, "of_prefix": 1.0},
    ]
    weights = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    parts: Mapping[str, Any] = {
        "schema": Schema({"state": (3,)}, (-1.0, 0.0), (1.0, 2.0), 2, 2, noise_shape=(2, 2), control_hz=50.0),
        "programs": {"plan": {"ops": ops, "output": "chunk"}},
        "noise": (NoiseInput((2, 2)),),
        "tensors": {"w": weights, "b": np.full(4, 0.1, np.float32)},
        "about": {"class": "none", "git": "0" * 40},
        "parity": {"tolerance": 1e-5},
    }
    return Bundle(**{**parts, **changes})
