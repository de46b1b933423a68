"""Execution of an update function: line by line, compiled, or as one CUDA graph. The results are the same.

``cudagraph`` replays exactly the kernels that ``eager`` launches, so it equals it bit for bit; ``compile`` fuses them
and equals it up to rounding. That of Adam is coarse: compiled, it forms 1 - beta2^t in float32 whatever the type of the
weights, which at t = 1 leaves four digits. The two combine: give a compiled function to ``cudagraph``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import BurnishError


class Execution(enum.Enum):
    """The ways to run an update: line by line, by torch.compile, or as a CUDA graph."""

    eager = "eager"
    compile = "compile"
    cudagraph = "cudagraph"


class Precision(enum.Enum):
    """The number format of the networks' forward passes: float32, or bfloat16 by autocast."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def execution(
    fn: Callable[..., Any],
    mode: Execution,
    *,
    device: torch.device | str,
    generators: Sequence[torch.Generator] = (),
) -> Callable[..., Any]:
    """``fn`` as ``mode`` says. Arguments and results are tensors, or dicts, lists and tuples of them.

    For ``cudagraph`` ``fn`` must be replayable: fixed shapes, every number that changes between calls in a tensor on
    the device (learning rate and counters too), optimizers with ``capturable=True``, no ``.item()``, and each CUDA
    generator that it draws from named in ``generators``.
    """
    if mode is Execution.eager:
        return fn
    if mode is Execution.compile:
        return torch.compile(fn, dynamic=False)
    return _Graphed(fn, generators, device)


def with_execution(config: Any, mode: Execution) -> Any:
    """Settings with this execution wherever they name one."""
    changes = {name: with_execution(x, mode) for name, x in vars(config).items() if is_dataclass(x)}
    changes |= {name: mode for name, x in vars(config).items() if isinstance(x, Execution)}
    return replace(config, **changes)


def autocast(device: torch.device | str, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Mixed precision: weights stay float32. bfloat16 is allowed on the CPU, where it is right but seldom faster, so
    that the same configuration can be tried anywhere. There is no float16: it would need loss scaling."""
    if precision is Precision.float32:
        return contextlib.nullcontext()
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise BurnishError(f"precision=bfloat16 needs device=cuda or cpu, but device={device}; use precision=float32")
    return torch.autocast(kind, torch.bfloat16)


class _Graphed:
    """The first calls run ``fn`` on a side stream, which makes what it allocates once (optimizer state, workspaces);
    the next is recorded; that and all later ones copy their arguments into fixed memory and replay. Each call is one
    update, whichever way it is executed."""

    warmup = 3

    def __init__(
        self, fn: Callable[..., Any], generators: Sequence[torch.Generator], device: torch.device | str
    ) -> None:
        if torch.device(device).type != "cuda":
            raise BurnishError(
                f"execution=cudagraph needs a CUDA device, but device={device}; use execution=eager or "
                "execution=compile"
            )
        self._fn, self._generators, self._device, self._calls = fn, generators, torch.device(device), 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fixed: dict[str, Any] = {}
        self._result: Any = None

    def __call__(self, *arguments: Any) -> Any:
        with torch.cuda.device(self._device):
            return self._call(arguments)

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        self._calls += 1
        if self._calls <= self.warmup:
            stream = _side_stream(torch.cuda.current_device())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = self._fn(*arguments)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        if self._graph is None:
            self._graph = self._record(arguments)
        given = _leaves(arguments, "argument")
        for name in {**self._fixed, **given}:
            recorded, asked = _kind(self._fixed.get(name)), _kind(given.get(name))
            if recorded != asked:
                raise BurnishError(
                    f"execution=cudagraph recorded a call with {name} = {recorded}, but now it is {asked}; "
                    "give every call the same shapes and constants, or use execution=eager"
                )
        for name, fixed in self._fixed.items():
            if isinstance(fixed, Tensor):
                fixed.copy_(given[name], non_blocking=True)
        self._graph.replay()
        return _map(torch.clone, self._result)  # the next replay writes over the original

    def _record(self, arguments: tuple[Any, ...]) -> torch.cuda.CUDAGraph:
        fixed = _map(torch.clone, arguments)
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            # Another thread may draw the next batch meanwhile (`prefetch.py`).
            stream = _side_stream(torch.cuda.current_device())
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._result = self._fn(*fixed)
        except RuntimeError as error:
            # Leaving the recording fails too, once something inside it has failed: the first error is the cause.
            cause = str(error.__context__ or error).splitlines()[0].rstrip(".")
            raise BurnishError(f"execution=cudagraph cannot record the update: {cause}; use execution=eager") from error
        self._fixed = _leaves(fixed, "argument")
        return graph


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings of a device, because autograd adds up the gradient of a parameter on the stream that used
    it first."""
    return torch.cuda.Stream(device)


def _map(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: _map(fn, item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_map(fn, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def _leaves(tree: Any, name: str) -> dict[str, Any]:
    """Tensors and constants of nested containers by the place where they were found."""
    if not isinstance(tree, (dict, list, tuple)):
        return {name: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {key: leaf for place, item in items for key, leaf in _leaves(item, f"{name}[{place!r}]").items()}


def _kind(leaf: Any) -> str:
    """The properties that a recording depends on: the shape and type of a tensor, the value of a constant."""
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
