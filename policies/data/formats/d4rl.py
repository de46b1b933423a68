"""D4RL: one HDF5 file of flat arrays, episodes one after the other.

    observations (N, ...), actions (N, A), rewards, terminals (N,), timeouts?, next_observations?, infos/...

An episode ends where ``terminals`` or ``timeouts`` is 1. Its last action led to the last row of ``next_observations``,
which the older sets lack.
"""

from __future__ import annotations

from pathlib import Path

from ..episodes import Bad, Episodes
from .columns import Columns, recordings
from .hdf5 import Group
from .recording import Source, episodes_of

WANTED = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations", "success")


def read(columns: Columns, bad: Bad | None = None) -> Episodes:
    """The episodes of such columns, in their order."""
    terminated, truncated = columns.flags("terminals"), columns.flags("timeouts")
    source = Source("d4rl", notes=columns.note(WANTED))
    played = recordings(columns, terminated, truncated, terminated | truncated)
    return episodes_of(columns.path, source, played, bad)


def read_group(path: Path, root: Group, bad: Bad | None = None) -> Episodes:
    """Those of an HDF5 file."""
    return read(Columns.of_group(root, WANTED), bad)
