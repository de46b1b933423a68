"""Episodes -> a LeRobotDataset v3.0 folder, with pyarrow and json alone.

The folder grows beside its target under a hidden name, is flushed to the disk and renamed at the end: a writer that
dies leaves nothing at the target, and at worst a ``.<name>.<hex>.partial`` folder that may be deleted.

**Departures.** LeRobot stores T observations per episode and only ``next.done``. We add ``next.terminated`` and
``next.truncated``, and keep the final observation and the seed in ``meta/final_obs.parquet``, which LeRobot passes
over. ``timestamp`` and ``fps`` are LeRobot's (an integer); the exact control rate stands in our entry of ``info.json``.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ..core.errors import BurnishError
from ..core.manifest import sync
from ..core.spec import EnvSpec
from . import lerobot_layout as layout
from . import lerobot_statistics as statistics
from .episodes import Episode, Episodes, check_fits

MEGABYTE = 2**20


class LeRobotWriter:
    """``with LeRobotWriter(path, spec, meta) as writer: writer.add(episode)``; the set appears at the end, or never."""

    def __init__(
        self,
        path: str | Path,
        spec: EnvSpec,
        meta: Mapping[str, Any] | None = None,
        *,
        fps: int | None = None,
        robot_type: str | None = None,
        data_files_size_in_mb: int = 100,
    ) -> None:
        self.path, self.spec = Path(path).absolute(), spec
        self._refuse_existing()
        self._fps = fps if fps is not None else max(1, round(spec.control_hz))
        if self._fps < 1 or data_files_size_in_mb < 1:
            raise BurnishError("fps and data_files_size_in_mb must be at least 1")
        self._features = layout.features_of(spec)
        try:
            entry = json.loads(json.dumps(layout.burnish_entry(spec, meta or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise BurnishError(
                f"the dataset's meta and action limits must be finite plain JSON data: {error}"
            ) from error
        self._info = {"robot_type": robot_type, "data_files_size_in_mb": data_files_size_in_mb, "burnish": entry}
        self._root = self.path.parent / f".{self.path.name}.{secrets.token_hex(4)}.partial"
        self._file: pq.ParquetWriter | None = None
        self._file_number, self._file_bytes = -1, 0
        self._frames, self._tasks = 0, {}
        self._rows: list[dict[str, Any]] = []
        self._finals: list[pa.Table] = []
        # Low-dimensional columns are kept for exact quantiles: 4 bytes a number. Images need only a histogram each.
        self._values: dict[str, list[np.ndarray]] = {
            name: [] for name, feature in self._features.items() if feature["dtype"] != "image"
        }
        self._histograms: dict[str, np.ndarray] = {}
        self._root.mkdir(parents=True)

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def add(self, episode: Episode) -> None:
        number, length, first = len(self._rows), len(episode), self._frames
        check_fits(episode, self.spec, number)
        frame = np.arange(length)
        last = frame == length - 1
        vectors = {
            layout.column_of(key): x.cpu().numpy().reshape(length + 1, -1)
            for key, x in episode.obs.items()
            if not layout.is_image(key)
        }
        images = {layout.column_of(key): x.cpu().numpy() for key, x in episode.obs.items() if layout.is_image(key)}
        results = {
            "action": episode.action.cpu().numpy(),
            "next.reward": episode.reward.cpu().numpy(),
            "next.done": last & (episode.terminated or episode.truncated),
            "next.terminated": last & episode.terminated,
            "next.truncated": last & episode.truncated,
            "next.success": last & episode.success,
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(length, number),
            "index": first + frame,
            "task_index": np.full(length, self._tasks.setdefault(episode.task, len(self._tasks))),
        }
        rows = {name: x[:-1] for name, x in vectors.items()}
        rows |= {name: x.reshape(length, -1) for name, x in results.items()}
        encoded = {name: _png(x) for name, x in images.items()}
        arrays = {name: _vector(x) for name, x in rows.items()} | {name: x[:-1] for name, x in encoded.items()}
        table = pa.table({name: arrays[name] for name in self._features})
        self._write_rows(table)
        self._frames += length

        found = {name: statistics.of_vectors(x) for name, x in rows.items()}
        for name, x in rows.items():
            self._values[name].append(x)
        for name, x in images.items():
            histogram = statistics.image_histogram(x[:-1])
            self._histograms[name] = self._histograms.get(name, 0) + histogram
            found[name] = statistics.of_images(histogram, length)
        chunk_index, file_index = divmod(self._file_number, layout.CHUNKS_SIZE)
        row = {
            "episode_index": number,
            "tasks": [episode.task],
            "length": length,
            "data/chunk_index": chunk_index,
            "data/file_index": file_index,
            "dataset_from_index": first,
            "dataset_to_index": first + length,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        row |= {f"stats/{name}/{stat}": x.tolist() for name in found for stat, x in found[name].items()}
        self._rows.append(row)
        final = {name: _vector(x[-1:]) for name, x in vectors.items()} | {name: x[-1:] for name, x in encoded.items()}
        self._finals.append(
            pa.table({"episode_index": [number], "seed": pa.array([episode.seed], pa.int64()), **final})
        )

    def finish(self) -> Path:
        """Write what describes the whole set, flush everything to the disk, and give the folder its name."""
        if not self._rows:
            self.abort()
            raise BurnishError(f"no episodes were added, so no dataset was written at {self.path}")
        try:
            self._close_file()
            self._write_meta()
            _flush(self._root)
            self._refuse_existing()
            os.rename(self._root, self.path)
        except BaseException:
            self.abort()
            raise
        sync(self.path.parent)
        return self.path

    def abort(self) -> None:
        """Remove what was written; the target stays untouched."""
        self._close_file()
        shutil.rmtree(self._root, ignore_errors=True)

    def _refuse_existing(self) -> None:
        if self.path.exists() or self.path.is_symlink():
            raise BurnishError(f"{self.path} exists already; choose another path or remove it first")

    def _write_rows(self, table: pa.Table) -> None:
        """One row group per episode, so that an episode is one cheap read. Files roll over at LeRobot's size."""
        limit = self._info["data_files_size_in_mb"] * MEGABYTE
        if self._file is None or self._file_bytes + table.nbytes > limit:
            self._close_file()
            self._file_number, self._file_bytes = self._file_number + 1, 0
            chunk_index, file_index = divmod(self._file_number, layout.CHUNKS_SIZE)
            target = self._root / layout.DATA_PATH.format(chunk_index=chunk_index, file_index=file_index)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = pq.ParquetWriter(target, table.schema, compression="snappy", write_page_checksum=True)
        self._file.write_table(table, row_group_size=len(table))
        self._file_bytes += table.nbytes

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_meta(self) -> None:
        found = {name: statistics.of_vectors(np.concatenate(parts)) for name, parts in self._values.items()}
        found |= {name: statistics.of_images(x, self._frames) for name, x in self._histograms.items()}
        stats = {name: {stat: x.tolist() for stat, x in found[name].items()} for name in self._features}
        info = {
            "codebase_version": layout.VERSION,
            "total_episodes": len(self._rows),
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": layout.CHUNKS_SIZE,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": layout.DATA_PATH,
            "video_path": None,
            "features": self._features,
            **self._info,
        }
        episodes = self._root / layout.EPISODES_PATH
        episodes.parent.mkdir(parents=True)
        tables = {
            episodes: pa.Table.from_pylist(self._rows),
            self._root / layout.TASKS_PATH: _task_table(list(self._tasks)),
            self._root / layout.FINAL_OBS_PATH: pa.concat_tables(self._finals),
        }
        for target, table in tables.items():
            pq.write_table(table, target, write_page_checksum=True)
        for name, data in (("info", info), ("stats", stats)):
            (self._root / "meta" / f"{name}.json").write_text(json.dumps(data, indent=2, allow_nan=False))


