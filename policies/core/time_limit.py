"""A time limit for a first act: an untrusted checkpoint chooses the steps of its generation and the draws among them.

Sizes are bounded where they are read, so a single step ends; who plays a policy asks for `first_act` around the first
decision, and whatever generates in steps calls `go_on` before each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .errors import BurnishError

FIRST_ACT_S = 300.0
_until: ContextVar[float | None] = ContextVar("until", default=None)


@contextmanager
def first_act() -> Iterator[None]:
    """A block of code within which ``go_on`` holds a policy's generation to ``FIRST_ACT_S`` seconds."""
    before = _until.set(time.monotonic() + FIRST_ACT_S)
    try:
        yield
    finally:
        _until.reset(before)


def go_on() -> None:
    """A check, called between steps of a generation, that the limit of ``first_act`` has not passed."""
    until = _until.get()
    if until is not None and time.monotonic() > until:
        raise BurnishError(
            f"the policy did not choose its first action within {FIRST_ACT_S:g} s; let it act in fewer steps "
            "(policy.steps=...) or in fewer worlds at once"
        )
