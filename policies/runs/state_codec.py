"""Nested state <-> JSON and named tensors: how a checkpoint holds a ``state_dict`` without pickle.

The round trip is exact: bits of tensors, integers of any size, NaN, tuples, and keys that are not strings. Types that
would come back as something else are refused when they are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.errors import BurnishError

Place = tuple[Any, ...]


SEGMENTS = "segments"
CONTENT = "sha256:"  # begins the name of a tensor that a checkpoint stands on and does not hold (`policies/partial.py`)
_ELSEWHERE = re.compile(CONTENT + "(float16|bfloat16|float32|float64):[0-9a-f]{64}")


@dataclass(frozen=True)
class Elsewhere:
    """A tensor that is not in the checkpoint: its type and content."""

    name: str


def segments_of(state: Any) -> list[Any]:
    """The items of each list of a state that is called ``segments``: parts that seldom change."""
    if isinstance(state, list | tuple):
        return [part for item in state for part in segments_of(item)]
    if not isinstance(state, dict):
        return []
    own = state.get(SEGMENTS)
    rest = [part for key, item in state.items() if key != SEGMENTS for part in segments_of(item)]
    return [*(own if isinstance(own, list) else ()), *rest]


def place_of(x: Tensor) -> Place:
    """Equal for two tensors that are the same numbers in the same memory."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg()


def encode(state: Any, known: Mapping[Place, str] | None = None) -> tuple[Any, dict[str, Tensor]]:
    """JSON for ``state``, and its tensors under their dotted paths. ``known`` names tensors that are written elsewhere:
    they are referred to.

    A value that JSON lacks becomes an object with one key that begins with "$". A dict that has such a key itself, or
    keys that are not strings, is written as a list of pairs under "$dict".
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, (), tensors, known or {}), tensors


def _encode(value: Any, where: tuple[str, ...], tensors: dict[str, Tensor], known: Mapping[Place, str]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        if known and value.numel() and (elsewhere := known.get(place_of(value))) is not None:
            return {"$tensor": elsewhere}
        name = ".".join(where)
        while name in tensors or name == "__metadata__":  # the latter is reserved by the format
            name += "~"
        tensors[name] = value
        return {"$tensor": name}
    if kind in (list, tuple):
        items = [_encode(item, (*where, str(i)), tensors, known) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    place = f"the state at {'.'.join(where)!r}"
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int, bool, type(None)):
                raise BurnishError(f"{place} has the key {key!r}, but a checkpoint holds only keys that are str or int")
        pairs = [(key, _encode(item, (*where, str(key)), tensors, known)) for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": pairs}
    raise BurnishError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
        "use tensors, numbers, str, None, and dict, list or tuple of these"
    )


def decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The nested state that a JSON node and the named tensors beside it describe."""
    if isinstance(node, list):
        return [decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item, tensors) for key, item in node.items()}
    body = node[tag]
    if tag == "$tensor":
        return Elsewhere(body) if body not in tensors and _ELSEWHERE.fullmatch(body) else tensors[body]
    if tag == "$float":
        return float(body)
    if tag == "$tuple":
        return tuple(decode(item, tensors) for item in body)
    if tag == "$dict":
        return {key: decode(item, tensors) for key, item in body}
    raise ValueError(f"it has the unknown mark {tag!r}")


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory, which the format forbids; copies only where it must."""
    result: dict[str, Tensor] = {}
    owned: set[int] = set()
    for name, tensor in tensors.items():
        data = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        if data.untyped_storage().data_ptr() in owned:
            data = data.clone()
        owned.add(data.untyped_storage().data_ptr())
        result[name] = data
    return result
