"""Tables of a LeRobot v3.0 set: an episode as rows of the data file, of the episode table and of our side file.

Everything here is a pure function of the episode and its place, so that equal sets have equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..core.errors import BurnishError
from ..core.files import named
from . import lerobot_images as images
from . import lerobot_layout as layout
from . import lerobot_statistics as statistics
from .episodes import Episode

PIECES = 64  # tables of one row each are merged once there are so many
# The time between two frames may be off by so many seconds, as in LeRobot, and by the rounding of its float32.
TOLERANCE, ROUNDING = 1e-4, float(np.finfo(np.float32).eps)


class Place(NamedTuple):
    """The position of an episode in the set."""

    number: int
    first: int  # its first frame, counted over the set
    task_index: int
    fps: int


class EpisodeTables(NamedTuple):
    """One episode of T frames as tables, with the columns of numbers for its statistics."""

    data: pa.Table  # (T rows)
    final: pa.Table  # (1 row): our side file
    vectors: dict[str, np.ndarray]  # column -> (T, n)
    histograms: dict[str, np.ndarray]  # camera -> (C, 256)


def tables_of(episode: Episode, place: Place, features: Mapping[str, Any]) -> EpisodeTables:
    """The tables of an episode that stands at ``place`` in the set."""
    length = len(episode)
    frame = np.arange(length)
    last = frame == length - 1
    vectors = {
        layout.column_of(key): x.cpu().numpy().reshape(length + 1, -1)
        for key, x in episode.obs.items()
        if not layout.is_image(key)
    }
    pictures = {layout.column_of(key): x.cpu().numpy() for key, x in episode.obs.items() if layout.is_image(key)}
    results = {
        **{name: x.cpu().numpy() for name, x in episode.extra.items()},
        "action": episode.action.cpu().numpy(),
        "next.reward": episode.reward.cpu().numpy(),
        "next.done": last & (episode.terminated or episode.truncated),
        "next.terminated": last & episode.terminated,
        "next.truncated": last & episode.truncated,
        "next.success": last & episode.success,
        "timestamp": (frame / place.fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.full(length, place.number),
        "index": place.first + frame,
        "task_index": np.full(length, place.task_index),
    }
    rows = {name: x[:-1] for name, x in vectors.items()}
    rows |= {name: x.reshape(length, -1) for name, x in results.items()}
    encoded = {name: images.encode(x) for name, x in pictures.items()}
    arrays = {name: _column(x) for name, x in rows.items()} | {name: x[:-1] for name, x in encoded.items()}
    final = {name: _column(x[-1:]) for name, x in vectors.items()} | {name: x[-1:] for name, x in encoded.items()}
    head = {"episode_index": [place.number], "seed": pa.array([episode.seed], pa.int64())}
    return EpisodeTables(
        data=pa.table({name: arrays[name] for name in features}),
        final=pa.table({**head, **final}),
        vectors=rows,
        histograms={name: statistics.image_histogram(x[:-1]) for name, x in pictures.items()},
    )


def episode_row(episode: Episode, place: Place, file_number: int, tables: EpisodeTables) -> pa.Table:
    """The row of the episode table: length, tasks, statistics, and the place in file ``file_number``."""
    length = len(episode)
    chunk_index, file_index = divmod(file_number, layout.CHUNKS_SIZE)
    found = {name: statistics.of_vectors(x) for name, x in tables.vectors.items()}
    found |= {name: statistics.of_images(x, length) for name, x in tables.histograms.items()}
    row = {
        "episode_index": place.number,
        "tasks": [episode.task],
        "length": length,
        "data/chunk_index": chunk_index,
        "data/file_index": file_index,
        "dataset_from_index": place.first,
        "dataset_to_index": place.first + length,
        "meta/episodes/chunk_index": 0,
        "meta/episodes/file_index": 0,
    }
    row |= {f"stats/{name}/{stat}": x.tolist() for name in found for stat, x in found[name].items()}
    return pa.Table.from_pylist([row])


def task_table(tasks: Sequence[str]) -> pa.Table:
    """A pandas frame whose index is the task and whose column is its number, described without pandas."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "__index_level_0__": pa.array(tasks)})

    def column(name: str | None, field: str | None, kind: str, numpy: str, metadata: Any = None) -> dict[str, Any]:
        return {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy, "metadata": metadata}

    pandas = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [column(None, None, "unicode", "object", {"encoding": "UTF-8"})],
        "columns": [
            column("task_index", "task_index", "int64", "int64"),
            column(None, "__index_level_0__", "unicode", "object"),
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def write_groups(path: Path, tables: Sequence[pa.Table], **options: Any) -> None:
    """One row group per table (per episode), so that an episode is one cheap read."""
    named(path.parent)
    with pq.ParquetWriter(path, tables[0].schema, compression="snappy", write_page_checksum=True, **options) as file:
        for table in tables:
            file.write_table(table, row_group_size=len(table))


def payload(table: pa.Table) -> int:
    """Bytes of the values themselves. (``nbytes`` counts how they lie in memory, which differs once they were read
    back, and files must roll over at the same episode either way.)"""
    total = 0
    for column in table.columns:
        kind = column.type
        if pa.types.is_struct(kind):
            lengths = pc.call_function("binary_length", [column.combine_chunks().field("bytes")])
            total += int(lengths.to_numpy(zero_copy_only=False).sum())
        elif pa.types.is_fixed_size_list(kind):
            total += len(table) * kind.list_size * kind.value_type.bit_width // 8
        else:
            total += len(table) * kind.bit_width // 8
    return total


def vector_of(column: pa.ChunkedArray, rows: int) -> np.ndarray:
    """A column that we wrote -> (F, n)."""
    array: Any = column.combine_chunks()
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    return flat.to_numpy(zero_copy_only=False).reshape(rows, -1)


def numbers_of(column: pa.ChunkedArray, shape: tuple[int, ...], kind: type = np.float32) -> np.ndarray:
    """A column of anybody's, whether it is plain, of lists or of lists of lists -> (T, *shape)."""
    array, alike = cast(Any, column.combine_chunks()), True
    while isinstance(array.type, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        alike &= len(pc.call_function("list_value_length", [array]).unique()) < 2  # else numbers change rows
        array = array.flatten()
    if not alike or array.null_count or len(array) != len(column) * layout.size_of(shape):
        raise BurnishError(f"missing values or another shape than {shape}")
    try:
        return array.to_numpy(zero_copy_only=False).astype(kind).reshape(len(column), *shape)
    except (TypeError, ValueError) as error:  # pyarrow's own errors derive from them
        raise BurnishError(f"values that are not numbers ({error})") from error


def checked_times(rows: int, fps: float, index: np.ndarray | None, stamps: np.ndarray | None) -> np.ndarray:
    """(T,) s: the time stamps of an episode's rows, or without such the times of as many frames. Rows that are not one
    frame after the other are refused, and so is a ``frame_index`` that does not rise."""
    if index is not None and len(wrong := np.flatnonzero(~(np.diff(index) > 0))):
        raise BurnishError(f"its frame_index does not rise in row {wrong[0] + 1}; sort its rows")
    if stamps is None:
        return np.arange(rows) / fps
    late = np.minimum(TOLERANCE + ROUNDING * np.abs(stamps), 0.5 / fps)
    with np.errstate(invalid="ignore"):  # NaN is no number of seconds
        good = np.abs(np.diff(stamps, prepend=stamps[0] - 1 / fps) - 1 / fps) <= late
    if len(wrong := np.flatnonzero(~good | (stamps < -late))):
        row = wrong[0]
        before = f" after {stamps[row - 1]:.6g}" if row else ""
        raise BurnishError(
            f"its timestamp in row {row} is {stamps[row]:.6g}{before}, and seconds are needed, from 0 on, which rise "
            f"by 1/{fps:g} in each row, as fps in meta/info.json says"
        )
    return stamps


class Growing:
    """Rows that arrive one at a time, in one piece when they are asked for."""

    def __init__(self, *pieces: pa.Table) -> None:
        self._pieces = list(pieces)

    def add(self, row: pa.Table) -> None:
        self._pieces.append(row)
        if len(self._pieces) >= PIECES:
            self.table()

    def table(self) -> pa.Table:
        self._pieces = [pa.concat_tables(self._pieces).combine_chunks()]
        return self._pieces[0]


def _column(x: np.ndarray) -> pa.Array:
    """(F, n) -> fixed-size lists; (F, 1) -> a plain column, as LeRobot stores what has shape [1]."""
    flat = pa.array(np.ascontiguousarray(x).reshape(-1))
    return flat if x.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, x.shape[1])
