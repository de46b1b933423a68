"""Exported policies at work, by NumPy and onnxruntime: no torch, and nothing of ours outside this folder.

    policy = load("bundle")                     # refuses what it does not understand
    policy.act(obs, noise=..., prefix=...)      # a chunk (H, A) in [-1, 1]
    controller = ChunkController(policy, seed=0)
    controller.reset(); controller.step(obs)    # at every tick: (A,) in the units of the actuators

The noise is that of the policy side (`RowNoise`: SplitMix64, counter based), so the same seeds make the same chunks.
A wrong observation (another shape, another type, NaN) is a sentence, never an action.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import Refused
from .bundle import PLAN, TICK, Bundle, is_image, read, stacked_by_history
from .network import Network

Array = NDArray[np.float32]
Words = NDArray[np.int64]
T = TypeVar("T")

GOAL_GIVEN, BASE_ACTION, PREFIX, PREFIX_KNOWN = "goal_given", "base_action", "prefix", "prefix_known"  # inputs


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX1, _MIX2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x: Words, bits: int) -> Words:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _hash(x: Words) -> Words:
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def _words(values: Sequence[int] | Words) -> Words:
    return np.array([_signed(int(x)) for x in values], np.int64)


class RowNoise:
    """`policies.core.seed.RowNoise` in NumPy: row i of the m-th draw depends on (seeds[i], index[i], m) alone."""

    def __init__(self, seeds: Sequence[int] | Words, index: Sequence[int] | Words) -> None:
        self._key = _hash(_hash(_words(seeds) + _GOLDEN) + _words(index) * _GOLDEN)
        self._draws = 0

    def uniform(self, shape: Sequence[int]) -> NDArray[np.float64]:
        """In (0, 1); ``shape[0]`` must be the number of rows."""
        if shape[0] != len(self._key):
            raise ValueError(f"this generator holds {len(self._key)} rows, but shape {tuple(shape)} was asked for")
        self._draws += 1
        stream = _hash(self._key + _signed(self._draws * _MIX2))[:, None]
        count = np.arange(1, math.prod(shape[1:]) + 1, dtype=np.int64)
        bits = _hash(stream + count * _GOLDEN)
        return ((_shift_right(bits, 11).astype(np.float64) + 0.5) * 2.0**-53).reshape(shape)

    def normal(self, shape: Sequence[int]) -> NDArray[np.float64]:
        """Box and Muller (1958)."""
        drawn = self.uniform((*shape, 2))
        return np.sqrt(-2 * np.log(drawn[..., 1])) * np.cos(2 * math.pi * drawn[..., 0])

    def split(self, count: int) -> RowNoise:
        """A stream for each of ``count`` candidates, out of the one row that there is."""
        seeds = (self.uniform((1, count)) * 2.0**53).astype(np.int64)[0]
        return RowNoise(seeds, np.zeros_like(seeds))


def derive(seed: int, *names: str | int) -> int:
    """The seed, in 63 bits, of a generator with these names, equal to that of the policy's own ``derive``."""
    digest = hashlib.blake2b(repr((int(seed), *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ExportedPolicy:
    """A bundle at work: observations to chunks, row by row, by NumPy and onnxruntime."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.schema = bundle, bundle.schema
        schema = self.schema
        self._chunk = (schema.horizon, schema.dim)
        self._keys = {key: shape for key, shape in schema.obs.items() if key != "goal_mask"}
        self._goals = [key for key in self._keys if key == "goal" or key.startswith("goal_image.")]
        self._inputs: dict[str, NDArray[Any]] = {
            f"obs.{key}": np.zeros((1, *shape), np.uint8 if is_image(key) else np.float32)
            for key, shape in self._keys.items()
        }
        if self._goals:
            self._inputs[GOAL_GIVEN] = np.ones((1, 1), np.float32)
        self._noise = [np.zeros((x.rows, *x.shape), np.float32) for x in bundle.noise]
        self._prefix = np.zeros((1, *self._chunk), np.float32)
        self._prefix_known = np.zeros((1, schema.horizon, 1), np.float32)
        self._base_action = np.zeros((1, schema.dim), np.float32)
        first = next((x for x in bundle.noise if not x.split), None)
        if schema.noise_shape is not None and (first is None or first.shape != schema.noise_shape):
            raise Refused(f"the bundle takes noise of shape {schema.noise_shape}, but its network reads none such")
        read_by_plan = {
            **self._inputs,
            **{f"noise.{i}": x for i, x in enumerate(self._noise)},
            PREFIX: self._prefix,
            PREFIX_KNOWN: self._prefix_known,
        }
        self._plan = BoundNetwork(PLAN, bundle.networks[PLAN], read_by_plan, self._chunk)
        self._tick: BoundNetwork | None = None
        if TICK in bundle.networks:
            read_by_tick = {**self._inputs, BASE_ACTION: self._base_action}
            self._tick = BoundNetwork(TICK, bundle.networks[TICK], read_by_tick, (schema.dim,))
        self._low, self._high = np.array(schema.low), np.array(schema.high)

    @property
    def continues(self) -> bool:
        """It heeds a prefix."""
        return PREFIX in self._plan.feed

    @property
    def ticks(self) -> bool:
        """Each action is corrected when its time has come (`correct`)."""
        return self._tick is not None

    def act(
        self,
        obs: Mapping[str, Any],
        *,
        noise: Any = None,
        prefix: Any = None,
        greedy: bool = False,
        source: RowNoise | None = None,
    ) -> Array:
        """(H, A) in [-1, 1]. ``noise`` has the shape ``schema.noise_shape``, ``source`` makes what noise is missing,
        and ``greedy`` is noise 0. ``prefix`` (p, A) holds actions already committed, which the chunk continues."""
        self._observe(obs)
        self._draw(noise, greedy, source)
        self._pin(prefix)
        return self._plan()

    def correct(self, obs: Mapping[str, Any], action: Any) -> Array:
        """(A,): what is played in place of ``action`` of the chunk, now that this is observed."""
        if self._tick is None:
            raise Refused("this policy does not correct single actions; play its chunks as they are")
        self._observe(obs)
        self._base_action[0] = self._number("action", action, (self.schema.dim,))
        return self._tick()

    def to_actuator(self, action: Array) -> NDArray[np.float64]:
        """[-1, 1] to the units of the actuators, within their limits to the last bit."""
        share = (np.minimum(np.maximum(action, -1.0), 1.0).astype(np.float64) + 1) / 2
        return np.minimum(np.maximum(self._low + share * (self._high - self._low), self._low), self._high)

    def check(self, obs: Mapping[str, Any], frame: bool = False) -> dict[str, NDArray[Any]]:
        """The observation as arrays, or a sentence; ``frame``: a single one of a history."""
        found: dict[str, NDArray[Any]] = {}
        if not isinstance(obs, Mapping):
            raise Refused(f"an observation is a mapping of names to arrays, not a {type(obs).__name__}")
        for key, shape in self._keys.items():
            if frame and self.schema.history > 1 and stacked_by_history(key):
                shape = shape[1:]
            if key in obs:
                hidden = key in self._goals and not self._goal_given(obs)
                found[key] = self._number(key, obs[key], shape, is_image(key), finite=not hidden)
            elif not (key in self._goals and self.schema.goal_free and not any(k in obs for k in self._goals)):
                raise Refused(f"the observation lacks {key!r}; it has {sorted(map(str, obs))[:20]}")
        return found

    def _goal_given(self, obs: Mapping[str, Any]) -> bool:
        """``goal_mask`` 0 hides a goal, whatever it is."""
        if not any(key in obs for key in self._goals):
            return False
        mask = obs.get("goal_mask")
        return mask is None or bool(self._number("goal_mask", mask, ()) > 0.5)

    def _observe(self, obs: Mapping[str, Any]) -> None:
        found = self.check(obs)
        given = not self._goals or self._goal_given(obs)
        for key in self._keys:
            buffer = self._inputs[f"obs.{key}"]
            if key in found and (given or key not in self._goals):
                np.copyto(buffer[0], found[key])
            else:
                buffer.fill(0)
        if self._goals:
            self._inputs[GOAL_GIVEN].fill(given)

    def _number(self, name: str, x: Any, shape: tuple[int, ...], image: bool = False, finite: bool = True) -> Any:
        try:
            array = np.asarray(x)
        except Exception as error:  # an object that fails at being an array, in whatever way
            raise Refused(f"{name!r} cannot be read as numbers: {error}") from error
        if array.shape != shape:
            raise Refused(f"{name!r} has the shape {array.shape}, but {shape} is needed")
        if (array.dtype != np.uint8) if image else (array.dtype.kind not in "fiub"):
            raise Refused(f"{name!r} is {array.dtype}, but {'uint8' if image else 'a number'} is needed")
        if image:
            return array
        if array.dtype != np.float32:
            with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and is refused as such
                array = array.astype(np.float32)
        if finite and not np.isfinite(array).all():
            raise Refused(f"{name!r} holds NaN or infinity, so there is no action for it; look at the sensor")
        return array

    def _draw(self, noise: Any, greedy: bool, source: RowNoise | None) -> None:
        if noise is not None and self.schema.noise_shape is None:
            raise Refused("this policy takes no noise from outside; leave noise= out")
        candidates: dict[int, RowNoise] = {}
        for kind, buffer in zip(self.bundle.noise, self._noise, strict=True):
            if noise is not None and not kind.split:
                buffer[0] = self._number("noise", noise, kind.shape)
                noise = None
            elif greedy or not kind.drawn:
                buffer.fill(0)
            elif source is None:
                raise Refused("this policy acts on noise; give noise=, source=RowNoise([seed], [decision]) or greedy")
            elif kind.split:
                if kind.rows not in candidates:
                    candidates[kind.rows] = source.split(kind.rows)
                buffer[:] = candidates[kind.rows].normal(buffer.shape)
            else:
                buffer[:] = source.normal(buffer.shape)

    def _pin(self, prefix: Any) -> None:
        self._prefix_known.fill(0)
        if prefix is None:
            return
        horizon, dim = self._chunk
        if not self.continues:
            raise Refused("this policy cannot continue a prefix; leave prefix= out")
        length = len(prefix) if hasattr(prefix, "__len__") else -1
        given = self._number("prefix", prefix, (min(length, horizon), dim))
        self._prefix[0, : len(given)] = given
        self._prefix_known[0, : len(given)] = 1


def load(folder: Path | str) -> ExportedPolicy:
    """The exported policy in a folder."""
    return ExportedPolicy(read(folder))


class BoundNetwork:
    """A network of a bundle with the arrays that it reads and the shape of what it makes."""

    def __init__(self, file: str, model: bytes, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...]) -> None:
        self._file = file
        try:
            self._network = Network(model)
        except Exception as error:  # the errors of onnxruntime have no other base
            raise Refused(f"{file} is no network that onnxruntime can run by itself: {_first_line(error)}") from error
        self.feed: dict[str, NDArray[Any]] = {}
        for node in self._network.inputs:
            if node.name not in arrays:
                raise Refused(f"{file} reads {node.name[:60]!r}, which the bundle does not observe or draw")
            array = arrays[node.name]
            kind = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}.get(node.type)
            if list(node.shape) != list(array.shape) or kind != array.dtype:
                raise Refused(
                    f"{file} reads {node.name!r} as {node.type} of {node.shape}, and the bundle has {array.shape}"
                )
            self.feed[node.name] = array
        if len(self._network.outputs) != 1:
            raise Refused(f"{file} makes {len(self._network.outputs)} outputs, and one is needed")
        # The first answer takes longer, and should not be the robot's.
        name = self._network.outputs[0].name
        answer = self._refusing(lambda: self._network.run(name, self.feed))
        if answer.shape != (1, *shape) or answer.dtype != np.float32:
            raise Refused(f"{file} makes {answer.dtype} of {answer.shape}, and {(1, *shape)} is needed")
        self._answer = np.zeros((1, *shape), np.float32)
        self._run = self._network.bind(self.feed, name, self._answer)

    def __call__(self) -> Array:
        self._refusing(self._run)
        if not np.isfinite(self._answer).all():
            raise Refused(
                "the policy answered with something that is no number; the observation is far from all it knew"
            )
        return self._answer[0].copy()

    def _refusing(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except Exception as error:  # the errors of onnxruntime have no other base
            raise Refused(f"{self._file} cannot be run: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class ChunkController:
    """Asks for a chunk, plays ``execute`` actions of it, asks again; stacks the frames of a history.

    It makes what `policies.controllers` makes in one world with the same seeds, and scales it to the actuators. A
    refused observation changes nothing: the next one is taken as if it had not been."""

    def __init__(self, policy: ExportedPolicy, *, seed: int = 0, greedy: bool = False) -> None:
        self.policy, self.greedy = policy, greedy
        self._base = _hash(np.array([derive(seed, "episodes")], np.int64))
        self._episodes = self._decision = self._left = 0
        self._seed: int | None = None
        self._chunk = np.zeros((policy.schema.execute, policy.schema.dim), np.float32)
        self._frames: dict[str, list[NDArray[Any]]] = {}

    def reset(self, seed: int | None = None) -> None:
        """A new episode, of the seed given, or of the next one of its own."""
        if seed is None:
            seed = int(_shift_right(_hash(self._base + _signed(self._episodes * _MIX1)), 1)[0])
            self._episodes += 1
        self._seed, self._decision, self._left, self._frames = seed, 0, 0, {}

    def step(self, obs: Mapping[str, Any]) -> NDArray[np.float64]:
        """(A,): what the actuators are to do now, having observed a single frame."""
        if self._seed is None:
            raise Refused("the controller has no episode yet; call reset() first")
        policy, schema = self.policy, self.policy.schema
        frames = self._with(policy.check(obs, frame=True))
        seen = {**obs, **{key: np.stack(stack) for key, stack in frames.items()}}
        chunk, left = self._chunk, self._left
        if left == 0:
            source = RowNoise([self._seed], [self._decision])
            whole = policy.act(seen, greedy=self.greedy, source=source)
            chunk, left = whole[schema.start : schema.start + schema.execute], schema.execute
        action = chunk[schema.execute - left]
        if policy.ticks:
            action = policy.correct(seen, action)
        self._decision += self._left == 0
        self._frames, self._chunk, self._left = frames, chunk, left - 1
        return policy.to_actuator(action)

    def _with(self, frame: Mapping[str, NDArray[Any]]) -> dict[str, list[NDArray[Any]]]:
        """The stacks with this frame, of which the first of an episode fills them."""
        history = self.policy.schema.history
        if history == 1:
            return {}
        new = {key: x.copy() for key, x in frame.items() if stacked_by_history(key)}
        return {key: [*self._frames.get(key, [x] * history)[1:], x] for key, x in new.items()}
