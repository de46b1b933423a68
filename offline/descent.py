"""One step down a loss: what every learner here does in the same way."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..policies.core.execute import Execution


def adam(parameters: Iterable[nn.Parameter], lr: float, mode: Execution) -> torch.optim.Adam:
    """Fused: one kernel for all parameters. ``mode`` is how its steps will be executed."""
    return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=mode is Execution.cudagraph)


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, limit: float | None = None, *parts: Iterable[nn.Parameter]
) -> None:
    """The gradient goes to the parameters of ``optimizer`` and to no others: an actor that climbs a critic does not
    teach it. ``limit`` bounds the norm of the gradient of each of ``parts`` for itself, or of all of them together."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad(set_to_none=True)
    loss.backward(inputs=trained)
    if limit is not None:
        for part in parts or (trained,):
            nn.utils.clip_grad_norm_(part, limit)
    optimizer.step()
