"""The state of a learner is that of its parts: modules, optimisers, generators, and anything with a ``state_dict``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def state_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each part by its name, ready for a checkpoint."""
    return {
        name: part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
        for name, part in parts.items()
    }


def restore(parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Into parts that were built in the same way. ``state`` is copied first: optimisers keep what they are given."""
    for name, part in parts.items():
        saved = copy.deepcopy(state[name])
        if isinstance(part, torch.Generator):
            part.set_state(saved.cpu())
        elif isinstance(part, torch.optim.Optimizer):
            _restore_optimizer(part, saved)
        else:
            part.load_state_dict(saved)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """A learning rate that is a tensor stays the same tensor, because others hold it and a recorded graph reads it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):
            group["lr"] = rate.fill_(float(group["lr"]))
