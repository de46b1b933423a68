"""The expert of tabletop: grasps as in pick_place and stack, and pushes with the closed hand from the other side.

Clumsy, it takes cubes off their middle, puts them down short of the other one, and pushes beside their middle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..physics import Array
from ..tasks.tabletop import PUSH, PUSHED, Tabletop
from .carrying import CLOSED, STEP, Carry, _height, _there
from .scripted import Level, Move

BESIDE = 0.042  # m, from a cube's middle to where the hand comes down
TOUCHING = 0.025  # m, from a cube's middle to the tool that pushes it
LOW = 0.014  # m, of the tool that pushes
SLOW = 0.004  # m in a tick, of the tool that pushes: a cube that is struck slides on by itself


@dataclass(frozen=True)
class FollowInstruction:
    """The script of tabletop: what the instruction says."""

    carry: Carry = field(default_factory=Carry)  # lifts, touches and puts down: all begin with a grasp
    beside_m: float = 0.0  # pushes so far beside the middle of the cube
    choices: int = 2

    def __call__(self, task: Tabletop, phase: Array, ticks: Array, choice: Array) -> Move:
        carried, pushed = self.carry(task, phase, ticks, choice), self._push(task, phase)
        push = task.skill == PUSH
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


CARELESS = Carry(grasp_m=(0.0, 0.003), short=0.155, drop_m=0.003, attentive=False)
LEVELS = {
    "clean": Level(FollowInstruction()),
    "noisy": Level(FollowInstruction(), noise=0.1),
    "multi_modal": Level(FollowInstruction(Carry(ways=True))),
    "clumsy": Level(FollowInstruction(CARELESS, beside_m=0.009), noise=0.06),
}
