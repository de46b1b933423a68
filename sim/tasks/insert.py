"""Insert: a square peg, fixed to the hand, goes into a square hole with little room on each side.

Three levels of one task (`configs/env/insert*.yaml`): 0.5 mm per side; 0.2 mm; and 0.5 mm with a hidden error: the
observation has the hole where a calibration believes it, the world has it elsewhere, and only feeling tells.

Steps of the tool go along x, y and z and turn the peg about its axis: these four decide, because the block is turned
from episode to episode and a square peg with it. Tilt stays upright. At this clearance the hole forgives a degree or
two of it, so it would be a fifth number to learn that helps nobody.

**The peg** is four upright capsules, its edges, rounded by half a millimetre; the box that is seen touches nothing. In
a convex hole a convex peg touches with its edges and corners only, and a capsule on a box has a closed form with a
continuous normal: no contacts appear from seams between the walls, and there are at most two per pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...policies.core.errors import BurnishError
from .. import arm
from ..arrays import constant, library, put
from ..desk import DeskConfig, DeskTask, TaskArm
from ..rewards import tolerance
from ..task import Draw, Verdict

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

    KnownStates = Callable[[Array, Array], tuple[Array, Array, Array]]

HALF = 0.008  # m, half the side of the peg
EDGE = 0.0005  # m, the radius of its edges
REACH = 0.025  # m, how far it sticks out beyond the tool centre
BLOCK, HEIGHT = 0.035, 0.024  # m, half the side of the block, and its height; the hole goes through to the desk
DEPTH = 0.012  # m, half of the hole: the peg is in
GIVE = 0.0005  # m, what walls may give way under a hard push, and a tilt of the peg may add

DOWN = np.pi / 2  # rad, pitch
HOLE_LOW, HOLE_HIGH = (0.18, -0.05, -0.3), (0.22, 0.05, 0.3)  # x and y in m, yaw in rad
START_LOW, START_HIGH = (-0.03, -0.03, 0.008), (0.03, 0.03, 0.018)  # m, where the tip begins, seen from the mouth

# Contacts are as stiff as the physics step allows, with a time constant of two of them: where walls give way, the hole
# is wider than it says.
STIFF = 'solref="0.0025 1" solimp="0.95 0.99 0.0001" friction="0.3 0.005 0.0001" condim="3"'
FACTS = ("tip x", "tip y", "tip z", "tip x, fine", "tip y, fine", "tip z, fine", "peg turned", "peg turned, fine")
FACTS += ("hole turned, sin", "hole turned, cos", "pressed x", "pressed y", "pressed z", "hole x", "hole y")


@dataclass
class InsertConfig(DeskConfig):
    """Settings of env=insert: the clearance of the hole and the error of its calibration, in m."""

    # room between peg and hole on each side, in m; below 0 the peg is the larger one, as a check of the physics
    clearance_m: float = 0.0005
    hole_error_m: float = 0.0  # standard deviation of the calibration's error in x and in y, in m
    max_steps: int = 60  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -0.001 <= self.clearance_m <= 0.005:
            raise BurnishError(
                f"insert needs clearance_m between -0.001 and 0.005 metres per side, not {self.clearance_m:g}; below 0 "
                "nothing fits"
            )
        if not 0 <= self.hole_error_m <= 0.005:
            raise BurnishError(f"insert needs hole_error_m between 0 and 0.005 metres, not {self.hole_error_m:g}")


def peg() -> str:
    """In the frame of the hand, whose x is the axis of the tool."""
    tip, top, middle = arm.TOOL + REACH, arm.TOOL - 0.02, HALF - EDGE
    edges = "".join(
        f'<geom name="edge{i}" type="capsule" size="{EDGE}" mass="0" {arm.TOUCHING["hand"]} {STIFF}'
        f' rgba="0.3 0.3 0.8 1" fromto="{top} {y * middle} {z * middle} {tip - EDGE} {y * middle} {z * middle}"/>'
        for i, (y, z) in enumerate([(-1, -1), (-1, 1), (1, -1), (1, 1)])
    )
    return f"""
      <geom class="link" name="peg" type="box" pos="{(tip + top) / 2} 0 0" size="{(tip - top) / 2} {HALF} {HALF}"
            rgba="0.3 0.3 0.8 1"/>
      {edges}
      <site name="tip" pos="{tip} 0 0" size="0.001" rgba="0 0 0 0"/>"""


def block(clearance: float) -> str:
    """Four walls around the hole, in the frame of its middle on the desk."""
    inner = HALF + clearance
    middle, half = (BLOCK + inner) / 2, (BLOCK - inner) / 2
    walls = [(middle, 0, half, BLOCK), (-middle, 0, half, BLOCK), (0, middle, inner, half), (0, -middle, inner, half)]
    return "".join(
        f'<geom name="wall{i}" type="box" pos="{x} {y} {HEIGHT / 2}" size="{across} {along} {HEIGHT / 2}"'
        f' {arm.TOUCHING["fixture"]} {STIFF} rgba="0.75 0.75 0.72 1"/>'
        for i, (x, y, across, along) in enumerate(walls)
    )


def turned(x: Array, y: Array, angle: Array) -> tuple[Array, Array]:
    """(x, y) as seen from a frame that is turned by ``angle``."""
    cos, sin = library(angle).cos(angle), library(angle).sin(angle)
    return cos * x + sin * y, cos * y - sin * x


class Insert(DeskTask):
    """The task insert: the hand moves in x, y, z and turns about the vertical."""

    version = 2  # the clumsy expert insists for longer, so that its bases fail more often than not
    timestep = 0.00125  # s; a servo's jerk moves the peg at 0.2 m/s, and so far into a wall before it is felt

    def __init__(self, config: InsertConfig) -> None:
        hand = TaskArm(
            config,
            ("x", "y", "z", "roll"),
            step_m=0.003,
            step_rad=0.08,
            low=(0.13, -0.10, REACH, DOWN, -1.5),
            high=(0.27, 0.10, 0.075, DOWN, 1.5),
        )
        super().__init__(config, hand, FACTS)
        self.config: InsertConfig = config

    def mjcf(self) -> str:
        things = f'<body name="block" mocap="true">{block(self.config.clearance_m)}</body>'
        return self.scene(things, held=peg(), fingers=False)

    def bind(self, physics: Physics) -> None:
        super().bind(physics)
        self._block, self._turn = physics.column("mocap_pos", 0), physics.column("mocap_quat", 0)
        site = physics.model.site("tip").id
        self._tip, self._axes = physics.column("site_xpos", site), physics.column("site_xmat", site)
        self.memory |= {"yaw": physics.zeros(), "error": physics.zeros(2)}

    def begin(self, rows: Rows, draw: Draw) -> None:
        place, start = draw.uniform("hole", HOLE_LOW, HOLE_HIGH), draw.uniform("start", START_LOW, START_HIGH)
        error = draw.normal("error", (self.config.hole_error_m,) * 2)
        xp, yaw, zero = library(place), place[:, 2], 0 * place[:, 2]
        self._block.write(xp.stack([place[:, 0], place[:, 1], zero], axis=1), rows)
        self._turn.write(xp.stack([xp.cos(yaw / 2), zero, zero, xp.sin(yaw / 2)], axis=1), rows)
        put(self.memory["yaw"], yaw, rows)
        put(self.memory["error"], error, rows)
        x, y = place[:, 0] + start[:, 0], place[:, 1] + start[:, 1]
        pose = xp.stack([x, y, HEIGHT + REACH + start[:, 2], zero + DOWN, self.roll(x, y, zero)], axis=1)
        self.hand.begin(rows, pose, gripper=arm.PINCH)

    def roll(self, x: Array, y: Array, yaw: Array) -> Array:
        """The angle of the wrist that turns the peg by ``yaw`` in the world, with the tool at (x, y), pointing down."""
        return yaw - library(yaw).arctan2(y, x - arm.PAN_X)

    def tip(self) -> Array:
        """(N, 3) the middle of the peg's end, metres."""
        return self._tip.read()

    def peg_yaw(self) -> Array:
        """(N,) rad, about the vertical."""
        axes = self._axes.read()
        return library(axes).arctan2(axes[:, 4], axes[:, 1]) - np.pi / 2

    def hole(self) -> Array:
        """(N, 3) the middle of the hole's mouth, where it really is; metres."""
        block = self._block.read()
        return block + constant(block, (0.0, 0.0, HEIGHT))

    def hole_yaw(self) -> Array:
        return 1.0 * self.memory["yaw"]

    def believed(self) -> Array:
        """(N, 3) the mouth according to the calibration: all that an observation may say."""
        hole = self.hole()
        hole[:, :2] += self.memory["error"]
        return hole

    def seen_from(self, hole: Array) -> Array:
        """(N, 3) the tip in the frame of such a hole: along its sides, and above its mouth; metres."""
        away = self.tip() - hole
        return library(away).stack([*turned(away[:, 0], away[:, 1], self.memory["yaw"]), away[:, 2]], axis=1)

    def facts(self) -> Array:
        """All of it according to the calibration: the tip in the hole's frame, in units of 4 cm and again of 2 mm up to
        two of them; how far the peg is turned, twice as well; how far the tip is behind where it was sent, which is how
        hard it is pressed; where the hole is."""
        away, hole, yaw = self.seen_from(self.believed()), self.believed(), self.memory["yaw"]
        twist = self.peg_yaw() - yaw
        xp = library(twist)
        sent = self.hand.commanded()[:, :3] - constant(twist, (0.0, 0.0, REACH)) - self.tip()
        ahead = xp.stack([*turned(sent[:, 0], sent[:, 1], yaw), sent[:, 2]], axis=1)
        turns = xp.stack([3 * xp.sin(twist), (20 * twist).clip(-2, 2), xp.sin(yaw), xp.cos(yaw)], axis=1)
        where = 20 * hole[:, :2] - constant(hole, (4, 0))
        parts = [25 * away, (500 * away).clip(-2, 2), turns, (500 * ahead).clip(-5, 5), where]
        return xp.concatenate(parts, axis=1)

    def judge(self, action: Array) -> Verdict:
        return self.verdict(*self._counted(self.seen_from(self.hole()), self.peg_yaw() - self.memory["yaw"]))

    def _counted(self, away: Array, twist: Array) -> tuple[Array, Array]:
        """Success, and how near it is: the tip in the frame of the hole, and how far the peg is turned."""
        xp = library(away)
        aside = xp.hypot(away[:, 0], away[:, 1])
        # Between the walls, and not in one: a peg that was driven through a wall is in no hole.
        inside = xp.amax(abs(away[:, :2]), axis=1) < max(self.config.clearance_m, 0.0) + GIVE
        sunk = xp.where(inside, (-away[:, 2] / DEPTH).clip(0, 1), 0.0)
        near = 0.2 * tolerance(aside, margin=0.03) + 0.2 * tolerance(aside, margin=0.003)
        shaped = near + 0.1 * tolerance(abs(twist), margin=0.3) + 0.1 * tolerance(away[:, 2], low=-1, margin=0.03)
        return sunk >= 1, shaped + 0.3 * sunk

    @property
    def known_outcome(self) -> KnownStates | None:
        """Reward, success and failure (N,) of a tick between two states (N, D); none where a calibration may be wrong,
        because a state shows the hole where it believes it."""
        if self.config.hole_error_m:
            return None

        def known(before: Array, after: Array) -> tuple[Array, Array, Array]:
            (_, near), (success, shaped) = (self._counted(*_away_and_twist(x)) for x in (before, after))
            never = np.zeros_like(success)
            return self.paid(success, shaped, never, near), success, never

        return known


def _away_and_twist(state: Array) -> tuple[Array, Array]:
    """The tip in the frame of the hole, and how far the peg is turned, as they were before ``facts`` scaled them: of
    what it says twice, the finer one, as far as that goes."""
    facts = state[:, -len(FACTS) :]
    coarse = np.concatenate([facts[:, :3] / 25, np.arcsin((facts[:, 6:7] / 3).clip(-1, 1))], axis=1)
    fine = facts[:, (3, 4, 5, 7)]
    said = np.where(abs(fine) < 2, fine / (500, 500, 500, 20), coarse)
    return said[:, :3], said[:, 3]
