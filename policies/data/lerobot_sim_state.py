"""The simulator's own state beside every frame, so that a recording can be entered anywhere and played on bit by bit.

``sim_state/chunk-000/file-000.parquet`` lies outside what LeRobot reads. It is numbered like the data file that holds
the same episodes, with one row group per episode and T + 1 rows in each: row t is the world before ``action[t]``, the
last row where the last action led. A row is one string of bytes, little-endian, all tensors of the world's
``state_dict`` one after the other; their names, types and shapes stand in our entry of ``info.json``. Bytes, because a
NaN or a negative zero must come back as what it was.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..core.errors import BurnishError
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


def read_sim_state(path: str | Path, episode: int, frame: int) -> State:
    """The world of an episode before its action ``frame`` (T: after the last one), each tensor (1, ...): what
    ``load_state_dict`` of a single world takes. For several worlds, rows are joined with ``torch.cat``."""
    root = Path(path)
    try:
        info = files.read_info(root)
        entry = info["burnish"].get("sim_state")
        if entry is None:
            raise BurnishError(f"the dataset {root} was recorded without simulator states; collect with sim_state=true")
        tensors = _described(entry["tensors"])
        file, group = _row_group(root, entry["path"], episode, info["total_episodes"])
        width = sum(kind.itemsize * layout.size_of(shape) for _, kind, shape in tensors) + 32
        table = files.read_table(root, file, None, rows=info["total_frames"] + 1, width=width, group=group)
        owners = set(table["episode_index"].to_pylist())
        if owners != {episode} or table["frame_index"].to_pylist() != list(range(len(table))):
            raise BurnishError(f"{file} holds other frames than those of episode {episode} in row group {group}")
        if not 0 <= frame < len(table):
            raise BurnishError(
                f"episode {episode} of {root} has {len(table) - 1} actions, so frame={frame} must lie between 0 and "
                f"{len(table) - 1}"
            )
        return _unpacked(table["state"][frame].as_py(), tensors)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, MemoryError, pa.ArrowException) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BurnishError(f"the simulator states of {root} cannot be read ({reason})") from error


def _row_group(root: Path, template: Any, episode: int, episodes: int) -> tuple[str, int]:
    columns = ["episode_index", "data/chunk_index", "data/file_index"]
    table = files.read_table(root, layout.EPISODES_PATH, columns, rows=episodes, width=8 * len(columns))
    places = {row[columns[0]]: (row[columns[1]], row[columns[2]]) for row in table.to_pylist()}
    if episode not in places:
        raise BurnishError(f"the dataset {root} has {len(places)} episodes, but none of number {episode}")
    chunk_index, file_index = place = places[episode]
    group = sum(other == place and number < episode for number, other in places.items())
    template = files.checked_template(root, template)
    return template.format(chunk_index=chunk_index, file_index=file_index), group


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


def _unpacked(data: bytes, tensors: list[tuple[str, np.dtype, tuple[int, ...]]]) -> State:
    state, begin = {}, 0
    for name, kind, shape in tensors:
        end = begin + kind.itemsize * layout.size_of(shape)
        values = np.frombuffer(data[begin:end], kind.newbyteorder("<")).astype(kind)
        state[name] = torch.from_numpy(values).reshape(1, *shape)
        begin = end
    if begin != len(data):
        raise BurnishError(f"a simulator state has {len(data)} bytes, but {begin} are described")
    return state
