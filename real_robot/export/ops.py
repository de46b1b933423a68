"""The words in which an exported policy is written down, and what each of them does: pure NumPy.

A program is a list of operations, each a JSON object: what it is (``op``), what it reads (``in``, names of values made
before it), the name of what it makes (``out``), and its own settings. Values are float32 matrices (rows, width); rows
are the candidates among which `pick` chooses, else there is one, and one row meets many as in NumPy. A program has no
loops, branches or calls, so it ends, and how long it takes is known when it is read.

`prepare` reads the list once: it checks every name, shape and number, lays out all memory, and returns calls that need
none. Whatever does not fit is refused by a sentence; nothing is ever executed that is not in this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import Refused
from .activations import ACTIVATIONS, Array, Call

MAX_OPS = 50_000
MAX_VALUES = 2**24  # numbers that all values of a program hold together: 64 MiB
MAX_WORK = 2**36  # multiplications in all its matrix products: some seconds


class Pinned:
    """The actions that are committed already, (H * A,) flattened, of which the first ``count`` numbers count."""

    def __init__(self, width: int) -> None:
        self.known, self.count = np.zeros(width, np.float32), 0


class Item:
    """One operation while it is prepared; each of its settings must be asked for, and no other may be there."""

    def __init__(
        self,
        number: int,
        data: Any,
        values: Mapping[str, Array],
        tensors: Mapping[str, Array],
        turned: dict[str, Array],
    ) -> None:
        if not isinstance(data, dict) or not isinstance(data.get("op"), str):
            raise Refused(f"operation {number} of the program is no object that names its op")
        self.kind, self.name = data["op"], f"operation {number} ({data['op'][:40]})"
        self._left = {key: x for key, x in data.items() if key not in ("op", "in", "out")}
        self._tensors, self._turned = tensors, turned
        if self.kind not in OPS:
            raise Refused(f"{self.name} is unknown; this version knows {', '.join(OPS)}")
        names, out = data.get("in"), data.get("out")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused(f"{self.name} must list the names of what it reads as 'in'")
        if not isinstance(out, str) or out in values:
            raise Refused(f"{self.name} must make one new value, not {str(out)[:60]!r}")
        self.out = out
        for name in names:
            if name not in values:
                raise Refused(f"{self.name} reads {name[:60]!r}, which nothing before it has made")
        self.inputs = [values[name] for name in names]

    def need(self, holds: bool, what: str) -> None:
        if not holds:
            raise Refused(f"{self.name} {what}; it reads {[x.shape for x in self.inputs]}")

    def count(self, least: int, most: int | None = None) -> list[Array]:
        fits = least <= len(self.inputs) <= (least if most is None else most)
        self.need(fits, f"reads {len(self.inputs)} values, and that many make no sense")
        return self.inputs

    def number(self, key: str) -> float:
        x = self._left.pop(key, None)
        if isinstance(x, bool) or not isinstance(x, int | float) or not abs(x) < 1e30:
            raise Refused(f"{self.name} needs a finite number as {key!r}, not {str(x)[:40]}")
        return float(x)

    def index(self, key: str) -> int:
        x = self._left.pop(key, None)
        if type(x) is not int or not 0 <= x < 2**31:
            raise Refused(f"{self.name} needs an index as {key!r}, not {str(x)[:40]}")
        return x

    def choice(self, key: str, choices: Mapping[str, Any]) -> Any:
        x = self._left.pop(key, None)
        if not isinstance(x, str) or x not in choices:
            raise Refused(f"{self.name} has {key}={str(x)[:40]!r}; choices: {', '.join(choices)}")
        return choices[x]

    def tensor(self, key: str, *shape: int) -> Array:
        name = self._left.pop(key, None)
        if not isinstance(name, str) or name not in self._tensors:
            raise Refused(f"{self.name} needs the tensor {str(name)[:60]!r} as {key!r}, which the bundle does not hold")
        found = self._tensors[name]
        self.need(found.shape == shape, f"needs {key!r} of shape {shape}, and {name[:60]!r} has {found.shape}")
        return found

    def transposed(self, key: str, *shape: int) -> Array:
        """The steps of a generation share their weights, and a program of kilobytes can name a large one often."""
        name, found = str(self._left.get(key)), self.tensor(key, *shape)
        if name not in self._turned:
            self._turned[name] = np.ascontiguousarray(found.T)
        return self._turned[name]

    def has(self, key: str) -> bool:
        return self._left.get(key) is not None

    def numbers(self, key: str, count: int) -> list[np.float32]:
        given = self._left.pop(key, None)
        if not isinstance(given, list) or len(given) != count:
            raise Refused(f"{self.name} needs {count} numbers as {key!r}")
        out = []
        for x in given:
            self._left[key] = x
            out.append(np.float32(self.number(key)))
        return out

    def broadcast(self) -> Array:
        """Memory for what the inputs make together."""
        try:
            return np.zeros(np.broadcast_shapes(*(x.shape for x in self.inputs)), np.float32)
        except ValueError:
            raise Refused(f"{self.name} reads values that do not fit: {[x.shape for x in self.inputs]}") from None

    def finish(self) -> None:
        if self._left:
            raise Refused(f"{self.name} has the unknown setting {next(iter(self._left))[:40]!r}")


Made = tuple[Array, list[Call]]


def _constant(item: Item, _: Pinned) -> Made:
    item.count(0)
    width = item.index("width")
    return item.tensor("tensor", width).reshape(1, -1), []


def _affine(item: Item, _: Pinned) -> Made:
    """(x - shift) / scale, in this order, as the normaliser of a policy has it."""
    (x,) = item.count(1)
    # As large as x, here and below: NumPy takes thrice as long over what it has to broadcast.
    shift, scale = (np.tile(item.tensor(name, x.shape[1]), (len(x), 1)) for name in ("shift", "scale"))
    item.need(bool((scale != 0).all()), "divides by a scale of 0")
    out = np.zeros_like(x)
    return out, [partial(np.subtract, x, shift, out), partial(np.divide, out, scale, out)]


def _linear(item: Item, _: Pinned) -> Made:
    """x W^T + bias, and a second value added: what other inputs of the same layer gave, before its bias."""
    x, *plus = item.count(1, 2)
    width = item.index("width")
    weight = item.transposed("weight", width, x.shape[1])
    out = np.zeros((x.shape[0], width), np.float32)
    calls: list[Call] = [partial(np.dot, x, weight, out)]
    if item.has("bias"):
        calls.append(partial(np.add, out, np.tile(item.tensor("bias", width), (len(out), 1)), out))
    for more in plus:
        item.need(more.shape in (out.shape, (1, width)), "adds a value of another shape than it makes")
        calls.append(partial(np.add, out, more, out))
    return out, calls


def _layernorm(item: Item, _: Pinned) -> Made:
    (x,) = item.count(1)
    rows, width = x.shape
    weight, bias = item.tensor("weight", width), item.tensor("bias", width)
    eps = np.float32(item.number("eps"))
    item.need(bool(eps > 0), "needs a positive eps")
    out, square, mean, spread = np.zeros_like(x), np.zeros_like(x), np.zeros((rows, 1), "f"), np.zeros((rows, 1), "f")
    average = np.full((width, 1), 1 / width, np.float32)
    return out, [
        partial(np.dot, x, average, mean),
        partial(np.subtract, x, mean, out),
        partial(np.multiply, out, out, square),
        partial(np.dot, square, average, spread),
        partial(np.add, spread, eps, spread),
        partial(np.sqrt, spread, spread),
        partial(np.divide, out, spread, out),
        partial(np.multiply, out, weight, out),
        partial(np.add, out, bias, out),
    ]


def _activation(item: Item, _: Pinned) -> Made:
    (x,) = item.count(1)
    out = np.zeros_like(x)
    return out, item.choice("kind", ACTIVATIONS)(x, out)


def _concat(item: Item, _: Pinned) -> Made:
    """Beside each other, where one row meets many; or ``axis`` 0, below each other."""
    values = item.count(1, 4096)
    if item.has("axis"):
        item.need(item.index("axis") == 0 and len({x.shape[1] for x in values}) == 1, "stacks rows of other widths")
        out = np.zeros((sum(len(x) for x in values), values[0].shape[1]), np.float32)
        parts = np.split(out, np.cumsum([len(x) for x in values])[:-1])
    else:
        rows = {len(x) for x in values} - {1}
        item.need(len(rows) < 2, "joins values with other numbers of rows")
        out = np.zeros((max(rows, default=1), sum(x.shape[1] for x in values)), np.float32)
        parts = np.split(out, np.cumsum([x.shape[1] for x in values])[:-1], axis=1)
    return out, [partial(np.copyto, part, x) for part, x in zip(parts, values, strict=True)]


def _slice(item: Item, _: Pinned) -> Made:
    (x,) = item.count(1)
    start, stop = item.index("start"), item.index("stop")
    item.need(start < stop <= x.shape[1], f"cuts out columns {start} to {stop}")
    out = np.zeros((len(x), stop - start), np.float32)
    return out, [partial(np.copyto, out, x[:, start:stop])]


def _mix(item: Item, _: Pinned) -> Made:
    """The weighted sum of its inputs; a weight of 1 costs nothing."""
    values = item.count(1, 4096)
    out, term = item.broadcast(), item.broadcast()
    calls: list[Call] = []
    for i, (x, weight) in enumerate(zip(values, item.numbers("weights", len(values)), strict=True)):
        into = out if i == 0 else term
        if weight != 1:
            calls.append(partial(np.multiply, x, weight, into))
        elif i == 0:
            calls.append(partial(np.copyto, out, x))
        if i:
            calls.append(partial(np.add, out, x if weight == 1 else term, out))
    return out, calls


def _multiply(item: Item, _: Pinned) -> Made:
    a, b = item.count(2)
    out = item.broadcast()
    return out, [partial(np.multiply, a, b, out)]


def _clip(item: Item, _: Pinned) -> Made:
    (x,) = item.count(1)
    low, high = item.number("low"), item.number("high")
    item.need(low <= high, f"clips between {low:g} and {high:g}")
    out = np.zeros_like(x)
    least, most = np.full_like(x, low), np.full_like(x, high)
    return out, [partial(np.maximum, x, least, out=out), partial(np.minimum, out, most, out=out)]


def _pin(item: Item, pinned: Pinned) -> Made:
    """The actions that are committed already replace the head of a chunk, as they look at this step of its making:
    ``of_noise`` parts of the noise it began with, and ``of_prefix`` of the actions."""
    x, noise = item.count(2)
    of_noise, of_prefix = np.float32(item.number("of_noise")), np.float32(item.number("of_prefix"))
    out = item.broadcast()
    fits = x.shape[1] == noise.shape[1] == len(pinned.known) and out.shape == x.shape
    item.need(fits, f"pins something else than a chunk of {len(pinned.known)} numbers")

    def pin() -> None:
        np.copyto(out, x)
        if n := pinned.count:
            out[:, :n] = of_noise * noise[:, :n] + of_prefix * pinned.known[:n]

    return out, [pin]


def _minimum(item: Item, _: Pinned) -> Made:
    first, *others = item.count(1, 4096)
    out = item.broadcast()
    return out, [partial(np.copyto, out, first), *(partial(np.minimum, out, x, out=out) for x in others)]


def _expectation(item: Item, _: Pinned) -> Made:
    """The mean of ``support`` under the softmax of each row."""
    (x,) = item.count(1)
    support = item.tensor("support", x.shape[1])
    out = np.zeros((len(x), 1), np.float32)

    def expect() -> None:
        weights = np.exp(x - x.max(1, keepdims=True))
        np.divide(weights @ support[:, None], weights.sum(1, keepdims=True), out)

    return out, [expect]


def _pick(item: Item, _: Pinned) -> Made:
    """The row with the highest score; the first of several."""
    x, score = item.count(2)
    item.need(score.shape == (len(x), 1), "picks by scores that are not one per row")
    out = np.zeros((1, x.shape[1]), np.float32)

    def pick() -> None:
        np.copyto(out[0], x[score[:, 0].argmax()])

    return out, [pick]


OPS: Mapping[str, Callable[[Item, Pinned], Made]] = {
    "constant": _constant,
    "affine": _affine,
    "linear": _linear,
    "layernorm": _layernorm,
    "activation": _activation,
    "concat": _concat,
    "slice": _slice,
    "mix": _mix,
    "multiply": _multiply,
    "clip": _clip,
    "pin": _pin,
    "minimum": _minimum,
    "expectation": _expectation,
    "pick": _pick,
}


class Program(NamedTuple):
    calls: Sequence[Call]  # in order; they read the inputs where they lie, and allocate nothing but in `pick`'s company
    output: Array


def prepare(
    ops: Any, output: Any, inputs: Mapping[str, Array], tensors: Mapping[str, Array], pinned: Pinned
) -> Program:
    """``inputs`` are the matrices that are filled before the calls are made."""
    if not isinstance(ops, list) or len(ops) > MAX_OPS:
        raise Refused(f"a program is a list of at most {MAX_OPS} operations")
    values, calls, held, work = dict(inputs), [], 0, 0
    turned: dict[str, Array] = {}
    for number, data in enumerate(ops):
        item = Item(number, data, values, tensors, turned)
        held += _planned(item)
        if held > MAX_VALUES:
            raise Refused(f"{item.name} makes the program hold more than {MAX_VALUES} numbers at once")
        made, more = OPS[item.kind](item, pinned)
        item.finish()
        work += made.size * max((x.shape[1] for x in item.inputs), default=1) if item.kind == "linear" else made.size
        if work > MAX_WORK:
            raise Refused(f"{item.name} makes the program compute more than {MAX_WORK} products")
        values[item.out] = made
        calls += more
    if not isinstance(output, str) or output not in values:
        raise Refused(f"the output of the program is {str(output)[:60]!r}, which none of its operations makes")
    return Program(calls, values[output])


def _planned(item: Item) -> int:
    """No operation makes more numbers than this, said before any memory is asked for."""
    rows = sum(len(x) for x in item.inputs) or 1
    width = item._left.get("width", 0)
    return rows * max(sum(x.shape[1] for x in item.inputs), width if type(width) is int and width > 0 else 0)
