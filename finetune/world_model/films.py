"""Films of a real episode, left, and of what is imagined from its start, right: of worlds that can draw any state that
they show (`wrapper.pictures_of`). Other worlds have curves alone (`record.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...policies.core.errors import BurnishError
from ...policies.core.spec import VISION
from ...policies.core.types import Obs, VecEnv
from ...policies.core.wrapper import pictures_of
from ...policies.measure.video import Mp4Writer

FRAMES = 250  # of a film, at most: drawn in software, each takes some ten milliseconds
GAP = 4  # pixels between the two


class Course(NamedTuple):
    """The first ``FRAMES`` observations of an episode, and of the imagined one from its start."""

    real: Obs
    imagined: Obs


def film_name(number: int) -> str:
    """The file of one pair, in the folder of the run; ``number`` begins at 0."""
    return f"imagined_{number + 1}.mp4"


def shoot(folder: Path, courses: Sequence[Course], env: VecEnv) -> str:
    """A film of each, where the world can be drawn; the shorter of the two stays at its end until the other ends. Words
    for the end of a sentence about the run."""
    draw = pictures_of(env)
    if draw is None or not courses or any(key.startswith(VISION) for key in env.spec.obs.shapes):
        return ""
    try:
        pairs = [[draw(obs).cpu() for obs in course] for course in courses]
    except BurnishError as error:  # no renderer; the run is none the worse
        return f" without films ({error})"
    for number, pair in enumerate(pairs):
        writer = Mp4Writer(folder / film_name(number), env.spec.control_hz)
        gap = torch.full_like(pair[0][0, :, :GAP], 255)
        for tick in range(max(map(len, pair))):
            real, imagined = (frames[min(tick, len(frames) - 1)] for frames in pair)
            writer.add(torch.cat([real, gap, imagined], 1).numpy())
        writer.save()
    return " and films"
