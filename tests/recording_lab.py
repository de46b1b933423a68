"""What a recording would miss, seen on a CPU: each call is made of the same operations on the same memory as the last.

It does not see what Python changes beside them, such as a counter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


# What comes of the first two is free to differ, and is wanted at once; the last brings numbers of Python to a device.
FREE = ("_local_scalar_dense", "nonzero", "lift_fresh")


class Operations(TorchDispatchMode):
    """What was done, and to which memory: that of an argument, of an earlier result, or some that was there before."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.done: list[Any] = []
        self.refused: list[str] = []
        self.places = {self._memory(x): ("argument", i) for i, x in enumerate(tensors(arguments))}

    @staticmethod
    def _memory(x: Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def _of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return (*x.shape, x.dtype, *x.stride(), x.storage_offset()), self.places.get(
                self._memory(x), ("before", self._memory(x))
            )
        if isinstance(x, torch.Generator):
            return getattr(x, "_cdata", None)  # each call wraps it anew
        return tuple(map(self._of, x)) if isinstance(x, (list, tuple)) else repr(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [self._of(x) for x in (*args, *(kwargs or {}).values())]
        if str(func).split(".")[1] in FREE:
            self.refused.append(f"{func} asks the device for a number, or brings it one")
        found = func(*args, **(kwargs or {}))
        held = {self._memory(x) for x in tensors([args, kwargs])}
        for x in tensors(found):
            if self._memory(x) not in held:  # no view, and nothing in place
                self.places[self._memory(x)] = ("result", len(self.done))
        if func.namespace != "profiler":  # that of an optimiser, which only notes the time
            self.done.append((str(func), *given))
        return found


class Watched:
    """In the place of a recording: from the fourth call on all do what the fourth did."""

    def __init__(self, fn: Any, generators: Any, device: Any) -> None:
        self.fn, self.calls, self.recorded = fn, 0, []

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        with Operations(arguments) as seen:
            found = self.fn(*arguments)
        seen.done.append([x for x in tree_leaves(found) if not isinstance(x, Tensor)])  # a replay returns those again
        assert self.calls < 4 or not seen.refused, seen.refused
        if self.calls == 4:
            self.recorded = seen.done
        elif self.calls > 4:
            for number, (was, now) in enumerate(zip(self.recorded, seen.done, strict=True)):
                assert was == now, f"operation {number} of call {self.calls} is not that of call 4: {was}, {now}"
        return found
