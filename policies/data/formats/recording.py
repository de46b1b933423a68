"""From the arrays of a file to ``Episodes``: one arrangement of observations, and one list of what had to be filled in.

Observations are arranged as those of Gymnasium's worlds are (`policies/data/observation.py`), so that a policy that
learnt from a file can act in the world from which the file came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ...core.errors import BurnishError
from ...core.spec import UNKNOWN, ActionSpec, EnvSpec
from ..episodes import (
    ASSUMED_HZ,
    LIMIT_TOLERANCE,
    NO_END,
    NO_ENDS,
    NO_FINAL,
    NO_LIMITS,
    NO_RATE,
    NO_REWARD,
    NO_SUCCESS,
    PASSED_OVER,
    Bad,
    Episode,
    Episodes,
    Mine,
    action_limits,
    usable,
    why_empty,
)
from ..observation import Layout
from .bounds import naming, refusal

FASTEST_HZ, LONGEST = 10_000, 10_000_000  # what a rate and a number of steps can be
Leaves = Mapping[tuple[str, ...], np.ndarray]


@dataclass
class Recording:
    """One episode as a file has it: T actions, and observations (T, ...) or, with the final one, (T + 1, ...)."""

    obs: Leaves
    action: np.ndarray
    reward: np.ndarray | None = None
    terminated: bool | None = None  # None: the file does not say
    truncated: bool | None = None
    success: bool | None = None
    seed: int | None = None
    place: int | None = None  # among all episodes of the file, where some stay unread


@dataclass
class Source:
    """The world of a file's recordings, as far as the file says."""

    name: str  # of the format
    limits: ActionSpec | None = None  # of the actuators; None: those of the data
    unit: bool = False  # or they are [-1, 1], whatever the number of actuators
    control_hz: float | None = None
    action_mode: str = UNKNOWN
    max_steps: int | None = None  # None: the longest episode
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def picked(names: Mapping[int, str], mine: Mine | None) -> Iterator[tuple[int, int, str]]:
    """Place, number and name of each episode of a file that is read: of all, or of those that are ``mine``."""
    which = range(len(names)) if mine is None else {*mine(len(names))}
    return ((place, *pair) for place, pair in enumerate(names.items()) if place in which)


def episodes_of(path: Path, source: Source, recordings: Iterable[Recording], bad: Bad | None = None) -> Episodes:
    """The recordings of a file as ``Episodes``; ``meta["notes"]`` says what was filled in. Those that cannot be used go
    into ``bad`` where it is given."""
    notes, made, layout, like, first = source.notes, [], None, None, 0
    for number, recording in enumerate(recordings):
        number = number if recording.place is None else recording.place
        obs = {key: x for key, x in recording.obs.items() if _is_read(x)}
        if layout is None or not made:  # the first that can be used says what the others have to be like
            if passed := sorted(".".join(key) for key in recording.obs if key not in obs):
                notes.append(PASSED_OVER + ", ".join(passed))
            layout, like, first = _layout(path, obs), (_kinds(obs), recording.action.shape[1:]), number
        with usable(number, path, bad):
            if (_kinds(obs), recording.action.shape[1:]) != like:
                raise BurnishError(f"its arrays have other names, shapes or types than those of episode {first}")
            made.append(_episode(recording, obs, layout, number, notes))
    if layout is None or not made:
        raise refusal(path, why_empty(bad))
    hz, limits, dim = source.control_hz, source.limits, made[0].action.shape[1]
    if source.unit:
        limits = ActionSpec((-1.0,) * dim, (1.0,) * dim)
    if hz is None:
        notes.append(NO_RATE)
    if limits is None or not _within(made, limits):
        notes.append(NO_LIMITS)
        limits = action_limits(made)
    longest = max(map(len, made))
    spec = EnvSpec(layout.spec, limits, hz or ASSUMED_HZ, source.action_mode, max(source.max_steps or 0, longest))
    meta = {"source": source.name, **source.meta}
    names = {key: found for key in ("state", "goal") if (found := layout.names(key))}
    with naming(path):
        return Episodes(made, spec.checked(), {**meta, "notes": list(dict.fromkeys(notes))} if notes else meta, names)


