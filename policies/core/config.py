"""Dataclass <-> plain data, strictly: what a checkpoint stores of a configuration, and how it is read back.

Only the types named by the dataclass are ever built; unknown keys and wrong types are refused by a sentence. This is
data, never code: a file can choose among values that we wrote down, and nothing else.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar, cast

from .errors import BurnishError, did_you_mean

T = TypeVar("T")

# ``field(..., metadata=LATER)``: a setting that came later is written only where it is not the default. So what was
# written before it came is equal to what is written now, where data are compared (worlds, runs) or hashed (tasks).
LATER = types.MappingProxyType({"later": True})


def to_data(value: Any) -> Any:
    """Nested dataclasses, enums, lists and dicts to what YAML and JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if not _left_out(field, getattr(value, field.name))]
        return {field.name: to_data(getattr(value, field.name)) for field in fields}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    return value


def _left_out(field: dataclasses.Field[Any], value: Any) -> bool:
    if "later" not in field.metadata:
        return False
    made = field.default_factory
    return bool(value == (field.default if made is dataclasses.MISSING else made()))


def from_data(kind: type[T], data: Any, where: str = "") -> T:
    """The dataclass ``kind`` from plain data; ``where`` names the place in error sentences."""
    place = where or kind.__name__
    if not isinstance(data, Mapping):
        raise BurnishError(f"{place} must be a mapping of settings, but it is {data!r}")
    hints = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(cast(Any, kind)) if field.init}
    for key in data:
        if key not in fields:
            raise BurnishError(f"{place} has no setting {key!r}; {did_you_mean(str(key), fields)}")
    return kind(**{key: _value(hints[key], item, f"{where}.{key}" if where else key) for key, item in data.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), value, where)
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise BurnishError(f"{where} must be a list, but it is {value!r}")
        return [_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise BurnishError(f"{where} must be a mapping, but it is {value!r}")
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return from_data(cast(type, kind), value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value not in kind.__members__:
            raise BurnishError(f"{where}={value!r} is not a choice; {did_you_mean(str(value), kind.__members__)}")
        return kind[value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise BurnishError(f"{where} must be {kind.__name__}, but it is {value!r}")
    return value


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted names at which two trees of plain data differ, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            yield from differences(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{name}.{key}" if name else str(key))
    elif old != new and repr(old) != repr(new):  # NaN differs from itself
        yield name, old, new


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()
