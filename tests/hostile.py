"""Seeded streams of hostile requests, for the guard, for drivers and for the soak.

`ROWS` are kinds whose requests have the right shape, though their numbers may be anything; `SHAPELESS` are kinds that
no guard can read, row by row or at all. ``mixed`` lets every row change its kind every ``hold`` ticks, and drops in a
request without shape now and then: what matters are the changes, from full speed into NaN, from NaN into a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.random import Generator

from burnish.real_robot.safety.guard import Limits
from soak import SOAK as SOAK

Shape = tuple[int, ...]
Make = Callable[[Generator, Limits, Shape], Iterator[Any]]


def random_limits(rng: Generator, joints: int = 7) -> Limits:
    """From a gantry that creeps to a wrist that reaches full speed in one tick, in rooms from a millirad to two turns.

    The promise of 1e-9 and 1e-6 is about limits that positions in float64 can express: here V h > 1e-5 and A h^2 > 1e-7
    beside positions below 10, which are rounded by 1e-15.
    """
    middle, width = rng.uniform(-3, 3, joints), 10 ** rng.uniform(-3, 0.8, joints)
    velocity, acceleration = 10 ** rng.uniform(-2, 1.3, joints), 10 ** rng.uniform(-1, 3, joints)
    return Limits(middle - width, middle + width, velocity, acceleration, float(10 ** rng.uniform(-3, -1)))


def _each(draw: Callable[[Generator, Limits, Shape], Any]) -> Make:
    """A stream without memory."""

    def stream(rng: Generator, limits: Limits, shape: Shape) -> Iterator[Any]:
        while True:
            yield draw(rng, limits, shape)

    return stream


def _inside(rng: Generator, limits: Limits, shape: Shape) -> Any:
    return rng.uniform(limits.lower, limits.upper, shape)


def _side(rng: Generator, limits: Limits, shape: Shape) -> Any:
    return np.where(rng.random(shape) < 0.5, limits.lower, limits.upper)


def _bang_bang(every: int) -> Make:
    def stream(rng: Generator, limits: Limits, shape: Shape) -> Iterator[Any]:
        while True:
            side = _side(rng, limits, shape)
            for _ in range(every):
                yield side

    return stream


def _chirp(rng: Generator, limits: Limits, shape: Shape) -> Iterator[Any]:
    """Slow at first, in the end faster than commands are sent, and wider than the limits."""
    middle, half = (limits.upper + limits.lower) / 2, (limits.upper - limits.lower) / 2
    phase, tick = rng.uniform(0, 2 * np.pi, shape), 0
    while True:
        yield middle + 1.2 * half * np.sin(phase + 1e-4 * tick**2)
        tick = (tick + 1) % 500


def _walk(rng: Generator, limits: Limits, shape: Shape) -> Iterator[Any]:
    """Nearly admissible: steps of about the velocity limit, so the guard cuts a little, all the time."""
    at = _inside(rng, limits, shape)
    while True:
        at = at + limits.velocity * limits.period_s * rng.normal(size=shape)
        at = np.clip(at, limits.lower - 0.1, limits.upper + 0.1)
        yield at


def _along_the_edge(rng: Generator, limits: Limits, shape: Shape) -> Iterator[Any]:
    """Full speed towards a limit, with full speed away from it in between: asks for what braking barely allows."""
    while True:
        side = _side(rng, limits, shape)
        for _ in range(int(rng.integers(1, 40))):
            yield side + rng.uniform(-1e-6, 1e-6, shape)


def _flicker(rng: Generator, limits: Limits, shape: Shape) -> Iterator[Any]:
    """Stands a little way from a limit, and for single ticks asks for the far side or for the limit itself, so that it
    is met at a crawl by who was just asked to come at full speed."""
    c = limits.acceleration * limits.period_s**2
    while True:
        side, other = _side(rng, limits, shape), _side(rng, limits, shape)
        at = np.clip(side + 2 * c * rng.uniform(-1, 1, shape), limits.lower, limits.upper)
        for _ in range(int(rng.integers(20, 60))):
            yield np.where(rng.random(shape) < 0.3, other, np.where(rng.random(shape) < 0.3, side, at))


ROWS: dict[str, Make] = {
    "inside": _each(_inside),
    "far_outside": _each(lambda rng, limits, shape: 1e3 * rng.normal(size=shape)),
    "partly_nan": _each(
        lambda rng, limits, shape: np.where(rng.random(shape) < 0.2, np.nan, _inside(rng, limits, shape))
    ),
    "infinite": _each(lambda rng, limits, shape: rng.choice([-np.inf, np.inf, 0.0], shape)),
    "denormal": _each(lambda rng, limits, shape: rng.choice([5e-324, -5e-324, 1e-310, -0.0], shape)),
    "bang_bang_1": _bang_bang(1),
    "bang_bang_25": _bang_bang(25),
    "limit_ulp": _each(
        lambda rng, limits, shape: np.nextafter(_side(rng, limits, shape), rng.choice([-np.inf, np.inf], shape))
    ),
    "float16": _each(lambda rng, limits, shape: _inside(rng, limits, shape).astype(np.float16)),
    "whole_numbers": _each(lambda rng, limits, shape: rng.integers(-(2**62), 2**62, shape)),
    "huge": _each(lambda rng, limits, shape: rng.choice([-1e308, 1e308, 1.7e308], shape)),
    "chirp": _chirp,
    "walk": _walk,
    "along_the_edge": _along_the_edge,
    "flicker": _flicker,
}


class Raises:
    """Fails at being an array, in the way it is told."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise self.error("no array")


