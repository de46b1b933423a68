"""``burnish data show``: one episode as lines of text, as a film of its cameras, or as a drawing of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from ..core.errors import BurnishError, plain
from ..core.files import named, replace
from ..core.spec import is_image
from ..measure.video import Mp4Writer
from .coverage import numbers
from .episodes import NO_REWARD, NO_SUCCESS, Episode, Episodes
from .stats import named as names_of

BARS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, MARGIN = 640, 60, 170  # pixels of a curve in a drawing, and of the text to its left


def curves(episodes: Episodes, episode: Episode) -> Iterator[tuple[str, str, np.ndarray]]:
    """(feature, name, (T,)) of each number that was observed or commanded, and the rewards."""
    for key in episodes.spec.obs.shapes:
        x = numbers(episode, [key])
        if not is_image(key):
            yield from ((key, name, x[:, i]) for i, name in enumerate(names_of(episodes, key, x.shape[1])))
    names = names_of(episodes, "action", episode.action.shape[1])
    yield from (("action", name, episode.action.numpy()[:, i]) for i, name in enumerate(names))
    yield "reward", "", episode.reward.numpy()


def sparkline(x: np.ndarray, width: int = 60) -> str:
    """The course of (T,) numbers in at most ``width`` characters, each the mean of a stretch."""
    parts = np.array([part.mean() for part in np.array_split(x, min(width, len(x)))])
    low, high = parts.min(), parts.max()
    if high <= low:
        return BARS[0] * len(parts)
    return "".join(BARS[int(share * (len(BARS) - 1) + 0.5)] for share in (parts - low) / (high - low))


def lines(episodes: Episodes, number: int) -> Iterator[str]:
    """The episode in lines of text."""
    episode = episodes[number]
    notes = episodes.meta.get("notes", ())
    success = "success unknown" if NO_SUCCESS in notes else f"{'' if episode.success else 'no '}success"
    value = "unknown" if NO_REWARD in notes else f"{float(episode.reward.sum()):.4g}"
    end = {(True, False): "terminated", (False, True): "truncated"}.get((episode.terminated, episode.truncated), "cut")
    yield (
        f"episode {number}: {len(episode)} frames at {episodes.spec.control_hz:g} Hz, {end}, "
        f"{success}, return {value}, seed {episode.seed}" + (f", task {episode.task!r}" if episode.task else "")
    )
    rows = list(curves(episodes, episode))
    width = max(len(f"{key} {name}") for key, name, _ in rows)
    for key, name, x in rows:
        yield f"{f'{key} {name}':<{width}}  {x.min():>9.3g} {x.max():>9.3g}  {sparkline(x)}"


def film(episodes: Episodes, number: int, out: Path) -> Path:
    """All cameras side by side, as mp4."""
    episode = episodes[number]
    cameras = [x.numpy() for key, x in episode.obs.items() if key.startswith("image.")]
    if not cameras:
        raise BurnishError(
            f"the episodes have no pictures, so there is no film of them; draw their numbers: {out.stem}.svg"
        )
    height = max(x.shape[2] for x in cameras)
    named(out.parent)
    writer = Mp4Writer(out, episodes.spec.control_hz)
    try:
        for row in range(len(episode) + 1):
            writer.add(np.concatenate([_shown(x[row], height) for x in cameras], axis=1))
        return writer.save()
    except BaseException:
        writer.discard()
        raise


def _shown(frame: np.ndarray, height: int) -> np.ndarray:
    """(C, H, W) of 1, 3 or 4 channels -> (height, W, 3)."""
    colours = frame.repeat(3, axis=0) if len(frame) == 1 else frame[:3]
    return np.pad(colours.transpose(1, 2, 0), ((0, height - frame.shape[1]), (0, 0), (0, 0)))


def drawing(episodes: Episodes, number: int) -> str:
    """An SVG: a curve for each number, one above the other, over the time of the episode."""
    rows = list(curves(episodes, episodes[number]))
    body = [_curve(i, f"{key} {name}", x) for i, (key, name, x) in enumerate(rows)]
    size = f'width="{MARGIN + WIDTH}" height="{HEIGHT * len(rows)}"'
    style = 'font-family="sans-serif" font-size="11" style="background:white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(body) + "\n</svg>\n"


def _curve(row: int, label: str, x: np.ndarray) -> str:
    low, high = float(x.min()), float(x.max())
    top, room = row * HEIGHT + 4, HEIGHT - 8
    across = np.linspace(MARGIN, MARGIN + WIDTH - 1, len(x))
    down = top + room * (1 - (x - low) / (high - low if high > low else 1.0))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True))
    texts: Sequence[tuple[float, str]] = ((0.5, plain(label, 26)), (0.95, f"{low:.3g} to {high:.3g}"))
    said = "".join(f'<text x="4" y="{top + room * at:.0f}">{escape(text)}</text>' for at, text in texts)
    return f'{said}<polyline fill="none" stroke="#2060a0" points="{points}"/>'


def write(episodes: Episodes, number: int, out: str) -> Path:
    """The film or the drawing of an episode, by the ending of its file."""
    path = Path(out)
    if path.suffix == ".mp4":
        return film(episodes, number, path)
    if path.suffix != ".svg":
        raise BurnishError(f"out={out} is no film and no drawing; end it with .mp4 or .svg")
    named(path.parent)
    replace(path, drawing(episodes, number))
    return path
