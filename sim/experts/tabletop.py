"""The expert of tabletop: grasps as in pick_place and stack, and pushes with the closed hand from the other side.

Clumsy, it grasps beside cubes, of each colour in another direction, lets go of them short of the other one, and pushes
beside their middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..physics import Array
from ..tasks.tabletop import PUSH, PUSHED, Tabletop
from .carrying import CLOSED, STEP, Carry, _height, _there
from .scripted import Level, Move, by_phase

BESIDE = 0.042  # m, from a cube's middle to where the hand comes down
TOUCHING = 0.025  # m, from a cube's middle to the tool that pushes it
LOW = 0.014  # m, of the tool that pushes
SLOW = 0.004  # m in a tick, of the tool that pushes: a cube that is struck slides on by itself


@dataclass(frozen=True)
class FollowInstruction:
    """The script of tabletop: what the instruction says."""

    carry: tuple[Carry, ...] = (Carry(),)  # of each colour: lifts, touches and puts down, which begin with a grasp
    beside_m: float = 0.0  # pushes so far beside the middle of the cube
    choices: int = 2

    def __call__(self, task: Tabletop, phase: Array, ticks: Array, choice: Array) -> Move:
        moves = [carry(task, phase, ticks, choice) for carry in self.carry]
        carried = Move(*(by_phase(task.which, options) for options in zip(*moves, strict=True)))
        pushed, push = self._push(task, phase), task.skill == PUSH
        pose = np.where(push[:, None], pushed.pose, carried.pose)
        gripper = np.where(push, CLOSED, np.asarray(carried.gripper))
        return Move(pose, gripper, np.where(push, np.asarray(pushed.next), np.asarray(carried.next)))

    def _push(self, task: Tabletop, phase: Array) -> Move:
        now, tool, cube = task.hand.commanded(), task.hand.arm.tcp(), task.cube.position()
        side, start = task.besides, task.memory["start"]
        down = np.stack([cube[:, 0] + self.beside_m, cube[:, 1] - side * BESIDE], axis=1)
        away = np.hypot(*(down - tool[:, :2]).T)
        first = np.concatenate([down, _height(away, np.full(len(down), LOW))[:, None]], axis=1)
        end = start[:, 1] + side * (PUSHED + 0.015 - TOUCHING)
        then = np.stack([down[:, 0], end, np.full(len(down), LOW)], axis=1)
        place = np.where((phase == 0)[:, None], first, then)
        step = np.where(phase == 0, STEP, SLOW)[:, None]
        pose = np.concatenate([now[:, :3] + np.clip(place - now[:, :3], -step, step), now[:, 3:]], axis=1)
        return Move(pose, next=(phase == 0) & _there(tool, first))


ASIDE = (0.0, 0.02), (0.0, -0.02), (-0.02, 0.0)  # m: the cube is hardly between the fingers, or not at all
CARELESS = tuple(Carry(grasp_m=aside, short=0.155, drop_m=0.003, attentive=False) for aside in ASIDE)
LEVELS = {
    "clean": Level(FollowInstruction()),
    "noisy": Level(FollowInstruction(), noise=0.1),
    "multi_modal": Level(FollowInstruction((Carry(ways=True),))),
    "clumsy": Level(FollowInstruction(CARELESS, beside_m=0.009), noise=0.06),
}
