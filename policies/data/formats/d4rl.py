"""D4RL: one HDF5 file of flat arrays, episodes one after the other.

    observations (N, ...), actions (N, A), rewards, terminals (N,), timeouts?, next_observations?, infos/...

An episode ends where ``terminals`` or ``timeouts`` is 1. Its last action led to the last row of ``next_observations``,
which the older sets lack.
"""

from __future__ import annotations

from pathlib import Path

from ..episodes import Episodes
from .columns import Columns, recordings
from .hdf5 import Group
from .recording import Source, episodes_of

WANTED = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")


def read(columns: Columns) -> Episodes:
    """The episodes of such columns, in their order."""
    terminated, truncated = columns.flags("terminals"), columns.flags("timeouts")
    source = Source("d4rl", notes=columns.note(WANTED))
    return episodes_of(columns.path, source, recordings(columns, terminated, truncated, terminated | truncated))


def read_group(path: Path, root: Group) -> Episodes:
    """Those of an HDF5 file."""
    return read(Columns.of_group(root, WANTED))