def write_lerobot(
    episodes: Episodes,
    path: str | Path,
    *,
    fps: int | None = None,
    robot_type: str | None = None,
    data_files_size_in_mb: int = 100,
) -> Path:
    """The whole set or nothing. ``fps`` is the control rate, rounded, unless given."""
    with LeRobotWriter(
        path,
        episodes.spec,
        episodes.meta,
        fps=fps,
        robot_type=robot_type,
        data_files_size_in_mb=data_files_size_in_mb,
    ) as writer:
        for episode in episodes:
            writer.add(episode)
    return writer.path


def _vector(x: np.ndarray) -> pa.Array:
    """(F, n) -> fixed-size lists; (F, 1) -> a plain column, as LeRobot stores what has shape [1]."""
    flat = pa.array(np.ascontiguousarray(x).reshape(-1))
    return flat if x.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, x.shape[1])


def _png(frames: np.ndarray) -> pa.StructArray:
    """(F, C, H, W) uint8 -> PNG bytes. Equal neighbours (goals, still cameras) are compressed once."""
    encoded: list[bytes] = []
    for number, frame in enumerate(frames):
        if number > 0 and np.array_equal(frame, frames[number - 1]):
            encoded.append(encoded[-1])
            continue
        buffer = io.BytesIO()
        pixels = np.ascontiguousarray(frame[0] if len(frame) == 1 else frame.transpose(1, 2, 0))
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
        encoded.append(buffer.getvalue())
    paths = pa.nulls(len(encoded), pa.string())
    return pa.StructArray.from_arrays([pa.array(encoded, pa.binary()), paths], names=["bytes", "path"])


def _task_table(tasks: list[str]) -> pa.Table:
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


def _flush(root: Path) -> None:
    """A rename is atomic, but only what was flushed before it is sure to survive a power cut."""
    for path in [*root.rglob("*"), root]:
        sync(path)
