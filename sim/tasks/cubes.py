"""Cubes on the desk, and what it means to pick one up and to put it down: shared by pick_place and stack.

A cube has an edge as long as the gap between the parallel fingers. It looks the same after a quarter turn, so its turn
about the vertical is known up to that, and is observed as the sine and cosine of four times the angle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from .. import arm
from ..arrays import library
from ..desk import TaskArm
from ..rewards import tolerance
from ..task import Draw

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

EDGE = arm.GAP  # m
START = (0.20, 0.0, 0.09, np.pi / 2, 0.0)  # x, y, z, pitch, roll: the tool points down
OPEN = 0.4  # rad of the gripper: wider than a cube by almost its size
# Where cubes and goals lie: on opposite sides of the desk's middle line, 8 cm apart at least. The arm reaches all of it
# with the tool pointing down.
MIDDLE, SPREAD = (0.23, 0.075), (0.05, 0.035)  # m, of x and of the distance from that line
RELEASED = 0.03  # m, the tool is so far from the cube that no finger touches it
AT_REST, AT_REST_TURN = 0.02, 0.5  # m/s and rad/s, below which a cube lies still
LEVEL = 0.0015  # m, how exactly a cube's height says what it rests on

# Contacts of cubes are four times as fast as MuJoCo's usual ones: under the squeeze of the gripper (11 N) a cube of
# 25 g would otherwise sink millimetres into the fingers. The weight says that a cube's setting counts, not the other's.
CONTACT = 'solref="0.005 1" solimp="0.95 0.99 0.0005" solmix="1000" friction="0.4 0.005 0.0001"'


def cube(name: str, rgba: str, mass: float) -> str:
    """The MJCF of a free cube of that colour and mass in kg."""
    half = EDGE / 2
    return f"""
    <body name="{name}" pos="0.3 0 {half}"><freejoint name="{name}"/>
      <geom name="{name}" type="box" size="{half} {half} {half}" mass="{mass}" rgba="{rgba}"
            {arm.TOUCHING["object"]} {CONTACT}/>
    </body>"""


class AnyCube(Protocol):
    """A cube in each of N worlds, not necessarily the same one."""

    def position(self) -> Array: ...
    def turn(self) -> Array: ...
    def at_rest(self) -> np.ndarray: ...


class Cube:
    """One cube in N worlds."""

    def __init__(self, physics: Physics, name: str) -> None:
        joint = physics.model.joint(name)
        place, motion = int(joint.qposadr[0]), int(joint.dofadr[0])
        self._place = physics.column("qpos", slice(place, place + 7))
        self._motion = physics.column("qvel", slice(motion, motion + 6))

    def put(self, rows: Rows, position: Array, turn: Array) -> None:
        """``position`` (N, 3) of its centre, ``turn`` (N,) about the vertical."""
        xp, still = library(turn), 0 * turn
        quaternion = xp.stack([xp.cos(turn / 2), still, still, xp.sin(turn / 2)], axis=1)
        self._place.write(xp.concatenate([position, quaternion], axis=1), rows)
        self._motion.write(0.0, rows)

    def position(self) -> Array:
        """(N, 3) metres."""
        return self._place.read()[:, :3]

    def turn(self) -> Array:
        """(N,) rad in [-pi/4, pi/4], of its upright faces, whichever face is up.

        An axis of the cube that points along the angle a of the desk contributes exp(4ia), an upright one nothing.
        """
        w, x, y, z = self._place.read()[:, 3:].T
        xp = library(w)
        across = xp.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)])
        along = xp.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)])
        directions = (across + 1j * along) ** 4
        return xp.angle(directions[0] + directions[1] + directions[2]) / 4

    def at_rest(self) -> np.ndarray:
        """(N,) bool."""
        v = self._motion.read() ** 2
        slow = v[:, 0] + v[:, 1] + v[:, 2] < AT_REST**2
        return slow & (v[:, 3] + v[:, 4] + v[:, 5] < AT_REST_TURN**2)


def places(draw: Draw, spread: float) -> tuple[Array, Array]:
    """(N, 3) twice: x, y and turn of two things on opposite sides of the desk."""
    side = draw.uniform("side", [-1.0], [1.0])
    side = library(side).sign(side)
    where = draw.uniform("places", [-1.0] * 6, [1.0] * 6)
    made = []
    for sign, u in ((side, where[:, :3]), (-side, where[:, 3:])):
        x = MIDDLE[0] + spread * SPREAD[0] * u[:, 0]
        y = sign[:, 0] * (MIDDLE[1] + spread * SPREAD[1] * u[:, 1])
        made.append(library(side).stack([x, y, np.pi / 4 * u[:, 2]], axis=1))
    return made[0], made[1]


def quarter(angle: Array) -> Array:
    """The same angle up to quarter turns, in [-pi/4, pi/4]."""
    return (angle + np.pi / 4) % (np.pi / 2) - np.pi / 4


def azimuth(position: Array) -> Array:
    """(N,) rad: the direction of a place from the axis about which the arm turns."""
    return library(position).arctan2(position[:, 1], position[:, 0] - arm.PAN_X)


def closing(hand: TaskArm) -> Array:
    """(N, 2) the direction in the desk in which the moving finger opens. Pointing down, the roll turns it against the
    pan: both together give its angle."""
    q = hand.arm.q()
    angle = q[:, 4] - q[:, 0]
    xp = library(angle)
    return xp.stack([xp.cos(angle), xp.sin(angle)], axis=1)


def in_hand(hand: TaskArm, cube: AnyCube) -> Array:
    """(N, 3) metres from the tool to the cube: along the direction of closing, across it, and up."""
    away, along = cube.position() - hand.arm.tcp(), closing(hand)
    return library(away).stack(
        [
            away[:, 0] * along[:, 0] + away[:, 1] * along[:, 1],
            away[:, 1] * along[:, 0] - away[:, 0] * along[:, 1],
            away[:, 2],
        ],
        axis=1,
    )


def held(hand: TaskArm, cube: AnyCube) -> np.ndarray:
    """(N,) bool: the gripper would close further, and the cube is what keeps it from that."""
    place, gripper = abs(in_hand(hand, cube)), hand.arm.q()[:, 5]
    stopped = (abs(gripper - arm.PINCH) < 0.05) & (hand.arm.target[:, 5] < gripper)
    return stopped & (place[:, 0] < 0.006) & (place[:, 1] < 0.018) & (place[:, 2] < 0.018)


FACTS = ("cube x from tool", "cube y from tool", "cube z from tool", "cube x in hand", "cube y in hand")
FACTS += ("goal x from cube", "goal y from cube", "goal z from cube", "goal x", "goal y", "cube turned, sin")
FACTS += ("cube turned, cos",)


def facts(hand: TaskArm, cube: AnyCube, goal: Array) -> Array:
    """(N, 12): where the cube is from the tool, in the frames of the desk and of the hand, how far it is turned from
    the fingers, and where its goal (N, 3) is. In units of 5 cm, and no more than 10 of them: a cube can fall off the
    desk."""
    position, tool = cube.position(), hand.arm.tcp()
    # As if the tool were above the cube already: on the way there the pan turns the fingers too.
    turned = 4 * (cube.turn() - azimuth(position) - hand.arm.q()[:, 4])
    xp = library(turned)
    angles = xp.stack([xp.sin(turned), xp.cos(turned)], axis=1)
    metres = xp.concatenate([position - tool, in_hand(hand, cube)[:, :2], goal - position, goal[:, :2]], axis=1)
    return xp.concatenate([(20 * metres).clip(-10, 10), angles], axis=1)


def distance(hand: TaskArm, cube: AnyCube) -> Array:
    """(N,) metres from the tool to the cube's centre."""
    return _length(cube.position() - hand.arm.tcp())


