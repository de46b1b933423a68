"""Reach: the tool goes to a point in the air and stays there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...policies.core.errors import BurnishError
from .. import arm
from ..arrays import everywhere, library, put
from ..desk import DeskConfig, DeskTask, TaskArm
from ..rewards import tolerance
from ..task import Draw, Verdict

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

START = (0.20, 0.0, 0.15, 1.2, 0.0)  # x, y, z, pitch, roll
FACTS = ("goal x", "goal y", "goal z", "goal x from tool", "goal y from tool", "goal z from tool", "held")
GOAL_LOW, GOAL_HIGH = (0.16, -0.12, 0.03), (0.30, 0.12, 0.20)  # m


@dataclass
class ReachConfig(DeskConfig):
    """Settings of env=reach: the radius of the goal and the time to stay there."""

    radius: float = 0.01  # distance to the goal, in m, at which the tool is there
    hold: int = 5  # ticks for which it must stay there
    max_steps: int = 60  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.radius > 0 or self.hold < 1:
            raise BurnishError("reach needs radius above 0 and hold of at least 1")


class Reach(DeskTask):
    """The task reach: the tool moves in x, y and z."""

    def __init__(self, config: ReachConfig) -> None:
        super().__init__(config, TaskArm(config, ("x", "y", "z")), FACTS)
        self.config: ReachConfig = config

    def mjcf(self) -> str:
        ball = f'<geom size="0.01" rgba="0.2 0.8 0.3 1" {arm.TOUCHING["nothing"]}/>'
        return self.scene(f'<body name="goal" mocap="true">{ball}</body>')

    def bind(self, physics: Physics) -> None:
        super().bind(physics)
        self._goal = physics.column("mocap_pos", 0)
        self.memory["held"] = physics.zeros()

    def begin(self, rows: Rows, draw: Draw) -> None:
        self.hand.begin(rows, everywhere(self.memory["held"], START), gripper=0.0)
        self._goal.write(draw.uniform("goal", GOAL_LOW, GOAL_HIGH), rows)
        put(self.memory["held"], 0.0, rows)

    def goal(self) -> Array:
        """(N, 3) metres."""
        return self._goal.read()

    def facts(self) -> Array:
        away = self.goal() - self.hand.arm.tcp()
        return library(away).concatenate([self.goal(), away, self.memory["held"][:, None] / self.config.hold], axis=1)

    def judge(self, action: Array) -> Verdict:
        xp = library(self.goal())
        away = xp.linalg.norm(self.goal() - self.hand.arm.tcp(), axis=1)
        there = away <= self.config.radius
        self.memory["held"][:] = xp.where(there, self.memory["held"] + 1, 0)
        return self.verdict(self.memory["held"] >= self.config.hold, 0.9 * tolerance(away, margin=0.1))
