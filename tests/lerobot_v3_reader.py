"""A strict reader of LeRobotDataset v3.0, written after the specification alone: it imports nothing of ours.

``read(root)`` returns every frame, or raises ``Violation`` for the first thing that the specification does not allow.
What stands in the folder beyond the specification is passed over, as LeRobot does.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

STATS = {"min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"}
ASCENDING = ("min", "q01", "q10", "q50", "q90", "q99", "max")
INDICES = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}
INDICES["task_index"] = "int64"
COUNTS = ("total_episodes", "total_frames", "total_tasks", "chunks_size", "data_files_size_in_mb")
EPISODE_COLUMNS = ("episode_index", "tasks", "length", "data/chunk_index", "data/file_index", "dataset_from_index")
EPISODE_COLUMNS += ("dataset_to_index", "meta/episodes/chunk_index", "meta/episodes/file_index")
NUMBERED = re.compile(r"chunk-(\d{3})/file-(\d{3})\.parquet")
Row = dict[str, Any]


class Violation(Exception):
    """The first thing that is not as the specification says."""


def need(condition: Any, what: str) -> None:
    if not condition:
        raise Violation(what)


def read(root: Path) -> list[Row]:
    try:
        info = read_info(root)
        tasks = read_tasks(root, info)
        frames, places = read_data(root, info)
        check_rows(frames, info, tasks)
        check_episodes(root, info, tasks, frames, places)
        check_stats(json.loads((root / "meta/stats.json").read_text()), info["features"], frames, info["total_frames"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as error:
        raise Violation(f"cannot be read: {type(error).__name__} {error}") from error
    return [{**frame, "task": tasks[frame["task_index"]]} for frame in frames]


def read_info(root: Path) -> Row:
    info = json.loads((root / "meta/info.json").read_text())
    need(info["codebase_version"] == "v3.0", "codebase_version")
    need(info["robot_type"] is None or isinstance(info["robot_type"], str), "robot_type")
    for key in (*COUNTS, "video_files_size_in_mb", "fps"):
        need(type(info[key]) is int and info[key] > 0, f"info {key}")
    need(info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "data_path")
    need(info["splits"] == {"train": f"0:{info['total_episodes']}"}, "splits")
    features = info["features"]
    need("action" in features and any(name.startswith("observation.") for name in features), "action and observation")
    for name, kind in INDICES.items():
        need(features[name] == {"dtype": kind, "shape": [1], "names": None}, f"feature {name}")
    for name, feature in features.items():
        shape, names = feature["shape"], feature["names"]
        need("/" not in name, f"name of {name}")
        need(isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape), f"shape of {name}")
        need(feature["dtype"] != "video" and info["video_path"] is None, "no video was announced")
        if feature["dtype"] == "image":
            need(len(shape) == 3 and names == ["height", "width", "channels"], f"image {name}")
        else:
            np.dtype(feature["dtype"])
            need(names is None or len(names) == int(np.prod(shape)), f"names of {name}")
    return info


def read_tasks(root: Path, info: Row) -> list[str]:
    table = pq.read_table(root / "meta/tasks.parquet")
    pandas = json.loads(table.schema.metadata[b"pandas"])
    (index,) = pandas["index_columns"]
    need(sorted(table.column_names) == sorted(["task_index", index]), "columns of tasks")
    need({column["field_name"] for column in pandas["columns"]} == set(table.column_names), "pandas columns of tasks")
    need(table["task_index"].to_pylist() == list(range(len(table))), "order of tasks")
    names = table[index].to_pylist()
    need(all(isinstance(name, str) for name in names) and len(set(names)) == len(names), "names of tasks")
    need(len(names) == info["total_tasks"], "total_tasks")
    return names


def read_data(root: Path, info: Row) -> tuple[list[Row], dict[int, tuple[int, int]]]:
    """All frames in order, and the (chunk, file) in which each episode lies."""
    frames: list[Row] = []
    places: dict[int, tuple[int, int]] = {}
    files = sorted((root / "data").rglob("*"))
    for number, path in enumerate(path for path in files if path.is_file()):
        expected = divmod(number, info["chunks_size"])
        found = NUMBERED.fullmatch(path.relative_to(root / "data").as_posix())
        need(found and tuple(map(int, found.groups())) == expected, f"number of {path.name}")
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            need(set(parquet.schema_arrow.names) == set(info["features"]), f"columns of {path.name}")
            for name, feature in info["features"].items():
                check_type(name, parquet.schema_arrow.field(name).type, feature)
            groups = [parquet.read_row_group(i) for i in range(parquet.num_row_groups)]
        need(len(groups) == 1 or path.stat().st_size <= 1.1 * info["data_files_size_in_mb"] * 2**20, "size of a file")
        for group in groups:
            owners = set(group["episode_index"].to_pylist())
            need(len(owners) == 1, "a row group of two episodes")
            (owner,) = owners
            need(owner not in places, f"episode {owner} in two row groups")
            places[owner] = expected
            need(all(column.null_count == 0 for column in group.columns), "a missing value")
            frames += group.to_pylist()
    for frame in frames:
        for name, feature in info["features"].items():
            if feature["dtype"] == "image":
                frame[name] = pixels(frame[name]["bytes"], feature["shape"], name)
    return frames, places


def check_type(name: str, kind: pa.DataType, feature: Row) -> None:
    shape = feature["shape"]
    if feature["dtype"] == "image":
        fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
        need(fields == {"bytes": pa.binary(), "path": pa.string()}, f"type of {name}")
        return
    scalar = pa.from_numpy_dtype(np.dtype(feature["dtype"]))
    need(kind == (scalar if shape == [1] else pa.list_(scalar, shape[0])), f"type of {name}: {kind}")


def pixels(data: bytes, shape: list[int], name: str) -> np.ndarray:
    image = np.asarray(Image.open(io.BytesIO(data)))
    need(image.dtype == np.uint8 and list(image.shape) == shape, f"pixels of {name}")
    return image


def check_rows(frames: list[Row], info: Row, tasks: list[str]) -> None:
    need(len(frames) == info["total_frames"], "total_frames")
    previous: Row = {"episode_index": -1, "frame_index": -1}
    for number, frame in enumerate(frames):
        begins = frame["episode_index"] == previous["episode_index"] + 1
        need(begins or frame["episode_index"] == previous["episode_index"], "order of episode_index")
        need(frame["index"] == number, "index is not contiguous")
        need(frame["frame_index"] == (0 if begins else previous["frame_index"] + 1), "frame_index")
        need(abs(frame["timestamp"] - frame["frame_index"] / info["fps"]) < 1e-4, "timestamp")
        need(0 <= frame["task_index"] < len(tasks), "task_index")
        previous = frame
    need(previous["episode_index"] + 1 == info["total_episodes"], "total_episodes")


def check_episodes(root: Path, info: Row, tasks: list[str], frames: list[Row], places: dict) -> None:
    folder, rows = root / "meta/episodes", []
    for path in sorted(folder.rglob("*.parquet")):
        found = NUMBERED.fullmatch(path.relative_to(folder).as_posix())
        need(found, f"name of {path.name}")
        for row in pq.read_table(path, page_checksum_verification=True).to_pylist():
            need(set(EPISODE_COLUMNS) <= set(row), "columns of episodes")
            own = (row["meta/episodes/chunk_index"], row["meta/episodes/file_index"])
            need(own == tuple(map(int, found.groups())), "meta/episodes indices")
            rows.append(row)
    need(len(rows) == info["total_episodes"], "number of episodes")
    begin = 0
    for number, row in enumerate(rows):
        end = begin + row["length"]
        need(row["episode_index"] == number and row["length"] > 0, "episode_index of episodes")
        need((row["dataset_from_index"], row["dataset_to_index"]) == (begin, end), "dataset range")
        need(places[number] == (row["data/chunk_index"], row["data/file_index"]), "data file of an episode")
        mine = frames[begin:end]
        need(len(mine) == row["length"] and {frame["episode_index"] for frame in mine} == {number}, "length")
        need(set(row["tasks"]) == {tasks[frame["task_index"]] for frame in mine}, "tasks of an episode")
        stats: Row = {}
        for column in (name for name in row if name.startswith("stats/")):
            feature, _, stat = column.removeprefix("stats/").rpartition("/")
            stats.setdefault(feature, {})[stat] = row[column]
        check_stats(stats, info["features"], mine, row["length"])
        begin = end


def check_stats(stats: Row, features: Row, frames: list[Row], count: int) -> None:
    need(set(stats) == {name for name, feature in features.items() if feature["dtype"] != "string"}, "stats: features")
    for name, found in stats.items():
        need(set(found) == STATS, f"stats of {name}")
        need(found["count"] == [count], f"count of {name}")
        image = features[name]["dtype"] == "image"
        shape = (3, 1, 1) if image else tuple(features[name]["shape"])
        arrays = {stat: np.array(x, np.float64) for stat, x in found.items() if stat != "count"}
        need(all(x.shape == shape and np.isfinite(x).all() for x in arrays.values()), f"stats shape of {name}")
        values = np.array([frame[name] for frame in frames], np.float64).reshape(len(frames), *features[name]["shape"])
        if image:
            values = (values.reshape(-1, 3) / 255)[:, :, None, None]
        for stat, truth in (("min", values.min(0)), ("max", values.max(0)), ("mean", values.mean(0))):
            need(np.allclose(arrays[stat], truth, rtol=1e-5, atol=1e-6), f"{stat} of {name}")
        need(np.allclose(arrays["std"], values.std(0), rtol=1e-4, atol=1e-5), f"std of {name}")
        levels = np.stack([arrays[stat] for stat in ASCENDING])
        need((np.diff(levels, axis=0) >= -1e-9).all(), f"quantiles of {name}")
