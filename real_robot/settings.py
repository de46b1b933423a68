"""A device's settings from plain data, checked: known names, right kinds, finite numbers; each mistake one sentence.

A driver is told its settings by a command line, a file, or another process. The code that turns them into the dataclass
of a device does it here, so that the same mistake is the same sentence on every way: ``TwinConfig``, ``ArmConfig``,
``UniversalConfig``. Ranges and relations stay where they belong, in the ``__post_init__`` of those.

`policies.core.config.from_data` does the like for what a checkpoint remembers. It is not used here, because the control
process imports nothing of the policy side.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

from ..policies.core.errors import did_you_mean
from .errors import Refused

T = TypeVar("T")
LARGEST = sys.float_info.max
CALLED = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false"}


def settings(kind: type[T], data: Mapping[str, Any], device: str, /, *, place: str = "robot.device", **given: Any) -> T:
    """The dataclass ``kind`` of ``data``. ``device`` names it in sentences ("a twin"), and ``place`` where a command
    line has its settings; what is ``given`` by the program is taken as it is, and nobody else may say it."""
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    for name in data:
        if name not in fields or name in given:
            raise Refused(f"{device} has no setting {name!r}; {did_you_mean(str(name), fields.keys() - given.keys())}")
    needed = [name for name, field in fields.items() if _needed(field) and name not in data and name not in given]
    if needed:
        raise Refused(f"{device} needs {' and '.join(needed)}; give {' '.join(f'{place}.{n}=...' for n in needed)}")
    hints = typing.get_type_hints(kind)
    return kind(**given, **{name: _value(hints[name], x, name, device) for name, x in data.items()})


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(kind: Any, value: Any, name: str, device: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        known = [a for a in arguments if a is not type(None)]
        matching = (a for a in known if isinstance(a, type) and _is(a, value))
        return _value(next(matching, known[0]), value, name, device)
    if origin is Sequence:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise Refused(f"{name}={value!r} of {device} must be a list")
        return [_value(arguments[0], item, f"{name}[{i}]", device) for i, item in enumerate(value)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = [str(member.value) for member in kind]
        if str(value) not in known:
            raise Refused(f"{name}={value!r} of {device} is not known; choices: {', '.join(known)}")
        return kind(value)
    if not _is(kind, value):
        raise Refused(f"{name}={value!r} of {device} must be {CALLED.get(kind, f'a {kind.__name__}')}")
    return float(value) if kind is float else value


def _is(kind: type, value: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) <= LARGEST  # neither inf nor NaN
    return isinstance(value, kind)
