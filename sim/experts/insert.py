"""The expert of insert: above the hole, turned as the hole is; then down; and to the hole if it stands beside it.

It sees tip and hole as they are, so the servos' sag of a tenth of a millimetre, a hidden error of the calibration and
what friction holds back are all corrected by what it sees. The clumsy expert comes down beside the hole, always on the
same side of it, presses on in the belief to be right for a second and a half, and slides over when its patience ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..physics import Array
from ..tasks.insert import DOWN, REACH, Insert, turned
from .scripted import Level, Move

FAST, GENTLE = 0.003, 0.0015  # m in a tick: where nothing is touched, and where something may be
TURN = 0.06  # rad in a tick
ABOVE = 0.002  # m above the mouth, where the peg stops until it is placed
LONG = 30  # ticks after which it goes down even so


@dataclass(frozen=True)
class InsertScript:
    """The script of insert: above the hole, down, and a search for the hole where it was missed."""

    aim_m: tuple[float, float] = (0.0, 0.0)  # where it comes down, seen from the hole, along the hole's sides
    either_side: bool = False  # there or on the opposite side, chosen per episode
    patience: int = 0  # ticks from leaving the air until it looks for the hole
    near_m: float = 0.00015  # it is placed when it is as near as that
    choices: int = 1

    def __call__(self, task: Insert, phase: Array, ticks: Array, choice: Array) -> Move:
        """Phases: to the place above; down, where it aimed; down and to the hole."""
        tip, hole, yaw = task.tip(), task.hole(), task.hole_yaw()
        sent = task.hand.commanded()
        side = np.where(self.either_side & (choice[:, 0] < 0.5), -1.0, 1.0)
        aim = np.stack(turned(side * self.aim_m[0], side * self.aim_m[1], -yaw), axis=1)
        goal = hole + np.array([0.0, 0.0, ABOVE])
        goal[:, :2] += np.where(phase[:, None] < 2, aim, 0.0)

        # Far away it goes by what was commanded, because the arm is still swinging; near by, by what is seen.
        ahead = goal - sent[:, :3] + np.array([0.0, 0.0, REACH])
        step = np.where(np.abs(ahead) > 0.001, ahead, 0.5 * (goal - tip))
        # Downwards the command stays so much below the tip: it presses no harder the longer it stands.
        lead = np.where(tip[:, 2] < hole[:, 2] - 0.002, FAST, GENTLE)
        step[:, 2] = np.where(phase > 0, tip[:, 2] - lead + REACH - sent[:, 2], step[:, 2])
        twist = yaw - task.peg_yaw()
        pose = sent.copy()
        pose[:, :3] += np.clip(step, -FAST, FAST)
        pose[:, 3] = DOWN
        pose[:, 4] += np.clip(twist, -TURN, TURN)

        aside = np.abs(goal - tip)
        placed = (aside[:, :2].max(axis=1) < self.near_m) & (aside[:, 2] < 0.001) & (np.abs(twist) < 50 * self.near_m)
        over = np.where(phase == 0, placed | (ticks >= LONG), (phase == 1) & (ticks >= self.patience))
        return Move(pose, next=over)


LEVELS = {
    "clean": Level(InsertScript()),
    "noisy": Level(InsertScript(near_m=0.001), noise=0.2),
    # From the left or from the right, sliding over the block. A hand that trembles a little does not stick.
    "multi_modal": Level(InsertScript(aim_m=(0.005, 0.0), either_side=True, patience=3, near_m=0.0005), noise=0.03),
    "clumsy": Level(InsertScript(aim_m=(0.002, 0.0015), patience=32, near_m=0.001), noise=0.1),
}
