"""The LeRobotDataset v3.0 layout as plain data: names, paths, features, and our own key in ``info.json``.

meta/info.json  meta/stats.json  meta/tasks.parquet
meta/episodes/chunk-000/file-000.parquet     one row per episode
meta/final_obs.parquet                       ours: final observation and seed, one row per episode
data/chunk-000/file-000.parquet              one row per frame, one row group per episode
sim_state/chunk-000/file-000.parquet         ours, optional: the simulator's state (lerobot_sim_state.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import BurnishError
from ..core.spec import ActionSpec, EnvSpec, ObsSpec
from .lerobot_images import MODES

VERSION = "v3.0"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
TASKS_PATH = "meta/tasks.parquet"
FINAL_OBS_PATH = "meta/final_obs.parquet"
CHUNKS_SIZE = 1000  # files per chunk folder

# Every frame carries these; the reader's observations never come from them.
INDEX_FEATURES = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}
# ``next.done`` is LeRobot's word for terminated or truncated; it exists only as this column.
RESULT_FEATURES = {
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    "next.terminated": {"dtype": "bool", "shape": [1], "names": None},
    "next.truncated": {"dtype": "bool", "shape": [1], "names": None},
    "next.success": {"dtype": "bool", "shape": [1], "names": None},
}
_PREFIXES = (("image.", "observation.images."), ("goal_image.", "observation.goal_images."))


def column_of(key: str) -> str:
    """Observation key -> column name."""
    if "/" in key:
        raise BurnishError(f"the observation {key!r} cannot be written: LeRobot allows no '/' in a name")
    for ours, theirs in _PREFIXES:
        if key.startswith(ours):
            return theirs + key[len(ours) :]
    return f"observation.{key}"


def key_of(column: str, image: bool) -> str:
    """Column name -> observation key. LeRobot also knows the single camera ``observation.image``, without a name."""
    for ours, theirs in _PREFIXES:
        if column.startswith(theirs):
            return ours + column[len(theirs) :]
    key = column.removeprefix("observation.")
    return f"image.{'main' if key == 'image' else key}" if image else key


def is_image(key: str) -> bool:
    return key.startswith(("image.", "goal_image."))


def size_of(shape: tuple[int, ...]) -> int:
    """Columns are flat vectors; our specification remembers any other shape."""
    size = 1
    for extent in shape:
        size *= extent
    return size


def features_of(spec: EnvSpec) -> dict[str, dict[str, Any]]:
    """The ``features`` entry of ``info.json``, in the order of the columns."""
    features: dict[str, dict[str, Any]] = {}
    for key, shape in spec.obs.shapes.items():
        column = column_of(key)
        if is_image(key):
            channels, height, width = shape
            if channels not in MODES:
                raise BurnishError(
                    f"the observation {key!r} has {channels} channels; images are written with 1, 3 or 4"
                )
            names = ["height", "width", "channels"]
            features[column] = {"dtype": "image", "shape": [height, width, channels], "names": names}
        else:
            size = size_of(shape)
            dtype = "int64" if key == "tokens" else "float32"
            features[column] = {"dtype": dtype, "shape": [size], "names": [f"{key}_{i}" for i in range(size)]}
    names = [f"action_{i}" for i in range(spec.action.dim)]
    features["action"] = {"dtype": "float32", "shape": [spec.action.dim], "names": names}
    return {**features, **RESULT_FEATURES, **INDEX_FEATURES}


def burnish_entry(spec: EnvSpec, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What LeRobot has no word for; it passes over keys that it does not know."""
    return {
        "columns": {key: column_of(key) for key in spec.obs.shapes},
        "obs": {key: list(shape) for key, shape in spec.obs.shapes.items()},
        "action": {"low": list(spec.action.low), "high": list(spec.action.high)},
        "action_mode": spec.action_mode,
        "control_hz": spec.control_hz,
        "max_steps": spec.max_steps,
        "pixels": spec.pixels,
        "meta": dict(meta),
    }


def read_burnish_entry(entry: Any) -> tuple[EnvSpec, dict[str, str], dict[str, Any]]:
    """(specification, observation key -> column, meta)."""
    try:
        spec = EnvSpec(
            obs=ObsSpec(entry["obs"]),
            action=ActionSpec(**entry["action"]),
            control_hz=float(entry["control_hz"]),
            action_mode=str(entry["action_mode"]),
            max_steps=int(entry["max_steps"]),
            pixels=entry.get("pixels"),
        )
        columns = {key: str(entry["columns"][key]) for key in spec.obs.shapes}
        return spec, columns, dict(entry["meta"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BurnishError(f"the 'burnish' entry of info.json is malformed ({error!r})") from error
