"""One seed -> named generators; and noise that belongs to a world, not to a batch.

``RowNoise`` is counter based: row i of the m-th draw depends on (seed_i, index_i, m) alone, so a world draws the same
numbers whether it is alone or among a thousand. The hash is SplitMix64's finaliser (Steele, Lea, Flood 2014) in
wrapping int64 arithmetic; normals by Box and Muller (1958) in float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def derive(seed: int, *names: str | int) -> int:
    """A child seed in [0, 2^63): independent for different names, the same on every machine."""
    digest = hashlib.blake2b(repr((int(seed), *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator of its own for these names, seeded by ``derive(seed, *names)``."""
    made = torch.Generator(device=device)
    made.manual_seed(derive(seed, *names))
    return made


Words = TypeVar("Words", Tensor, NDArray[np.int64])


def _signed(value: int) -> int:
    """The low 64 bits of a Python integer, as the int64 that torch stores."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Words, bits: int) -> Words:
    """Logical shift: >> keeps the sign of an int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# Of arrays without dimensions: NumPy converts a number of Python at each use.
_ROUNDS = [
    (np.array(bits, np.uint64), np.array(mix, np.int64).view(np.uint64)) for bits, mix in ((30, _MIX1), (27, _MIX2))
]
_LAST = np.array(31, np.uint64)


def _hash(x: Words) -> Words:
    if isinstance(x, np.ndarray):
        word = x.view(np.uint64)
        for bits, mix in _ROUNDS:
            word = (word ^ (word >> bits)) * mix
        return (word ^ (word >> _LAST)).view(np.int64)
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def _words(x: Tensor) -> Any:
    """On a CPU an array, because NumPy is faster with so few numbers."""
    return x.numpy() if x.device.type == "cpu" else x


class RowNoise:
    """One independent stream per row, addressed by (seed, index) and the number of draws so far."""

    def __init__(self, seeds: Tensor | Sequence[int], index: Tensor | Sequence[int]) -> None:
        seeds, index = torch.as_tensor(seeds, dtype=torch.int64), torch.as_tensor(index, dtype=torch.int64)
        if seeds.ndim != 1 or seeds.shape != index.shape:
            raise ValueError(f"seeds and index must be (N,), got {tuple(seeds.shape)} and {tuple(index.shape)}")
        self._key = _hash(_hash(_words(seeds) + _GOLDEN) + _words(index) * _GOLDEN)
        self._draws = 0

    @property
    def stream(self) -> Tensor:
        """(N,): what its numbers are computed of, before the first draw."""
        return torch.as_tensor(self._key)

    @classmethod
    def of(cls, stream: Tensor) -> RowNoise:
        """With the numbers of another one's ``stream``."""
        made = cls.__new__(cls)
        made._key, made._draws = _words(stream), 0
        return made

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """float64 in (0, 1); ``shape[0]`` must be the number of rows."""
        if shape[0] != len(self._key):
            raise ValueError(f"this generator holds {len(self._key)} rows, but shape {tuple(shape)} was asked for")
        self._draws += 1
        stream = _hash(self._key + _signed(self._draws * _MIX2))[:, None]
        place = _words(torch.arange(1, 1 + math.prod(shape[1:]), device=getattr(stream, "device", "cpu")))
        bits = torch.as_tensor(_shift_right(_hash(stream + place * _GOLDEN), 11))
        return bits.double().add_(0.5).mul_(2.0**-53).view(*shape)

    def normal(self, shape: Sequence[int]) -> Tensor:
        angle, radius = self.uniform((*shape, 2)).unbind(-1)
        return torch.log(radius).mul_(-2).sqrt_() * (2 * math.pi * angle).cos_()

    def split(self, count: int) -> RowNoise:
        """Streams for ``count`` candidates of each row. Those of a row come from its own stream, so that they are the
        same in whatever company the row is."""
        seeds = (self.uniform((len(self._key), count)) * 2.0**53).long().flatten()
        return RowNoise(seeds, torch.zeros_like(seeds))


class SharedGenerator:
    """Every process of a training has the same generator and draws for all rows of their common batch; each keeps the
    rows that are its own (`ranks.py`). So the numbers are those of one process, and so is the state afterwards."""

    def __init__(self, generator: torch.Generator, rank: int, size: int) -> None:
        self.generator, self.device, self._rank, self._size = generator, generator.device, rank, size

    def draw(self, make: Callable[..., Tensor], shape: Sequence[int], dim: int, **options: Any) -> Tensor:
        """``shape`` is that of this process; dimension ``dim`` counts rows of the batch."""
        whole = (*shape[:dim], shape[dim] * self._size, *shape[dim + 1 :])
        drawn = make(whole, generator=self.generator, device=self.device, **options)
        return drawn[(slice(None),) * dim + (slice(self._rank, None, self._size),)]

    def first_rows(self, share: float, count: int) -> int:
        """How many of this process's ``count`` rows are among the first ``share`` of the common batch."""
        return len(range(self._rank, round(share * count * self._size), self._size))

    def get_state(self) -> Tensor:
        return self.generator.get_state()

    def set_state(self, state: Tensor) -> None:
        self.generator.set_state(state)


