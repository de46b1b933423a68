"""Chunks for imitation, made of the actions that a replay holds.

A replay holds the executed slice (B, n, A) of every decision, zero after the ``steps`` that were really played;
``bc_loss`` wants whole chunks (B, H, A) and a mask of what is real. Actions before and after the slice stand
in the neighbouring decisions of the same episode, so a learner asks the loop for as many of them as a chunk covers
(``around = neighbours(spec)``), and learns all H positions as imitation of recordings does.

    horizon H = 8, start = 1, execute n = 3; the episode ends with c0

    decision           before        this one      after
    executed          a0 a1 a2       b0 b1 b2      c0  -  -
    position j               0       1  2  3       4  5  6  7
    chunk                   a2      b0 b1 b2      c0 c0 c0 c0      behind an end, the nearest real action
    mask                     1       1  1  1       1  0  0  0

Real positions are one run through the slice: it stops at an end of the episode, where a decision was cut short or left
out, and at the newest row. A batch that does not say what is around it has no more than the slice. Positions without
data do not enter the loss, but a denoising network reads them as part of its noisy input, so they are filled as
imitation fills its own padding (``Pad.repeat``): with the nearest action and not with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..policies.core.spec import PolicySpec
from ..policies.core.tree import check


def neighbours(spec: PolicySpec) -> tuple[int, int]:
    """Decisions before and after one that its chunk reaches into: what ``Replay.sample(around=)`` takes."""
    return -(-spec.start // spec.execute), -(-(spec.horizon - spec.start) // spec.execute) - 1


def played_around(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of a batch, what ``imitation_chunk`` wants to know of the neighbours: the actions that were executed (B, L, n, A)
    and which of them are real (B, L, n). Empty where the batch does not hold any."""
    if "around" not in batch:
        return {}
    near = batch["around"]
    action = near.get("executed", near["action"])
    real = torch.arange(action.shape[2], device=action.device) < near["steps"][..., None]
    return {"action": action, "real": real & near["valid"][..., None]}


def imitation_chunk(
    spec: PolicySpec, action: Tensor, steps: Tensor, around: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(chunk (B, H, A), mask (B, H)) for ``bc_loss``, of executed actions (B, n, A), how many are real (B,), and
    ``played_around`` them.

    A row with ``steps`` 0 has an empty mask and a chunk that repeats its first action.
    """
    sizes = check(action, f"B {spec.execute} {spec.action.dim}")
    check(steps, "B", {"B": sizes["B"]})
    real = torch.arange(spec.execute, device=action.device) < steps[:, None]
    first = 0  # of this decision among the ticks that are known
    if around:
        back, ahead = neighbours(spec)
        check(around["action"], f"B {back + 1 + ahead} {spec.execute} {spec.action.dim}", {"B": sizes["B"]})
        before, after, first = slice(0, back), slice(back + 1, None), back * spec.execute
        action, real = (
            torch.cat([near[:, before], own[:, None], near[:, after]], 1).flatten(1, 2)
            for near, own in ((around["action"], action), (around["real"], real))
        )
    # Real is what no gap separates from the beginning of this decision, which must be real itself.
    forward = real[:, first:].cumprod(1).sum(1, keepdim=True)
    backward = real[:, :first].flip(1).cumprod(1).sum(1, keepdim=True) * (forward > 0)
    place = torch.arange(spec.horizon, device=action.device) - spec.start  # of each position, from this decision on
    mask = (place >= -backward) & (place < forward)
    source = first + torch.maximum(place, -backward).minimum((forward - 1).clamp(min=0))
    return action.gather(1, source[:, :, None].expand(-1, -1, action.shape[2])), mask
