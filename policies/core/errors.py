"""The one exception that a user may see: a sentence that says what, why, and what to do.

Such a sentence may quote a server, a checkpoint, a dataset or a file name, all of which others can write. A terminal
obeys control characters, so they are written out (`plain`), and no text is endless.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST, LINES = 4000, 200  # characters of a line that is shown, and lines of a text


def plain(text: object, most: int = LONGEST) -> str:
    """One line of what others wrote: control characters (also ends of lines, and those that turn the direction of
    writing) as ``\\x1b``, and no more than ``most`` characters."""
    line = "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in str(text)[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."


def plain_text(text: object) -> str:
    """The same for what has lines of its own."""
    return "\n".join(plain(line) for line in str(text).split("\n", LINES)[:LINES])


class BurnishError(ValueError):
    """Bad input. The command line prints it as one sentence and exits with status 2."""

    def __str__(self) -> str:
        return plain_text(super().__str__())


class WorldError(BurnishError):
    """A world failed in mid-work, or its process died; a run says how it goes on."""


def reason(error: BaseException, most: int = LONGEST, *, named: bool = False) -> str:
    """The text of an error of other code, for a sentence of ours: its first line without the full stop. ``named`` puts
    the name of its kind in front; an error without a text has nothing but that name."""
    first, *_ = str(error).strip().splitlines() or [""]
    kind, text = type(error).__name__, first.strip().rstrip(".")
    if not text:
        return kind
    return plain(f"{kind}: {text}" if named else text, most)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A tail for an error sentence: the nearest choice, or all of them."""
    known = sorted(choices)
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return "choices: " + ", ".join(known) if known else "there are no choices"
