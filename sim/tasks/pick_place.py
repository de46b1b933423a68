"""Pick and place: a cube lies somewhere on the desk; the arm takes it and sets it down on a low stand elsewhere.

The stand is there so that pushing the cube over the desk does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...policies.core.errors import BurnishError
from .. import arm
from ..arrays import constant, everywhere, library
from ..desk import DeskConfig, DeskTask, TaskArm
from ..task import Draw, Verdict
from . import cubes

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

STAND = (0.022, 0.022, 0.004)  # m, half its extents: a cube that is 22 mm off its middle falls down


@dataclass
class PickPlaceConfig(DeskConfig):
    """Settings of env=pick_place: the cube, the tolerance of its place, and the spread of starts."""

    radius: float = 0.015  # largest distance of the cube's centre from the stand's middle, in m
    cube_mass: float = 0.025  # mass of the cube in kg, of wood or printed
    spread: float = 1.0  # share of the area in which cube and stand may lie
    max_steps: int = 80  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.radius <= STAND[0] or not 0.005 <= self.cube_mass <= 0.2 or not 0 <= self.spread <= 1:
            raise BurnishError(
                f"pick_place needs radius above 0 and at most {STAND[0]} (beyond that a cube falls off its stand), "
                "cube_mass in [0.005, 0.2] and spread in [0, 1]"
            )


class PickPlace(DeskTask):
    """The task pick_place: the hand moves in x, y, z, turns about the vertical, and grips."""

    def __init__(self, config: PickPlaceConfig) -> None:
        super().__init__(config, TaskArm(config, ("x", "y", "z", "roll", "gripper")), cubes.FACTS)
        self.config: PickPlaceConfig = config

    def mjcf(self) -> str:
        size = " ".join(map(str, STAND))
        stand = f"""
    <body name="stand" mocap="true">
      <geom name="stand" type="box" size="{size}" rgba="0.2 0.7 0.3 1" {arm.TOUCHING["fixture"]} friction="0.6"/>
    </body>"""
        return self.scene(cubes.cube("cube", "0.85 0.2 0.15 1", self.config.cube_mass) + stand)

    def bind(self, physics: Physics) -> None:
        super().bind(physics)
        self.cube = cubes.Cube(physics, "cube")
        self._stand, self._stand_turn = physics.column("mocap_pos", 0), physics.column("mocap_quat", 0)

    def begin(self, rows: Rows, draw: Draw) -> None:
        start, goal = cubes.places(draw, self.config.spread)
        xp = library(goal)
        self.hand.begin(rows, everywhere(start, cubes.START), gripper=cubes.OPEN)
        self.cube.put(rows, xp.concatenate([start[:, :2], everywhere(start, [cubes.EDGE / 2])], axis=1), start[:, 2])
        self._stand.write(xp.concatenate([goal[:, :2], everywhere(goal, [STAND[2]])], axis=1), rows)
        half, still = goal[:, 2] / 2, 0 * goal[:, 2]
        self._stand_turn.write(xp.stack([xp.cos(half), still, still, xp.sin(half)], axis=1), rows)

    def goal(self) -> Array:
        """(N, 3) metres: the centre of a cube that rests on the middle of the stand."""
        stand = self._stand.read()
        return stand + constant(stand, (0.0, 0.0, STAND[2] + cubes.EDGE / 2))

    def facts(self) -> Array:
        return cubes.facts(self.hand, self.cube, self.goal())

    def judge(self, action: Array) -> Verdict:
        asked = self.hand, self.cube, self.goal(), self.config.radius
        return self.verdict(cubes.placed(*asked), cubes.progress(*asked))
