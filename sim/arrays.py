"""Array functions that a task's formulas need, for NumPy (worlds in C) and torch (worlds on a device) alike.

Both libraries know `concatenate`, `stack`, `where`, `arctan2` and the like by the same names, with ``axis``; so a
formula takes the library of its argument (`library`) and is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch


def library(x: Any) -> Any:
    """The module whose functions work on ``x``: NumPy or torch."""
    return torch if isinstance(x, torch.Tensor) else np


def constant(beside: Any, values: Any) -> Any:
    """``values`` in float64, of the kind of ``beside`` and on its device, to which they are copied once."""
    if not isinstance(beside, torch.Tensor):
        return np.asarray(values, np.float64)
    given = np.asarray(values, np.float64)
    return _on_device(beside.device, given.shape, given.tobytes())


@lru_cache(maxsize=256)
def _on_device(device: torch.device, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    return torch.tensor(np.frombuffer(data).reshape(shape), device=device)


def everywhere(beside: Any, values: Any) -> Any:
    """(N, D): the numbers ``values`` (D,) in each of the N rows of ``beside``."""
    return constant(beside, values) + 0 * beside.reshape(len(beside), -1)[:, :1]


def whole(x: Any) -> Any:
    """The numbers of ``x`` as int64, rounded towards zero."""
    return x.long() if isinstance(x, torch.Tensor) else x.astype(np.int64)


def pick(choices: Sequence[Any], which: Any) -> Any:
    """In row i that of ``choices``, (N, ...) each, whose number stands in row i of ``which`` (N,)."""
    xp = library(which)
    rows = torch.arange(len(which), device=which.device) if xp is torch else np.arange(len(which))
    return xp.stack(choices)[which, rows]


def put(into: Any, value: Any, rows: Any) -> None:
    """``into[rows] = value[rows]``; None are all rows. Rows are numbers in NumPy, and in torch a mask (N,), because a
    GPU would have to tell the host how many numbers there are."""
    if rows is None:
        into[:] = value
    elif isinstance(into, torch.Tensor):
        mask = rows.reshape(-1, *(1,) * (into.ndim - 1))
        into.copy_(torch.where(mask, value, into))
    else:
        into[rows] = np.broadcast_to(value, into.shape)[rows]
