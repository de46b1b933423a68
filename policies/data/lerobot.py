"""Reads LeRobotDataset v3.0 folders into ``Episodes``; the writer stands beside it and is offered here too.

Sets that were not written by us lack what reinforcement learning needs; it is filled in, and ``meta["notes"]`` says so:
action limits from the data, the final observation as a repetition of the last one, episodes that end truncated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..core.errors import BurnishError, reason
from ..core.spec import UNKNOWN, EnvSpec, ObsSpec
from ..runs.manifest import memory
from . import lerobot_files as files
from . import lerobot_images as images
from . import lerobot_layout as layout
from .episodes import Episode, Episodes, action_limits
from .lerobot_writer import LeRobotWriter, write_lerobot

__all__ = ["LeRobotWriter", "fingerprint", "read_extra", "read_lerobot", "write_lerobot"]

# The features that become an observation, an action or the result of one; anything else is passed over with a note.
RESULTS = set(layout.RESULT_FEATURES)
INDICES = set(layout.INDEX_FEATURES)
TASK, HEAD, RESULT = 1 << 12, 1 << 9, 1 << 6  # bytes in memory: of a task's words, beside pixels, of all results


def read_lerobot(path: str | Path) -> Episodes:
    """The episodes of a LeRobotDataset v3.0 folder, in memory."""
    if not Path(path).is_dir():
        raise BurnishError(f"there is no dataset at {path}; `burnish collect` makes one")
    return _Reader(Path(path)).read()


def read_extra(path: str | Path) -> list[dict[str, torch.Tensor]]:
    """``Episode.extra`` of each episode, without unpacking a picture; empty where the set has no further columns."""
    return _Reader(Path(path)).read_extra()


def fingerprint(data: str | Path) -> str:
    """Which dataset it is, wherever it lies: the hash of its description and of its table of episodes."""
    digest = hashlib.sha256()
    for path in sorted((Path(data) / "meta").rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(data).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


class _Reader:
    """One pass over one folder; the fields are what ``meta/`` says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes: list[str] = []
        self.info = self._read_info()
        self.columns = self._observation_columns()
        self.spec, self.meta, self.extra = None, {}, {}
        if "burnish" in self.info:
            self.spec, self.columns, self.meta = layout.read_burnish_entry(self.info["burnish"])
            self.extra = layout.read_extra_entry(self.info)
        self._note_what_is_passed_over()
        self.shapes = self._shapes()
        self.frames, self.width = self._promised()
        self.tasks = self._read_tasks()
        self.final_rows, self.finals = self._read_finals()

    def read(self) -> Episodes:
        needed = [*self.columns.values(), *self.extra, "action", "task_index"]
        needed += sorted(RESULTS & set(self.info["features"]))
        episodes = [self._episode(row, table) for row, table in self._episode_tables(needed)]
        if not episodes:
            raise self._error("holds no episodes")
        spec, meta = self.spec, self.meta
        if spec is None:
            self.notes.append("action limits are the range of the data")
            rate, longest = float(self.info["fps"]), max(map(len, episodes))
            spec = EnvSpec(ObsSpec(self.shapes), action_limits(episodes), rate, UNKNOWN, longest)
            meta = {"source": "lerobot", "robot_type": self.info.get("robot_type")}
        if self.notes:
            meta = {**meta, "notes": list(dict.fromkeys(self.notes))}
        return Episodes(episodes, spec, meta)

    def read_extra(self) -> list[dict[str, torch.Tensor]]:
        tables = self._episode_tables(list(self.extra)) if self.extra else ()
        return [self._extra(table, row["episode_index"]) for row, table in tables]

    # The folder's description of itself.

    def _read_info(self) -> dict[str, Any]:
        try:
            info = files.read_info(self.root)
        except OSError as error:
            raise self._error(f"is not a LeRobot dataset: meta/info.json cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise self._error(f"has a meta/info.json that is not JSON: {error}") from error
        if not isinstance(info, dict) or info.get("codebase_version") != layout.VERSION:
            found = info.get("codebase_version") if isinstance(info, dict) else None
            raise self._error(
                f"has codebase_version {found!r}, but only {layout.VERSION!r} is read; "
                "convert it with LeRobot's own tool"
            )
        missing = [key for key in ("features", "fps", "data_path", "total_episodes", "total_frames") if key not in info]
        if missing:
            raise self._error(f"has a meta/info.json without {missing}")
        if not isinstance(info["features"], dict) or not isinstance(info["fps"], int | float):
            raise self._error("has a meta/info.json whose features or fps are malformed")
        if not 0 < info["fps"] < float("inf"):
            raise self._error("has a meta/info.json whose features or fps are malformed")
        for name, feature in info["features"].items():
            shape = feature.get("shape") if isinstance(feature, dict) else None
            if not isinstance(shape, list) or not all(isinstance(d, int) for d in shape) or "dtype" not in feature:
                raise self._error(f"has a meta/info.json whose feature {name!r} lacks dtype or shape")
        return info

    def _observation_columns(self) -> dict[str, str]:
        """Observation key -> column."""
        columns = {}
        for name, feature in self.info["features"].items():
            if feature["dtype"] == "video":
                raise self._error(
                    f"stores {name!r} as video, which is not read yet; record it with images (use_videos=False)"
                )
            if name.startswith("observation.") and feature["dtype"] != "string":
                key = layout.key_of(name, feature["dtype"] == "image")
                if key in columns:
                    raise self._error(f"has two columns, {columns[key]!r} and {name!r}, that would both become {key!r}")
                columns[key] = name
        if "action" not in self.info["features"]:
            raise self._error("has no 'action' feature")
        if not columns:
            raise self._error("has no 'observation.*' feature")
        return columns

    def _note_what_is_passed_over(self) -> None:
        known = RESULTS | INDICES | {"action", *self.columns.values(), *self.extra}
        ignored = sorted(set(self.info["features"]) - known)
        if ignored:
            self.notes.append(f"columns passed over: {', '.join(ignored)}")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for key, column in self.columns.items():
            feature = self.info["features"].get(column, {"dtype": None, "shape": [0]})
            shape = tuple(feature["shape"])
            if feature["dtype"] == "image":
                if len(shape) != 3 or shape[2] not in images.MODES:
                    raise self._error(f"has the image {column!r} of shape {shape}; (height, width, 1, 3 or 4) is read")
                shape = (shape[2], shape[0], shape[1])
            shapes[key] = shape
        if self.spec is None:
            return shapes
        ours = dict(self.spec.obs.shapes)
        flat = {key: layout.size_of(shape) for key, shape in shapes.items()}
        if flat != {key: layout.size_of(shape) for key, shape in ours.items()}:
            raise self._error("has features in info.json that contradict its 'burnish' entry")
        return ours

    def _promised(self) -> tuple[int, int]:
        """(frames, bytes of a frame in memory): all files are compared with it, and it with this machine."""
        counts = [self.info[name] for name in ("total_episodes", "total_frames")]
        if any(type(count) is not int for count in counts) or not 0 <= counts[0] <= counts[1]:
            raise self._error(f"promises {counts[0]!r:.40} episodes of {counts[1]!r:.40} frames in meta/info.json")
        sizes = [layout.size_of(shape) * (1 if layout.is_image(key) else 4) for key, shape in self.shapes.items()]
        sizes += [size * np.dtype(kind).itemsize for kind, size in self.extra.values()]
        action = 4 * layout.size_of(tuple(self.info["features"]["action"]["shape"]))
        width = sum(sizes) + action + RESULT + HEAD * sum(map(layout.is_image, self.shapes))
        if min(sizes, default=0) < 0 or counts[1] * sum(sizes) > memory() // 2:
            # A file is read beside the episodes that were made of others.
            raise self._error(
                f"promises {counts[1]} frames of {sum(sizes)} bytes, more than half of the {memory() / 2**30:.3g} GiB "
                "of memory that there are; train on a part of it"
            )
        return counts[1], width

    def _read_tasks(self) -> dict[int, str]:
        if not (self.root / layout.TASKS_PATH).exists():
            return {}
        table = self._table(layout.TASKS_PATH, None, self.info["total_episodes"], TASK)
        if "task_index" not in table.column_names:
            raise self._error(f"lacks the columns ['task_index'] in {layout.TASKS_PATH}")
        # The other column is the index of a pandas frame; its name differs between LeRobot's versions.
        names = [name for name in table.column_names if name != "task_index"]
        if len(names) != 1:
            raise self._error(f"has a {layout.TASKS_PATH} with columns {table.column_names}")
        return dict(zip(table["task_index"].to_pylist(), map(str, table[names[0]].to_pylist()), strict=True))

    def _read_finals(self) -> tuple[dict[int, int], pa.Table | None]:
        """(episode -> row, table) of the final observations and seeds, where the set has them."""
        if self.spec is None:
            return {}, None
        needed = ["episode_index", "seed", *self.columns.values()]
        table = self._table(layout.FINAL_OBS_PATH, needed, self.info["total_episodes"], self.width)
        return {episode: row for row, episode in enumerate(table["episode_index"].to_pylist())}, table

    # Rows.

    def _episode_tables(self, needed: list[str]) -> Iterator[tuple[dict[str, Any], pa.Table]]:
        """Each episode's row of ``meta/episodes`` and, of its frames, the columns; a data file is read once."""
        names = ["episode_index", "length", "data/chunk_index", "data/file_index"]
        listed, rows = self.info["total_episodes"], []
        for path in sorted(self.root.glob("meta/episodes/*/*.parquet")):
            rows += self._table(path.relative_to(self.root), names, listed, RESULT).to_pylist()
        if any(not isinstance(row[name], int) for row in rows for name in names):
            raise self._error("has a malformed row in meta/episodes: an index or a length is missing")
        if len(rows) != self.info["total_episodes"]:
            raise self._error(f"promises {self.info['total_episodes']} episodes, but meta/episodes lists {len(rows)}")
        if sum(row["length"] for row in rows) > self.frames:
            raise self._error(f"promises {self.frames} frames, but the episodes in meta/episodes have more in all")
        current, table, owner = None, None, np.empty(0)
        template = files.checked_template(self.root, self.info["data_path"])
        for row in sorted(rows, key=lambda row: row["episode_index"]):
            file = template.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
            if table is None or file != current:
                current, table = file, self._table(file, ["episode_index", *needed], self.frames, self.width)
                owner = table["episode_index"].to_numpy()
            begin, end = np.searchsorted(owner, [row["episode_index"], row["episode_index"] + 1])
            if end - begin != row["length"] or row["length"] < 1:
                raise self._error(
                    f"has {end - begin} rows of episode {row['episode_index']} in {file}, "
                    f"but meta/episodes says {row['length']}"
                )
            yield row, table.slice(begin, end - begin)

    def _episode(self, row: Mapping[str, Any], table: pa.Table) -> Episode:
        number = row["episode_index"]
        results = {name: self._numbers(table, name, (), number) for name in RESULTS & set(table.column_names)}
        reward = results.get("next.reward", np.zeros(len(table), np.float32))
        ends = {name: bool(x[-1]) for name, x in results.items()}
        truncated = ends.get("next.truncated", False)
        terminated = ends.get("next.terminated", ends.get("next.done", False) and not truncated)
        if "next.done" not in ends and "next.terminated" not in ends and not truncated:
            truncated = True
            self.notes.append("no column says how episodes end: they count as truncated")
        if "next.reward" not in results:
            self.notes.append("there is no reward: it is zero")
        final = self.final_rows.get(number)
        if final is None:
            self.notes.append("final observations are missing: the last observation is repeated")
        shape = tuple(self.info["features"]["action"]["shape"])
        try:
            return Episode(
                obs={key: self._observations(key, table, final, number) for key in self.columns},
                action=torch.from_numpy(self._numbers(table, "action", shape, number)),
                reward=torch.from_numpy(reward),
                terminated=terminated,
                truncated=truncated,
                success=bool(results.get("next.success", np.zeros(1)).any()),
                seed=number if final is None or self.finals is None else self.finals["seed"][final].as_py(),
                task=self.tasks.get(table["task_index"][0].as_py(), ""),
                extra=self._extra(table, number),
            )
        except BurnishError as error:
            raise BurnishError(f"episode {number} of {self.root} cannot be used: {error}") from error

    def _extra(self, table: pa.Table, number: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(self._numbers(table, name, (size,), number, np.dtype(kind).type))
            for name, (kind, size) in self.extra.items()
        }

    def _observations(self, key: str, table: pa.Table, final: int | None, number: int) -> torch.Tensor:
        """(T + 1, ...): the rows of the data file, and the final observation or the last one again."""
        column, shape = self.columns[key], self.shapes[key]
        tail = table.slice(len(table) - 1) if final is None or self.finals is None else self.finals.slice(final, 1)
        if layout.is_image(key):
            rows = [self._images(part, column, shape, number) for part in (table, tail)]
        else:
            kind = np.int64 if key == "tokens" else np.float32
            rows = [self._numbers(part, column, shape, number, kind) for part in (table, tail)]
        return torch.from_numpy(np.concatenate(rows))

    def _numbers(
        self, table: pa.Table, name: str, shape: tuple[int, ...], number: int, kind: type = np.float32
    ) -> np.ndarray:
        """(T, *shape), whether the column is plain, a list or a list of lists."""
        array: Any = table[name].combine_chunks()
        while isinstance(array.type, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
            array = array.flatten()
        if array.null_count or len(array) != len(table) * layout.size_of(shape):
            raise self._error(f"has missing values or another shape than {shape} in {name!r} of episode {number}")
        try:
            return array.to_numpy(zero_copy_only=False).astype(kind).reshape(len(table), *shape)
        except (TypeError, ValueError) as error:  # pyarrow's own errors derive from them
            raise self._error(f"has values in {name!r} of episode {number} that are not numbers: {error}") from error

    def _images(self, table: pa.Table, name: str, shape: tuple[int, ...], number: int) -> np.ndarray:
        try:
            return images.decode(table[name].to_pylist(), shape)
        except BurnishError as error:
            raise self._error(f"has {error} of episode {number} in {name!r}") from error

    def _table(self, file: str | Path, needed: list[str] | None, rows: int, width: int) -> pa.Table:
        try:
            return files.read_table(self.root, file, needed, rows=rows, width=width)
        except FileNotFoundError as error:
            raise self._error(f"lacks {file}") from error
        except (OSError, MemoryError, pa.ArrowException) as error:
            raise self._error(f"has a damaged or truncated {file} ({reason(error)})") from error

    def _error(self, what: str) -> BurnishError:
        return BurnishError(f"the dataset {self.root} {what}")
