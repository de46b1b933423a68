"""``policy=onnx``: a network in an ONNX file, run by onnxruntime on the CPU.

Observations go to the inputs of their names (``keys`` translates), and an input called ``noise`` takes the noise of the
generation. Pictures are uint8, (C, H, W) or (H, W, C), as the input says. The output holds a chunk (B, H, A), or single
actions (B, A), in the units of the actuators, or in [-1, 1] where ``unit`` says so. Where the batch is fixed at 1, rows
are asked one by one. A model with a `PolicySpec` as JSON under ``burnish.spec`` in its metadata is a policy as we
understand it: its specification is that, and its actions are in [-1, 1].

A model can run nothing but onnxruntime's own operators, within bounds of time and memory
(real_robot/export/network.py). Where only a checkpoint names a model (`table.py`), it must lie in the checkpoint or
below the folder that one stands in, and have the sha256 of the model that was refined.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from ...real_robot.export.network import Network
from ..core.errors import BurnishError, reason
from ..core.ranges import check_ranges
from ..core.scale import Scale
from ..core.spec import EnvSpec, PolicySpec, dtype_of
from ..core.types import ActOptions, Obs
from ..wire.server_spec import shown
from .policy import CallablePolicy, checked

SPEC = "burnish.spec"
LARGEST = 1 << 31  # bytes; the format holds no more
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(uint8)": np.uint8,
    "tensor(int64)": np.int64,
}


@dataclass
class OnnxConfig:
    """Settings of `policy=onnx`: the file, its names of inputs and outputs, and how its chunks are played."""

    path: str  # path of the ONNX file
    keys: dict[str, str] = field(default_factory=dict)  # our name of an observation: theirs; empty: they are the same
    noise: str = "noise"  # the input that takes noise, if there is one of this name
    actions: str | None = None  # the output; null: the first
    unit: bool = False  # actions of the network are in [-1, 1], not in the units of the actuators
    execute: int | None = None  # actions of a chunk that are played; null: all
    threads: int = 1  # CPU threads of onnxruntime
    sha256: str | None = None  # SHA-256 of the file; refused if it is another

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "threads execute"}, "policy.")


class OnnxPolicy:
    """A network of an ONNX file as a policy of this world, frozen, run by onnxruntime on the CPU."""

    def __init__(self, config: OnnxConfig, world: EnvSpec) -> None:
        model, sha256 = _read(config)
        self.config, self.world = replace(config, sha256=sha256), world
        self._network = _network(config, model)
        self._inputs = {node.name: node for node in self._network.inputs}
        outputs = [node.name for node in self._network.outputs]
        self._output = config.actions or outputs[0]
        if self._output not in outputs:
            raise BurnishError(f"policy.actions={self._output}, but the outputs of {config.path} are {outputs}")
        for name, node in self._inputs.items():
            if node.type not in DTYPES:
                raise BurnishError(
                    f"the input {name!r} of {config.path} is a {node.type}; {', '.join(DTYPES)} can be given"
                )
        batches = {node.shape[0] for node in self._inputs.values() if node.shape and isinstance(node.shape[0], int)}
        if batches - {1}:
            raise BurnishError(
                f"{config.path} takes {batches} rows at once; export it with a batch of 1 or of any size"
            )
        self._singly = bool(batches)
        written = self._network.metadata.get(SPEC)
        self.spec = self._tried() if written is None else self._as_written(written)
        self._scale = None if written is not None or config.unit else Scale(self.spec.action)

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        return CallablePolicy(self._ask, self.spec).act(obs, **how)

    def _ask(self, seen: Obs, noise: Tensor | None = None) -> Tensor:
        feed = {self.config.keys.get(key, key): x for key, x in seen.items()}
        if noise is not None:
            feed[self.config.noise] = noise
        answer = self._run(feed)
        actions = checked(answer, (len(answer), *self.spec.chunk_shape))
        return actions if self._scale is None else self._scale.to_unit(actions)

    def _run(self, feed: dict[str, Tensor]) -> np.ndarray:
        """(B, H, A)"""
        arrays = {name: self._given(name, x) for name, x in feed.items()}
        rows = len(next(iter(arrays.values())))
        parts = [slice(i, i + 1) for i in range(rows)] if self._singly else [slice(0, rows)]
        try:
            answers = [self._network.run(self._output, {k: x[part] for k, x in arrays.items()}) for part in parts]
        except Exception as error:  # the errors of onnxruntime have no other base
            raise BurnishError(f"{self.config.path} cannot be run: {reason(error, 300)}") from error
        actions = np.concatenate(answers)
        return actions[:, None] if actions.ndim == 2 else actions

    def _given(self, name: str, x: Tensor) -> np.ndarray:
        """As the input of this name wants it. Nothing says what floats mean in a picture, shares of 1 or of 255."""
        node, array = self._inputs[name], x.detach().cpu().numpy()
        if (node.type == "tensor(uint8)") != (x.dtype == torch.uint8):
            raise BurnishError(f"the input {name!r} of {self.config.path} is a {node.type}, but {x.dtype} is observed")
        if x.dtype == torch.uint8 and list(node.shape[-3:]) == [*array.shape[-2:], array.shape[-3]]:
            array = np.moveaxis(array, -3, -1)
        return np.ascontiguousarray(array, DTYPES[node.type])

    def _as_written(self, text: str) -> PolicySpec:
        try:
            spec = PolicySpec.from_dict(json.loads(text))
        except (AttributeError, TypeError, ValueError) as error:
            raise BurnishError(f"the metadata {SPEC} of {self.config.path} makes no sense: {error}") from error
        return replace(spec, execute=self.config.execute or spec.execute, noise_shape=self._noise_shape())

    def _tried(self) -> PolicySpec:
        """Of a model that says nothing: what the shapes of its inputs, and of an answer to blank observations, show."""
        config, world, noise = self.config, self.world, self._noise_shape()
        ours = {theirs: key for key, theirs in config.keys.items()}
        names = {ours.get(name, name): name for name in map(str, self._inputs) if noise is None or name != config.noise}
        unknown = sorted(names[key] for key in names if key not in world.obs.shapes)
        if unknown or not names:
            raise BurnishError(
                f"{config.path} takes {sorted(self._inputs)}, but the environment gives {sorted(world.obs.shapes)}; "
                "say which is which, as in policy.keys={state: their_name}"
            )
        shapes = {key: world.obs.shapes[key] for key in names}
        feed = {names[key]: torch.zeros(1, *shape, dtype=dtype_of(key)) for key, shape in shapes.items()}
        if noise is not None:
            feed[config.noise] = torch.zeros(1, *noise)
        spec = shown(self._run(feed)[0], world, list(names), config.path)
        return replace(spec, execute=config.execute or spec.execute, noise_shape=noise)

    def _noise_shape(self) -> tuple[int, ...] | None:
        if self.config.noise not in self._inputs:
            return None
        shape = self._inputs[self.config.noise].shape[1:]
        if not shape or not all(isinstance(n, int) for n in shape):
            raise BurnishError(
                f"the input {self.config.noise!r} of {self.config.path} must have a fixed shape, not {shape}"
            )
        return tuple(shape)


def doubt(config: OnnxConfig, checkpoint: str) -> str:
    """Why a checkpoint's word is not enough to open the file; empty where it is. An untrusted checkpoint can name any
    file, and links can lead to any: first the names must lie here, and then what they stand for."""
    if config.sha256 is None:
        return "no sha256 says which file that was"
    for resolved in (os.path.abspath, os.path.realpath):
        path, here = resolved(config.path), [resolved(folder) for folder in (checkpoint, os.curdir)]
        if not any(os.path.commonpath([path, folder]) == folder for folder in here):
            return "that is neither in the checkpoint nor below this folder"
    return ""


def _read(config: OnnxConfig) -> tuple[bytes, str]:
    path = Path(config.path)
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
            raise BurnishError(f"{path} is no model: it is no file, or has more than {LARGEST} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise BurnishError(f"there is no model at {path} ({error.strerror})") from error
    found = hashlib.sha256(content).hexdigest()
    if config.sha256 not in (None, found):
        # The sentence does not say what it is instead: the file may be one that an untrusted checkpoint asks about.
        raise BurnishError(f"{path} is another model than the one that was used: its sha256 differs")
    return content, found


def _network(config: OnnxConfig, model: bytes) -> Network:
    try:
        return Network(model, config.threads)
    except Exception as error:  # the errors of onnxruntime have no other base
        raise BurnishError(
            f"{config.path} is no model that onnxruntime can run by itself, without operators or files of others: "
            f"{reason(error, 300)}"
        ) from error
