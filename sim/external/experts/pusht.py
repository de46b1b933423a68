"""The expert of gym-pusht (Chi et al. 2023, arXiv 2303.04137): again and again the push that helps most.

In that world the T has no momentum and nothing rubs: while the disc pushes, the T moves as one impulse along the face's
normal would move it. So where each push leads is one table in the frame of the T, made once by integrating that, and
the expert looks two pushes ahead in it. Between pushes the disc goes around the T, along straight lines between places
beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

RADIUS = 15.0  # px, of the disc
BOXES = np.array([[-60.0, 0.0, 60.0, 30.0], [-15.0, 30.0, 15.0, 120.0]])  # bar and stem: left, low, right, high
CENTRE = np.array([0.0, 45.0])  # px, of mass, about which the T turns
ARM2 = 3000.0  # px^2, moment of inertia / mass
WALLS = (24.0, 488.0)  # px, where the middle of the disc may be
STILL = np.full(2, np.nan)  # an action is the place to go to

# Places on the outline of the T, and the direction from there into it.
PLACES = np.array(
    [(x, 0, 0, 1) for x in (-50, -36, -22, -8, 0, 8, 22, 36, 50)]
    + [(side * 60, y, -side, 0) for side in (-1, 1) for y in (8, 22)]
    + [(side * x, 30, 0, -1) for side in (-1, 1) for x in (38, 50)]
    + [(side * 15, y, -side, 0) for side in (-1, 1) for y in (55, 70, 85, 100, 114)]
    + [(x, 120, 0, -1) for x in (-9, 0, 9)],
    dtype=float,
)
ON, INTO = PLACES[:, :2], PLACES[:, 2:]
LENGTHS = np.array([1.0, 2.0, 3.5, 5.5, 8.0, 12.0, 18.0, 26.0, 38.0, 55.0, 80.0])  # px, of pushes
BESIDE = RADIUS + 7.0  # px, from the T to the disc that goes around it
CORNERS = np.array([(-1, -1), (1, -1), (-1, 1), (1, 1)]) * BESIDE * 0.8
AROUND = np.concatenate(
    [
        ON - BESIDE * INTO,
        np.array([(-60, 0), (60, 0), (-60, 30), (60, 30)]) + CORNERS,
        np.array([(-15, 120), (15, 120)]) + CORNERS[2:],
        np.array([(-15, 30), (15, 30)]) + np.array([(-1, 1), (1, 1)]) * BESIDE,
    ]
)

PX, RAD = 2.0, 0.03  # errors that cost one
PUSH_COST = 2.5  # that another push is worth
WAY_COST = 0.01  # and a pixel of way to its place
LEAD, FREE_LEAD = 45.0, 110.0  # px, that the action is ahead of the disc in a push, and on the way to one


def turned(vector: NDArray, angle: NDArray | float) -> NDArray:
    """(..., 2) by an angle (...)."""
    cos, sin, x, y = np.cos(angle), np.sin(angle), vector[..., 0], vector[..., 1]
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)


def _led() -> NDArray:
    """(places, lengths, 3): the motion of the middle and the turn of the T by each push, in the frame it had before."""
    step = 0.5
    middle, angle = np.zeros((len(ON), 2)), np.zeros(len(ON))
    disc = ON - CENTRE - RADIUS * INTO
    found = []
    for tick in range(round(LENGTHS[-1] / step)):
        disc = disc + step * INTO
        normal = turned(INTO, angle)
        arm = disc + RADIUS * normal - middle
        lever = arm[:, 0] * normal[:, 1] - arm[:, 1] * normal[:, 0]
        # The face has to get out of the way of the disc, which goes straight on.
        face = turned(ON - CENTRE, angle) + middle
        depth = np.sum((disc + RADIUS * normal - face) * normal, axis=1)
        impulse = np.maximum(depth, 0.0) / (1 + lever**2 / ARM2)
        middle, angle = middle + impulse[:, None] * normal, angle + impulse * lever / ARM2
        if np.any(np.isclose((tick + 1) * step, LENGTHS)):
            found.append(np.concatenate([middle, angle[:, None]], axis=1))
    return np.stack(found, axis=1)


LED = _led()


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
    free = lane(AROUND[:, None], AROUND[None]) > RADIUS + 2.0
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
    levels: ClassVar = {"noisy": {"noise": 0.04}, "clumsy": {"bias": 0.022, "noise": 0.01, "scale": 150.0}}

    def __init__(self, env: Any) -> None:
        self._world = env.unwrapped
        self._place: int | None = None  # that the disc is on the way to
        self._end: NDArray | None = None  # of the push under way
        self._pushing = 0  # ticks

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        self._place, self._end, self._pushing = None, None, 0

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.float32]:
        world = self._world
        disc, pose = np.array(world.agent.position), np.array([*world.block.position, world.block.angle])
        if self._end is not None and (
            np.hypot(*(self._end - disc)) < 0.7 or (np.hypot(*world.agent.velocity) < 12.0 and self._pushing > 2)
        ):
            self._end = None
        if self._end is None:
            if self._place is None:
                self._place = self._choose(disc, pose)
            place = self._place
            touch = pose[:2] + turned(ON[place] - RADIUS * INTO[place], pose[2])
            into = turned(INTO[place], pose[2])
            if np.hypot(*(touch - 2.0 * into - disc)) > 4.0:
                return self._go(disc, pose, place)
            length = float(LENGTHS[np.argmin(self._after(self._pushed(self._error(pose), LED[place])))])
            self._end, self._place, self._pushing = np.clip(touch + length * into, *WALLS), None, 0
        self._pushing += 1
        return self._towards(disc, self._end, LEAD)

    def _error(self, pose: NDArray) -> NDArray:
        """(3,): how the middle and the angle of the T are off, in the world's frame."""
        goal = self._world.goal_pose
        shift = pose[:2] + turned(CENTRE, pose[2]) - goal[:2] - turned(CENTRE, goal[2])
        return np.array([*shift, (pose[2] - goal[2] + np.pi) % (2 * np.pi) - np.pi])

    def _pushed(self, error: NDArray, led: NDArray) -> NDArray:
        shift = error[..., :2] + turned(led[..., :2], error[..., 2] + self._world.goal_pose[2])
        angle = error[..., 2:] + led[..., 2:]
        return np.concatenate([shift, (angle + np.pi) % (2 * np.pi) - np.pi], axis=-1)

    def _cost(self, error: NDArray) -> NDArray:
        return np.hypot(error[..., 0], error[..., 1]) / PX + np.abs(error[..., 2]) / RAD

    def _after(self, error: NDArray) -> NDArray:
        """The cost of errors (..., 3), or that after the best next push."""
        best = self._cost(self._pushed(error[..., None, None, :], LED)).min(axis=(-2, -1))
        return np.minimum(self._cost(error), PUSH_COST + best)

    def _choose(self, disc: NDArray, pose: NDArray) -> int:
        led = self._pushed(self._error(pose), LED)
        cost = self._after(led).min(axis=1)
        spots = pose[:2] + turned(AROUND, pose[2])
        allowed = np.all((spots > WALLS[0]) & (spots < WALLS[1]), axis=1)
        here = turned(disc - pose[:2], -pose[2])
        way = distances(self._first(here, allowed), allowed)[: len(ON)]
        return int(np.argmin(cost + WAY_COST * np.minimum(way, 1e4)))

    def _first(self, here: NDArray, allowed: NDArray) -> NDArray:
        """(K,) px straight from ``here`` to the places around the T that are in sight; inf for the others."""
        room = min(RADIUS + 2.0, float(clearance(here)) - 0.5)
        seen = allowed & (lane(here[None], AROUND) > room)
        return np.where(seen, np.hypot(*(AROUND - here).T), np.inf)

    def _go(self, disc: NDArray, pose: NDArray, place: int) -> NDArray[np.float32]:
        """Around the T to the place before the face, and then to the face."""
        here = turned(disc - pose[:2], -pose[2])
        front = ON[place] - (RADIUS + 2.0) * INTO[place]
        off = here - front
        aside = abs(off @ np.array([-INTO[place][1], INTO[place][0]]))
        if aside < 4.0 and -12.0 < off @ INTO[place] < 2.0:
            return self._towards(disc, pose[:2] + turned(front, pose[2]), FREE_LEAD)
        spots = pose[:2] + turned(AROUND, pose[2])
        allowed = np.all((spots > WALLS[0]) & (spots < WALLS[1]), axis=1)
        rest = distances(np.where(np.arange(len(AROUND)) == place, 0.0, np.inf), allowed)
        total = self._first(here, allowed) + rest
        best = int(np.argmin(total))
        if not np.isfinite(total[best]):
            self._place = None  # no way: choose again next time
            best = int(np.argmin(np.hypot(*(AROUND - here).T)))
        return self._towards(disc, spots[best], FREE_LEAD)

    def _towards(self, disc: NDArray, spot: NDArray, lead: float) -> NDArray[np.float32]:
        """The disc follows the action like a critically damped spring, so it comes to rest there without overshoot."""
        way = spot - disc
        return np.clip(disc + way * min(1.0, lead / max(np.hypot(*way), 1e-9)), 0.0, 512.0).astype(np.float32)


def make(env: Any, seed: int = 0) -> PushTExpert:
    """The expert of an environment of PushT; its ``seed`` is not used."""
    return PushTExpert(env)
