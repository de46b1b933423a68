"""One step down a loss: what every learner here does in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ..policies.core.execute import Execution


def adam(parameters: ParamsT, lr: float, mode: Execution, **options: Any) -> torch.optim.Adam:
    """Fused: one kernel for all parameters. ``mode`` is how its steps will be executed."""
    return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=mode is Execution.cudagraph, **options)


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, limit: float | None = None, *parts: Iterable[nn.Parameter]
) -> None:
    """The gradient goes to the parameters of ``optimizer`` and to no others: an actor that climbs a critic does not
    teach it. ``limit`` bounds the norm of the gradient of each of ``parts`` for itself, or of all of them together. A
    loss (S,) is that of S learners whose parameters are stacked: the first dimension of each counts learners."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad(set_to_none=True)
    loss.sum().backward(inputs=trained)
    if limit is not None:
        clip = clip_each if loss.ndim else nn.utils.clip_grad_norm_
        for part in parts or (trained,):
            clip(part, limit)
    optimizer.step()


def clip_each(stacked: Iterable[nn.Parameter], limit: float) -> None:
    """``clip_grad_norm_`` for each of the learners whose parameters are stacked."""
    gradients = [p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None] for p in stacked if p.grad is not None]
    norm = torch.stack([g.norm(dim=1) for g in gradients]).norm(dim=0)
    scale = (limit / (norm + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(scale[:, None])
