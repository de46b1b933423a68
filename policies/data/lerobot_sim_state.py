"""The simulator's own state beside every frame, so that a recording can be entered anywhere and played on bit by bit.

``sim_state/chunk-000/file-000.parquet`` lies outside what LeRobot reads. It is numbered like the data file that holds
the same episodes, with one row group per episode and T + 1 rows in each: row t is the world before ``action[t]``, the
last row where the last action led. A row is one string of bytes, little-endian, all tensors of the world's
``state_dict`` one after the other; their names, types and shapes stand in our entry of ``info.json``. Bytes, because a
NaN or a negative zero must come back as what it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..core.errors import BurnishError, reason
from ..runs.manifest import memory
from . import lerobot_files as files
from . import lerobot_layout as layout

PATH = "sim_state/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
State = dict[str, Tensor]


def described(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Our entry in ``info.json``."""
    kinds = {name: str(x.dtype).removeprefix("torch.") for name, x in state.items()}
    tensors = [{"name": name, "dtype": kinds[name], "shape": list(x.shape[1:])} for name, x in state.items()]
    return {"path": PATH, "tensors": tensors}


def packed(state: Mapping[str, Tensor], number: int) -> pa.Table:
    """The states of one episode, each (T + 1, ...), as the rows of its row group."""
    rows = len(next(iter(state.values())))
    parts = [_bytes_of(x, rows) for x in state.values()]
    joined = np.concatenate(parts, axis=1)
    column = pa.Array.from_buffers(pa.binary(joined.shape[1]), rows, [None, pa.py_buffer(joined.tobytes())])
    return pa.table({"episode_index": np.full(rows, number), "frame_index": np.arange(rows), "state": column})


def kept_in(path: str | Path) -> bool:
    """Whether that set has states."""
    root = Path(path)
    with _in_a_sentence(root):
        return "sim_state" in files.read_info(root).get("burnish", {})


def read_sim_state(path: str | Path, episode: int, frame: int) -> State:
    """The world of an episode before its action ``frame`` (T: after the last one), each tensor (1, ...): what
    ``load_state_dict`` of a single world takes. For several worlds, rows are joined with ``torch.cat``. It is for
    users, who enter a recording at a frame of their choice (docs/data.md); no verb does."""
    root = Path(path)
    with _in_a_sentence(root):
        kept = _Kept(root)
        rows = kept.rows(episode)
        if not 0 <= frame < len(rows):
            raise BurnishError(
                f"episode {episode} of {root} has {len(rows) - 1} actions, so frame={frame} must lie between 0 and "
                f"{len(rows) - 1}"
            )
        return _unpacked(rows[frame : frame + 1], kept.tensors)


def read_sim_states(path: str | Path) -> list[State]:
    """Those of all episodes, each tensor (T + 1, ...)."""
    root, states = Path(path), []
    with _in_a_sentence(root):
        kept = _Kept(root)
        left = kept.most
        if left * kept.width > memory() // 2:
            raise BurnishError(
                f"{root} promises {left} simulator states of {kept.width} bytes, more than fit in memory"
            )
        for episode in sorted(kept.places):
            rows = kept.rows(episode)
            left -= len(rows)
            if left < 0:
                raise BurnishError(f"{root} holds more simulator states than the frames that its info.json promises")
            states.append(_unpacked(rows, kept.tensors))
    return states


class _Kept:
    """The states of one set: what a row is, and where they lie."""

    def __init__(self, root: Path) -> None:
        self._root, info = root, files.read_info(root)
        entry = info["burnish"].get("sim_state")
        if entry is None:
            raise BurnishError(f"the dataset {root} was recorded without simulator states; collect with sim_state=true")
        self.tensors = _described(entry["tensors"])
        self._template = files.checked_template(root, entry, "path")
        self.width = sum(kind.itemsize * layout.size_of(shape) for _, kind, shape in self.tensors) + 32
        self._frames = info["total_frames"]
        self.most = self._frames + info["total_episodes"]  # rows: an episode has one more than frames
        columns = ["episode_index", "data/chunk_index", "data/file_index"]
        table = files.read_table(
            root, layout.EPISODES_PATH, columns, rows=info["total_episodes"], width=8 * len(columns)
        )
        self.places = {row[columns[0]]: (row[columns[1]], row[columns[2]]) for row in table.to_pylist()}

    def rows(self, episode: int) -> list[bytes]:
        """T + 1 of them."""
        if episode not in self.places:
            raise BurnishError(
                f"the dataset {self._root} has {len(self.places)} episodes, but none of number {episode}"
            )
        chunk_index, file_index = place = self.places[episode]
        group = sum(other == place and number < episode for number, other in self.places.items())
        file = self._template.format(chunk_index=chunk_index, file_index=file_index)
        table = files.read_table(self._root, file, None, rows=self._frames + 1, width=self.width, group=group)
        owners = set(table["episode_index"].to_pylist())
        if owners != {episode} or table["frame_index"].to_pylist() != list(range(len(table))):
            raise BurnishError(f"{file} holds other frames than those of episode {episode} in row group {group}")
        return table["state"].to_pylist()


@contextmanager
def _in_a_sentence(root: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, LookupError, TypeError, ValueError, AttributeError, MemoryError, pa.ArrowException) as error:
        raise BurnishError(f"the simulator states of {root} cannot be read ({reason(error)})") from error


def _described(tensors: Any) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    """(name, type, shape) of each tensor: plain numbers, and of a shape that there can be."""
    found = [(str(x["name"]), np.dtype(x["dtype"]), tuple(x["shape"])) for x in tensors]
    for name, kind, shape in found:
        if kind.kind not in "biuf" or any(type(n) is not int or not 0 <= n < 2**31 for n in shape):
            raise ValueError(f"{name[:60]} cannot be of {kind} and {shape!r:.60}")
    return found


def _bytes_of(x: Tensor, rows: int) -> np.ndarray:
    if sys.byteorder != "little":
        raise BurnishError("simulator states are written on little-endian machines only")
    width = layout.size_of(tuple(x.shape[1:]))  # spelt out: a world without muscles has a state of width 0
    return np.ascontiguousarray(x.cpu().numpy()).reshape(rows, width).view(np.uint8)


def _unpacked(rows: list[bytes], tensors: list[tuple[str, np.dtype, tuple[int, ...]]]) -> State:
    """Each tensor (rows, ...)."""
    width = sum(kind.itemsize * layout.size_of(shape) for _, kind, shape in tensors)
    for row in rows:
        if len(row) != width:
            raise BurnishError(f"a simulator state has {len(row)} bytes, but {width} are described")
    state, begin = {}, 0
    for name, kind, shape in tensors:
        end = begin + kind.itemsize * layout.size_of(shape)
        values = np.frombuffer(b"".join(row[begin:end] for row in rows), kind.newbyteorder("<")).astype(kind)
        state[name] = torch.from_numpy(values).reshape(len(rows), *shape)
        begin = end
    return state
