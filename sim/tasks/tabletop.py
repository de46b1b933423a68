"""Tabletop: three coloured cubes on the desk, and an instruction that says which to lift, touch, push or put where.

All tasks share one scene, and nothing but the words tells them apart. Left and right are those of the arm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...policies.core.errors import BurnishError, did_you_mean
from ..arrays import constant, everywhere, library, pick, put, whole
from ..desk import DeskConfig, DeskTask, TaskArm
from ..rewards import tolerance
from ..task import Draw, Verdict
from . import cubes

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

COLOURS = {"red": "0.85 0.2 0.15 1", "blue": "0.15 0.3 0.85 1", "green": "0.2 0.65 0.25 1"}
LIFT, TOUCH, PUSH, PUT = range(4)  # the skills
LIFTED, HIGH = 0.045, 0.06  # m, the height of a cube's centre that counts, and to which an expert lifts it
TOUCHED = 0.015  # m, from the tool to a cube's centre
PUSHED, ASTRAY = 0.03, 0.02  # m, how far a pushed cube goes to its side at least, and nearer or farther at most
# m, between the lines in which cubes lie, and how far off these they may be.
LANES, SIDEWAYS, AHEAD = 0.095, 0.012, 0.05


def _skills() -> dict[str, tuple[int, int, int]]:
    """Sentence -> (skill, number of the cube, and what skill needs besides: 1 for left, -1 for right, another cube)."""
    found, names = {}, list(COLOURS)
    for i, name in enumerate(names):
        found |= {f"lift the {name} cube": (LIFT, i, 0), f"touch the {name} cube": (TOUCH, i, 0)}
        found |= {f"push the {name} cube to the {side}": (PUSH, i, y) for side, y in (("left", 1), ("right", -1))}
        found |= {f"put the {name} cube on the {names[j]} one": (PUT, i, j) for j in range(3) if j != i}
    return found


SKILLS = _skills()
USUAL = (
    *("lift the red cube", "lift the blue cube", "touch the red cube", "touch the green cube"),
    *("push the blue cube to the left", "push the green cube to the right"),
    *("put the red cube on the blue one", "put the blue cube on the green one"),
)
FACTS = tuple(f"{name} cube {axis} from tool" for name in COLOURS for axis in "xyz")
FACTS += tuple(f"{name} cube turned, {part}" for name in COLOURS for part in ("sin", "cos"))


@dataclass
class TabletopConfig(DeskConfig):
    """Settings of env=tabletop: the instructions that are given, and the cubes' mass."""

    instructions: list[str] = field(default_factory=lambda: list(USUAL))  # instructions, of which a seed draws one
    image_size: int = 64  # side of the pictures, in pixels
    offset: float = 0.01  # largest distance of a cube's centre from above that of the one it was put on, in m
    cube_mass: float = 0.025  # mass of a cube in kg, of wood or printed
    max_steps: int = 80  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.instructions:
            if text not in SKILLS:
                raise BurnishError(f"tabletop has no instruction {text!r}; {did_you_mean(text, SKILLS)}")
        if not self.instructions or len(set(self.instructions)) < len(self.instructions):
            raise BurnishError("tabletop needs one instruction or more, and none twice")
        if not 0 < self.offset < cubes.EDGE / 2 or not 0.005 <= self.cube_mass <= 0.2:
            raise BurnishError(f"tabletop needs offset in (0, {cubes.EDGE / 2}) and cube_mass in [0.005, 0.2]")


class Chosen:
    """In each world one of its cubes, as a `cubes.AnyCube`."""

    def __init__(self, things: list[cubes.Cube], which: Array) -> None:
        self._things, self._which = things, which

    def position(self) -> Array:
        return pick([cube.position() for cube in self._things], self._which)

    def turn(self) -> Array:
        return pick([cube.turn() for cube in self._things], self._which)

    def at_rest(self) -> np.ndarray:
        return pick([cube.at_rest() for cube in self._things], self._which)


