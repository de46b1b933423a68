"""OGBench: one npz file of flat arrays, trajectories one after the other.

    observations (N, ...), actions (N, A), terminals (N,), rewards?, masks?, valids?, qpos, qvel, button_states?

``terminals`` is 1 in the last row of each trajectory, which holds where the action of the row before led; its own
action led nowhere, and is dropped (ogbench/utils.py, load_dataset). That is an end of the recording and none of the
task, which ``masks`` say, 0 where the task is complete, in sets that have them. A file of what ``load_dataset`` returns
has ``next_observations`` in place of those rows; with ``compact_dataset`` it has the rows, where ``valids`` are 0, and
the row before each is a terminal, too. All worlds of OGBench with real actions take them from [-1, 1].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..episodes import Bad, Episodes
from .bounds import refusal
from .columns import Columns, cut
from .recording import Recording, Source, episodes_of, with_final

WANTED = ("observations", "actions", "terminals", "rewards", "masks", "next_observations", "valids")


def read(columns: Columns, bad: Bad | None = None) -> Episodes:
    """The trajectories of a file, in their order."""
    action = columns.actions()
    source = Source("ogbench", unit=True, notes=columns.note(WANTED))

    def trajectories() -> Iterator[Recording]:
        obs, reward, mask = columns.tree("observations"), columns.row("rewards"), columns.row("masks")
        following = columns.tree("next_observations")
        for part in cut(_ends(columns)):
            acted = part if following else slice(part.start, part.stop - 1)
            complete = [] if mask is None else mask[acted] == 0
            seen = {key: x[part] for key, x in obs.items()}
            if following:
                seen = with_final(columns.path, seen, {key: x[part][-1:] for key, x in following.items()})
            yield Recording(
                seen,
                action[acted],
                None if reward is None else reward[acted],
                terminated=any(complete[-1:]),
                truncated=not any(complete[-1:]),
                success=any(complete) if mask is not None else None,
            )

    return episodes_of(columns.path, source, trajectories(), bad)


def _ends(columns: Columns) -> np.ndarray:
    """(N,) whether a row is the last one of its trajectory."""
    terminal = columns.flags("terminals")
    if "valids" not in columns.names:
        return terminal
    valid = columns.flags("valids")
    if not np.array_equal(terminal & valid, np.append(~valid[1:], False)) or not terminal[~valid].all():
        what = "has other terminals than the row of each trajectory that is not valid, and the one before"
        raise refusal(columns.path, f"{what}; save what load_dataset returns without compact_dataset")
    return ~valid
