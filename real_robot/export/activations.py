"""The activations of an exported policy, in NumPy and in place: what fills ``out`` from ``x`` whenever it is called.

gelu needs the error function, which NumPy lacks: Abramowitz and Stegun 1964, formula 7.1.26, is off by 1.5e-7 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Call = Callable[[], Any]


def _silu(x: Array, out: Array) -> list[Call]:
    """x / (1 + exp(-x)) by way of tanh, which cannot overflow: x (1 + tanh(x / 2)) / 2."""
    half = np.full_like(x, 0.5)
    return [
        partial(np.multiply, x, half, out),
        partial(np.tanh, out, out),
        partial(np.multiply, out, half, out),
        partial(np.add, out, half, out),
        partial(np.multiply, out, x, out),
    ]


def _mish(x: Array, out: Array) -> list[Call]:
    """x tanh(log(1 + e)) with e = exp(x) is x n / (n + 2) with n = e (e + 2); from x = 20 on it is x in float32."""
    two, top, more = np.full_like(x, 2), np.full_like(x, 20), np.zeros_like(x)
    return [
        partial(np.minimum, x, top, out=out),
        partial(np.exp, out, out),
        partial(np.add, out, two, more),
        partial(np.multiply, out, more, out),
        partial(np.add, out, two, more),
        partial(np.divide, out, more, out),
        partial(np.multiply, out, x, out),
    ]


_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _gelu(x: Array, out: Array) -> list[Call]:
    """x (1 + erf(x / sqrt 2)) / 2. In float64, so that the formula is what limits it."""
    z, t, poly = (np.zeros(x.shape) for _ in range(3))
    calls: list[Call] = [
        partial(np.abs, x, z),
        partial(np.multiply, z, math.sqrt(0.5), z),
        partial(np.multiply, z, 0.3275911, t),
        partial(np.add, t, 1.0, t),
        partial(np.divide, 1.0, t, t),
        partial(np.multiply, t, _ERF[0], poly),
    ]
    for coefficient in _ERF[1:]:
        calls += [partial(np.add, poly, coefficient, poly), partial(np.multiply, poly, t, poly)]
    return [
        *calls,
        partial(np.multiply, z, z, z),
        partial(np.negative, z, z),
        partial(np.exp, z, z),
        partial(np.multiply, poly, z, poly),
        partial(np.subtract, 1.0, poly, poly),  # erf of |x| / sqrt 2
        partial(np.copysign, poly, x, poly),
        partial(np.add, poly, 1.0, poly),
        partial(np.multiply, poly, 0.5, poly),
        partial(np.multiply, poly, x, out, casting="same_kind"),
    ]


ACTIVATIONS: Mapping[str, Callable[[Array, Array], list[Call]]] = {
    "silu": _silu,
    "relu": lambda x, out: [partial(np.maximum, x, np.zeros_like(x), out=out)],
    "gelu": _gelu,
    "mish": _mish,
    "tanh": lambda x, out: [partial(np.tanh, x, out)],
    "softplus": lambda x, out: [partial(np.logaddexp, x, np.zeros_like(x), out)],
    "exp": lambda x, out: [partial(np.exp, x, out)],
}