class Tabletop(DeskTask):
    """The task tabletop: the hand moves in x, y, z, turns about the vertical, and grips."""

    version = 2  # the clumsy expert misses cubes that it is to touch or lift, which it did not before

    def __init__(self, config: TabletopConfig) -> None:
        super().__init__(config, TaskArm(config, ("x", "y", "z", "roll", "gripper")), FACTS)
        self.config: TabletopConfig = config
        self._table = np.array([SKILLS[text] for text in config.instructions])

    def mjcf(self) -> str:
        things = "".join(cubes.cube(name, rgba, self.config.cube_mass) for name, rgba in COLOURS.items())
        return self.scene(things)

    def bind(self, physics: Physics) -> None:
        super().bind(physics)
        self.cubes = [cubes.Cube(physics, name) for name in COLOURS]
        self.memory |= {"sentence": whole(physics.zeros()), "start": physics.zeros(2)}
        self._update()

    @property
    def instructions(self) -> list[str]:
        return [self.config.instructions[i] for i in self.memory["sentence"].tolist()]

    def _update(self) -> None:
        """The skill of each sentence, its cube, and the other thing that the skill needs."""
        sentence = self.memory["sentence"]
        self.skill, self.which, self.besides = whole(constant(sentence, self._table)[sentence]).T
        self.cube = Chosen(self.cubes, self.which)
        other = library(sentence).where(self.skill == PUT, self.besides, self.which)
        self.other = Chosen(self.cubes, other)

    def begin(self, rows: Rows, draw: Draw) -> None:
        share = draw.uniform("instruction", (0.0,), (1.0,))[:, 0]
        put(self.memory["sentence"], whole(share * len(self._table)), rows)
        xp, lanes = library(share), draw.uniform("lanes", (0.0,) * 3, (1.0,) * 3).argsort(axis=1) - 1
        off = draw.uniform("cubes", (-AHEAD, -SIDEWAYS, -np.pi) * 3, (AHEAD, SIDEWAYS, np.pi) * 3).reshape(-1, 3, 3)
        self.hand.begin(rows, everywhere(share, cubes.START), gripper=cubes.OPEN)
        height = 0 * share + cubes.EDGE / 2
        for i, cube in enumerate(self.cubes):
            x, y = cubes.MIDDLE[0] + off[:, i, 0], LANES * lanes[:, i] + off[:, i, 1]
            cube.put(rows, xp.stack([x, y, height], axis=1), off[:, i, 2])

    def settle(self, rows: Rows) -> None:
        super().settle(rows)
        self._update()
        put(self.memory["start"], self.cube.position()[:, :2], rows)

    def goal(self) -> Array:
        """(N, 3) metres: where the centre of the cube should be, of those that are lifted or put down."""
        xp = library(self.skill)
        up = xp.where(self.skill == LIFT, HIGH - self.cube.position()[:, 2], cubes.EDGE)
        return self.other.position() + xp.stack([0 * up, 0 * up, up], axis=1)

    def facts(self) -> Array:
        tool, roll = self.hand.arm.tcp(), self.hand.arm.q()[:, 4]
        places = [cube.position() for cube in self.cubes]
        turned = [4 * (cube.turn() - cubes.azimuth(p) - roll) for cube, p in zip(self.cubes, places, strict=True)]
        metres = [(20 * (p - tool)).clip(-10, 10) for p in places]
        xp = library(roll)
        return xp.concatenate([*metres, *(xp.stack([xp.sin(t), xp.cos(t)], axis=1) for t in turned)], axis=1)

    def judge(self, action: Array) -> Verdict:
        # A state that was loaded, or rows that were put back, may say other sentences than those of the last tick.
        self._update()
        place, near = self.cube.position(), cubes.distance(self.hand, self.cube)
        moved = place[:, :2] - self.memory["start"]
        aside, level = moved[:, 1] * self.besides, abs(place[:, 2] - cubes.EDGE / 2) <= cubes.LEVEL
        asked = self.hand, self.cube, self.goal(), self.config.offset
        reached = [
            place[:, 2] >= LIFTED,
            near <= TOUCHED,
            level & (aside >= PUSHED) & (abs(moved[:, 0]) <= ASTRAY),
            cubes.placed(*asked) & self.other.at_rest(),
        ]
        nearness = tolerance(near, margin=0.25)
        shares = [
            0.4 * nearness + 0.5 * tolerance(place[:, 2], low=LIFTED, high=1.0, margin=0.03),
            0.9 * nearness,
            0.4 * nearness + 0.5 * tolerance(aside, low=PUSHED, high=1.0, margin=PUSHED),
            cubes.progress(*asked),
        ]
        return self.verdict(pick(reached, self.skill), pick(shares, self.skill))
