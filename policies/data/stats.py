"""``burnish data stats``: each number of the observations and actions of a set, and what is suspicious about them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.spec import is_image
from . import lerobot_statistics as statistics
from .coverage import numbers, rows_of
from .episodes import LIMIT_TOLERANCE, Episode, Episodes

SHOWN = ("min", "q01", "mean", "q99", "max", "std")
# A step is a jump where it is so many times the 99th percentile of the steps of its number, and this share of its
# range: slower things are motion, and smaller ones noise.
TIMES, SHARE = 10, 0.1
REPEATED = 0.01  # of the frames of a camera: fewer equal neighbours are a robot that stands still for a moment


def named(episodes: Episodes, key: str, size: int) -> list[str]:
    """A name for each number of an observation, or of "action"."""
    return list(episodes.names.get(key) or (f"{key}_{i}" for i in range(size)))


def columns(episodes: Episodes) -> dict[str, np.ndarray]:
    """(F, n) of each observation that holds numbers, before each action, and of "action"."""
    keys = [key for key in episodes.spec.obs.shapes if not is_image(key)]
    found = {key: np.concatenate([numbers(episode, [key]) for episode in episodes]) for key in keys}
    found["action"] = np.concatenate([episode.action.numpy() for episode in episodes])
    return {key: x for key, x in found.items() if x.shape[1]}


def statistics_of(episodes: Episodes) -> dict[str, Any]:
    """The statistics of each number, by feature, and the suspicions."""
    found = {}
    for key, x in columns(episodes).items():
        values = statistics.of_vectors(x)
        found[key] = {"names": named(episodes, key, x.shape[1]), **{name: values[name].tolist() for name in SHOWN}}
    return {"features": found, "suspicions": list(suspicions(episodes))}


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines: one for each number, then the suspicions."""
    rows: list[tuple[str, ...]] = [("feature", "", *SHOWN)]
    for key, values in found["features"].items():
        for i, name in enumerate(values["names"]):
            rows.append((key, name, *(f"{values[stat][i]:.4g}" for stat in SHOWN)))
    widths = [min(40, max(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(
            f"{word:<{width}}" if i < 2 else f"{word:>{width}}"
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        )
    yield from (f"suspicious: {line}" for line in found["suspicions"])


def suspicions(episodes: Episodes) -> Iterator[str]:
    """Sentences on constant numbers, actions beyond their limits, grippers that know two states, repeated frames and
    episodes, and jumps."""
    for key, x in columns(episodes).items():
        names = named(episodes, key, x.shape[1])
        moves = x.min(0) < x.max(0)
        if not moves.all():
            yield f"{key}: {_count(~moves, names)} never change{'s' if (~moves).sum() == 1 else ''}"
        if key == "action":
            yield from _of_actions(x, names, episodes)
        yield from _jumps(key, names, episodes)
    yield from _repeated_frames(episodes)
    twice = repeated(episodes)
    if twice:
        yield f"{twice} of {len(episodes)} episodes repeat another one"


def _of_actions(x: np.ndarray, names: Sequence[str], episodes: Episodes) -> Iterator[str]:
    low, high = (np.array(limit) for limit in (episodes.spec.action.low, episodes.spec.action.high))
    outside = np.abs(x - (low + high) / 2) > (1 + LIMIT_TOLERANCE) * (high - low) / 2
    if outside.any():
        yield (
            f"action: {outside.any(1).sum()} of {len(x)} frames are outside of the limits, in "
            f"{_count(np.any(outside, axis=0), names)}"
        )
    low, high = np.quantile(x, (0.01, 0.99), axis=0)
    far = np.maximum(low - x.min(0), x.max(0) - high) > TIMES * (high - low)
    for i in np.flatnonzero(far & (high > low)).tolist():
        yield (
            f"action: {names[i]} reaches from {x[:, i].min():.4g} to {x[:, i].max():.4g}, where 98% of its values lie "
            f"between {low[i]:.4g} and {high[i]:.4g}; limits that are those of the data are as wide"
        )
    for i, name in enumerate(names):
        values = np.unique(x[:, i])
        if len(values) == 2:
            yield f"action: {name} takes the values {values[0]:g} and {values[1]:g} alone, as of a gripper's command"


def _jumps(key: str, names: Sequence[str], episodes: Episodes) -> Iterator[str]:
    if key == "action":
        return  # it may be noise
    parts = [numbers(episode, [key]) for episode in episodes]
    x, steps = np.concatenate(parts), [np.abs(np.diff(part, axis=0)) for part in parts]
    every = np.concatenate(steps)
    if not len(every):
        return
    usual, width = np.quantile(every, 0.99, axis=0), x.max(0) - x.min(0)
    limit = np.maximum(TIMES * usual, SHARE * width)
    limit[usual == 0] = np.inf  # it changes so seldom that a change is no jump
    found = every > limit
    for i in np.flatnonzero(np.any(found, axis=0)).tolist():
        number = max(range(len(steps)), key=lambda n: steps[n][:, i].max(initial=0))
        frame, size = int(steps[number][:, i].argmax()) + 1, float(steps[number][:, i].max())
        turn = (
            ", about a full turn: an angle that wraps?" if abs(size - 2 * np.pi) < 0.3 or abs(size - 360) < 18 else ""
        )
        yield (
            f"{key}: {names[i]} jumps {found[:, i].sum()} times, by {size:.4g} before frame {frame} of episode "
            f"{number}, where 99% of its steps are below {usual[i]:.2g}{turn}"
        )


def _repeated_frames(episodes: Episodes) -> Iterator[str]:
    keys, frames, whole = list(episodes.spec.obs.shapes), 0, 0
    counted: Counter[str] = Counter()
    for episode in episodes:
        # The final observation may be a repetition that a reader has filled in.
        same = {key: rows_of(x[1:-1] == x[:-2]).all(1) for key, x in episode.obs.items()}
        frames += len(episode) - 1
        counted.update({key: int(x.sum()) for key, x in same.items() if is_image(key)})
        whole += sum(map(all, zip(*(same[key].tolist() for key in keys), strict=True)))
    if whole > REPEATED * frames:
        yield f"{whole} of {frames} frames repeat the one before in every observation"
    for key, count in counted.items():
        # Goals are meant to stay.
        if key.startswith("image.") and count > max(whole, REPEATED * frames):
            yield f"{key}: {count} of {frames} pictures repeat the one before; a camera that is slow, or stands still"


def repeated(episodes: Sequence[Episode] | Episodes) -> int:
    """The episodes whose actions and numbers are, bit for bit, those of an earlier one."""
    seen = Counter(
        hashlib.sha256(episode.action.numpy().tobytes() + numbers(episode, sorted(episode.obs)).tobytes()).digest()
        for episode in episodes
    )
    return sum(seen.values()) - len(seen)


def _count(chosen: np.ndarray, names: Sequence[str]) -> str:
    """The chosen names, the first few of them."""
    found = [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
    more = f" and {len(found) - 6} more" if len(found) > 6 else ""
    return ", ".join(found[:6]) + more
