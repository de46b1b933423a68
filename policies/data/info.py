"""``burnish data info``: what a dataset is, how much it explores, and how good its episodes are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.spec import is_image
from . import lerobot_files
from .coverage import coverage, quality
from .episodes import NO_REWARD, NO_SUCCESS, Episodes
from .read import format_of

FEW = 6  # of what is listed in a line


def world_name(stored: Mapping[str, Any]) -> str:
    """The name of a stored world, and its id where it is one of many: "gym Hopper-v5"."""
    config = stored.get("config")
    own = config.get("id") if isinstance(config, Mapping) else None
    return f"{stored.get('name')} {own}" if isinstance(own, str) else str(stored.get("name"))


def described(
    path: str,
    episodes: Episodes,
    reference: tuple[str, Episodes] | None = None,
    worst: float | None = None,
    best: float | None = None,
) -> dict[str, Any]:
    """The set at ``path``, as plain JSON data. ``reference`` is a name and a set, for SACo; ``worst`` and ``best`` are
    the ends of TQ."""
    spec, notes = episodes.spec, list(episodes.meta.get("notes", ()))
    lengths = np.array([len(episode) for episode in episodes])
    returns = [float(episode.reward.double().sum()) for episode in episodes]
    env = episodes.meta.get("env")
    seen = coverage(episodes, reference[1] if reference else None)
    found: dict[str, Any] = {
        "path": path,
        "format": format_of(path),
        "version": _version(path),
        "world": world_name(env) if isinstance(env, dict) else None,
        "episodes": len(episodes),
        "frames": episodes.frames,
        "fps": spec.control_hz,
        "lengths": _spread(lengths),
        "observations": {
            key: {"shape": list(shape), "names": list(episodes.names.get(key, ()))}
            for key, shape in spec.obs.shapes.items()
        },
        "cameras": [key for key in spec.obs.shapes if is_image(key)],
        "action": {
            "dim": spec.action.dim,
            "mode": spec.action_mode,
            "names": list(episodes.names.get("action", ())),
            "low": list(spec.action.low),
            "high": list(spec.action.high),
        },
        "further_columns": sorted(episodes[0].extra),
        "ends": {
            "terminated": sum(episode.terminated for episode in episodes),
            "truncated": sum(episode.truncated for episode in episodes),
        },
        "tasks": dict(Counter(episode.task for episode in episodes)),
        "success": None if NO_SUCCESS in notes else float(np.mean([episode.success for episode in episodes])),
        "returns": None if NO_REWARD in notes else _spread(np.array(returns)),
        "notes": notes,
        "saco": {**seen._asdict(), "against": reference[0] if reference else "uniform draws"},
        "tq": None,
    }
    if found["returns"] is not None:
        own = sum(end is None for end in (worst, best))
        against = ("given ends", "a given end and the set's own episodes", "the set's own episodes")[own]
        found["tq"] = {**quality(returns, worst, best)._asdict(), "against": against}
    return found


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The description as lines of text."""
    length, action = found["lengths"], found["action"]
    rate = found["fps"]
    yield f"{found['path']}: {found['format']}{' ' + found['version'] if found['version'] else ''}" + (
        f", of the world {found['world']}" if found["world"] else ""
    )
    yield (
        f"episodes     {found['episodes']}, {found['frames']} frames at {rate:g} Hz, "
        f"{found['frames'] / rate / 60:.3g} minutes"
    )
    yield f"lengths      {_range(length)}"
    for key, about in found["observations"].items():
        size = " x ".join(map(str, about["shape"])) or "1"
        yield f"observation  {key} ({size}){_listed(about['names'])}"
    yield f"action       {action['dim']} numbers, action_mode={action['mode']}{_listed(action['names'])}"
    limits = [f"[{low:.4g}, {high:.4g}]" for low, high in zip(action["low"], action["high"], strict=True)]
    yield f"limits       {', '.join(limits)}"
    if found["further_columns"]:
        yield f"further      {', '.join(found['further_columns'])}"
    for task, count in found["tasks"].items():
        if task:
            yield f"task         {task!r}, {count} episodes"
    ends = found["ends"]
    yield f"ends         {ends['terminated']} terminated, {ends['truncated']} truncated"
    yield f"success      {'unknown' if found['success'] is None else format(found['success'], '.1%')}"
    yield f"returns      {'unknown' if found['returns'] is None else _range(found['returns'])}"
    yield from _measures(found)
    yield from (f"filled in    {note}" for note in found["notes"])


def _measures(found: Mapping[str, Any]) -> Iterator[str]:
    saco, tq = found["saco"], found["tq"]
    yield (
        f"exploration  SACo {saco['saco']:.3f}: {saco['frames']} frames lie in {saco['cells']} cells of "
        f"{saco['grids']} grids over {saco['numbers']} numbers of state and action, {saco['bins']} bins each; those of "
        f"{saco['against']} in {saco['reference']:.0f}"
    )
    if tq is None:
        yield "exploitation TQ unknown, without rewards"
    elif tq["tq"] is None:
        yield "exploitation TQ unknown: all returns are equal; give worst=... and best=..."
    else:
        yield (
            f"exploitation TQ {tq['tq']:.3f}: the mean return {tq['mean']:.4g} between {tq['worst']:.4g} and "
            f"{tq['best']:.4g}, of {tq['against']}"
        )


def _version(path: str) -> str | None:
    """Of a LeRobot set, which alone says one."""
    if not (Path(path) / "meta" / "info.json").is_file():
        return None
    return str(lerobot_files.read_info(Path(path)).get("codebase_version"))


def _spread(x: np.ndarray) -> dict[str, float]:
    found = {"min": x.min(), "median": np.median(x), "mean": x.mean(), "max": x.max()}
    return {name: float(value) for name, value in found.items()}


def _range(x: Mapping[str, float]) -> str:
    return f"{x['min']:.4g} to {x['max']:.4g}, median {x['median']:.4g}, mean {x['mean']:.4g}"


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - FEW} more" if len(names) > FEW else ""
    return f": {', '.join(names[:FEW])}{more}" if names else ""
