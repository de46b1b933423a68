"""A six-servo desktop arm of the SO-101 class: its body in primitives, its kinematics in closed form, its two controls.

Link lengths, joint signs, limits, servo gains, torque and masses are those of the public model of the SO-101 follower
with STS3215 servos (TheRobotStudio, SO-ARM100, calibration with the zeros in mid-range). The base stands at the origin,
x points forward, z up; at zero the upper arm is up, forearm and tool point forward.

**Departures.** Links are capsules and boxes. The tool centre lies on the axis of the wrist roll (there 8 mm below it),
without which there is no closed form. Upper arm and forearm touch nothing: only hand, fingers and what they hold do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .arrays import constant, library, put

if TYPE_CHECKING:
    from .physics import Array, Physics, Rows

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LOWER = np.array([-1.91986, -1.74533, -1.69, -1.65806, -2.74385, -0.17453])  # rad
UPPER = np.array([1.91986, 1.74533, 1.69, 1.65806, 2.84121, 1.74533])
TORQUE = 3.35  # Nm
SQUEEZE = TORQUE / 4  # Nm, of the gripper's servo: LeRobot's limit under load; 11 N at the fingertips
PINCH = 0.13  # rad, the gripper angle at which the fingers are parallel, 24 mm apart
GAP = 0.024  # m

# Metres, in the vertical plane of the arm: r from the pan axis, z from the desk.
PAN_X = 0.0388
SHOULDER = np.array([0.0304, 0.1166])
HAND = 0.0611  # wrist to the joint of the wrist roll
TOOL = 0.0981  # from there to the tool centre
_L3 = HAND + TOOL


class Links:
    """The two links that differ between builds of the arm, with their lengths and their elevations at zero."""

    def __init__(self, upper_arm: tuple[float, float], forearm: tuple[float, float]) -> None:
        """``upper_arm``: from shoulder to elbow, at zero; ``forearm``: from elbow to wrist. Both in m."""
        self.upper_arm, self.forearm = upper_arm, forearm
        self.upper, self.fore = float(np.hypot(*upper_arm)), float(np.hypot(*forearm))
        self.upper_tilt, self.fore_tilt = (float(np.arctan2(z, r)) for r, z in (upper_arm, forearm))


SO101 = Links((0.0280, 0.1126), (0.1349, 0.0052))
LONG = Links((0.0350, 0.1408), (0.1282, 0.0049))  # a quarter longer, and a twentieth shorter

# Collisions: parts of the hand touch objects and fixtures, objects touch each other too.
TOUCHING = {
    "hand": 'contype="1" conaffinity="0"',
    "object": 'contype="2" conaffinity="3"',
    "fixture": 'contype="0" conaffinity="3"',
    "nothing": 'contype="0" conaffinity="0"',
}

DEFAULTS = f"""
    <default class="servo">
      <joint damping="0.6" frictionloss="0.052" armature="0.028"/>
      <position kp="998.22" kv="2.731" forcerange="-{TORQUE} {TORQUE}"/>
    </default>
    <default class="link"><geom {TOUCHING["nothing"]} rgba="0.95 0.75 0.15 1" mass="0"/></default>
    <default class="hand">
      <geom {TOUCHING["hand"]} rgba="0.8 0.8 0.83 1" mass="0" friction="1 0.02 0.0001" condim="4"/>
    </default>
"""


def camera(
    name: str, place: Sequence[float], *, at: Sequence[float], up: Sequence[float] = (0, 0, 1), fovy: float = 45
) -> str:
    """A camera that looks at a point, with ``up`` upwards in its picture; ``fovy`` in degrees."""
    ahead = np.subtract(at, place)
    right = np.cross(ahead, up)
    above = np.cross(right, ahead)
    axes = " ".join(f"{x:.5f}" for x in (*(right / np.linalg.norm(right)), *(above / np.linalg.norm(above))))
    return f'<camera name="{name}" pos="{" ".join(map(str, place))}" xyaxes="{axes}" fovy="{fovy}"/>'


def _inertial(x: float, z: float, mass: float, length: float) -> str:
    """That of a rod about its middle, in all directions: near enough beside the servos' armature."""
    inertia = mass * (length**2 / 12 + 0.01**2)
    return f'<inertial pos="{x} 0 {z}" mass="{mass}" diaginertia="{inertia:.3e} {inertia:.3e} {inertia:.3e}"/>'