class StackedGenerator:
    """The generators of several learners whose losses `vmap` makes one call of; ``learner`` () is whose turn it is,
    batched there. Each draws what it would draw alone."""

    learner: Tensor

    def __init__(self, each: Sequence[torch.Generator]) -> None:
        self.each, self.device = each, each[0].device

    def draw(self, make: Callable[..., Tensor], shape: Sequence[int], dim: int, **options: Any) -> Tensor:
        drawn = [make(tuple(shape), generator=each, device=self.device, **options) for each in self.each]
        return torch.stack(drawn).index_select(0, self.learner[None])[0]


Generator = torch.Generator | SharedGenerator | StackedGenerator
Noise = Generator | RowNoise


def first_rows(share: float, count: int, source: Generator | None = None) -> int:
    """How many of ``count`` rows are the first ``share`` of a batch."""
    return source.first_rows(share, count) if isinstance(source, SharedGenerator) else round(share * count)


def normal(
    shape: Sequence[int],
    source: Noise | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normals from a torch generator or from per-row streams."""
    if isinstance(source, RowNoise):
        return source.normal(shape).to(device=device, dtype=dtype)
    return _drawn(torch.randn, shape, source, device, dtype=dtype)


def uniform(
    shape: Sequence[int],
    source: Noise | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniform numbers in [0, 1), from a torch generator or from per-row streams, which float32 may round up to 1."""
    if isinstance(source, RowNoise):
        return source.uniform(shape).to(device=device, dtype=dtype)
    return _drawn(torch.rand, shape, source, device, dtype=dtype)


def integers(
    low: int,
    high: int,
    shape: Sequence[int],
    source: Generator | None = None,
    *,
    device: torch.device | str | None = None,
    dim: int = 0,
) -> Tensor:
    """Uniform integers in [low, high); dimension ``dim`` counts rows of a batch."""
    return _drawn(partial(torch.randint, low, high), shape, source, device, dim)


def permutation(count: int, source: Generator | None = None, *, device: torch.device | str | None = None) -> Tensor:
    """The integers below ``count``, in an order drawn at random."""
    return _drawn(lambda shape, **options: torch.randperm(*shape, **options), (count,), source, device)


def _drawn(
    make: Callable[..., Tensor],
    shape: Sequence[int],
    source: Generator | None,
    device: torch.device | str | None,
    dim: int = 0,
    **options: Any,
) -> Tensor:
    if source is None:
        return make(tuple(shape), device=device, **options)
    if not isinstance(source, torch.Generator):
        return source.draw(make, shape, dim, **options).to(device)
    return make(tuple(shape), generator=source, device=source.device, **options).to(device)


# The rank and the number of the processes among which worlds are shared out that are made now (`ranks.py`).
SHARE: ContextVar[tuple[int, int]] = ContextVar("share", default=(0, 1))


class EpisodeSeeds:
    """Which seed each of N worlds runs on: the one it is given, else the next of its own derived sequence, which
    ``group`` neighbours have in common. Of worlds that are shared out a process has every ``size``-th."""

    def __init__(self, seed: int, num_envs: int, device: torch.device | str = "cpu", group: int = 1) -> None:
        rank, size = SHARE.get()
        world = torch.arange(rank, num_envs * size, size, dtype=torch.int64, device=device)
        self._base = _hash(derive(seed, "episodes") + world // group * _GOLDEN)
        self.count = torch.zeros_like(world)  # episodes begun without a given seed
        self.current = torch.zeros_like(world)

    def begin(self, mask: Tensor, seeds: Sequence[int] | Tensor | None = None) -> Tensor:
        """New seeds for the worlds of ``mask`` (N,); ``seeds`` holds one number per world. Returns all N."""
        if seeds is None:
            fresh = self._next()
            self.count = self.count + mask
        else:
            fresh = torch.as_tensor(seeds, dtype=torch.int64, device=self.current.device)
            if fresh.shape != self.current.shape:
                raise ValueError(f"one seed per world is needed: {len(self.current)} worlds, {len(fresh)} seeds")
        self.current = torch.where(mask, fresh, self.current)
        return self.current

    def _next(self) -> Tensor:
        """63 bits, because seeds are not negative."""
        return torch.as_tensor(_shift_right(_hash(_words(self._base) + _words(self.count) * _MIX1), 1))

    def state_dict(self) -> dict[str, Tensor]:
        return {"count": self.count, "current": self.current}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        device = self.count.device
        self.count, self.current = (state[name].to(device, copy=True) for name in ("count", "current"))
