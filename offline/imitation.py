"""What was executed, as the chunk that an imitator learns from.

A replay holds the executed slice (B, n, A) of every decision, zero after the ``steps`` that were really played;
``bc_loss`` wants whole chunks (B, H, A) and a mask of what is real.

    horizon H = 6, start = 1, execute n = 3, steps = 2
    position j     0    1    2    3    4    5
    chunk         a0   a0   a1   a1   a1   a1       outside, the nearest real action
    mask           0    1    1    0    0    0

Positions without data do not enter the loss, but a denoising network reads them as part of its noisy input, so they are
filled as imitation fills its own padding (``Pad.repeat``): with the nearest action and not with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..policies.core.spec import PolicySpec
from ..policies.core.tree import check


def imitation_chunk(spec: PolicySpec, action: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """(chunk (B, H, A), mask (B, H)) for ``bc_loss``, of executed actions (B, n, A) and how many are real (B,).

    A row with ``steps`` 0 has an empty mask and a chunk that repeats its first action.
    """
    sizes = check(action, f"B {spec.execute} {spec.action.dim}")
    check(steps, "B", {"B": sizes["B"]})
    place = torch.arange(spec.horizon, device=action.device) - spec.start  # of each position within the executed slice
    last = (steps - 1).clamp(min=0)[:, None]
    source = place.clamp(min=0).expand(len(action), -1).minimum(last)
    mask = (place >= 0) & (place < steps[:, None])
    return action.gather(1, source[:, :, None].expand(-1, -1, action.shape[2])), mask
