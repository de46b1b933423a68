"""Dicts of tensors, which may hold further dicts, and a shape checker that makes silent broadcasts impossible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def map_tree(fn: Callable[[Tensor], Tensor], tree: Mapping[str, Tensor]) -> Tree:
    """The tree of the same keys whose tensors are ``fn`` of those of ``tree``."""
    found: dict[str, Any] = {key: fn(x) if isinstance(x, Tensor) else map_tree(fn, x) for key, x in tree.items()}
    return found


def leaves(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of a tree, depth first, in the order of its keys."""
    for x in tree.values():
        yield from [x] if isinstance(x, Tensor) else leaves(x)


def stack(trees: Sequence[Mapping[str, Any]], dim: int = 0) -> Tree:
    """One tree out of several with the same keys, stacked along a new dimension ``dim``."""
    found: dict[str, Any] = {}
    for key, x in trees[0].items():
        parts = [tree[key] for tree in trees]
        found[key] = torch.stack(parts, dim) if isinstance(x, Tensor) else stack(parts, dim)
    return found


def concatenate(trees: Sequence[Mapping[str, Any]]) -> Tree:
    """One tree out of several with the same keys, whose rows follow each other."""
    found: dict[str, Any] = {}
    for key, x in trees[0].items():
        parts = [tree[key] for tree in trees]
        found[key] = torch.cat(parts) if isinstance(x, Tensor) else concatenate(parts)
    return found


def index(tree: Mapping[str, Tensor], rows: Any) -> Tree:
    """The given rows (an index, slice or mask) of each tensor of a tree."""
    return map_tree(lambda x: x[rows], tree)


def assign(tree: Mapping[str, Any], rows: Any, new: Mapping[str, Any]) -> None:
    """``tree[rows] = new`` in place, for each of the tensors."""
    for key, x in new.items():
        if isinstance(x, Tensor):
            tree[key][rows] = x
        else:
            assign(tree[key], rows, x)


def to(tree: Mapping[str, Tensor], device: torch.device | str) -> Tree:
    """The tree on a device; copies from pinned memory do not block."""
    return map_tree(lambda x: x.to(device, non_blocking=True), tree)


def rows(mask: Tensor, like: Tensor) -> Tensor:
    """(N,) -> (N, 1, ...), so that a mask over worlds broadcasts against any per-world tensor."""
    return mask.view(-1, *[1] * (like.ndim - 1))


def where(mask: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Tree:
    """Rows of ``new`` where ``mask`` (N,), rows of ``old`` elsewhere."""
    return {key: torch.where(rows(mask, x), x, old[key]) for key, x in new.items()}


def check(x: Tensor, shape: str, known: dict[str, int] | None = None) -> dict[str, int]:
    """``check(x, "B H A")``: refuse another rank, or another size of a letter that is already known.

    Numbers stand for themselves and ``_`` for anything. Returns the sizes, to be passed on to the next check.
    """
    sizes = {} if known is None else known
    names = shape.split()
    if x.ndim != len(names):
        raise ValueError(f"expected shape ({shape}), got {tuple(x.shape)}")
    for name, size in zip(names, x.shape, strict=True):
        if name == "_":
            continue
        expected = int(name) if name.isdigit() else sizes.setdefault(name, size)
        if size != expected:
            raise ValueError(f"expected shape ({shape}) with {name}={expected}, got {tuple(x.shape)}")
    return sizes
