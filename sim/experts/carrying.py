"""The script that takes a cube and puts it down, for pick_place and stack.

Over the cube, down around it, close, up, over the goal, down, open, up; and again from the start where that did not
help. Over a place the tool comes down as it comes near, so that place and height need no phases of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import arm
from ..physics import Array
from ..tasks import cubes
from ..tasks.pick_place import PickPlace
from ..tasks.stack import Stack
from ..tasks.tabletop import Tabletop
from .scripted import Move, by_phase

HIGH, LIFTED = 0.06, 0.045  # m, of the tool: on its way, and from where on it goes sideways with a cube
STEP = 0.012  # m in a tick and direction: the servos follow faster commands with swings of centimetres
STEEP = 4.0  # height over a place for distance from it
CLOSED = 0.0  # rad: tighter than a cube allows, so the servo presses with all it has
MARGIN = 0.005  # m, between the cube and the finger that does not move
BLOCKED = 0.008  # m
LOST = 0.025  # m: a cube that is farther from the tool is held no more


Carrying = PickPlace | Stack | Tabletop


@dataclass(frozen=True)
class Carry:
    """The script of pick_place and stack: grasp, lift, carry and let go, with the errors of a clumsy expert."""

    grasp_m: tuple[float, float] = (0.0, 0.0)  # where the hand takes the cube, off its middle: along and across closing
    short: float = 0.0  # undershoots by that share of the goal's distance from the middle line of the desk
    drop_m: float = 0.0  # lets go so far above where the cube would rest
    attentive: bool = True  # sees where in the hand the cube is, and makes up for it
    ways: bool = False  # takes the cube by either pair of faces, and carries it nearer or farther from the base
    choices: int = 2

    def __call__(self, task: Carrying, phase: Array, ticks: Array, choice: Array) -> Move:
        moves = [self._approach(task, choice), self._close(task, ticks), self._carry(task, choice)]
        moves += [self._open(task), self._leave(task, ticks)]
        pose, now = by_phase(phase, [m.pose for m in moves]), task.hand.commanded()
        pose[:, :3] = now[:, :3] + np.clip(pose[:, :3] - now[:, :3], -STEP, STEP)
        gripper = np.where((phase == 1) | (phase == 2), CLOSED, cubes.OPEN)
        return Move(pose, gripper, by_phase(phase, [np.asarray(m.next) for m in moves]))

    def _approach(self, task: Carrying, choice: Array) -> Move:
        now, tool, position = task.hand.commanded(), task.hand.arm.tcp(), task.cube.position()
        other = np.pi / 2 * (choice[:, 0] < 0.5) * self.ways
        roll = other + cubes.quarter(task.cube.turn() - cubes.azimuth(position) - other)
        angle = roll + cubes.azimuth(position)
        along, across = self.grasp_m[0] + MARGIN, self.grasp_m[1]
        x = position[:, 0] - along * np.cos(angle) + across * np.sin(angle)
        y = position[:, 1] - along * np.sin(angle) - across * np.cos(angle)
        turned, shut = np.abs(roll - now[:, 4]), np.maximum(cubes.OPEN - task.hand.arm.q()[:, 5], 0.0)
        # A hand that is not yet turned and open as it should be is as good as so many metres away.
        away = np.hypot(x - tool[:, 0], y - tool[:, 1]) + 0.03 * turned + 0.05 * shut
        # A finger that stands on the cube keeps the tool above where it is told to be.
        height = np.where(tool[:, 2] - now[:, 2] > BLOCKED, HIGH, _height(away, position[:, 2]))
        pose = np.stack([x, y, height, now[:, 3], roll], axis=1)
        there = _there(tool, np.stack([x, y, position[:, 2]], axis=1))
        return Move(pose, next=np.where(there & (turned < 0.1), 1, 0))

    def _close(self, task: Carrying, ticks: Array) -> Move:
        stopped = np.abs(task.hand.arm.velocity()[:, 5]) < 0.1
        return Move(task.hand.commanded(), next=np.where((ticks >= 3) & stopped, 1, 0))

    def _carry(self, task: Carrying, choice: Array) -> Move:
        now, tool, position, goal = task.hand.commanded(), task.hand.arm.tcp(), task.cube.position(), task.goal()
        offset = tool - position
        place = goal[:, :2] + (offset[:, :2] if self.attentive else 0.0)
        place[:, 1] -= self.short * goal[:, 1]
        away = np.hypot(*(place - tool[:, :2]).T)
        low = goal[:, 2] + offset[:, 2] + self.drop_m + 0.001
        pose = np.concatenate([place, _height(away, low)[:, None], now[:, 3:]], axis=1)
        if self.ways:
            side = np.where(choice[:, 1] < 0.5, -0.05, 0.05)
            pose[:, 0] = np.clip(pose[:, 0] + side * np.minimum(np.abs(place - now[:, :2])[:, 1] / 0.06, 1), 0.16, 0.31)
        rising = (now[:, 2] < LIFTED) & (away > 0.02)
        pose[:, :2] = np.where(rising[:, None], now[:, :2], pose[:, :2])
        arrived = _there(tool, np.concatenate([place, low[:, None]], axis=1))
        lost = np.linalg.norm(offset, axis=1) > LOST
        return Move(pose, next=np.where(lost, -2, np.where(arrived, 1, 0)))

    def _open(self, task: Carrying) -> Move:
        """The finger that does not move leaves the cube too, once the other has."""
        pose, gripper = task.hand.commanded(), task.hand.arm.q()[:, 5]
        loose = np.clip(cubes.in_hand(task.hand, task.cube)[:, :1] - MARGIN, -0.0015, 0)
        pose[:, :2] += loose * cubes.closing(task.hand) * (gripper > arm.PINCH + 0.06)[:, None]
        return Move(pose, next=np.where(gripper > arm.PINCH + 0.2, 1, 0))

    def _leave(self, task: Carrying, ticks: Array) -> Move:
        pose = task.hand.commanded()
        pose[:, 2] += 0.03
        return Move(pose, next=np.where(ticks >= 4, -4, 0))


def _height(away: Array, low: Array) -> Array:
    """Of the tool, so far away from the place where it should be at ``low``."""
    return np.minimum(low + STEEP * np.maximum(away - 0.005, 0.0), HIGH)


def _there(tool: Array, place: Array) -> np.ndarray:
    return np.abs(tool - place).max(axis=1) < 0.004
