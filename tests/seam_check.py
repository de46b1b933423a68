"""What a stored decision must say, checked in plain Python against a log of what the world really saw.

Nothing of the package is imported here: the definitions are written a second time, slowly. A world of the seam tests
tells in every observation where it comes from: ``state`` * 8 is (world, episode, tick), the image is filled with the
tick, and ``goal`` * 8 is (7 world, 7 episode).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

UNIT = 8.0


class Tick(NamedTuple):
    """One control tick of one world: ``tick`` counts from 1, ``end`` is "", "terminated" or "truncated"."""

    episode: int
    tick: int
    action: tuple[float, ...]  # what the actuators got, in their units
    reward: float
    end: str


class Place(NamedTuple):
    world: int
    episode: int
    tick: int


def base_chunk(place: Place, horizon: int, dim: int) -> list[list[float]]:
    """What the scripted base would do at a place: any formula that tells places apart."""
    world, episode, tick = place
    return [
        [((7 * world + 3 * episode + 5 * tick + 2 * i + j) % 17) / 17 - 0.5 for j in range(dim)] for i in range(horizon)
    ]


class Checker:
    """``log[world]`` in the order of time; ``rows`` (T, N, ...) in the order of time. ``complaints`` collects."""

    def __init__(
        self,
        log: Sequence[Sequence[Tick]],
        *,
        gamma: float,
        execute: int,
        low: Sequence[float],
        high: Sequence[float],
        history: int = 1,
    ) -> None:
        self.log, self.gamma, self.execute, self.history = log, gamma, execute, history
        self.low, self.high = low, high
        self.complaints: list[str] = []

    def expect(self, condition: Any, *facts: object) -> None:
        if not condition:
            self.complaints.append(" ".join(map(str, facts)))

    def near(self, got: Any, expected: float, *facts: object) -> None:
        close = math.isfinite(float(got)) and abs(float(got) - expected) <= 1e-5 * max(1.0, abs(expected))
        self.expect(close, *facts, "is", float(got), "and not", expected)

    def place_of(self, obs: Mapping[str, np.ndarray], at: tuple[int, ...], name: str) -> Place | None:
        """Where an observation comes from; every key of it must say the same."""
        frames = np.atleast_2d(np.asarray(obs["state"][at], dtype=np.float64)) * UNIT
        self.expect(len(frames) == self.history, name, at, "has", len(frames), "frames")
        if not np.isfinite(frames).all() or (frames != np.round(frames)).any():
            self.complaints.append(f"{name} {at} is no observation of any world: {frames.tolist()}")
            return None
        place = Place(*(int(x) for x in frames[-1]))
        for back, frame in enumerate(reversed(frames.tolist())):
            told = [place.world, place.episode, max(place.tick - back, 0)]
            self.expect(frame == told, name, at, "remembers", frame, "instead of", told)
        for key in obs:
            if key.startswith("image."):
                picture = np.asarray(obs[key][at])
                stack = picture if self.history > 1 else picture[None]
                for back in range(len(stack)):
                    shows = np.unique(stack[len(stack) - 1 - back]).tolist()
                    self.expect(shows == [max(place.tick - back, 0)], name, at, key, "shows", shows, "at", place)
        if "goal" in obs:
            goal = (np.asarray(obs["goal"][at], dtype=np.float64) * UNIT).tolist()
            self.expect(goal == [7 * place.world, 7 * place.episode], name, at, "has the goal", goal, "at", place)
        return place

    def rows(self, rows: Mapping[str, Any], known_next: np.ndarray | None = None) -> None:
        """``known_next`` (T, N) says where ``next_obs`` is stored; everywhere by default."""
        length, worlds = rows["reward"].shape
        for world in range(worlds):
            first = self.place_of(rows["obs"], (0, world), "obs")
            starts = [i for i, tick in enumerate(self.log[world]) if first and self._begins(tick, first)]
            if first is None or first.world != world or len(starts) != 1:
                self.complaints.append(f"the first row of world {world} is nowhere in the log: {first}")
                continue
            cursor = starts[0]
            for t in range(length):
                known = known_next is None or bool(known_next[t, world])
                cursor = self._row(rows, t, world, cursor, known)
                if cursor < 0:
                    break

    @staticmethod
    def _begins(tick: Tick, place: Place) -> bool:
        return (tick.episode, tick.tick) == (place.episode, place.tick + 1)

    def _row(self, rows: Mapping[str, Any], t: int, world: int, cursor: int, known_next: bool) -> int:
        """Check one decision that begins at ``cursor`` of the log; returns where the next one must begin."""
        at, log = (t, world), self.log[world]
        if cursor >= len(log):
            self.complaints.append(f"row {at} is stored, but the world never played it")
            return -1
        place = Place(world, log[cursor].episode, log[cursor].tick - 1)
        seen = self.place_of(rows["obs"], at, "obs")
        self.expect(seen == place, "obs", at, "is", seen, "and not", place)
        played: list[Tick] = []
        for tick in log[cursor : cursor + self.execute]:
            played.append(tick)
            if tick.end:
                break
        end = played[-1].end
        self.expect(end or len(played) == self.execute, "the chunk at", at, "was cut short without an end")
        self.expect(int(rows["steps"][at]) == len(played), "steps", at, rows["steps"][at], "and not", len(played))
        total = sum(self.gamma**i * tick.reward for i, tick in enumerate(played))
        self.near(rows["reward"][at], total, "reward", at)
        discount = 0.0 if end == "terminated" else self.gamma ** len(played)
        self.near(rows["discount"][at], discount, "discount", at)
        self.expect(bool(rows["ended"][at]) == bool(end), "ended", at)
        self.expect(bool(rows["terminated"][at]) == (end == "terminated"), "terminated", at)
        if "executed" in rows:
            self._executed(rows["executed"][at], played, at)
        if known_next:
            led, goes = self.place_of(rows["next_obs"], at, "next_obs"), place._replace(tick=place.tick + len(played))
            self.expect(led == goes, "next_obs", at, "is", led, "and not", goes)
        return cursor + len(played)

    def _executed(self, executed: np.ndarray, played: Sequence[Tick], at: tuple[int, int]) -> None:
        for i in range(self.execute):
            for j, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
                unit = 2 * (played[i].action[j] - low) / (high - low) - 1 if i < len(played) else 0.0
                self.near(executed[i, j], unit, "executed", at, "tick", i, "joint", j)

    def bootstrap(self, rows: Mapping[str, Any], stored: Sequence[int]) -> None:
        """A rollout keeps where it led of the rows that ended and of its last rows, each once."""
        length, worlds = rows["reward"].shape
        needed = sorted(
            t * worlds + n for t in range(length) for n in range(worlds) if rows["ended"][t, n] or t == length - 1
        )
        self.expect(sorted(stored) == needed, "bootstrap rows", sorted(stored), "and not", needed)

    def base_actions(self, rows: Mapping[str, Any], chunk: int, start: int, horizon: int) -> None:
        """``base_action`` of a view on the scripted base, whose chunks of ``chunk`` ticks begin at ``start``.

        The view of single ticks ((A,)) shows the action that comes next, the view of chunks ((n, A)) all of them.
        Where a world terminated, nothing comes next and nothing is expected.
        """
        dim = len(self.low)
        for name in ("obs", "next_obs"):
            shown = rows[name]["base_action"]
            for at in np.ndindex(rows["reward"].shape):
                place = self.place_of(rows[name], at, name)
                if place is None or (name == "next_obs" and rows["terminated"][at]):
                    continue
                wanted: Any
                if shown.ndim == 3:
                    planned = place._replace(tick=place.tick - place.tick % chunk)
                    wanted = base_chunk(planned, horizon, dim)[start + place.tick % chunk]
                else:
                    wanted = base_chunk(place, horizon, dim)[start : start + chunk]
                fits = np.allclose(shown[at], wanted, atol=1e-6)
                self.expect(fits, name, at, "shows base_action", shown[at].tolist(), "and not", wanted)
