"""Layers of a vision-language model and of its action expert, under the names of their published weights.

Attention is grouped (several query heads share a key head) and computed with its scores in float32 at least. Its keys
may come from several places, and those of an observation may serve several rows of queries: nothing is repeated for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WAVELENGTH = 10_000.0  # the longest of the rotations, whatever the language model was published with


class Keys(NamedTuple):
    """Keys and values (B, T, n, d) of T tokens, and a mask that broadcasts to (B, S, T): who may see them."""

    keys: Tensor
    values: Tensor
    seen: Tensor


class Style(NamedTuple):
    """The differences between language models of the same plan."""

    eps: float  # added to a mean square
    base: float  # a normalisation multiplies by base + weight
    gate: Callable[[Tensor], Tensor]  # activation in the gated parts


LLAMA = Style(1e-5, 0.0, F.silu)
GEMMA = Style(1e-6, 1.0, partial(F.gelu, approximate="tanh"))


class RMSNorm(nn.Module):
    """x / rms(x) * (base + weight) over the last dimension, the mean square in float32 at least."""

    def __init__(self, width: int, style: Style = LLAMA) -> None:
        super().__init__()
        self.weight, self.eps, self.base = nn.Parameter(torch.full((width,), 1 - style.base)), style.eps, style.base

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        del time  # it is the same at all times
        return (self.base + self.weight) * scaled(x, self.eps)

    def gate(self, time: Tensor | None) -> float:
        del time
        return 1.0


class AdaRMSNorm(nn.Module):
    """x / rms(x) (1 + scale) + shift, and the gate of what is made of it: all three by the embedded time (B, W)."""

    def __init__(self, width: int, style: Style) -> None:
        super().__init__()
        self.dense, self.eps = nn.Linear(width, 3 * width), style.eps

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift, _ = self.dense(time)[:, None].chunk(3, -1)
        return scaled(x, self.eps) * (1 + scale) + shift

    def gate(self, time: Tensor) -> Tensor:
        return self.dense(time)[:, None].chunk(3, -1)[2]


def scaled(x: Tensor, eps: float) -> Tensor:
    """x / rms(x), computed in float32 at least."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """RoPE in half-split form: x (B, S, heads, d) at ``position`` (B, S). Coordinates j and j + d/2 turn together."""
    half, kind = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    wavelength = WAVELENGTH ** (torch.arange(half, dtype=kind, device=x.device) / half)
    angle = (position[..., None].to(kind) / wavelength)[:, :, None]
    sine, cosine = angle.sin(), angle.cos()
    a, b = x.to(kind).split(half, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(x.dtype)


def attend(queries: Tensor, sources: Sequence[Keys]) -> Tensor:
    """(R, S, heads, d) -> (R, S, heads d), one softmax over the keys of all sources.

    A source of B keys with R = c B serves rows c i .. c i + c - 1 of the queries with its row i. A query that sees
    nothing is itself padding; what it gets is never read.
    """
    kind = torch.promote_types(queries.dtype, torch.float32)
    rows, steps, heads, width = queries.shape
    scores = []
    for source in sources:
        asked, count = _grouped(queries, source.keys), source.keys.shape[2]
        found = asked.to(kind) @ source.keys.permute(0, 2, 3, 1).to(kind) * width**-0.5
        found = found.unflatten(2, (rows // len(source.keys), steps, heads // count)).transpose(1, 2).flatten(0, 1)
        seen = source.seen.expand(len(source.keys), -1, -1).repeat_interleave(rows // len(source.keys), 0)
        scores.append(found.masked_fill(~seen[:, None, :, None], torch.finfo(kind).min))  # (R, n, S, g, T)
    shares = torch.cat(scores, -1).softmax(-1).to(queries.dtype)
    parts = shares.split([source.keys.shape[1] for source in sources], -1)
    total = sum(_gathered(part, source.values) for part, source in zip(parts, sources, strict=True))
    return torch.as_tensor(total).transpose(1, 2).flatten(2)


def _grouped(queries: Tensor, keys: Tensor) -> Tensor:
    """(R, S, heads, d) -> (B, n, c S g, d): all queries that ask the n key heads of one row."""
    batch, count = keys.shape[0], keys.shape[2]
    split = queries.unflatten(2, (count, -1)).unflatten(0, (batch, -1))  # (B, c, S, n, g, d)
    return split.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)


def _gathered(shares: Tensor, values: Tensor) -> Tensor:
    """(R, n, S, g, T) and (B, T, n, d) -> (R, n, S, g d)."""
    split = shares.unflatten(0, (len(values), -1)).transpose(1, 2)  # (B, n, c, S, g, T)
    found = split.flatten(2, 4) @ values.transpose(1, 2)
    return found.unflatten(2, split.shape[2:5]).transpose(1, 2).flatten(0, 1).flatten(3)


class GatedMLP(nn.Module):
    """down(activation(gate x) * up x), without biases."""

    def __init__(self, width: int, hidden: int, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Projections(nn.Module):
    """The four maps of an attention, without biases; ``keys_in`` is the width of what keys are made of."""

    def __init__(self, width: int, heads: int, key_heads: int, size: int, keys_in: int) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(keys_in, key_heads * size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * size, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """(..., heads d) -> (..., heads, d)."""
        return x.unflatten(-1, (-1, self.size))


class Layer(nn.Module):
    """A layer of a transformer like Llama or Gemma. ``keys_in``: its keys and values are made of others', not of its
    input. ``timed``: its normalisations and gates depend on the embedded ``time``."""

    def __init__(
        self,
        width: int,
        heads: int,
        key_heads: int,
        size: int,
        hidden: int,
        keys_in: int | None = None,
        style: Style = LLAMA,
        timed: bool = False,
    ) -> None:
        super().__init__()
        self.self_attn = Projections(width, heads, key_heads, size, width if keys_in is None else keys_in)
        self.mlp = GatedMLP(width, hidden, style.gate)
        self.input_layernorm, self.post_attention_layernorm = (norm_of(width, style, timed) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        before: Sequence[Keys],
        seen: Tensor | None = None,
        time: Tensor | None = None,
    ) -> tuple[Tensor, list[Keys]]:
        """Tokens x (B, S, W) attend to those ``before`` them and, as ``seen`` says, to each other; without ``seen``
        they look back alone. Returns their new values, and their own keys."""
        own = [] if seen is None else [self.keys(x, position, seen, time)]
        return self.after(x, attend(self.queries(x, position, time), [*before, *own]), time), own

    def queries(self, x: Tensor, position: Tensor, time: Tensor | None = None) -> Tensor:
        return rotated(self.self_attn.split(self.self_attn.q_proj(self.input_layernorm(x, time))), position)

    def keys(self, x: Tensor, position: Tensor, seen: Tensor, time: Tensor | None = None) -> Keys:
        """Of the layer's own input ``x``."""
        own, normed = self.self_attn, self.input_layernorm(x, time)
        return Keys(rotated(own.split(own.k_proj(normed)), position), own.split(own.v_proj(normed)), seen)

    def mapped(self, others: Keys) -> Keys:
        """Keys and values made of those of another model, which are rotated already."""
        own = self.self_attn
        keys, values = (own.split(f(x.flatten(2))) for f, x in zip((own.k_proj, own.v_proj), others[:2], strict=True))
        return Keys(keys, values, others.seen)

    def after(self, x: Tensor, attended: Tensor, time: Tensor | None = None) -> Tensor:
        """The rest of the layer, behind its attention."""
        x = x + self.input_layernorm.gate(time) * self.self_attn.o_proj(attended)
        return x + self.post_attention_layernorm.gate(time) * self.mlp(self.post_attention_layernorm(x, time))


def norm_of(width: int, style: Style, timed: bool = False) -> Any:
    """The normalisation of a layer."""
    return AdaRMSNorm(width, style) if timed else RMSNorm(width, style)