def body(held: str = "", fingers: bool = True, finger_m: float = TOOL + 0.006, links: Links = SO101) -> str:
    """The arm as MJCF. ``held`` is fixed to the hand, in whose frame the tool points along x; without ``fingers`` the
    gripper joint is there and moves nothing that touches. ``finger_m`` is how far fingers reach."""
    finger = 'class="hand"' if fingers else 'class="link"'
    tip, fore, up = finger_m, links.forearm, links.upper_arm
    joint = {
        name: f'<joint class="servo" name="{name}" axis="{axis}" range="{low} {high}"/>'
        for name, axis, low, high in zip(
            JOINTS, ("0 0 -1", "0 1 0", "0 1 0", "0 1 0", "-1 0 0", "0 -1 0"), LOWER, UPPER, strict=True
        )
    }
    return f"""
    <body name="base">
      <geom class="link" type="box" pos="0.02 0 0.03" size="0.045 0.03 0.03"/>
      <body name="shoulder" pos="{PAN_X} 0 0.0624">{joint["shoulder_pan"]}{_inertial(0.03, 0.025, 0.100, 0.06)}
        <geom class="link" type="box" pos="0.02 0 0.035" size="0.03 0.025 0.03"/>
        <body name="upper_arm" pos="{SHOULDER[0]} 0 {SHOULDER[1] - 0.0624:.4f}">{joint["shoulder_lift"]}
          {_inertial(0.02, 0.085, 0.103, 0.116)}
          <geom class="link" type="capsule" fromto="0 0 0 {up[0]} 0 {up[1]}" size="0.018"/>
          <body name="forearm" pos="{up[0]} 0 {up[1]}">{joint["elbow_flex"]}
            {_inertial(0.095, 0.003, 0.104, 0.135)}
            <geom class="link" type="capsule" fromto="0 0 0 {fore[0]} 0 {fore[1]}" size="0.016"/>
            <body name="wrist" pos="{fore[0]} 0 {fore[1]}">{joint["wrist_flex"]}{_inertial(0.035, 0, 0.079, 0.06)}
              <geom class="link" type="capsule" fromto="0 0 0 {HAND - 0.01:.4f} 0 0" size="0.016"/>
              <body name="hand" pos="{HAND} 0 0">{joint["wrist_roll"]}{_inertial(0.025, 0, 0.087, 0.08)}
                <geom class="hand" type="box" pos="0.005 0 0.002" size="0.012 0.014 0.02"/>
                <geom {finger} name="fixed_finger" type="box" pos="{tip / 2} 0 {-GAP / 2 - 0.003}"
                      size="{tip / 2} 0.009 0.003"/>
                <site name="tcp" pos="{TOOL} 0 0" size="0.004" rgba="0 0 0 0"/>
                {camera("wrist", (0.0, -0.08, 0.04), at=(0.11, 0.0, 0.0), up=(-1.0, 0.0, 0.0), fovy=60)}
                {held}
                <body name="jaw" pos="0.0234 0 0.0211" euler="0 {PINCH} 0">{joint["gripper"]}
                  {_inertial(0.03, -0.003, 0.012, 0.08)}
                  <geom {finger} name="moving_finger" type="box" size="{(tip - 0.0234) / 2} 0.009 0.003"
                        pos="{(tip - 0.0234) / 2} 0 {GAP / 2 + 0.003 - 0.0211}"/>
                </body>
              </body>
            </body>
          </body>
        </body>
      </body>
    </body>"""


def actuators() -> str:
    """The MJCF of the six position servos, with their ranges in rad and torques in Nm."""
    torque = [TORQUE] * 5 + [SQUEEZE]
    return "".join(
        f'<position class="servo" name="{name}" joint="{name}" ctrlrange="{low} {high}" forcerange="-{most} {most}"/>'
        for name, low, high, most in zip(JOINTS, LOWER, UPPER, torque, strict=True)
    )


