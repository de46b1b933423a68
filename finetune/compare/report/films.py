"""Films of the same seeds, side by side, inside the page: as data, while there is room for it."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .read import inside
from .words import plural

NAME = re.compile(r"seed_(\d+)(?:_(success|failure))?\.mp4")
MIB = 2**20


class Film(NamedTuple):
    """One video of an episode, embedded as a data URI."""

    label: str  # whose episode it is
    outcome: str  # "success", "failure", or empty where the world knows neither
    uri: str


class Strip(NamedTuple):
    """One seed, played by the base first and then by the others."""

    seed: str
    films: list[Film]


class Films(NamedTuple):
    """The rows of videos of a page, and a sentence on those that are missing."""

    strips: list[Strip]
    sentence: str  # what is missing and why; empty where nothing is


def films(folder: Path, labels: Sequence[str], room: int) -> Films:
    """Those in ``folder``, one folder below it per label; ``labels`` begin with the base and then the most interesting.

    ``room`` is in bytes of the page. A seed is shown if the base and the first of the others that was filmed fit; with
    what is left come the others, label by label, so that a narrow room costs those who matter least.
    """
    found = {label: _of(inside(folder, label)) for label in labels}
    others = [label for label in labels[1:] if found[label]]
    if not found[labels[0]] or not others:
        return Films([], "No films were made, of the base and of a refined policy on the same seeds.")
    paired = [seed for seed in found[labels[0]] if seed in found[others[0]]]
    chosen: dict[str, list[str]] = {}
    for seed in paired:
        size = sum(_size(found[label][seed]) for label in (labels[0], others[0]))
        if size <= room:
            chosen[seed], room = [labels[0], others[0]], room - size
    for label in others[1:]:
        for seed in chosen:
            size = _size(found[label][seed]) if seed in found[label] else room + 1
            if size <= room:
                chosen[seed].append(label)
                room -= size
    strips = [Strip(seed, [_film(label, found[label][seed]) for label in shown]) for seed, shown in chosen.items()]
    wanted = sum(seed in found[label] for seed in paired for label in (labels[0], *others))
    left_out = wanted - sum(len(strip.films) for strip in strips)
    sentence = ""
    if left_out:
        sentence = (
            f"{plural(left_out, 'film')} of {wanted} would make this page too large; raise videos_mib to embed more."
        )
    elif not paired:
        sentence = "The films that were made share no seed, so there is nothing to put side by side."
    return Films(strips, sentence)


def _of(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    named = {path: NAME.fullmatch(path.name) for path in sorted(folder.iterdir())}
    # A link could lead to any file of this machine, which would then travel with the page.
    return {match[1]: path for path, match in named.items() if match and path.is_file() and not path.is_symlink()}


def _size(path: Path) -> int:
    """Of what base64 makes of it."""
    return -(-path.stat().st_size // 3) * 4


def _film(label: str, path: Path) -> Film:
    match = NAME.fullmatch(path.name)
    assert match, "was matched before"
    return Film(label, match[2] or "", _uri(path))


def embedded(path: Path, room: int) -> str:
    """A film as a data URI; empty where there is none, or no room for it in so many bytes of the page."""
    return _uri(path) if path.is_file() and not path.is_symlink() and _size(path) <= room else ""


def _uri(path: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
