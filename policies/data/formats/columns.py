"""Files that hold all episodes one after the other, in arrays of as many rows as there are actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..episodes import PASSED_OVER
from .bounds import refusal
from .hdf5 import Group
from .recording import Array, Leaves, Recording, actions_of, with_final


@dataclass
class Columns:
    """The columns of a file by the names that lead to them. Those that a reader does not ask for are passed over."""

    path: Path
    found: Mapping[tuple[str, ...], Array]
    names: set[str]  # the first part of each name, also of what is not examined

    @classmethod
    def of_group(cls, root: Group, wanted: tuple[str, ...]) -> Columns:
        """Those of an HDF5 file."""
        names = [name for name in wanted if name in root]
        return cls(root.path, {(n, *key): x for n in names for key, x in root.leaves(n).items()}, set(root))

    @classmethod
    def of_arrays(cls, path: Path, found: Mapping[tuple[str, ...], Array]) -> Columns:
        """Those of an npz file."""
        return cls(path, found, {key[0] for key in found})

    def note(self, wanted: tuple[str, ...]) -> list[str]:
        """The note on columns that are passed over, if there are such."""
        others = sorted(self.names - {*wanted})
        return [PASSED_OVER + ", ".join(others)] if others else []

    def actions(self) -> np.ndarray:
        """(N, A)"""
        return actions_of(self.path, self._one("actions"))

    def tree(self, name: str) -> Leaves:
        """The array ``name``, or those below that name; each (N, ...)."""
        return {key[1:]: self._rows(x) for key, x in self.found.items() if key[0] == name}

    def row(self, name: str) -> np.ndarray | None:
        """One number for each action, (N,); None where there is no such column."""
        if name not in self.names:
            return None
        found = self._rows(self._one(name))
        if found.size != len(found):
            raise refusal(self.path, f"has {name!r} of shape {found.shape}, and one number in each row is needed")
        return found.reshape(-1)

    def flags(self, name: str) -> np.ndarray:
        """(N,) bool, all False where there is no such column."""
        found = self.row(name)
        if found is None:
            return np.zeros(self._length(), np.bool_)
        if not np.isin(found, (0, 1)).all():
            raise refusal(self.path, f"has other values than 0 and 1 in {name!r}")
        return found != 0

    def whole(self, name: str) -> np.ndarray:
        """An array of whole numbers, of any length."""
        column = self._one(name)
        if column.dtype.kind not in "iu" or len(column.shape) != 1:
            raise refusal(self.path, f"has {name!r} of type {column.dtype}, and a list of whole numbers is needed")
        return column.read(kind=np.int64)

    def _one(self, name: str) -> Array:
        if (name,) not in self.found:
            raise refusal(self.path, f"has no array {name!r}")
        return self.found[(name,)]

    def _length(self) -> int:
        """The number of rows."""
        shape = self._one("actions").shape
        if not shape:
            raise refusal(self.path, "has a single number as 'actions', and an array of shape (N, A) is needed")
        return shape[0]

    def _rows(self, column: Array) -> np.ndarray:
        rows = self._length()
        if column.shape[:1] != (rows,):
            raise refusal(self.path, f"has {column.name!r} of shape {column.shape}, but actions of {rows} rows")
        return column.read()


def cut(ends: np.ndarray) -> Iterator[slice]:
    """The rows of each episode, where ``ends`` (N,) says which are the last ones; rows behind them are an episode."""
    stops = [*(np.flatnonzero(ends) + 1).tolist(), len(ends)]
    for start, stop in zip([0, *stops[:-1]], stops, strict=True):
        if start < stop:
            yield slice(start, stop)


def recordings(
    columns: Columns, terminated: np.ndarray, truncated: np.ndarray, ends: np.ndarray, resets: bool = False
) -> Iterator[Recording]:
    """The episodes between ``ends``, and the flags of how they ended. With ``resets`` an episode also ends where its
    last action led elsewhere than to the next row."""
    obs, action, reward = columns.tree("observations"), columns.actions(), columns.row("rewards")
    following, success = columns.tree("next_observations"), columns.flags("success")
    for key in obs.keys() & following.keys() if resets else ():
        if following[key].shape == obs[key].shape:  # others are refused below
            elsewhere = (following[key][:-1] != obs[key][1:]).any(tuple(range(1, obs[key].ndim)))
            ends = ends | np.append(elsewhere, False)
    for part in cut(ends):
        last = part.stop - 1
        final = {key: x[last : part.stop] for key, x in following.items()}
        yield Recording(
            with_final(columns.path, {key: x[part] for key, x in obs.items()}, final),
            action[part],
            None if reward is None else reward[part],
            bool(terminated[last]),
            bool(truncated[last]),
            bool(success[part].any()) if "success" in columns.names else None,
        )
