"""A policy of which each rank holds its share of the parameters, gradients and moments: torch's FSDP2 (`fully_shard`).

ZeRO-3, Rajbhandari et al. 2020 (arXiv 1910.02054), as in FSDP, Zhao et al. 2023 (arXiv 2304.11277). Every parameter is
divided along its first dimension, frozen ones in their own number format too. Each transformer block and each table of
embeddings is gathered when it computes, and given up again; the rest is gathered for the whole of an update. Gradients
are averaged on the way back, and each rank keeps those of its shares.

A state is that of one process: parameter by parameter is gathered, and only the first rank keeps it, in the memory of
the CPU. On the others it has names and shapes alone (the device "meta").
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .core.ranks import Ranks, whole
from .lerobot.act import Layer as ActLayer
from .vla.layers import Layer
from .vla.prefix import VisionLayer

# The weights of any other part are read in more places than its own forward pass.
BLOCKS = (Layer, VisionLayer, ActLayer, nn.Embedding)
UNUSED = "lm_head"  # kept to be written again; as a block that never computes it is never gathered


def sharded(policy: nn.Module, ranks: Ranks, device: torch.device) -> Any:
    """A copy of ``policy`` for its loss alone, which lies on ``device`` and is shared by the ``ranks``. ``policy``
    itself, which lies on the CPU, stays whole on the first of them and loses its numbers on the others."""
    made = copy.deepcopy(policy)
    if not ranks.first:
        policy.to("meta")
    divide(made, ranks, device, "bc_loss")
    return made


def divide(network: nn.Module, ranks: Ranks, device: torch.device, *asked: str) -> None:
    """In place: each of the ``ranks`` keeps its share, on ``device``. ``asked`` are the methods that compute."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    # The keys of a layer are views, of which nothing is changed in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view tensor")
    mesh: Any = init_device_mesh(device.type, (ranks.size,))
    for name, part in [*network.named_modules()]:
        if isinstance(part, BLOCKS) or name.rpartition(".")[2] == UNUSED:
            fully_shard(part, mesh=mesh)
        if isinstance(part, Layer):
            register_fsdp_forward_method(part, "mapped")
    fully_shard(network, mesh=mesh)
    for name in asked:
        register_fsdp_forward_method(network, name)


def gathered(tree: Any, ranks: Ranks) -> Any:
    """The whole tensors of a state. All ranks take part, and the first one keeps them."""
    if isinstance(tree, Mapping):
        return {key: gathered(x, ranks) for key, x in tree.items()}
    if isinstance(tree, list):
        return [gathered(x, ranks) for x in tree]
    return whole(tree).to("cpu" if ranks.first else "meta") if hasattr(tree, "full_tensor") else tree


def shares(state: Mapping[str, Any], policy: nn.Module) -> dict[str, Any]:
    """This rank's part of the whole ``state`` of a learner (`imitate.py`) of a sharded ``policy``."""
    named, parameters = policy.state_dict(), [*policy.parameters()]
    optimizer, ema = state["optimizer"], state["ema"]
    return {
        **state,
        "policy": {name: share_of(x, named.get(name)) for name, x in state["policy"].items()},
        "ema": {**ema, "parameters": {name: share_of(x, named.get(name)) for name, x in ema["parameters"].items()}},
        "optimizer": shares_of_moments(optimizer, parameters),
    }


def shares_of_moments(optimizer: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The state of an optimiser whose first parameters are these; those of others stay whole."""
    like = dict(enumerate(parameters))
    rows = optimizer["state"].items()
    return {**optimizer, "state": {i: {name: share_of(x, like.get(i)) for name, x in row.items()} for i, row in rows}}


def share_of(x: Tensor, like: Any) -> Tensor:
    """The part of ``x`` that this rank has of ``like``, in memory of its own."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or x.shape != like.shape:  # the latter: the optimiser's count of updates
        return x
    part = distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return torch.empty_like(like, dtype=x.dtype).copy_(part)


@contextlib.contextmanager
def placed(policy: Any, device: torch.device) -> Iterator[None]:
    """Meanwhile a policy that is kept in the memory of the CPU lies on ``device``, where it acts."""
    first = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    if first is None or first.device.type == device.type:
        yield
        return
    home = first.device
    policy.to(device)
    try:
        yield
    finally:
        policy.to(home)