class Array(Protocol):
    """An array of a file, not yet read."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, first: int = 0, kind: type | None = None) -> np.ndarray:
        """The rows from ``first`` on (negative: from the end), as they are kept in memory, or as ``kind``."""
        ...


def actions_of(path: Path, found: Array) -> np.ndarray:
    """The actions of an episode or of a file. Whole numbers that choose one of a few actions are refused."""
    if found.dtype.kind != "f" and len(found.shape) < 2:
        raise refusal(path, f"has {found.name!r} of type {found.dtype}, but policies here act in real numbers")
    return found.read()


def json_object(found: Any) -> dict[str, Any]:
    """An object of JSON, or the text of one, as some write in their JSON; empty where it is none."""
    with suppress(RecursionError, ValueError):
        found = json.loads(found) if isinstance(found, str) else found
    return found if isinstance(found, dict) else {}


def rate_of(path: Path, name: str, found: Any) -> float | None:
    """The rate (Hz) that a file gives under that name, None where it gives none."""
    if found is None:
        return None
    if type(found) not in (int, float) or not 0 < found <= FASTEST_HZ:
        what = f"has {name}={found!r:.40}, which is no rate from above 0 to {FASTEST_HZ:g} Hz"
        raise refusal(path, f"{what}; correct it or leave it out")
    return float(found)


def whole(found: Any) -> int | None:
    """A number of steps that a file names, None where it is none."""
    return found if type(found) is int and 0 < found <= LONGEST else None


def with_final(path: Path, obs: Leaves, final: Leaves) -> Leaves:
    """Observations with one more row, where there is one of each."""
    if not obs.keys() <= final.keys():
        return obs
    if any(final[key].shape[1:] != x.shape[1:] for key, x in obs.items()):
        raise refusal(path, "has observations of other shapes among those that follow an action")
    return {key: np.concatenate([x, final[key]]) for key, x in obs.items()}


def seed_of(found: Any) -> int | None:
    """A seed that a file names, None where it is none that fits into 64 bits."""
    return found if type(found) is int and abs(found) < 1 << 63 else None


def ended(found: Array) -> bool:
    """The last of the flags of an episode."""
    return bool(found.read(-1).any())


def _is_read(x: np.ndarray) -> bool:
    """Whether the array holds a picture of each row, or numbers that belong into a vector."""
    return 1 <= x.ndim <= 3 or (x.ndim == 4 and x.dtype == np.uint8)


def _kinds(obs: Leaves) -> dict[tuple[str, ...], tuple[tuple[int, ...], bool]]:
    return {key: (x.shape[1:], x.dtype == np.uint8) for key, x in obs.items()}


def _layout(path: Path, obs: Leaves) -> Layout:
    if not obs:
        raise refusal(path, "has no observations of numbers or pictures")
    joined = [".".join(key) for key in obs]
    if twice := sorted({name for name in joined if joined.count(name) > 1}):
        raise refusal(path, f"has two observations that would both be called {twice[0]!r}")
    leaves = [{"path": key, "kind": "Box", "dtype": str(x.dtype), "shape": x.shape[1:]} for key, x in obs.items()]
    return Layout(leaves, str(path))


def _episode(recording: Recording, obs: Leaves, layout: Layout, number: int, notes: list[str]) -> Episode:
    action = recording.action
    if action.ndim == 1 and action.dtype.kind == "f":
        action = action[:, None]
    if action.ndim != 2 or action.dtype == np.bool_:
        raise BurnishError(f"its actions have shape {action.shape}, and real numbers of shape (T, A) are needed")
    length, rows = len(action), {len(x) for x in obs.values()}
    if not length:
        raise BurnishError("it has no actions")
    if len(rows) > 1 or not rows <= {length, length + 1}:
        raise BurnishError(f"it has {length} actions, but observations of {sorted(rows)} rows")
    seen = layout.room(length + 1)
    if rows == {length}:
        notes.append(NO_FINAL)
        obs = {key: np.concatenate([x, x[-1:]]) for key, x in obs.items()}
    layout.write({"obs." + ".".join(key): x for key, x in obs.items()}, seen)
    reward, terminated, truncated = recording.reward, bool(recording.terminated), bool(recording.truncated)
    if reward is None:
        notes.append(NO_REWARD)
        reward = np.zeros(length, np.float32)
    if reward.shape == (length, 1):
        reward = reward[:, 0]
    if recording.success is None:
        notes.append(NO_SUCCESS)
    if not terminated and not truncated:
        truncated = True
        notes.append(NO_ENDS if recording.truncated is None else NO_END)
    return Episode(
        obs={key: torch.from_numpy(x) for key, x in seen.items()},
        action=torch.from_numpy(action.astype(np.float32)),
        reward=torch.from_numpy(reward.astype(np.float32)),
        terminated=terminated,
        truncated=truncated,
        success=bool(recording.success),
        seed=number if recording.seed is None else recording.seed,
    )


def _within(episodes: Iterable[Episode], limits: ActionSpec) -> bool:
    low, high = (torch.tensor(x, dtype=torch.float64) for x in (limits.low, limits.high))
    slack = LIMIT_TOLERANCE * (high - low) / 2
    return all(
        episode.action.shape[1] == limits.dim
        and bool(((episode.action >= low - slack) & (episode.action <= high + slack)).all())
        for episode in episodes
    )
