"""The LeRobotDataset v3.0 layout as plain data: names, paths, features, and our own key in ``info.json``.

meta/info.json  meta/stats.json  meta/tasks.parquet
meta/episodes/chunk-000/file-000.parquet     one row per episode
meta/final_obs.parquet                       ours: final observation and seed, one row per episode
data/chunk-000/file-000.parquet              one row per frame, one row group per episode
sim_state/chunk-000/file-000.parquet         ours, optional: the simulator's state (lerobot_sim_state.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..core.errors import BurnishError
from ..core.spec import ActionSpec, EnvSpec, Names, ObsSpec, is_image
from .episodes import DONE_ALONE
from .lerobot_images import MODES

VERSION, OLDER = "v3.0", ("v2.0", "v2.1")  # written, and read too
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
TASKS_PATH = "meta/tasks.parquet"
FINAL_OBS_PATH = "meta/final_obs.parquet"
OLD_EPISODES_PATH, OLD_TASKS_PATH = "meta/episodes.jsonl", "meta/tasks.jsonl"
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
# A further column may hold types that LeRobot can average, and parquet gives back bit by bit.
EXTRA_TYPES = ("bool", "int64", "float32")
_PREFIXES = (("image.", "observation.images."), ("goal_image.", "observation.goal_images."))


def complaint(info: Any) -> str:
    """The fault of what ``meta/info.json`` holds, if it has one."""
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if not isinstance(info, dict) or version not in (VERSION, *OLDER):
        return f"has codebase_version {version!r:.40}, but {', '.join((*OLDER, VERSION))} are read"
    missing = [key for key in ("features", "fps", "data_path", "total_episodes", "total_frames") if key not in info]
    if missing:
        return f"has a meta/info.json without {missing}"
    features, rate = info["features"], info["fps"]
    if not isinstance(features, dict) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        return "has a meta/info.json whose features or fps are malformed"
    for name, feature in features.items():
        shape = feature.get("shape") if isinstance(feature, dict) else None
        if not isinstance(shape, list) or not all(isinstance(d, int) for d in shape) or "dtype" not in feature:
            return f"has a meta/info.json whose feature {name!r} lacks dtype or shape"
    return ""


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


def size_of(shape: tuple[int, ...]) -> int:
    """Columns are flat vectors; our specification remembers any other shape."""
    size = 1
    for extent in shape:
        size *= extent
    return size


def picture_shape(feature: Mapping[str, Any]) -> tuple[int, ...] | None:
    """(C, H, W) of a camera, None where it is none. Some sets write the channels first, as their ``names`` say; the
    files of pictures are alike in both."""
    shape, names = tuple(feature["shape"]), feature.get("names")
    first = names[0] if isinstance(names, list) and names else None
    if len(shape) == 3 and first in ("channel", "channels") and shape[0] in MODES:
        return shape
    return (shape[2], *shape[:2]) if len(shape) == 3 and shape[2] in MODES else None


def is_readable(feature: Mapping[str, Any]) -> bool:
    """Neither text nor a map of depths, nor a film that is not in colours."""
    about = [x for name in ("info", "video_info") if isinstance(x := feature.get(name), dict)]
    if feature["dtype"] == "string" or any(x.get("is_depth_map") or x.get("video.is_depth_map") for x in about):
        return False
    return feature["dtype"] != "video" or (picture_shape(feature) or (3,))[0] == 3


def ends_of(last: Mapping[str, bool]) -> tuple[bool, bool, str | None]:
    """(terminated, truncated, note) of an episode by the results in its last frame. ``next.done`` alone is the end of
    the task where that succeeds, and may be a time limit elsewhere."""
    terminated, truncated = (last.get(f"next.{end}", False) for end in ("terminated", "truncated"))
    if "next.terminated" in last or truncated or not last.get("next.done", False):
        return terminated, truncated, None
    if "next.truncated" in last or last.get("next.success", False):
        return True, False, None
    return False, True, DONE_ALONE


def _taken(name: str) -> bool:
    return "/" in name or name.startswith(("observation", "action", "next.")) or name in (*INDEX_FEATURES, "task")


def extra_features(extra: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Of the further columns (``Episode.extra``). Their names must not begin as those that LeRobot's policies take for
    an input or an output: to them ``action_of_somebody`` would be a second action."""
    features = {}
    for name, x in extra.items():
        kind = str(x.dtype).removeprefix("torch.")
        if _taken(name):
            raise BurnishError(f"a further column cannot be called {name!r}: LeRobot has a meaning for that name")
        if kind not in EXTRA_TYPES or x.ndim != 2 or x.shape[1] < 1:
            raise BurnishError(
                f"the further column {name!r} is {kind} of shape {tuple(x.shape)}; (T, n) of {', '.join(EXTRA_TYPES)} "
                "can be written"
            )
        names = [f"{name.rpartition('.')[2]}_{i}" for i in range(x.shape[1])] if x.shape[1] > 1 else None
        features[name] = {"dtype": kind, "shape": [x.shape[1]], "names": names}
    return features


