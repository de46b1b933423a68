"""The expert of avoid: straight through a gap of each row, and across between the rows.

``clean`` knows one route, ``multi_modal`` takes each of the 24 as often. ``clumsy`` cuts corners: it aims too near to
the post that it turns around, and turns too early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..physics import Array
from ..tasks.avoid import FINISH_X, HEIGHT, PITCH, ROUTES, ROWS, Avoid
from .scripted import Level, Move, by_phase

# Where gaps are gone through: in the middle, or as far beside the outermost posts.
GAPS = ((-0.028, 0.028), (-0.053, 0.0, 0.053), (-0.078, -0.025, 0.025, 0.078))


@dataclass(frozen=True)
class AvoidScript:
    """The script of avoid: the routes between the posts, and where it turns."""

    routes: tuple[int, ...] = (17,)  # one of them is drawn per episode
    before_m: float = 0.018  # so far before a row it is in the gap
    beyond_m: float = 0.018  # so far behind it, it turns
    cut_m: float = 0.0  # nearer to the inner post of the gap than its middle
    choices: int = 1

    def __call__(self, task: Avoid, phase: Array, ticks: Array, choice: Array) -> Move:
        route = np.array(self.routes)[(choice[:, 0] * len(self.routes)).astype(np.int64)]
        gaps = (route // 12, route // 4 % 3, route % 4)
        tip = task.tip()
        places = []
        for (x, _), middle, gap in zip(ROWS, GAPS, gaps, strict=True):
            y = np.array(middle)[gap]
            y = y - self.cut_m * np.sign(y)
            places += [np.stack([np.full(len(y), x + far), y], axis=1) for far in (-self.before_m, self.beyond_m)]
        places.append(np.stack([np.full(len(tip), FINISH_X + 0.01), places[-1][:, 1]], axis=1))
        target = by_phase(phase, places)
        near = np.hypot(*(target - tip).T) < 0.006
        pose = np.concatenate([target, np.tile((HEIGHT, PITCH, 0.0), (len(tip), 1))], axis=1)
        return Move(pose, next=near & (phase < 2 * len(ROWS)))


LEVELS = {
    "clean": Level(AvoidScript()),
    "noisy": Level(AvoidScript(), noise=0.5),
    "multi_modal": Level(AvoidScript(routes=tuple(range(ROUTES)))),
    "clumsy": Level(AvoidScript(routes=tuple(range(ROUTES)), before_m=0.013, beyond_m=0.010, cut_m=0.004), noise=0.3),
}
