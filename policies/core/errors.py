"""The one exception that a user may see: a sentence that says what, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BurnishError(ValueError):
    """Bad input. The command line prints it as one sentence and exits with status 2."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A tail for an error sentence: the nearest choice, or all of them."""
    known = sorted(choices)
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return "choices: " + ", ".join(known) if known else "there are no choices"
