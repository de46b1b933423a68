"""A network in an ONNX file, which may be untrusted, run by onnxruntime within bounds of time and memory.

It runs onnxruntime's own operators alone: libraries of others are never loaded, nor files beside it. Before anything
of it is run, the graph is walked: what repeats other nodes is refused, whatever says how often, and so are functions
that unfold to more than `MOST_NODES`. The rest is a list of operations, and ends. How long one of them takes is
seen only by running it, so reading the file and the first run have `FIRST_S` seconds each, and all networks of a
process have `MEMORY` bytes together. Constants are not worked out in advance, which nothing could stop.

Every error is an exception whose first line says what it is; those of onnxruntime have no other base.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

MOST_NODES = 100_000  # a hundred steps of a generation, unrolled, have some ten thousand
MEMORY = 1 << 32  # bytes
FIRST_S = 60.0
# Numbers of fields in onnx.proto.
MODEL_GRAPH, MODEL_FUNCTIONS = 7, 25
GRAPH_NODE, FUNCTION_NODE, FUNCTION_NAME, FUNCTION_DOMAIN = 1, 7, 1, 10
NODE_KIND, NODE_ATTRIBUTE, NODE_DOMAIN = 4, 5, 7
ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 6, 11


class Network:
    """A network of an ONNX file, read and tried within bounds of time and memory."""

    def __init__(self, model: bytes, threads: int = 1) -> None:
        self._session: Any = _within("reading it", lambda: _session(model, threads))
        self._tried = False
        self.inputs: Sequence[Any] = self._session.get_inputs()
        self.outputs: Sequence[Any] = self._session.get_outputs()
        self.metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map

    def run(self, output: str, feed: Mapping[str, np.ndarray]) -> np.ndarray:
        if self._tried:
            return np.asarray(self._session.run([output], feed)[0])
        import onnxruntime

        options = onnxruntime.RunOptions()
        found = _within(
            "its first answer",
            lambda: self._session.run([output], feed, options)[0],
            lambda: setattr(options, "terminate", True),  # after the operation that it is at
        )
        self._tried = True
        return np.asarray(found)

    def bind(self, feed: Mapping[str, np.ndarray], output: str, into: np.ndarray) -> Callable[[], None]:
        """A call that reads the arrays of ``feed`` and writes ``into``, all of them in place. It comes after `run`."""
        import onnxruntime

        def value(array: np.ndarray) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array)  # which shares its memory

        binding = self._session.io_binding()
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, value(array))
        binding.bind_ortvalue_output(output, value(into))
        return functools.partial(self._session.run_with_iobinding, binding)


def folded(file: Path) -> bytes:
    """A network of our own, beside whose file another is written: with all that is known worked out, such as the
    embedding of each step's time, in ONNX's own operators."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    made = file.with_name("folded.onnx")
    options.optimized_model_filepath = str(made)
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return made.read_bytes()


def check_graph(model: bytes) -> None:
    """Refuse what need not end, and what is more than its file. A field may be given in pieces, which are all seen."""
    if model[4:8] == b"ORTM":
        raise ValueError("it is in onnxruntime's own format; save it as ONNX")
    whole = memoryview(model)
    functions: dict[tuple[bytes, bytes], list[memoryview]] = {}
    for body in _parts(whole, MODEL_FUNCTIONS):
        functions.setdefault((_text(body, FUNCTION_DOMAIN), _text(body, FUNCTION_NAME)), []).append(body)
    counted: dict[tuple[bytes, bytes], int] = {}

    def inside(name: tuple[bytes, bytes]) -> int:
        """Nodes of a function with all that it calls."""
        if name not in counted:
            counted[name] = MOST_NODES + 1  # while it is counted: one that calls itself never ends
            counted[name] = sum(count(body, FUNCTION_NODE) for body in functions[name])
        return counted[name]

    def count(graph: memoryview, field: int, depth: int = 0) -> int:
        total = 0
        for node in _parts(graph, field):
            kind, name = _text(node, NODE_KIND), (_text(node, NODE_DOMAIN), _text(node, NODE_KIND))
            total += inside(name) if name in functions else 1
            for attribute in _parts(node, NODE_ATTRIBUTE):
                for number in (ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS):
                    for below in _parts(attribute, number):
                        if kind != b"If":
                            raise ValueError(f"its operator {kind.decode(errors='replace')[:40]!r} may repeat for ever")
                        if depth > 16:
                            raise ValueError("its branches are nested too deeply")
                        total += count(below, GRAPH_NODE, depth + 1)
            if total > MOST_NODES:
                raise ValueError(f"it unfolds to more than {MOST_NODES} operations")
        return total

    try:
        total = sum(count(graph, GRAPH_NODE) for graph in _parts(whole, MODEL_GRAPH))
    except RecursionError:
        raise ValueError("its functions are nested too deeply") from None
    if total > MOST_NODES:
        raise ValueError(f"it unfolds to more than {MOST_NODES} operations")


def _parts(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """The fields of that number in a message of protobuf that hold bytes."""
    at, end = 0, len(message)
    while at < end:
        key, at = _number(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _number(message, at)
            continue
        size, at = _number(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, end + 1), at)
        if size > end - at:
            raise ValueError("it is no ONNX model, or is cut off")
        if key >> 3 == wanted and kind == 2:
            yield message[at : at + size]
        at += size


def _number(message: memoryview, at: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    value = 0
    for i in range(10):
        if at + i >= len(message):
            break
        byte = message[at + i]
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return value & (1 << 64) - 1, at + i + 1
    raise ValueError("it is no ONNX model, or is cut off")


def _text(message: memoryview, field: int) -> bytes:
    """Of several the last one counts; a domain that is not given is "ai.onnx"."""
    found = b""
    for part in _parts(message, field):
        found = bytes(part[:200])
    return b"" if found == b"ai.onnx" else found


def _session(model: bytes, threads: int) -> Any:
    import onnxruntime

    check_graph(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # what goes wrong is raised, and said once
    # Else weights that lie outside of the model would be looked for in the folder that the process stands in.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    _bound_memory()
    options.add_session_config_entry("session.use_env_allocators", "1")
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
    )


@functools.cache
def _bound_memory() -> None:
    """For all sessions of this process that use the allocators of its environment."""
    import onnxruntime

    kinds = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    place = onnxruntime.OrtMemoryInfo("Cpu", kinds[0], 0, kinds[1])
    onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg(MEMORY, -1, -1, -1))


def _within(what: str, work: Callable[[], T], stop: Callable[[], Any] = lambda: None) -> T:
    """The result of ``work``, if it ends in time. A thread cannot be ended from outside: one that goes on is left
    behind, and is no reason for the process to stay."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="onnx", daemon=True)
    thread.start()
    thread.join(FIRST_S)
    if found:
        return found[0]
    if failed:
        raise failed[0]
    stop()
    raise TimeoutError(f"{what} took longer than {FIRST_S:g} s")
