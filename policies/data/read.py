"""Reads a dataset of any format that is known here into ``Episodes``: what every verb calls."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import BurnishError
from .episodes import Episodes
from .lerobot import fingerprint, read_lerobot

__all__ = ["fingerprint", "format_of", "read_dataset"]


def format_of(path: str | Path) -> str:
    """The name of the format that the dataset at ``path`` has, by its content."""
    if not Path(path).is_dir():
        raise BurnishError(f"there is no dataset at {path}; `burnish collect` makes one")
    return "lerobot"


def read_dataset(path: str | Path) -> Episodes:
    """The episodes of a dataset, in memory. ``meta["notes"]`` says what its format lacks, and how it was filled in."""
    format_of(path)
    return read_lerobot(path)
