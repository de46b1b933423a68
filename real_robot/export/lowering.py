"""From networks to a list of operations (`ops.py`): what collects them, and the layers that all policies share.

`Lowering` keeps the operations, tensors and noise of a policy that is followed through one act of its own, in the order
in which it would draw (`lowering_policies.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .bundle import NoiseInput, is_image
from .runtime import GOAL_GIVEN

ACTIVATIONS = {nn.SiLU: "silu", nn.ReLU: "relu", nn.GELU: "gelu", nn.Mish: "mish", nn.Tanh: "tanh"}


class NotLowered(Exception):
    """This policy, or a part of it, has no form as operations. The text names the part."""


class Lowering:
    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []
        self.tensors: dict[str, Tensor] = {}
        self.noise: list[NoiseInput] = []
        self.obs: dict[str, tuple[int, ...]] = {}
        self.candidates: int | None = None  # draws of a base among which the best is picked
        self.pins = True
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, op: str, inputs: Sequence[str], **settings: Any) -> str:
        out = f"v{len(self.ops)}"
        self.ops.append({"op": op, "in": list(inputs), "out": out, **settings})
        return out

    def tensor(self, name: str, value: Tensor) -> str:
        """Under a name of its own; the same numbers are kept once."""
        value = value.detach().to("cpu", torch.float32).contiguous()
        key = (tuple(value.shape), hashlib.sha256(value.numpy().tobytes()).digest())
        if key not in self._names:
            self._names[key] = f"{name}.{len(self.tensors)}"
            self.tensors[self._names[key]] = value
        return self._names[key]

    def draw(self, shape: Sequence[int], drawn: bool = True) -> str:
        split = self.candidates is not None
        self.noise.append(NoiseInput(tuple(shape), self.candidates or 1, split, drawn))
        return f"noise.{len(self.noise) - 1}"

    def observe(self, key: str, shape: Sequence[int]) -> str:
        if self.obs.setdefault(key, tuple(shape)) != tuple(shape):
            raise NotLowered(f"the parts of the policy observe {key!r} in different shapes")
        return f"obs.{key}"

    def constant(self, value: Tensor) -> str:
        flat = value.reshape(-1)
        return self.add("constant", [], tensor=self.tensor("constant", flat), width=len(flat))

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None, plus: str | None = None) -> str:
        named = {"weight": self.tensor("weight", weight)}
        if bias is not None:
            named["bias"] = self.tensor("bias", bias)
        return self.add("linear", [x] if plus is None else [x, plus], width=len(weight), **named)

    def mix(self, *terms: tuple[float, str]) -> str:
        kept = [(float(weight), x) for weight, x in terms if weight != 0] or [(0.0, terms[0][1])]
        if len(kept) == 1 and kept[0][0] == 1:
            return kept[0][1]
        return self.add("mix", [x for _, x in kept], weights=[weight for weight, _ in kept])

    def clip(self, x: str, limit: float = 1.0) -> str:
        return self.add("clip", [x], low=-limit, high=limit)

    def activation(self, x: str, kind: str) -> str:
        return self.add("activation", [x], kind=kind)

    def slice(self, x: str, start: int, stop: int) -> str:
        return self.add("slice", [x], start=start, stop=stop)

    def concat(self, *values: str) -> str:
        return values[0] if len(values) == 1 else self.add("concat", values)

    def layers(self, module: nn.Module, x: str, member: int | None = None) -> str:
        """``module``(x), of linear layers, norms, activations and sequences of them; one ``member`` of an ensemble."""
        kind = type(module).__name__
        if isinstance(module, nn.Sequential):
            for child in module:
                x = self.layers(child, x, member)
            return x
        if isinstance(module, nn.Identity):
            return x
        if isinstance(module, nn.Linear):
            return self.linear(x, module.weight, module.bias)
        if isinstance(module, nn.LayerNorm):
            return self._norm(x, module.weight, module.bias, module.eps)
        if isinstance(module, nn.GELU) and module.approximate != "none":
            raise NotLowered("an approximate gelu")
        if type(module) in ACTIVATIONS:
            return self.activation(x, ACTIVATIONS[type(module)])
        inner: Any = module
        if kind == "MLP":
            return self.layers(inner.layers, x)
        if kind == "_Residual":
            return self.mix((1, x), (1, self.layers(inner.layer, x)))
        if member is not None and kind == "EnsembleLinear":
            return self.linear(x, inner.weight[member].T, inner.bias[member, 0])
        if member is not None and kind == "EnsembleNorm":
            return self._norm(x, inner.weight[member, 0], inner.bias[member, 0], 1e-5)
        raise NotLowered(f"a layer of the class {kind}")

    def _norm(self, x: str, weight: Tensor, bias: Tensor, eps: float) -> str:
        return self.add("layernorm", [x], weight=self.tensor("weight", weight), bias=self.tensor("bias", bias), eps=eps)

    def encode(self, encoder: Any, seen: Mapping[str, str], free: bool = False) -> str:
        """`nets.encoder.ObsEncoder`. ``seen`` are values that stand for an observation; ``free`` hides the goal."""
        sensed = [self._scaled(encoder, key, seen) for key in encoder.sensed_keys]
        if encoder.goal_keys:
            goals = self.concat(*(self._scaled(encoder, key, seen) for key in encoder.goal_keys))
            # Hidden goals are zero already; their scaled form is not, so it is multiplied away.
            given = self.constant(torch.zeros(1)) if free else GOAL_GIVEN
            sensed += [self.add("multiply", [goals, given]), given]
        return self.layers(encoder.trunk, self.concat(*sensed))

    def _scaled(self, encoder: Any, key: str, seen: Mapping[str, str]) -> str:
        if is_image(key):
            raise NotLowered(f"a policy that sees {key!r}")
        shape = encoder._full.shapes[key]
        x = seen[key] if key in seen else self.observe(key, shape)
        if key not in encoder.normalizer.names:
            return x
        scaler = encoder.normalizer.scaler(key)
        shift, scale = (part.expand(shape).reshape(-1) for part in (scaler.shift, scaler.scale))
        if not bool(shift.any()) and bool((scale == 1).all()):
            return x
        return self.add("affine", [x], shift=self.tensor("shift", shift), scale=self.tensor("scale", scale))

    def pin(self, x: str, noise: str, of_noise: float, of_prefix: float) -> str:
        if not self.pins:
            return x
        return self.add("pin", [x, noise], of_noise=of_noise, of_prefix=of_prefix)

    def committed(self, x: str) -> str:
        """Actions that are committed already stay what they are."""
        return self.pin(x, x, 0.0, 1.0)
