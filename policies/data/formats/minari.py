"""Minari: a folder with ``metadata.json`` and ``main_data.hdf5``, which lie in ``data/`` where Minari downloads them.

    episode_<i>   observations (T + 1, ...), actions (T, A), rewards, terminations, truncations (T,), infos/...

Observations in dicts are groups, those in tuples groups with members ``_index_<k>``; Minari packs pictures as JPEG. The
spaces in ``metadata.json`` say the limits of the actions and the shapes of pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...core.spec import MOST_AXES, ActionSpec, ObsSpec, require_obs
from ...runs.manifest import parse
from .. import lerobot_images as images
from ..episodes import Bad, Episodes, Mine
from . import hdf5
from .bounds import naming, refusal
from .recording import Recording, Source, actions_of, ended, episodes_of, json_object, picked, whole

METADATA, DATA = "metadata.json", "main_data.hdf5"
INDEX = "_index_"


def place_of(path: Path) -> Path | None:
    """The folder with the two files, ``path`` or its ``data``; None where it is no set of Minari's."""
    return next((folder for folder in (path, path / "data") if (folder / METADATA).is_file()), None)


def read(path: Path, bad: Bad | None = None, mine: Mine | None = None, file: Path | None = None) -> Episodes:
    """The episodes of a folder, or those that are ``mine``, in the order of their numbers; those of ``file`` in it,
    where that is named."""
    folder = place_of(path) or path
    about = parse(folder / METADATA, json.loads)
    if not isinstance(about, dict) or about.get("data_format", "hdf5") != "hdf5":
        raise refusal(path, "is no set of Minari's in HDF5; write it again with data_format='hdf5'")
    world = json_object(about.get("env_spec"))
    source = Source("minari", _limits(path, json_object(about.get("action_space"))))
    source.max_steps = whole(world.get("max_episode_steps"))
    source.meta |= {"env_name": world["id"]} if isinstance(world.get("id"), str) else {}
    source.meta |= {"dataset_id": about["dataset_id"]} if isinstance(about.get("dataset_id"), str) else {}
    pictures = dict(_pictures(json_object(about.get("observation_space")), ()))
    with naming(path):
        require_obs(ObsSpec({".".join(key): shape for key, shape in pictures.items()}), 1)
    with hdf5.opened(file or folder / DATA) as root:
        return episodes_of(path, source, _recordings(root, pictures, mine), bad)


def _limits(path: Path, space: dict[str, Any]) -> ActionSpec | None:
    if space.get("type", "Box") != "Box":
        raise refusal(path, f"has actions of kind {space['type']!r:.40}, but policies here act in real numbers")
    try:
        low, high = (np.ravel(np.asarray(space[name], np.float64)) for name in ("low", "high"))
        return ActionSpec(tuple(low), tuple(high)) if (np.abs([*low, *high]) < 1e30).all() else None
    except (KeyError, TypeError, ValueError):
        return None


def _pictures(space: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Names and shapes of the spaces of pictures, which Minari may have packed."""
    inner = space.get("subspaces") if isinstance(space, dict) else None
    if isinstance(inner, list):
        inner = {f"{INDEX}{i}": part for i, part in enumerate(inner)}
    if isinstance(inner, dict) and len(path) < MOST_AXES:
        for name, part in inner.items():
            yield from _pictures(part, (*path, name))
    elif isinstance(space, dict) and space.get("dtype") == "uint8" and isinstance(space.get("shape"), list):
        shape = tuple(space["shape"])
        if len(shape) in (2, 3) and all(type(x) is int and x > 0 for x in shape):
            yield path, shape


def _recordings(
    root: hdf5.Group, pictures: dict[tuple[str, ...], tuple[int, ...]], mine: Mine | None
) -> Iterator[Recording]:
    for place, number, name in picked(root.numbered("episode_"), mine):
        episode = root.group(name)
        obs = {}
        for key, leaf in episode.leaves("observations").items():
            shape = pictures.get(key, leaf.shape[1:])
            found = leaf.read() if leaf.shape[1:] == shape else _unpacked(root.path, leaf, shape)
            obs[tuple(x.removeprefix(INDEX) for x in key)] = found
        infos = episode.group("infos") if "infos" in episode else None
        said = next((key for key in ("success", "is_success") if infos is not None and key in infos), None)
        yield Recording(
            obs,
            actions_of(root.path, episode.array("actions")),
            episode.array("rewards").read(),
            *(ended(episode.array(end)) for end in ("terminations", "truncations")),
            success=_success(infos.array(said).read()) if infos is not None and said else None,
            seed=number if (seed := episode.number("seed")) is None else seed,
            place=place,
        )


def _success(said: np.ndarray) -> bool | None:
    """Whether any step says so. Where a step had no such entry, Minari writes NaN, which says nothing."""
    known = said[~np.isnan(said)]
    return bool(known.any()) if len(known) else None


def _unpacked(path: Path, leaf: hdf5.Array, shape: tuple[int, ...]) -> np.ndarray:
    """(T, C, H, W) from one JPEG in each row."""
    height, width, channels = (*shape, 1)[:3]
    if channels not in images.MODES:
        raise refusal(path, f"has pictures {leaf.name!r} of {channels} colours; 1, 3 or 4 are read")
    rows = leaf.packed(height * width * channels)
    with naming(path / leaf.name.lstrip("/")):
        return images.decode(rows, (channels, height, width))
