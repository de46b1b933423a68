"""``burnish data mirror``: what would have been recorded had everything stood on the other side.

A mirror image doubles the data of a task that has no side of its own: pictures are turned left to right, numbers that
point sideways change their sign, those of two sides change places, and so do the words (GR-RL, 2025, arXiv 2512.01801).
Only who knows the robot can say which numbers these are: of the sideways axis y, for example, y itself, roll and yaw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.errors import BurnishError, did_you_mean
from .episodes import LIMIT_TOLERANCE, NO_LIMITS, Episode, Episodes, action_limits
from .on_disk import PictureFiles, rows_in_file

ACTION = "action"


@dataclass(frozen=True)
class Mirror:
    """The changes that a mirror makes. A number goes by its name, in every column that has the name, or as
    column.place, from 0 on: "shoulder_pan", "action.0"."""

    flip: Sequence[str] = ()  # pictures
    negate: Sequence[str] = ()  # numbers
    swap: Sequence[str] = ()  # pairs of numbers, as left_x:right_x
    words: Sequence[str] = ()  # pairs of words, as left:right


def mirrored(episodes: Episodes, mirror: Mirror) -> Episodes:
    """The mirror image of a set. The simulator's states and further columns, which know nothing of it, are left out."""
    widths = {ACTION: episodes.spec.action.dim}
    widths |= {key: shape[0] for key, shape in episodes.spec.obs.shapes.items() if len(shape) == 1}
    sign, source = ({key: f(width) for key, width in widths.items()} for f in (torch.ones, torch.arange))
    for word in mirror.negate:
        for key, place in _numbers(word, widths, episodes.names):
            sign[key][place] = -1
    for a, b in pairs(mirror.swap, "swap"):
        one, other = (_numbers(word, widths, episodes.names) for word in (a, b))
        if [key for key, _ in one] != [key for key, _ in other]:
            raise BurnishError(f"swap={a}:{b} must be two numbers of the same columns")
        for (key, i), (_, j) in zip(one, other, strict=True):
            source[key][[i, j]] = source[key][[j, i]]
    pictures = [key for key, shape in episodes.spec.obs.shapes.items() if len(shape) == 3]
    for key in mirror.flip:
        if key not in pictures:
            raise BurnishError(f"the set has no picture {key!r} to turn; {did_you_mean(key, pictures)}")
    # Pictures that memory cannot hold are turned into another file.
    large = [key for key in {*mirror.flip} if rows_in_file([x.obs[key] for x in episodes]) is not None]
    rows = sum(len(episode) + 1 for episode in episodes)
    files = PictureFiles({key: episodes.spec.obs.shapes[key] for key in large}, rows) if large else None
    low, high = (torch.tensor(x) for x in (episodes.spec.action.low, episodes.spec.action.high))
    fitted = NO_LIMITS in episodes.meta.get("notes", ())  # its limits are no more than the range of these actions
    words = {x: y for a, b in pairs(mirror.words, "words") for x, y in ((a, b), (b, a))}

    def image(key: str, x: Tensor) -> Tensor:
        if key in mirror.flip:
            return files.lay(key, x.flip(-1)) if files and key in large else x.flip(-1)
        return x[:, source[key]] * sign[key].to(x.dtype) if key in sign else x

    def turned(number: int, episode: Episode) -> Episode:
        action = image(ACTION, episode.action)
        if words and not episode.task:
            raise BurnishError(f"words= changes instructions, but episode {number} has none")
        over = torch.maximum(low - action, action - high).amax(0) > LIMIT_TOLERANCE * (high - low)
        if bool(over.any()) and not fitted:
            raise BurnishError(
                f"the mirror image of episode {number} would leave the limits of the actions in number "
                f"{int(over.nonzero()[0, 0])}: their range is not the same on both sides"
            )
        obs = {key: image(key, x) for key, x in episode.obs.items()}
        task = re.sub(r"\w+", lambda found: words.get(found[0], found[0]), episode.task)
        return replace(episode, obs=obs, action=action, task=task, sim_state=None, extra={})

    images = [turned(number, episode) for number, episode in enumerate(episodes)]
    spec = replace(episodes.spec, action=action_limits(images)) if fitted else episodes.spec
    return replace(episodes, episodes=images, spec=spec)


def pairs(words: Sequence[str], what: str) -> list[tuple[str, str]]:
    """Words of the setting ``what``, each "one:other"."""
    found = [tuple(word.split(":")) for word in words]
    if bad := [word for word, pair in zip(words, found, strict=True) if len(pair) != 2 or not all(pair)]:
        raise BurnishError(f"{what}={bad[0]} is no pair; write it as left:right")
    return [(a, b) for a, b in found]


def _numbers(word: str, widths: Mapping[str, int], names: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """Where a number stands, as (column, place)."""
    key, dot, place = word.rpartition(".")
    if dot and key in widths and place.isdecimal() and int(place) < widths[key]:
        return [(key, int(place))]
    if found := [(key, list(names[key]).index(word)) for key in widths if word in names.get(key, ())]:
        return found
    known = sorted({name for key in widths for name in names.get(key, ())})
    raise BurnishError(f"the set has no number {word!r}; {did_you_mean(word, [*known, *(f'{k}.0' for k in widths)])}")
