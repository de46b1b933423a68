"""Stack: two cubes lie somewhere on the desk; the arm puts the red one onto the blue one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...policies.core.errors import BurnishError
from ..arrays import constant, everywhere, library
from ..desk import DeskConfig, DeskTask, TaskArm
from ..task import Draw, Verdict
from . import cubes

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows


@dataclass
class StackConfig(DeskConfig):
    """Settings of env=stack: the tolerance, the cubes' mass, and the spread of starts."""

    offset: float = 0.01  # largest distance of the red cube's centre from above the blue one's, in m
    cube_mass: float = 0.025  # mass of a cube in kg, of wood or printed
    spread: float = 1.0  # share of the area in which the cubes may lie
    max_steps: int = 80  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.offset < cubes.EDGE / 2 or not 0.005 <= self.cube_mass <= 0.2 or not 0 <= self.spread <= 1:
            raise BurnishError(
                f"stack needs offset above 0 and below {cubes.EDGE / 2} (half a cube, beyond which it falls), "
                "cube_mass in [0.005, 0.2] and spread in [0, 1]"
            )


class Stack(DeskTask):
    """The task stack: the hand moves in x, y, z, turns about the vertical, and grips."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config, TaskArm(config, ("x", "y", "z", "roll", "gripper")), cubes.FACTS)
        self.config: StackConfig = config

    def mjcf(self) -> str:
        mass = self.config.cube_mass
        red, blue = cubes.cube("red", "0.85 0.2 0.15 1", mass), cubes.cube("blue", "0.15 0.3 0.85 1", mass)
        return self.scene(red + blue)

    def bind(self, physics: Physics) -> None:
        super().bind(physics)
        self.cube, self.blue = cubes.Cube(physics, "red"), cubes.Cube(physics, "blue")

    def begin(self, rows: Rows, draw: Draw) -> None:
        red, blue = cubes.places(draw, self.config.spread)
        self.hand.begin(rows, everywhere(red, cubes.START), gripper=cubes.OPEN)
        xp, height = library(red), everywhere(red, [cubes.EDGE / 2])
        self.cube.put(rows, xp.concatenate([red[:, :2], height], axis=1), red[:, 2])
        self.blue.put(rows, xp.concatenate([blue[:, :2], height], axis=1), blue[:, 2])

    def goal(self) -> Array:
        """(N, 3) metres: the centre of a cube that rests on the blue one."""
        blue = self.blue.position()
        return blue + constant(blue, (0.0, 0.0, cubes.EDGE))

    def facts(self) -> Array:
        return cubes.facts(self.hand, self.cube, self.goal())

    def judge(self, action: Array) -> Verdict:
        asked = self.hand, self.cube, self.goal(), self.config.offset
        return self.verdict(cubes.placed(*asked) & self.blue.at_rest(), cubes.progress(*asked))
