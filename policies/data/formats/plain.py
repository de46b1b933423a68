"""A plain npz file: flat arrays, written by ``numpy.savez`` under these names.

observations        (N, ...), or observations/<name> for several; pictures (N, H, W, C) uint8
actions             (N, A)
terminated          (N,) 1 where an episode ended for good      } either these two,
truncated           (N,) 1 where it was cut off                 }
episode_ends        (E,) the row behind the last one of each    } or this one
rewards, success    (N,), optional
next_observations   as observations, optional: of each episode the last row is read
control_hz          one number, optional
"""

from __future__ import annotations

import numpy as np

from ..episodes import Bad, Episodes
from .bounds import refusal
from .columns import Columns, recordings
from .recording import Source, episodes_of, rate_of

ENDS = ("terminated", "truncated", "episode_ends")
WANTED = ("observations", "actions", "rewards", "success", "next_observations", "control_hz", *ENDS)


def read(columns: Columns, bad: Bad | None = None) -> Episodes:
    """The episodes of a file, in their order."""
    if not columns.names & {*ENDS}:
        both = " and ".join(ENDS[:2])
        if "terminals" in columns.names:
            said = "has terminals, but no timeouts, so nothing says where episodes were cut off"
            raise refusal(columns.path, f"{said}; add timeouts, or write {both} instead")
        raise refusal(columns.path, f"does not say where episodes end; {both}, or {ENDS[2]}, is needed")
    terminated, truncated = columns.flags("terminated"), columns.flags("truncated")
    ends = terminated | truncated
    if not len(ends):
        raise refusal(columns.path, "is empty: its actions have no rows")
    if "episode_ends" in columns.names:
        stops = columns.whole("episode_ends")
        if not len(stops) or not (np.diff(stops, prepend=0) > 0).all() or stops[-1] != len(ends):
            raise refusal(columns.path, f"has episode_ends that do not rise to the {len(ends)} rows of its actions")
        ends[stops - 1] = True
    source = Source("npz", control_hz=_rate(columns), notes=columns.note(WANTED))
    return episodes_of(columns.path, source, recordings(columns, terminated, truncated, ends), bad)


def _rate(columns: Columns) -> float | None:
    found = columns.found.get(("control_hz",))
    if found is None:
        return None
    said = np.ravel(found.read())
    # As it was written, not as float32 has it.
    return rate_of(columns.path, "control_hz", float(f"{said[0]:.6g}") if len(said) == 1 else said[:3].tolist())
