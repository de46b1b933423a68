"""Partial checkpoints: what was trained, and the sha256 of each weight of the base that it stands on.

A weight of the base is left out of a checkpoint, and named there by its type and its content. To load it the user says
where the base is, a folder of ours or of LeRobot, or hands in the policy; each weight must be found there bit for bit.
The checkpoint names no place, so nothing is opened that it chose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .core.errors import BurnishError
from .lerobot.checkpoint import find as find_lerobot
from .lerobot.names import WEIGHTS
from .lerobot.stored import tensors_of
from .runs.run import find_policy
from .runs.state_codec import CONTENT, Elsewhere, Place, place_of


def content(x: Tensor) -> str:
    """The name of a tensor by its type and numbers."""
    plain = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{CONTENT}{str(x.dtype).removeprefix('torch.')}:{hashlib.sha256(plain.numpy().data).hexdigest()}"


def weights_elsewhere(base: Any) -> dict[Place, str]:
    """The weights of ``base``, to be left out of checkpoints of what is trained on it."""
    if not isinstance(base, nn.Module) or not any(True for _ in base.parameters()):
        raise BurnishError(
            "partial=true leaves the weights of the base out of checkpoints, and this run has no base with weights; "
            "leave partial=false"
        )
    return {place_of(x.detach()): content(x) for x in base.parameters() if x.numel()}


def completed(state: Any, base: Any, where: Path | str) -> Any:
    """The ``state`` of the checkpoint at ``where`` with what is left out of it, from ``base``: a policy, or the folder
    of one. A state that lacks nothing is returned as it is."""
    wanted = {x.name for x in _leaves(state) if isinstance(x, Elsewhere)}
    if not wanted:
        return state
    if base is None:
        raise BurnishError(
            f"{where} holds what was trained alone, and stands on {len(wanted)} weights of its base; say where that "
            "is: policy.base=FOLDER"
        )
    kinds = {getattr(torch, name.split(":")[1]) for name in wanted}
    found: dict[str, Tensor] = {}
    for x in _weights(base):
        for kind in kinds if x.is_floating_point() else ():
            if (name := content(x.to(kind))) in wanted:
                found[name] = x.to(kind)
    if lacking := wanted - found.keys():
        named = "the base" if isinstance(base, nn.Module) else base
        raise BurnishError(
            f"{where} stands on {len(wanted)} weights, and {named} has other ones in place of {len(lacking)} of them: "
            "it is not the policy that was refined there; give the one that was, policy.base=FOLDER"
        )
    return _filled(state, found)


def _weights(base: Any) -> Iterable[Tensor]:
    if isinstance(base, nn.Module):
        return base.parameters()
    if not isinstance(base, (str, Path)):
        return ()
    if (theirs := find_lerobot(base)) is not None:
        return tensors_of(theirs / WEIGHTS).values()
    return (x for x in _leaves(find_policy(base).state) if isinstance(x, Tensor))


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for x in state.values():
            yield from _leaves(x)
    elif isinstance(state, (list, tuple)) and not isinstance(state, Elsewhere):
        for x in state:
            yield from _leaves(x)
    else:
        yield state


def _filled(state: Any, found: Mapping[str, Tensor]) -> Any:
    if isinstance(state, Elsewhere):
        return found[state.name]
    if isinstance(state, dict):
        return {key: _filled(x, found) for key, x in state.items()}
    return type(state)(_filled(x, found) for x in state) if isinstance(state, (list, tuple)) else state