def forward(q: Array, links: Links = SO101) -> Array:
    """(N, 5 or 6) joint angles -> (N, 5): x, y, z of the tool centre, its pitch (0 forward, pi/2 down), its roll."""
    xp = library(q)
    fore = q[:, 1] + q[:, 2]
    pitch = fore + q[:, 3]
    first, second = links.upper_tilt - q[:, 1], links.fore_tilt - fore
    r = SHOULDER[0] + links.upper * xp.cos(first) + links.fore * xp.cos(second) + _L3 * xp.cos(pitch)
    z = SHOULDER[1] + links.upper * xp.sin(first) + links.fore * xp.sin(second) - _L3 * xp.sin(pitch)
    return xp.stack([PAN_X + r * xp.cos(q[:, 0]), -r * xp.sin(q[:, 0]), z, pitch, q[:, 4]], axis=1)


def _two_links(r: Array, z: Array, first: float, second: Array | float) -> tuple[Array, Array]:
    """Elevations of two links of these lengths that reach from the shoulder to (r, z), elbow up; what is out of reach
    becomes a stretched or folded arm in its direction. By the law of cosines, twice."""
    xp = library(r)
    reach = xp.hypot(r, z).clip(abs(first - second) + 1e-6, first + second - 1e-6)
    bend = xp.arccos((first**2 + reach**2 - second**2) / (2 * first * reach))
    inner = xp.arccos((first**2 + second**2 - reach**2) / (2 * first * second))
    upper = xp.arctan2(z, r) + bend
    return upper, upper - (np.pi - inner)


def inverse(pose: Array, links: Links = SO101) -> Array:
    """(N, 5) as ``forward`` gives it -> (N, 5) joint angles within limits, elbow up. Where the wrist cannot bend as far
    as the pitch asks, the place of the tool is kept and the pitch gives way."""
    xp = library(pose)
    x, y, z, pitch, roll = pose.T
    r, z = xp.hypot(x - PAN_X, y) - SHOULDER[0], z - SHOULDER[1]
    upper, fore = _two_links(r - _L3 * xp.cos(pitch), z + _L3 * xp.sin(pitch), links.upper, links.fore)
    flex = pitch + fore - links.fore_tilt
    bent = flex.clip(LOWER[3], UPPER[3])
    # A wrist at its limit makes one link of forearm and tool.
    angle = bent + links.fore_tilt  # between them, downwards
    along, across = links.fore + _L3 * xp.cos(angle), _L3 * xp.sin(angle)
    stiff_upper, stiff = _two_links(r, z, links.upper, xp.hypot(along, across))
    limited = bent != flex
    upper = xp.where(limited, stiff_upper, upper)
    fore = xp.where(limited, stiff + xp.arctan2(across, along), fore)
    lift = links.upper_tilt - upper
    q = xp.stack([-xp.arctan2(y, x - PAN_X), lift, links.fore_tilt - fore - lift, bent, roll], axis=1)
    return q.clip(constant(q, LOWER[:5]), constant(q, UPPER[:5]))


class Arm:
    """The arm in N worlds: its columns, and the joint targets that its servos were last given (``target``)."""

    def __init__(self, physics: Physics) -> None:
        first = int(physics.model.joint(JOINTS[0]).qposadr[0])
        dof, motor = int(physics.model.joint(JOINTS[0]).dofadr[0]), int(physics.model.actuator(JOINTS[0]).id)
        self._q, self._v = physics.column("qpos", slice(first, first + 6)), physics.column("qvel", slice(dof, dof + 6))
        self._ctrl = physics.column("ctrl", slice(motor, motor + 6))
        self._tcp = physics.column("site_xpos", physics.model.site("tcp").id)
        self.target = physics.zeros(6)

    def begin(self, rows: Rows, q: Array) -> None:
        """At rest at the joint angles ``q`` (N, 6)."""
        self._q.write(q, rows)
        self._ctrl.write(q, rows)
        put(self.target, q, rows)

    def aim(self, target: Array, rows: Rows | None) -> Array:
        """New joint targets (N, 6) for the worlds ``rows``; returns those of all worlds, within limits."""
        put(self.target, target.clip(constant(target, LOWER), constant(target, UPPER)), rows)
        return self.target

    def place(self, q: Array, velocity: Array) -> None:
        """Where the arm of every world is (N, 6); its targets stay."""
        self._q.write(q)
        self._v.write(velocity)

    def q(self) -> Array:
        return self._q.read()

    def velocity(self) -> Array:
        return self._v.read()

    def tcp(self) -> Array:
        """(N, 3) metres."""
        return self._tcp.read()
