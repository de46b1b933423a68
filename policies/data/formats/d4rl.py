"""D4RL: one HDF5 file of flat arrays, episodes one after the other.

    observations (N, ...), actions (N, A), rewards, terminals (N,), timeouts?, next_observations?, infos/...

An episode ends where ``terminals`` or ``timeouts`` is 1. Its last action led to the last row of ``next_observations``,
which the older sets lack. Without ``timeouts`` a reset is seen where ``next_observations`` differ from the next row.
"""

from __future__ import annotations

from pathlib import Path

from ..episodes import Bad, Episodes, Mine
from .bounds import refusal
from .columns import Columns, recordings
from .hdf5 import Group
from .recording import Source, episodes_of

WANTED = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations", "success")

RESETS_SEEN = "there are no timeouts: an episode also ends where its last action led elsewhere than to the next row"
RESETS_UNSEEN = "there are no timeouts: resets cannot be seen, so an episode here may be several"


def read(columns: Columns, bad: Bad | None = None) -> Episodes:
    """The episodes of such columns, in their order."""
    terminated, truncated = columns.flags("terminals"), columns.flags("timeouts")
    source, resets = Source("d4rl", notes=columns.note(WANTED)), "timeouts" not in columns.names
    if resets:
        seen = "next_observations" in columns.names
        if not seen and not terminated.any():
            what = f"has neither a terminal nor timeouts, so it would be one episode of {len(terminated)} rows"
            raise refusal(columns.path, f"{what}; add timeouts, which are 1 in the last row of each episode")
        source.notes.append(RESETS_SEEN if seen else RESETS_UNSEEN)
    played = recordings(columns, terminated, truncated, terminated | truncated, resets)
    return episodes_of(columns.path, source, played, bad)


def read_group(path: Path, root: Group, bad: Bad | None = None, _: Mine | None = None) -> Episodes:
    """Those of an HDF5 file, all of them: they have no groups of their own."""
    return read(Columns.of_group(root, WANTED), bad)
