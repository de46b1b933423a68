"""Push: a T on the desk is pushed by a ball on a stick into a pose, in many short pushes from its different sides.

The T is a free body on three feet, so its friction is that of three points under Coulomb's law: a tripod carries its
weight in one way only, which makes sliding steady and cheap. The pusher is fixed to the hand and the fingers are left
out: pushing needs none, and a ball touches a T in the same way however the hand leans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...policies.core.errors import BurnishError
from .. import arm
from ..arrays import constant, everywhere, library
from ..desk import DeskConfig, DeskTask, TaskArm
from ..rewards import tolerance
from ..task import Draw, Verdict

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

# Metres, in the frame of the T: its centre of mass is the origin, the stem points along -y.
BAR, STEM = (0.080, 0.020), (0.020, 0.060)  # along x, along y
BAR_Y = 0.040 * 1200 / 2800  # the two middles are 40 mm apart, with areas of 1600 and 1200 mm^2
STEM_Y = BAR_Y - 0.040
FEET = ((-0.033, BAR_Y), (0.033, BAR_Y), (0.0, STEM_Y - 0.023))
FOOT = 0.003  # radius; the boxes are a millimetre above the desk
TOP = 0.024  # height of the upper faces

BALL = 0.008  # m, radius of the pusher
LOW, LIFT = 0.016, 0.046  # m, heights of the ball: beside the T, and well above it
HARD = 'solref="0.01 1" solimp="0.95 0.99 0.0005"'  # contacts twice as stiff as MuJoCo's own
TARGET = (0.250, 0.0, -np.pi / 2)  # x, y, yaw: the stem points to the base, and all sides are within reach
LOST = 0.15  # m from its target, a T is out of reach, and the episode over
PITCH = 1.25  # rad; leaning, the hand reaches around the T on both sides
FACTS = ("T x", "T y", "T turned, sin", "T turned, cos", "ball x from T", "ball y from T", "ball height")
FACTS += ("tool x", "tool y")


@dataclass
class PushConfig(DeskConfig):
    """Settings of env=push: starts and tolerances of the T, its mass and its friction."""

    start_m: float = 0.035  # largest distance of the T from its target at the start, along x and y, in m
    start_rad: float = 1.0  # largest turn of the T from its target at the start, in rad
    position_m: float = 0.012  # distance below which the T is at its target, in m
    angle_rad: float = 0.15  # turn below which the T is at its target, in rad
    mass_kg: float = 0.1  # mass of the T, in kg
    friction: float = 0.6  # friction of the T on the desk
    max_steps: int = 160  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.start_m <= 0.05 and 0 < self.start_rad <= 3.2):
            raise BurnishError(
                "push needs start_m in (0, 0.05], which the arm can reach around, and start_rad in (0, 3.2]"
            )
        if not all(x > 0 for x in (self.position_m, self.angle_rad, self.mass_kg, self.friction)):
            raise BurnishError("push needs position_m, angle_rad, mass_kg and friction above 0")


def t_shape(height: float, middle: float, attributes: str) -> str:
    """The MJCF of the two boxes of a T, with half-height ``height`` and the middle at ``middle`` above the desk (m)."""
    return "".join(
        f'<geom type="box" pos="0 {y} {middle}" size="{x_size / 2} {y_size / 2} {height / 2}" {attributes}/>'
        for y, (x_size, y_size) in ((BAR_Y, BAR), (STEM_Y, STEM))
    )


class Push(DeskTask):
    """The task push: the ball on the stick moves in x, y and z."""

    def __init__(self, config: PushConfig) -> None:
        hand = TaskArm(
            config, ("x", "y", "z"), step_m=0.009, low=(0.12, -0.16, LOW, 0, 0), high=(0.35, 0.16, 0.08, 2, 0)
        )
        super().__init__(config, hand, FACTS)
        self.config: PushConfig = config

    def mjcf(self) -> str:
        density = self.config.mass_kg / (2800e-6 * (TOP - FOOT - 0.001))
        solid = f'{arm.TOUCHING["object"]} {HARD} density="{density}" rgba="0.2 0.45 0.8 1"'
        feet = "".join(
            f'<geom type="sphere" size="{FOOT}" pos="{x} {y} {FOOT}" mass="0" friction="{self.config.friction} 0 0" '
            f'priority="1" {HARD} {arm.TOUCHING["object"]}/>'
            for x, y in FEET
        )
        height, middle = TOP - FOOT - 0.001, (TOP + FOOT + 0.001) / 2
        things = f"""
    <body name="target" pos="{TARGET[0]} {TARGET[1]} 0" euler="0 0 {TARGET[2]}">
      {t_shape(0.001, 0.0005, f'{arm.TOUCHING["nothing"]} rgba="0.3 0.8 0.3 0.6"')}
    </body>
    <body name="t"><freejoint name="t"/>{t_shape(height, middle, solid)}{feet}</body>"""
        stick = f"""
                <geom class="link" type="capsule" fromto="0.02 0 0 {arm.TOOL} 0 0" size="0.004"/>
                <geom class="hand" name="ball" type="sphere" pos="{arm.TOOL} 0 0" size="{BALL}" condim="3" {HARD}/>"""
        return self.scene(things, held=stick, fingers=False, finger_m=0.05)

    def bind(self, physics: Physics) -> None:
        super().bind(physics)
        first = int(physics.model.joint("t").qposadr[0])
        self._t = physics.column("qpos", slice(first, first + 7))

    def begin(self, rows: Rows, draw: Draw) -> None:
        hand = draw.uniform("hand", (0.20, -0.03, LIFT), (0.24, 0.03, LIFT))
        lean = everywhere(hand, (PITCH, 0.0))
        self.hand.begin(rows, library(hand).concatenate([hand, lean], axis=1), gripper=0.0)
        most = np.array([self.config.start_m, self.config.start_m, self.config.start_rad])
        self.place(draw.uniform("t", TARGET - most, TARGET + most), rows)

    def place(self, pose: Array, rows: Rows | None = None) -> None:
        """The T at rest at ``pose`` (N, 3): x, y, yaw."""
        xp, zero = library(pose), 0 * pose[:, 0]
        x, y, half = pose[:, 0], pose[:, 1], pose[:, 2] / 2
        self._t.write(xp.stack([x, y, zero, xp.cos(half), zero, zero, xp.sin(half)], axis=1), rows)

    def t(self) -> Array:
        """(N, 3) x, y and yaw of the T, on the desk."""
        x, y, _, qw, qx, qy, qz = self._t.read().T
        xp = library(x)
        return xp.stack([x, y, xp.arctan2(2 * (qw * qz + qx * qy), 1 - 2 * (qy**2 + qz**2))], axis=1)

    def tipped(self) -> Array:
        """(N,) whether the T stands on its edge or lies on its back."""
        qx, qy = self._t.read()[:, 4:6].T
        return 1 - 2 * (qx**2 + qy**2) < 0.9

    def error(self) -> Array:
        """(N, 3) of the T from its target: metres, and radians in (-pi, pi]."""
        t = self.t()
        xp = library(t)
        away = t - constant(t, TARGET)
        away[:, 2] = xp.arctan2(xp.sin(away[:, 2]), xp.cos(away[:, 2]))
        return away

    def ball(self) -> Array:
        """(N, 3) the middle of the ball: in the frame of the T on the desk, and its height."""
        t, tcp = self.t(), self.hand.arm.tcp()
        x, y = tcp[:, 0] - t[:, 0], tcp[:, 1] - t[:, 1]
        xp = library(t)
        cos, sin = xp.cos(t[:, 2]), xp.sin(t[:, 2])
        return xp.stack([cos * x + sin * y, cos * y - sin * x, tcp[:, 2]], axis=1)

    def facts(self) -> Array:
        error, ball = self.error(), self.ball()
        xp, tool = library(error), self.hand.arm.tcp()[:, :2] - constant(error, TARGET[:2])
        turned = xp.stack([xp.sin(error[:, 2]), xp.cos(error[:, 2])], axis=1)
        parts = [20 * error[:, :2], turned, 20 * ball[:, :2], 50 * ball[:, 2:].clip(max=0.1), 20 * tool]
        return xp.concatenate(parts, axis=1)

    def judge(self, action: Array) -> Verdict:
        success, shaped, lost = self._counted(self.error(), self.ball())
        return self.verdict(success, shaped, failed=lost | self.tipped())

    def _counted(self, error: Array, ball: Array) -> tuple[Array, Array, Array]:
        """Success, how near it is, and whether the T is out of reach."""
        xp = library(error)
        away, turned = xp.hypot(error[:, 0], error[:, 1]), abs(error[:, 2])
        success = (away <= self.config.position_m) & (turned <= self.config.angle_rad)
        beside = tolerance(xp.hypot(ball[:, 0], ball[:, 1]), high=0.06, margin=0.1)
        shaped = 0.45 * tolerance(away, margin=0.06) + 0.4 * tolerance(turned, margin=1.0) + 0.05 * beside
        return success, shaped, away > LOST

    def known_outcome(self, before: Array, after: Array) -> tuple[Array, Array, Array]:
        """Reward, success and failure (N,) of a tick between two states (N, D); the state shows no T that tips."""
        (_, near, _), (success, shaped, lost) = (self._counted(*_error_and_ball(x)) for x in (before, after))
        return self.paid(success, shaped, lost, near), success, lost


def _error_and_ball(state: Array) -> tuple[Array, Array]:
    """The error of the T and the place of the ball, as they were before ``facts`` scaled them."""
    x, y, sin, cos, *ball = state[:, -len(FACTS) : -3].T
    return np.stack([x / 20, y / 20, np.arctan2(sin, cos)], axis=1), np.stack(ball, axis=1) / 20
