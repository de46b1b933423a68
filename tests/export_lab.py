"""Policies to export, and a bundle made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from burnish.policies.build import build_policy
from burnish.policies.compose import BestOf, Repeated, Residual, Steered
from burnish.policies.core.offset import OFFSET, OffsetConfig
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.diffusion import DiffusionConfig
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import CriticConfig, QEnsemble
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.split_chain import SplitChain
from burnish.real_robot.export.bundle import PLAN, Bundle, NoiseInput, Schema

H, EXECUTE, A = 4, 2, 2
SPEC = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-0.5, 0.0), (1.5, 4.0)), H, EXECUTE, start=1, control_hz=20.0)
GOALS = PolicySpec(
    ObsSpec({"state": (5,), "goal": (2,)}), ActionSpec((-2.0,) * 3, (1.0,) * 3), H, EXECUTE, start=1, history=2
)


def one_step_flow(obs: int = 48, horizon: int = 8, dim: int = 7, widths: tuple[int, ...] = (256, 256, 256)) -> Any:
    """The flow whose speed is measured: one Euler step through the default network."""
    spec = PolicySpec(ObsSpec({"state": (obs,)}), ActionSpec((-1,) * dim, (1,) * dim), horizon, horizon)
    return alive(build_policy(FlowConfig(steps=1, net=DenoiserConfig(mlp=MlpBodyConfig(list(widths)))), spec))


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


def agent(shape: tuple[int, int], seen: Mapping[str, tuple[int, ...]] | None = None, **changes: Any) -> Any:
    """What methods train beside a base: it chooses ``shape`` numbers, from the state and ``seen``."""
    obs = ObsSpec({"state": (3,)} | dict(seen or {}))
    spec = PolicySpec(obs, ActionSpec((-1,) * shape[1], (1,) * shape[1]), shape[0], shape[0], control_hz=20.0)
    return made(GaussianConfig(**({"hidden": [16], "squash": True} | changes)), spec, 2)


def residual(every: str, base: Any = None, offset: OffsetConfig | None = None) -> Residual:
    shape, corrected = ((1, A), (A,)) if every == "step" else ((1, EXECUTE * A), (EXECUTE, A))
    seen = {"base_action": corrected} | ({} if offset is None else {OFFSET: (A,)})
    return Residual(small() if base is None else base, agent(shape, seen), 0.5, every, offset)


def steered(residual_bound: float | None = 0.25, base: Any = None, **changes: Any) -> Steered:
    base = small() if base is None else base
    size = int(np.prod(base.spec.noise_shape)) + (EXECUTE * A if residual_bound is not None else 0)
    return Steered(base, agent((1, size), **changes), 1.5, residual_bound)


def best_of(base: Any = None, edits: bool = False, **changes: Any) -> BestOf:
    edit = agent((EXECUTE, A), {"base_action": (EXECUTE, A)}) if edits else None
    critic = QEnsemble(SPEC, CriticConfig(hidden=[16], **changes)).eval()
    return BestOf(small() if base is None else base, critic, 3, edit, 0.2 if edits else 0.0)


def ddim(**changes: Any) -> Any:
    return made(DiffusionConfig(**{"steps": 4, "net": DenoiserConfig(mlp=MlpBodyConfig([32, 32], 16)), **changes}))


def relay() -> SplitChain:
    return SplitChain(small(seed=1), small(seed=9), 2)


def repeated() -> Steered:
    return steered(None, Repeated(small()))


def by_hand(**changes: Any) -> Bundle:
    """action = clip(noise + W state + b): a chunk of 2 actions of 2 numbers, without any torch."""
    parts: Mapping[str, Any] = {
        "schema": Schema({"state": (3,)}, (-1.0, 0.0), (1.0, 2.0), 2, 2, noise_shape=(2, 2), control_hz=50.0),
        "networks": {PLAN: network_by_hand()},
        "noise": (NoiseInput((2, 2)),),
        "about": {"class": "none", "git": "0" * 40},
        "parity": {"tolerance": 1e-5},
    }
    return Bundle(**{**parts, **changes})


W, B = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32), np.full(4, 0.1, np.float32)


def network_by_hand(name: str = "obs.state", width: int = 3, horizon: int = 2, weight: Any = W) -> bytes:
    reads = {name: [1, width], "noise.0": [1, 2, 2], "prefix": [1, 2, 2], "prefix_known": [1, 2, 1]}
    constants = {"w": weight, "b": B, "chunk": np.array([1, 2, 2]), "low": np.float32(-1), "high": np.float32(1)}
    constants["half"] = np.float32(0.5)
    nodes = [
        helper.make_node("Gemm", [name, "w", "b"], ["flat"], transB=1),
        helper.make_node("Reshape", ["flat", "chunk"], ["mean"]),
        helper.make_node("Add", ["mean", "noise.0"], ["sum"]),
        helper.make_node("Clip", ["sum", "low", "high"], ["clipped"]),
        helper.make_node("Greater", ["prefix_known", "half"], ["known"]),
        helper.make_node("Where", ["known", "prefix", "clipped"], ["actions"]),
    ]
    graph = helper.make_graph(
        nodes,
        "by_hand",
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key, shape in reads.items()],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, [1, horizon, 2])],
        [numpy_helper.from_array(np.asarray(x), key) for key, x in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
