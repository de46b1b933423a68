"""The expert of gym-pusht (Chi et al. 2023, arXiv 2303.04137): it turns the T, and then shifts it along its own axes.

In that world the T has no momentum and nothing rubs, so a push through its middle only shifts it, and one beside the
middle turns it. Between pushes the disc goes around the T, along straight lines between places beside it, so far off
that a policy which imitates this and errs does not push the T on its ways. The expert remembers nothing: what it does
is a function of the poses of the disc and the T.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

RADIUS = 15.0  # px, of the disc
BOXES = np.array([[-60.0, 0.0, 60.0, 30.0], [-15.0, 30.0, 15.0, 120.0]])  # bar and stem: left, low, right, high
CENTRE = np.array([0.0, 45.0])  # px, of mass, about which the T turns
WALLS = (24.0, 488.0)  # px, where the middle of the disc may be
STILL = np.full(2, np.nan)  # an action is the place to go to

# Places on the outline of the T, and the direction from there into it.
TURNS = [(15, 105, -1, 0), (-15, 105, 1, 0), (48, 0, 0, 1), (-48, 0, 0, 1)]
SHIFTS = [(15, 52, -1, 0), (-15, 52, 1, 0), (0, 0, 0, 1), (0, 120, 0, -1)]
BESIDES = [(60, 15, -1, 0), (-60, 15, 1, 0), (42, 30, 0, -1), (-42, 30, 0, -1)]  # shift and turn, where walls hinder
PLACES = np.array(TURNS + SHIFTS + BESIDES, dtype=float)
ON, INTO = PLACES[:, :2], PLACES[:, 2:]
TOUCH = ON - RADIUS * INTO  # the disc there
ASIDE = INTO[:, ::-1]  # along the outline
LEVERS = (ON - CENTRE)[:, 0] * INTO[:, 1] - (ON - CENTRE)[:, 1] * INTO[:, 0]  # px
# What is pushed first: the first and the last of some places, and the px that a push there must bring.
ORDER = ((0, 2, 2.5), (2, 4, 2.5), (4, 12, 0.3), (0, 4, 0.3))
WEIGHTS = np.repeat([1.0, 0.5], [8, 4])  # of a px there
MOST_TURN, SKEW = 1.2, 0.8  # rad, of one push, and beyond which nothing is shifted beside the middle

GAP, ROOM = 22.0, RADIUS + 6.0  # px, from the T to the places of a disc that goes around it; the least on its ways
CORNERS = np.array([(-1, -1), (1, -1), (-1, 1), (1, 1)]) * (RADIUS + GAP) * 0.8
AROUND = np.concatenate(
    [
        TOUCH - GAP * INTO,
        np.array([(-60, 0), (60, 0), (-60, 30), (60, 30)]) + CORNERS,
        np.array([(-15, 120), (15, 120)]) + CORNERS[2:],
        np.array([(-15, 30), (15, 30)]) + np.array([(-1, 1), (1, 1)]) * (RADIUS + GAP),
    ]
)
LEAD, FREE_LEAD = 45.0, 60.0  # px, that the action is ahead of the disc in a push, and on the way to one


def turned(vector: NDArray, angle: float) -> NDArray:
    """(..., 2) by an angle."""
    cos, sin, x, y = np.cos(angle), np.sin(angle), vector[..., 0], vector[..., 1]
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)


def clearance(points: NDArray) -> NDArray:
    """(...) px from points (..., 2) in the frame of the T to its outline; 0 inside."""
    low, high = BOXES[:, :2], BOXES[:, 2:]
    out = np.maximum(np.maximum(low - points[..., None, :], points[..., None, :] - high), 0.0)
    return np.hypot(out[..., 0], out[..., 1]).min(axis=-1)


def lane(start: NDArray, end: NDArray) -> NDArray:
    """(...) px of room along the straight line from ``start`` to ``end`` (..., 2)."""
    share = np.linspace(0.0, 1.0, 25)[:, None]
    return clearance(start[..., None, :] + share * (end - start)[..., None, :]).min(axis=-1)


def _ways() -> NDArray:
    """(K, K) px between places around the T by straight lines that clear it; inf where there is none."""
    free = lane(AROUND[:, None], AROUND[None]) > ROOM
    return np.where(free, np.hypot(*np.moveaxis(AROUND[:, None] - AROUND[None], -1, 0)), np.inf)


WAYS = _ways()


def distances(ends: NDArray, allowed: NDArray) -> NDArray:
    """(K,) px from each place around the T, by allowed places, to the nearest end (K, where 0 is an end, else inf)."""
    ways, found = np.where(allowed[:, None] & allowed[None], WAYS, np.inf), ends
    for _ in range(len(ends)):
        better = np.minimum(found, (ways + found[None]).min(axis=1))
        if np.array_equal(better, found):
            break
        found = better
    return found


class PushTExpert:
    """The expert of PushT: in turn a way to the next place of contact and a push."""

    still = STILL
    # Actions are places, so an error of 1 would be half the table.
    levels: ClassVar = {"noisy": {"noise": 0.06}, "clumsy": {"bias": 0.014, "noise": 0.01, "scale": 150.0}}

    def __init__(self, env: Any) -> None:
        self._world = env.unwrapped

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        """There is nothing to forget."""

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.float32]:
        world = self._world
        disc, pose = np.array(world.agent.position), np.array([*world.block.position, world.block.angle])
        here, left = turned(disc - pose[:2], -pose[2]), self._left(pose)
        ahead, aside = np.sum((here - TOUCH) * INTO, axis=1), np.sum((here - TOUCH) * ASIDE, axis=1)
        under_way = (left > 0.5) & (ahead > -5.0) & (ahead < 6.0) & (abs(aside) < 7.0)
        if under_way.any():
            return self._push(disc, pose, int(np.argmax(under_way)))
        spots = pose[:2] + turned(AROUND, pose[2])
        allowed = np.all((spots > WALLS[0]) & (spots < WALLS[1]), axis=1)
        first = self._first(here, allowed)
        place = self._choose(left, np.isfinite(distances(first, allowed)[: len(ON)]), pose)
        if -GAP - 7.0 < ahead[place] < 6.0 and abs(aside[place]) < 4.0:
            return self._push(disc, pose, place)
        total = first + distances(np.where(np.arange(len(AROUND)) == place, 0.0, np.inf), allowed)
        nearest = 1e6 + np.hypot(*(AROUND - here).T)  # where there is no way
        return self._towards(disc, spots[np.argmin(np.where(np.isfinite(total), total, nearest))], FREE_LEAD)

    def _left(self, pose: NDArray) -> NDArray:
        """(places,) px that the disc has to push on at each place until the error that it is for is gone."""
        goal = self._world.goal_pose
        shift = goal[:2] + turned(CENTRE, goal[2]) - pose[:2] - turned(CENTRE, pose[2])
        turn = (goal[2] - pose[2] + np.pi) % (2 * np.pi) - np.pi
        shifts = INTO @ turned(shift, -pose[2])
        turns = np.minimum(turn * np.sign(LEVERS), MOST_TURN) * abs(LEVERS)
        return np.concatenate([turns[:4], shifts[4:8], shifts[8:] * (abs(turn) < SKEW)])

    def _choose(self, left: NDArray, reached: NDArray, pose: NDArray) -> int:
        """The place to push at, of those that are ``reached``; where none of them helps, into the open."""
        weighted = np.where(reached, left * WEIGHTS, -np.inf)
        for begin, end, least in ORDER:
            if weighted[begin:end].max() > least:
                return begin + int(np.argmax(weighted[begin:end]))
        middle = turned(np.full(2, 256.0) - pose[:2] - turned(CENTRE, pose[2]), -pose[2])
        return int(np.argmax(np.where(reached, INTO @ middle, -np.inf)))

    def _push(self, disc: NDArray, pose: NDArray, place: int) -> NDArray[np.float32]:
        """On into the T, and back to the place along its outline."""
        left, off = self._left(pose)[place], turned(disc - pose[:2], -pose[2]) - TOUCH[place]
        on = max(-off @ INTO[place], 0.0) + (left + 2.0 if left > 0 else LEAD)
        way = on * INTO[place] - (off @ ASIDE[place]) * ASIDE[place]
        return self._towards(disc, disc + turned(way, pose[2]), LEAD)

    def _first(self, here: NDArray, allowed: NDArray) -> NDArray:
        """(K,) px straight from ``here`` to the places around the T that are in sight; inf for the others."""
        room = min(ROOM, float(clearance(here)) - 0.5)
        seen = allowed & (lane(here[None], AROUND) > room)
        return np.where(seen, np.hypot(*(AROUND - here).T), np.inf)

    def _towards(self, disc: NDArray, spot: NDArray, lead: float) -> NDArray[np.float32]:
        """The disc follows the action like a critically damped spring, so it comes to rest there without overshoot."""
        way = spot - disc
        return np.clip(disc + way * min(1.0, lead / max(np.hypot(*way), 1e-9)), 0.0, 512.0).astype(np.float32)


def make(env: Any, seed: int = 0) -> PushTExpert:
    """The expert of an environment of PushT; its ``seed`` is not used."""
    return PushTExpert(env)