def at_goal(cube: AnyCube, goal: Array, radius: float) -> np.ndarray:
    """(N,) bool: its centre is above a point within ``radius`` of the goal, and as high as resting there means."""
    away = cube.position() - goal
    return (_length(away[:, :2]) <= radius) & (abs(away[:, 2]) <= LEVEL)


def placed(hand: TaskArm, cube: AnyCube, goal: Array, radius: float) -> np.ndarray:
    """(N,) bool: it lies still at its goal, and the fingers have left it."""
    return at_goal(cube, goal, radius) & cube.at_rest() & (distance(hand, cube) >= RELEASED)


def progress(hand: TaskArm, cube: AnyCube, goal: Array, radius: float) -> Array:
    """(N,) in [0, 0.9]: first for going to the cube, then for holding it, lifting it, carrying it over the goal and
    lowering it, then, where it is at its goal, for letting go."""
    position, tool = cube.position(), distance(hand, cube)
    xp = library(tool)
    away = _length((goal - position)[:, :2])
    above = tolerance(away, high=0.5 * radius, margin=2 * radius)
    # A cube over the goal need not be high any more, so lowering it there costs nothing.
    lifted = xp.maximum(tolerance(position[:, 2], low=EDGE + 0.02, high=1.0, margin=0.03), above)
    lowered = above * tolerance(position[:, 2] - goal[:, 2], margin=0.05)
    carrying = 0.3 + 0.1 * lifted + 0.3 * tolerance(away, high=0.5 * radius, margin=0.25) + 0.1 * lowered
    letting_go = 0.8 + 0.1 * (tool / RELEASED).clip(max=1.0)
    going = 0.3 * tolerance(tool, margin=0.25)
    return xp.where(at_goal(cube, goal, radius), letting_go, xp.where(held(hand, cube), carrying, going))


def _length(x: Array) -> Array:
    """(N, D) -> (N,), the components added in a fixed order, so that it does not depend on N."""
    total = x[:, 0] * x[:, 0]
    for i in range(1, x.shape[1]):
        total = total + x[:, i] * x[:, i]
    return library(total).sqrt(total)
