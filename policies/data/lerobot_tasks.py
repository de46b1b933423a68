"""Tasks of a LeRobot set that may be untrusted: their texts, and the one of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BurnishError
from . import lerobot_files as files
from . import lerobot_layout as layout

TASK = 1 << 12  # bytes in memory of a task's words


class Tasks:
    """The texts of all tasks by their numbers, and how many episodes have several."""

    def __init__(self, root: Path, info: Mapping[str, Any]) -> None:
        self._root, self.several, listed = root, 0, info.get("total_tasks")
        # A file that someone has put together may say too few tasks, so the number is no more than a bound.
        most = max(info["total_episodes"], min(listed, info["total_frames"]) if type(listed) is int else 0)
        old = info["codebase_version"] in layout.OLDER
        self._file = layout.OLD_TASKS_PATH if old else layout.TASKS_PATH
        self._texts = self._of_lines(most) if old else self._of_table(most)

    def of(self, indices: np.ndarray, number: int) -> str:
        """The task of episode ``number`` with these (T,) numbers of tasks: that of its first frame."""
        found = list(dict.fromkeys(indices.tolist()))
        if unknown := [index for index in found if index not in self._texts]:
            raise self._error(f"has task_index={unknown[0]} in episode {number}, which {self._file} does not list")
        self.several += len(found) > 1
        return self._texts[found[0]]

    def __len__(self) -> int:
        return len(self._texts)

    def _of_lines(self, most: int) -> dict[int, str]:
        lines = files.read_lines(self._root, self._file, most)
        if not all(type(x.get("task_index")) is int and isinstance(x.get("task"), str) for x in lines):
            raise self._error(f"has a {self._file} with other lines than task_index and task")
        return {x["task_index"]: x["task"] for x in lines}

    def _of_table(self, most: int) -> dict[int, str]:
        if not (self._root / self._file).exists():
            return {}
        table = files.read_table(self._root, self._file, None, rows=most, width=TASK)
        if "task_index" not in table.column_names:
            raise self._error(f"lacks the columns ['task_index'] in {self._file}")
        # The other column is the index of a pandas frame; its name differs between LeRobot's versions.
        names = [name for name in table.column_names if name != "task_index"]
        if len(names) != 1:
            raise self._error(f"has a {self._file} with columns {table.column_names}")
        return dict(zip(table["task_index"].to_pylist(), map(str, table[names[0]].to_pylist()), strict=True))

    def _error(self, what: str) -> BurnishError:
        return BurnishError(f"the dataset {self._root} {what}")
