"""The modules that the user names by BURNISH_IMPORT: their code may run on a file's word."""

from __future__ import annotations

import os

VARIABLE = "BURNISH_IMPORT"


def named_modules() -> list[str]:
    """The modules of the variable, separated by commas."""
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