class Lies:
    """Says that it is an array and gives something else."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return "not an array"


def _endless() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def _unreadable(shape: Shape) -> dict[str, list[Any]]:
    zeros = np.zeros(shape)
    return {
        "wrong_type": [None, "zero", b"0", {"q": 0.0}, {1.0, 2.0}, object(), zeros.tobytes(), float("nan"), 3, print],
        "wrong_shape": [
            np.zeros(0),
            np.zeros(()),
            np.zeros((*shape[:-1], shape[-1] + 1)),
            np.zeros((*shape[:-1], shape[-1] - 1)),
            np.zeros((1, *shape)),
            [zeros.tolist()],
        ],
        "wrong_dtype": [
            zeros.astype(bool),
            zeros.astype(complex),
            zeros.astype(object),
            zeros.astype("datetime64[s]"),
            zeros.astype("U8"),
            np.zeros(shape, [("q", float)]),
        ],
        "ragged": [[[0.0], [0.0, 1.0]], [0.0, [1.0]], [*([0.0] * (shape[-1] - 1)), None], _endless()],
        "raises": [Raises(e) for e in (ValueError, TypeError, RuntimeError, MemoryError, RecursionError)] + [Lies()],
        # Right in shape and kind, and no float64: the cast overflows, or meets a signalling NaN.
        "no_float64": [
            np.full(shape, "1e4000").astype(np.longdouble),
            np.full(shape, 0x7F800001, np.uint32).view(np.float32),
            np.full(shape, 0x7FF0000000000001, np.uint64).view(np.float64),
        ],
    }


def _unreadable_stream(kind: str) -> Make:
    def stream(rng: Generator, limits: Limits, shape: Shape) -> Iterator[Any]:
        choices = _unreadable(shape)[kind]
        while True:
            yield choices[rng.integers(len(choices))]

    return stream


SHAPELESS: dict[str, Make] = {kind: _unreadable_stream(kind) for kind in _unreadable((2,))}
KINDS: dict[str, Make] = {**ROWS, **SHAPELESS}


def mixed(
    rng: Generator, limits: Limits, shape: Shape, ticks: int, hold: int = 25, shapeless: float = 0.02
) -> Iterator[Any]:
    """``ticks`` requests; rows are (*shape[:-1]), of which there may be only one."""
    streams = [make(rng, limits, shape) for make in ROWS.values()]
    unreadable = [make(rng, limits, shape) for make in SHAPELESS.values()]
    rows = shape[:-1]
    kind = rng.integers(len(streams), size=rows)
    # Rows change at different ticks.
    left = rng.integers(1, hold + 1, size=rows)
    for _ in range(ticks):
        kind = np.where(left == 0, rng.integers(len(streams), size=rows), kind)
        left = np.where(left == 0, rng.integers(1, 2 * hold, size=rows), left) - 1
        if rng.random() < shapeless:
            yield next(unreadable[rng.integers(len(unreadable))])
            continue
        request = np.empty(shape)
        for i in np.unique(kind):
            request = np.where((kind == i)[..., None], np.asarray(next(streams[i]), np.float64), request)
        yield request
