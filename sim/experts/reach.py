"""The expert of reach: straight to the goal; by way of one side (multi_modal); or not quite as far as that (clumsy)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..physics import Array
from ..tasks.reach import START, Reach
from .scripted import Level, Move


@dataclass(frozen=True)
class ReachScript:
    """The script of reach: to the goal, perhaps by way of one side or not quite as far."""

    short: float = 0.0  # the share of the way from the start to the goal that is missing in the end
    detour_m: float = 0.0  # of the way, to the left or to the right
    choices: int = 1

    def __call__(self, task: Reach, phase: Array, ticks: Array, choice: Array) -> Move:
        goal, start = task.goal(), np.array(START[:3])
        side = np.where(choice[:, 0] < 0.5, -1.0, 1.0)
        detour = (start + goal) / 2
        detour[:, 1] += side * self.detour_m
        on_detour = (phase == 0) & (self.detour_m > 0)
        position = np.where(on_detour[:, None], detour, goal - self.short * (goal - start))
        near = np.linalg.norm(task.hand.arm.tcp() - position, axis=1) < 0.02
        pose = np.concatenate([position, np.tile(START[3:], (len(goal), 1))], axis=1)
        return Move(pose, next=near & on_detour)


LEVELS = {
    "clean": Level(ReachScript()),
    "noisy": Level(ReachScript(), noise=0.27),
    "multi_modal": Level(ReachScript(detour_m=0.08)),
    "clumsy": Level(ReachScript(short=0.1), noise=0.15),
}
