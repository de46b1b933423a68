"""Reads LeRobotDataset folders (v2.0, v2.1, v3.0) into ``Episodes``; the writer of v3.0 is offered here too.

Sets that were not written by us lack what reinforcement learning needs; it is filled in, and ``meta["notes"]`` says so:
action limits from the data, the final observation as a repetition of the last one, episodes that end truncated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ..core.errors import BurnishError
from ..core.spec import UNKNOWN, EnvSpec, ObsSpec
from ..runs.manifest import memory
from . import lerobot_files as files
from . import lerobot_images as images
from . import lerobot_layout as layout
from . import lerobot_tables as tables
from . import lerobot_video as video
from .episodes import (
    NO_ENDS,
    NO_FINAL,
    NO_LIMITS,
    NO_REWARD,
    NO_SUCCESS,
    PASSED_OVER,
    Bad,
    Episode,
    Episodes,
    Mine,
    action_limits,
    usable,
    why_empty,
)
from .lerobot_tasks import Tasks
from .lerobot_writer import LeRobotWriter, write_lerobot
from .on_disk import PictureFiles

__all__ = ["LeRobotWriter", "read_extra", "read_lerobot", "write_lerobot"]

# The features that become an observation, an action or the result of one; anything else is passed over with a note.
RESULTS, INDICES = set(layout.RESULT_FEATURES), set(layout.INDEX_FEATURES)
CLOCK = {"frame_index", "timestamp"}  # what says when a row was seen
PICTURES = ("image", "video")  # types of features
HEAD, RESULT = 1 << 9, 1 << 6  # bytes in memory: beside pixels, of all results


def read_lerobot(
    path: str | Path, bad: Bad | None = None, mine: Mine | None = None, keys: Collection[str] = ()
) -> Episodes:
    """The episodes of a LeRobotDataset folder, in memory. Those that cannot be used go into ``bad``, if given. Pictures
    of those that are not ``mine`` stay unread (``Episode.elsewhere``), as do others than ``keys``, where these are
    given: they are black."""
    if not Path(path).is_dir():
        raise BurnishError(f"there is no dataset at {path}; `burnish collect` makes one")
    return _Reader(Path(path), mine, keys).read(bad)


def read_extra(path: str | Path) -> list[dict[str, torch.Tensor]]:
    """``Episode.extra`` of each episode, without unpacking a picture; empty where the set has no further columns."""
    return _Reader(Path(path)).read_extra()


class _Reader:
    """One pass over one folder; the fields are what ``meta/`` says."""

    def __init__(self, root: Path, mine: Mine | None = None, keys: Collection[str] = ()) -> None:
        self.root, self.mine = root, mine
        self.notes: list[str] = []
        self.picture_files: PictureFiles | None = None
        self.elsewhere: set[int] = set()  # episodes whose pictures stay unread
        self.info = self._read_info()
        self.old = self.info["codebase_version"] in layout.OLDER
        self.columns = self._observation_columns()
        self.spec, self.meta, self.extra = None, {}, {}
        if "burnish" in self.info:
            self.spec, self.columns, self.meta = layout.read_burnish_entry(self.info["burnish"])
            # Of a converted set, whatever was filled in stands in columns; so its notes are part of it.
            kept = self.meta.pop("notes", None)
            self.notes += map(str, kept if isinstance(kept, list) else ())
            self.extra = layout.read_extra_entry(self.info)
        known = RESULTS | INDICES | {"action", *self.columns.values(), *self.extra}
        if ignored := sorted(set(self.info["features"]) - known):
            self.notes.append(PASSED_OVER + ", ".join(ignored))
        self.shapes = self._shapes()
        self.unread = {key for key in self.shapes if keys and key not in keys and layout.is_image(key)}
        self.frames, self.width = self._promised()
        self.tasks = Tasks(root, self.info)
        self.final_rows, self.finals = self._read_finals()

    def read(self, bad: Bad | None = None) -> Episodes:
        needed = [*self._stored(), *self.extra, "action", "task_index"]
        needed += sorted((RESULTS | CLOCK) & set(self.info["features"]))
        episodes = []
        for number, (row, table) in enumerate(self._episode_tables(needed)):
            with usable(number, self.root, bad):
                episodes.append(self._episode(row, table))
        if not episodes:
            raise self._error(why_empty(bad))
        spec, meta = self.spec, self.meta
        if spec is None:
            self.notes.append(NO_LIMITS)
            rate, longest = float(self.info["fps"]), max(map(len, episodes))
            spec = EnvSpec(ObsSpec(self.shapes), action_limits(episodes), rate, UNKNOWN, longest)
            meta = {"source": "lerobot", "robot_type": self.info.get("robot_type")}
        if several := self.tasks.several:
            self.notes.append(f"episodes of several tasks: {several}; each has that of its first frame")
        if self.notes:
            meta = {**meta, "notes": list(dict.fromkeys(self.notes))}
        return Episodes(episodes, spec, meta, layout.read_names(self.info["features"], self.columns))

    def read_extra(self) -> list[dict[str, torch.Tensor]]:
        found = self._episode_tables(list(self.extra)) if self.extra else ()
        return [self._extra(table, row["episode_index"]) for row, table in found]

    # The folder's description of itself.

    def _read_info(self) -> dict[str, Any]:
        try:
            info = files.read_info(self.root)
        except OSError as error:
            raise self._error(f"is not a LeRobot dataset: meta/info.json cannot be read ({error.strerror})") from error
        except BurnishError:
            raise
        except ValueError as error:
            raise self._error(f"has a meta/info.json that is not JSON: {error}") from error
        if wrong := layout.complaint(info):
            raise self._error(wrong)
        return info

    def _observation_columns(self) -> dict[str, str]:
        """Observation key -> column."""
        columns = {}
        for name, feature in self.info["features"].items():
            if name.startswith("observation.") and layout.is_readable(feature):
                key = layout.key_of(name, feature["dtype"] in PICTURES)
                if key in columns:
                    raise self._error(f"has two columns, {columns[key]!r} and {name!r}, that would both become {key!r}")
                columns[key] = name
        if "action" not in self.info["features"]:
            raise self._error("has no 'action' feature")
        if not columns:
            raise self._error("has no 'observation.*' feature that is read here")
        return columns

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for key, column in self.columns.items():
            feature = self.info["features"].get(column, {"dtype": None, "shape": [0]})
            picture = feature["dtype"] in PICTURES
            shape = layout.picture_shape(feature) if picture else tuple(feature["shape"])
            if shape is None:
                raise self._error(
                    f"has the image {column!r} of shape {tuple(feature['shape'])}; (height, width, 1, 3 or 4) is read, "
                    "and (1, 3 or 4, height, width) where its names begin with 'channels'"
                )
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
        seen = {key: shape for key, shape in self.shapes.items() if key not in self.unread}
        sizes = [layout.size_of(shape) * (1 if layout.is_image(key) else 4) for key, shape in seen.items()]
        sizes += [size * np.dtype(kind).itemsize for kind, size in self.extra.values()]
        action = 4 * layout.size_of(tuple(self.info["features"]["action"]["shape"]))
        width = sum(sizes) + action + RESULT + HEAD * sum(map(layout.is_image, seen))
        pictures = {key: shape for key, shape in seen.items() if layout.is_image(key)}
        unpacked = sum(map(layout.size_of, pictures.values()))
        listed, shown = counts  # episodes and frames with pictures that are read
        if self.mine is not None:
            rows = self._episode_rows()
            own = [rows[i] for i in self.mine(len(rows))]
            self.elsewhere = {row["episode_index"] for row in rows} - {row["episode_index"] for row in own}
            self.unread |= set() if own else {key for key in self.shapes if layout.is_image(key)}
            listed, shown = len(own), min(counts[1], sum(row["length"] for row in own))
        # Windows copy what is in memory.
        spilled = shown * unpacked > memory() // 4
        kept = sum(sizes) - unpacked * spilled
        held = counts[1] * (sum(sizes) - unpacked) + (0 if spilled else shown * unpacked)
        if min(sizes, default=0) < 0 or held > memory() // 2:
            # A file is read beside the episodes that were made of others.
            raise self._error(
                f"promises {counts[1]} frames of {kept} bytes, more than half of the {memory() / 2**30:.3g} GiB "
                "of memory that there are; take a machine with more, or divide the set with lerobot-edit-dataset"
            )
        if spilled:
            try:
                self.picture_files = PictureFiles(pictures, listed + shown)
            except BurnishError as error:
                raise self._error(f"cannot be read: {error}") from error
        return counts[1], width

    def _read_finals(self) -> tuple[dict[int, int], pa.Table | None]:
        """(episode -> row, table) of the final observations and seeds, where the set has them."""
        if self.spec is None:
            return {}, None
        needed = ["episode_index", "seed", *self._stored()]
        table = self._table(layout.FINAL_OBS_PATH, needed, self.info["total_episodes"], self.width)
        return {episode: row for row, episode in enumerate(table["episode_index"].to_pylist())}, table

    # Rows.

    def _episode_tables(self, needed: list[str]) -> Iterator[tuple[dict[str, Any], pa.Table]]:
        """Each episode's row of ``meta/episodes`` and, of its frames, the columns; a data file is read once."""
        rows = self._episode_rows()
        if len(rows) != self.info["total_episodes"]:
            raise self._error(f"promises {self.info['total_episodes']} episodes, but meta/episodes lists {len(rows)}")
        if sum(row["length"] for row in rows) > self.frames:
            raise self._error(f"promises {self.frames} frames, but the episodes in meta/episodes have more in all")
        if self.picture_files and max(row["length"] for row in rows) * self.width > memory() // 2:
            raise self._error("has an episode that is larger than half of memory")
        current, table, owner = None, None, np.empty(0)
        template = files.checked_template(self.root, self.info, "data_path")
        for row in rows:
            file = self._file(template, row, "data")
            if table is None or file != current:
                current, table = file, self._table(file, ["episode_index", *needed], self.frames, self.width)
                owner = table["episode_index"].to_numpy()
            begin, end = np.searchsorted(owner, [row["episode_index"], row["episode_index"] + 1])
            if end - begin != row["length"]:
                raise self._error(
                    f"has {end - begin} rows of episode {row['episode_index']} in {file}, "
                    f"but meta/episodes says {row['length']}"
                )
            yield row, table.slice(begin, end - begin)

    def _episode_rows(self) -> list[dict[str, Any]]:
        """Of each episode its number and length, and since v3.0 the places of its data and videos; by their numbers."""
        most = self.info["total_episodes"]
        rows = files.read_lines(self.root, layout.OLD_EPISODES_PATH, most) if self.old else self._places()
        if any(type(row.get(name)) is not int for row in rows for name in ("episode_index", "length")):
            raise self._error("has a malformed row in meta/episodes: an index or a length is missing")
        return sorted(rows, key=lambda row: row["episode_index"])

    def _places(self) -> list[dict[str, Any]]:
        listed, rows = self.info["total_episodes"], []
        places = [f"videos/{name}" for name in self.columns.values() if self._is_video(name)]
        names = [f"{place}/{part}" for place in ("data", *places) for part in ("chunk_index", "file_index")]
        names += ["episode_index", "length", *(f"{place}/from_timestamp" for place in places)]
        for path in sorted(self.root.glob("meta/episodes/*/*.parquet")):
            rows += self._table(path.relative_to(self.root), names, listed, RESULT * (1 + len(places))).to_pylist()
        if any(type(row[name]) is not int for row in rows for name in names if name.endswith("_index")):
            raise self._error("has a malformed row in meta/episodes: an index or a length is missing")
        return rows

    def _file(self, template: str, row: Mapping[str, Any], place: str, video_key: str = "") -> str:
        """The path of the file in which an episode's ``place``, its data or a video, is."""
        number = row["episode_index"]
        if self.old:
            size = self.info.get("chunks_size", layout.CHUNKS_SIZE)
            if type(size) is not int or size < 1:
                raise self._error(f"has chunks_size={size!r:.40} in info.json")
            numbers = {"episode_chunk": number // size, "episode_index": number}
        else:
            numbers = {part: row[f"{place}/{part}"] for part in ("chunk_index", "file_index")}
        try:
            return template.format(**numbers, video_key=video_key)
        except KeyError as error:
            raise self._error(f"has a path in info.json that asks for {error}: {template!r:.200}") from error

    def _stored(self) -> list[str]:
        """The columns of tables with the observations that are read."""
        found = {key: column for key, column in self.columns.items() if not self._is_video(column)}
        return [column for key, column in found.items() if key not in self.unread]

    def _is_video(self, column: str) -> bool:
        return self.info["features"].get(column, {}).get("dtype") == "video"

    def _episode(self, row: Mapping[str, Any], table: pa.Table) -> Episode:
        number = row["episode_index"]
        if not len(table):
            raise BurnishError("it has no frames")
        results = {name: self._numbers(table, name, (), number) for name in RESULTS & set(table.column_names)}
        reward = results.get("next.reward", np.zeros(len(table), np.float32))
        ends = {name: bool(x[-1]) for name, x in results.items()}
        terminated, truncated, unsure = layout.ends_of(ends)
        self.notes += [unsure] if unsure else []
        if not (terminated or truncated) and self.spec is None:  # of a set that we did not write
            truncated = True
            self.notes.append(NO_ENDS)
        if "next.reward" not in results:
            self.notes.append(NO_REWARD)
        if "next.success" not in results:
            self.notes.append(NO_SUCCESS)
        final = self.final_rows.get(number)
        if final is None:
            self.notes.append(NO_FINAL)
        shape = tuple(self.info["features"]["action"]["shape"])
        times = self._times(table, number)
        return Episode(
            obs={key: self._observations(key, table, final, row, times) for key in self.columns},
            action=torch.from_numpy(self._numbers(table, "action", shape, number)),
            reward=torch.from_numpy(reward),
            terminated=terminated,
            truncated=truncated,
            success=bool(results.get("next.success", np.zeros(1)).any()),
            seed=number if final is None or self.finals is None else self.finals["seed"][final].as_py(),
            task=self._task(table, number),
            extra=self._extra(table, number),
            elsewhere=number in self.elsewhere,
        )

    def _task(self, table: pa.Table, number: int) -> str:
        """Empty in a set without tasks."""
        return self.tasks.of(self._numbers(table, "task_index", (), number, np.int64), number) if self.tasks else ""

    def _extra(self, table: pa.Table, number: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(self._numbers(table, name, (size,), number, np.dtype(kind).type))
            for name, (kind, size) in self.extra.items()
        }

    def _times(self, table: pa.Table, number: int) -> np.ndarray:
        """(T,) s: when each row was seen."""
        clock = {x: self._numbers(table, x, (), number, np.float64) for x in CLOCK & set(table.column_names)}
        index, stamps = clock.get("frame_index"), clock.get("timestamp")
        return tables.checked_times(len(table), float(self.info["fps"]), index, stamps)

    def _observations(
        self, key: str, table: pa.Table, final: int | None, row: Mapping[str, Any], times: np.ndarray
    ) -> torch.Tensor:
        """(T + 1, ...): the rows of the data file, and the final observation or the last one again."""
        column, shape, number = self.columns[key], self.shapes[key], row["episode_index"]
        if key in self.unread or (layout.is_image(key) and number in self.elsewhere):
            return torch.zeros((), dtype=torch.uint8).expand(len(table) + 1, *shape)  # takes no memory
        if self._is_video(column):
            frames = torch.from_numpy(self._video(column, shape, row, times))
            return self._kept(key, torch.cat([frames, frames[-1:]]))
        tail = table.slice(len(table) - 1) if final is None or self.finals is None else self.finals.slice(final, 1)
        if layout.is_image(key):
            rows = [self._images(part, column, shape, number) for part in (table, tail)]
        else:
            kind = np.int64 if key == "tokens" else np.float32
            rows = [self._numbers(part, column, shape, number, kind) for part in (table, tail)]
        return self._kept(key, torch.from_numpy(np.concatenate(rows)))

    def _kept(self, key: str, x: torch.Tensor) -> torch.Tensor:
        """In memory, or on the disk."""
        return self.picture_files.lay(key, x) if self.picture_files and layout.is_image(key) else x

    def _numbers(
        self, table: pa.Table, name: str, shape: tuple[int, ...], number: int, kind: type = np.float32
    ) -> np.ndarray:
        """(T, *shape)"""
        try:
            return tables.numbers_of(table[name], shape, kind)
        except BurnishError as error:
            raise self._error(f"has {error} in {name!r} of episode {number}") from error

    def _images(self, table: pa.Table, name: str, shape: tuple[int, ...], number: int) -> np.ndarray:
        try:
            return images.decode(table[name].to_pylist(), shape)
        except BurnishError as error:
            raise self._error(f"has {error} of episode {number} in {name!r}") from error

    def _video(self, column: str, shape: tuple[int, ...], row: Mapping[str, Any], times: np.ndarray) -> np.ndarray:
        if "/" in column or shape[0] != 3:
            raise self._error(f"has a video {column!r:.80} of shape {shape}; three colours and no '/' are read")
        template = files.checked_template(self.root, self.info, "video_path", ["video_key"])
        file = self._file(template, row, f"videos/{column}", column)
        start = 0.0 if self.old else row[f"videos/{column}/from_timestamp"]
        try:
            path = files.regular(self.root, file)
        except OSError as error:
            raise self._error(f"lacks {file}") from error
        try:
            if not isinstance(start, float) or not 0 <= start < 1e9:
                raise BurnishError(f"no time at which it begins ({start!r:.40})")
            return video.decode(path, (start + times).tolist(), float(self.info["fps"]), shape)
        except BurnishError as error:
            raise self._error(f"has {error} in {file}, episode {row['episode_index']}") from error

    def _table(self, file: str | Path, needed: list[str] | None, rows: int, width: int) -> pa.Table:
        return files.read_table(self.root, file, needed, rows=rows, width=width)

    def _error(self, what: str) -> BurnishError:
        return BurnishError(f"the dataset {self.root} {what}")
