"""The text of each setting: the comment beside the field of its dataclass, or the lines of comment above it.

`burnish VERB --help` prints it beside the setting, and the pages of the documentation have it in their tables, so it is
written in one place.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from functools import cache

COLUMN, WIDTH = 44, 120  # where texts begin, and where they are wrapped


@cache
def texts(config: type) -> dict[str, str]:
    """Field of a dataclass -> its text, or "" where it has none; those of base classes among them."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        if dataclasses.is_dataclass(base):
            found |= _own(base)
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(config)}


def _own(config: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except OSError:  # installed without its source, or made by a program
        return {}
    lines = source.splitlines()
    beside = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    made = ast.parse(source).body[0]
    assert isinstance(made, ast.ClassDef), config
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            line = node.lineno - 1
            while line in beside and lines[line - 1].lstrip().startswith("#"):
                above.insert(0, beside[line])
                line -= 1
            said = [*above, beside.get(node.end_lineno or node.lineno, "")]
            found[node.target.id] = " ".join(filter(None, said))
    return found


def beside(shown: str, text: str) -> str:
    """A setting as it is shown, and its text in a column of its own."""
    if not text:
        return shown
    head = shown.ljust(COLUMN - 2) + "  " if len(shown) <= COLUMN - 2 else f"{shown}\n{' ' * COLUMN}"
    return head + f"\n{' ' * COLUMN}".join(textwrap.wrap(text, WIDTH - COLUMN))
