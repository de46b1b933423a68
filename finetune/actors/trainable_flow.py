"""Common to actors made of a flow: which policies they accept, one batch for all steps, the terms of evidence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...policies.chain import state_shape
from ...policies.core.errors import BurnishError
from ...policies.core.spec import PolicySpec
from ...policies.core.tree import check
from ...policies.core.types import Condition, Obs
from ...policies.flow import FlowPolicy
from ...policies.trainable import TrainableConfig, trainable


def trainable_flow(base: Any, method: str, train: TrainableConfig | None = None) -> FlowPolicy:
    """A copy of ``base`` to be trained, by default as a whole; ``base`` itself is left alone."""
    if not isinstance(base, nn.Module) or not all(hasattr(base, name) for name in ("velocity", "time")):
        raise BurnishError(
            f"method={method} trains the velocity of a flow policy, but {type(base).__name__} has none; "
            "use method=dppo for a diffusion policy, or a residual method for a policy that only acts"
        )
    return trainable(base, train or TrainableConfig())


class FlowActor(nn.Module):
    """``flow`` is what is trained and deployed. One factor of the likelihood sums over ``terms`` coordinates, and joins
    so many ``transitions``. Where a model pads its actions, the padding gets neither noise nor density."""

    coordinates: Tensor
    transitions: Tensor

    def __init__(self, flow: FlowPolicy) -> None:
        super().__init__()
        self.flow = flow

    def _count(self, terms: float, transitions: float) -> None:
        self.register_buffer("coordinates", torch.tensor([terms]), persistent=False)
        self.register_buffer("transitions", torch.tensor([transitions]), persistent=False)

    @property
    def spec(self) -> PolicySpec:
        return self.flow.spec

    @property
    def num_steps(self) -> int:
        return self.flow.num_steps

    def real(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., A): a state of the chain without padding."""
        return x[..., : self.spec.action.dim]

    def padded(self, std: Tensor) -> Tensor:
        """(..., A) -> (..., D): deviations of a state of the chain, 0 in its padding."""
        return F.pad(std, (0, state_shape(self.spec)[1] - std.shape[-1]))

    def encode(self, obs: Obs) -> Condition:
        return self.flow.encode(obs)


def evidence(spec: PolicySpec, density: Tensor, last: Tensor, steps: Tensor) -> Tensor:
    """(B, 1): the sum of the elementwise log-densities (B, M, H, A) that may have steered what was executed.

    ``last`` (M,) or (B, M) marks a chain's last transition, where an action that was not executed (outside the slice
    ``start : start + execute``, or behind an early end) has a score without influence on the outcome. At earlier
    transitions every coordinate counts, because the network carries it over to those that are executed.
    """
    sizes = check(density, f"B M {spec.horizon} {spec.action.dim}")
    check(steps, "B", sizes)
    tick = torch.arange(spec.horizon, device=density.device) - spec.start
    executed = (tick >= 0) & (tick < steps[:, None])
    counted = executed[:, None, :] | ~last.view(-1, sizes["M"], 1)
    return (density.sum(-1) * counted).sum((1, 2))[:, None]
