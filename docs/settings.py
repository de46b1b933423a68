"""Settings as tables: the fields of a dataclass with their defaults and the comments beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from burnish.policies.cli.settings_text import texts


class Setting(NamedTuple):
    name: str
    default: str
    meaning: str


def fields(config: Any) -> Iterator[tuple[str, Any, str]]:
    """(name, value, meaning) of a dataclass, or of an instance of one; of a class the value is the default."""
    kind = config if isinstance(config, type) else type(config)
    meaning = texts(kind)
    for field in dataclasses.fields(kind):
        if not isinstance(config, type):
            value = getattr(config, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        yield field.name, value, meaning[field.name]


def shown(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, Enum):
        others = ", ".join(f"`{name}`" for name in type(value).__members__ if name != value.name)
        return f"`{value.name}`" + (f" (or {others})" if others else "")
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return "must be given" if value == "???" else f"`{value}`"


def settings(config: Any, prefix: str = "") -> list[Setting]:
    """Every setting with its whole name."""
    found = []
    for name, value, meaning in fields(config):
        if dataclasses.is_dataclass(value):
            found += settings(value, f"{prefix}{name}.")
        else:
            found.append(Setting(prefix + name, shown(value), meaning))
    return found


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def settings_tables(config: type, prefix: str) -> str:
    """The dataclass's own settings as a table, and those of each part folded up under its name."""
    every, own = settings(config, prefix), []
    parts: dict[str, list[Setting]] = {}
    for setting in every:
        part, dot, _ = setting.name.removeprefix(prefix).partition(".")
        parts.setdefault(part, []).append(setting) if dot else own.append(setting)
    meaning = {name: text for name, _, text in fields(config)}
    titles = ("setting", "default", "meaning")
    found = [table(titles, [(f"`{x.name}`", x.default, x.meaning) for x in own])] if own else []
    for part, inside in parts.items():
        rows = table(titles, [(f"`{x.name}`", x.default, x.meaning) for x in inside])
        about = f"{meaning[part]}\n\n" if meaning[part] else ""
        found.append(folded("abstract", f"`{prefix}{part}`", about + rows))
    return "\n\n".join(found)


def folded(kind: str, title: str, text: str) -> str:
    inside = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f'??? {kind} "{title}"\n\n{inside}'
