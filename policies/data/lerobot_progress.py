"""The state of a growing LeRobot set, and how a writer continues what an earlier one has left.

Full data files are on the disk; the rows of the last one stay in memory until it is full (100 MB), because a parquet
file must be rewritten to grow. Read back, they are the same rows, so a set that was written in several goes has the
bytes of one that was written in one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..core.config import differences
from ..core.errors import BurnishError, reason
from . import lerobot_images as images
from . import lerobot_layout as layout
from . import lerobot_sim_state as sim_state
from . import lerobot_statistics as statistics
from . import lerobot_tables as tables

INFO_PATH, STATS_PATH = "meta/info.json", "meta/stats.json"


@dataclass
class OpenFile:
    """The data file that is not full yet: a table per episode, and of simulator states too where they are kept."""

    number: int = 0
    data: list[pa.Table] = field(default_factory=list)
    states: list[pa.Table] = field(default_factory=list)
    size: int = 0  # bytes

    def add(self, data: pa.Table, states: pa.Table | None) -> None:
        self.data.append(data)
        self.states += [states] if states is not None else []
        self.size += size_of(data, states)

    def write(self, root: Path) -> None:
        tables.write_groups(root / file_path(layout.DATA_PATH, self.number), self.data)
        if self.states:
            target = root / file_path(sim_state.PATH, self.number)
            tables.write_groups(target, self.states, use_dictionary=False)


@dataclass
class Progress:
    """The state of a writer: statistics, rows of the tables, tasks, frames, and the open data file."""

    tally: statistics.Tally
    rows: tables.Growing = field(default_factory=tables.Growing)
    finals: tables.Growing = field(default_factory=tables.Growing)
    tasks: dict[str, int] = field(default_factory=dict)
    open: OpenFile = field(default_factory=OpenFile)
    frames: int = 0
    sim_state: dict[str, Any] | None = None  # names, types and shapes, once the first episode has come


def begun(features: Mapping[str, Any]) -> Progress:
    """The progress of a set with these features before its first episode."""
    return Progress(statistics.Tally(name for name, feature in features.items() if feature["dtype"] != "image"))


def taken_up(root: Path, features: Mapping[str, Any]) -> Progress:
    """The set at ``root``, which this Burnish wrote, as if its episodes had just been added."""
    try:
        progress = begun(features)
        progress.sim_state = _info(root)["burnish"].get("sim_state")
        episodes = _read(root / layout.EPISODES_PATH)
        progress.rows.add(episodes)
        progress.finals.add(_read(root / layout.FINAL_OBS_PATH))
        tasks = _read(root / layout.TASKS_PATH)
        progress.tasks = dict(zip(tasks["__index_level_0__"].to_pylist(), tasks["task_index"].to_pylist(), strict=True))
        progress.frames = sum(episodes["length"].to_pylist())
        last = {name: episodes[name][-1].as_py() for name in ("data/chunk_index", "data/file_index")}
        last_number = last["data/chunk_index"] * layout.CHUNKS_SIZE + last["data/file_index"]
        for number in range(last_number + 1):
            for group in _groups(root / file_path(layout.DATA_PATH, number)):
                _count(progress.tally, group, features)
                progress.open.data += [group] if number == last_number else []
        if progress.sim_state is not None:
            progress.open.states = list(_groups(root / file_path(sim_state.PATH, last_number)))
        pairs = zip(progress.open.data, progress.open.states or [None] * len(progress.open.data), strict=True)
        progress.open.number, progress.open.size = last_number, sum(size_of(*pair) for pair in pairs)
        return progress
    except (OSError, LookupError, ValueError, TypeError, pa.ArrowException) as error:
        raise BurnishError(f"the dataset {root} is damaged and cannot be continued ({reason(error)})") from error


def recorded_seeds(root: Path, info: Mapping[str, Any]) -> list[int]:
    """The seeds of the set at ``root``, once it is sure that a writer that would write ``info`` may go on with it."""
    try:
        found = _info(root)
        seeds = _read(root / layout.FINAL_OBS_PATH, ["seed"])["seed"].to_pylist() if "burnish" in found else []
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise BurnishError(f"{root} holds no dataset that could be continued ({reason(error)})") from error
    if "burnish" not in found:
        raise BurnishError(f"{root} was not written by Burnish, so it cannot be continued; choose another path")
    listed = set(root.glob("meta/episodes/*/*.parquet"))
    if listed != {root / layout.EPISODES_PATH} or len(seeds) != found.get("total_episodes"):
        raise BurnishError(
            f"{root} has episodes that another program has added or taken away, so it cannot be continued; choose "
            "another path"
        )
    kept, mine = found["burnish"], info["burnish"]["meta"]
    meta = {key: x for key, x in dict(kept.get("meta") or {}).items() if key != "notes" or key in mine}
    known = {**found, "burnish": {key: x for key, x in kept.items() if key != "sim_state"} | {"meta": meta}}
    known["features"] = layout.renamed(found.get("features"), info["features"])
    for name, old, new in differences({key: known.get(key) for key in info}, info):
        name = name.removeprefix("burnish.").removeprefix("meta.")
        raise BurnishError(
            f"{root} was recorded with {name}={old!r}, and {name}={new!r} cannot continue it; choose another path"
        )
    return seeds


def file_path(template: str, number: int) -> str:
    """The path of file ``number`` by a template of the set, with ``CHUNKS_SIZE`` files to a folder."""
    chunk_index, file_index = divmod(number, layout.CHUNKS_SIZE)
    return template.format(chunk_index=chunk_index, file_index=file_index)


def size_of(data: pa.Table, states: pa.Table | None) -> int:
    """The bytes that an episode adds: its rows, and those of its simulator states if there are any."""
    return tables.payload(data) + (tables.payload(states) if states is not None else 0)


def _info(root: Path) -> dict[str, Any]:
    return json.loads((root / INFO_PATH).read_text())


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
        return _as_made(parquet.read(columns))


def _groups(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
        for number in range(parquet.num_row_groups):
            yield _as_made(parquet.read_row_group(number))


def _as_made(table: pa.Table) -> pa.Table:
    """With the types that the table had before it was written: reading calls the children of lists "element" and not
    "item", and that name would be written again."""
    return table.cast(pa.schema([pa.field(field.name, _plain(field.type)) for field in table.schema]))


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    return pa.list_(_plain(kind.value_type)) if pa.types.is_list(kind) else kind


def _count(tally: statistics.Tally, table: pa.Table, features: Mapping[str, Any]) -> None:
    vectors, histograms = {}, {}
    for name, feature in features.items():
        if feature["dtype"] == "image":
            height, width, channels = feature["shape"]
            frames = images.decode(table[name].to_pylist(), (channels, height, width))
            histograms[name] = statistics.image_histogram(frames)
        else:
            vectors[name] = tables.vector_of(table[name], len(table))
    tally.add(vectors, histograms)