def features_of(spec: EnvSpec, extra: Mapping[str, Tensor], names: Names | None = None) -> dict[str, dict[str, Any]]:
    """The ``features`` entry of ``info.json``, in the order of the columns; numbers without ``names`` are numbered."""
    features: dict[str, dict[str, Any]] = {}
    for key, shape in spec.obs.shapes.items():
        column = column_of(key)
        if is_image(key):
            channels, height, width = shape
            if channels not in MODES:
                raise BurnishError(
                    f"the observation {key!r} has {channels} channels; images are written with 1, 3 or 4"
                )
            axes = ["height", "width", "channels"]
            features[column] = {"dtype": "image", "shape": [height, width, channels], "names": axes}
        else:
            dtype = "int64" if key == "tokens" else "float32"
            features[column] = {"dtype": dtype, **_named(key, size_of(shape), names)}
    features["action"] = {"dtype": "float32", **_named("action", spec.action.dim, names)}
    return {**features, **extra_features(extra), **RESULT_FEATURES, **INDEX_FEATURES}


def _named(key: str, size: int, names: Names | None) -> dict[str, Any]:
    given = list((names or {}).get(key, ())) or _numbered(key, size)
    if len(given) != size:
        raise BurnishError(f"there are {len(given)} names for the {size} numbers of {key!r}: {given!r:.200}")
    return {"shape": [size], "names": given}


def _numbered(key: str, size: int) -> list[str]:
    return [f"{key}_{i}" for i in range(size)]


def read_names(features: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The names that a set gives to the numbers of its observations and actions."""
    names = {key: _names_in(features.get(column), key) for key, column in {**columns, "action": "action"}.items()}
    return {key: tuple(x) for key, x in names.items() if x and not is_image(key)}


def renamed(features: Any, new: Mapping[str, Any]) -> Any:
    """The features of a set whose numbers have no names, with the names that they have in ``new``."""
    if not isinstance(features, dict):
        return features
    bare = [name for name, feature in features.items() if name in new and not _names_in(feature, key_of(name, False))]
    return {**features, **{name: {**features[name], "names": new[name]["names"]} for name in bare}}


def _names_in(feature: Any, key: str) -> list[str]:
    """A list, or a list in a dict, as of ``{"motors": [...]}``. Numbered ones are none, nor are those that do not fit
    the shape."""
    names, shape = (feature.get(x) for x in ("names", "shape")) if isinstance(feature, dict) else (None, None)
    if isinstance(names, dict) and len(names) == 1:
        (names,) = names.values()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    return [] if names == _numbered(key, len(names)) or size_of(tuple(shape or ())) != len(names) else names


def burnish_entry(spec: EnvSpec, meta: Mapping[str, Any], extra: Iterable[str] = ()) -> dict[str, Any]:
    """The keys that LeRobot has no word for; it passes over keys that it does not know."""
    return {
        "columns": {key: column_of(key) for key in spec.obs.shapes},
        "obs": {key: list(shape) for key, shape in spec.obs.shapes.items()},
        "action": {"low": list(spec.action.low), "high": list(spec.action.high)},
        "action_mode": spec.action_mode,
        "control_hz": spec.control_hz,
        "max_steps": spec.max_steps,
        "pixels": spec.pixels,
        "meta": dict(meta),
        # Sets without any are, byte for byte, what they were before there were further columns.
        **({"extra": list(extra)} if extra else {}),
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
        ).checked()
        columns = {key: str(entry["columns"][key]) for key in spec.obs.shapes}
        return spec, columns, dict(entry["meta"])
    except (ArithmeticError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BurnishError(f"the 'burnish' entry of info.json is malformed ({error!r})") from error


def read_extra_entry(info: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Name -> (type, numbers in a row) of the further columns that our entry names."""
    found, names = {}, info["burnish"].get("extra", [])
    for name in names if isinstance(names, list) else [names]:
        feature = info["features"].get(name, {}) if isinstance(name, str) and not _taken(name) else {}
        kind, shape = feature.get("dtype"), feature.get("shape", [])
        if kind not in EXTRA_TYPES or len(shape) != 1 or shape[0] < 1:
            raise BurnishError(f"the 'burnish' entry of info.json names a further column that is none: {name!r:.80}")
        found[name] = (kind, shape[0])
    return found
