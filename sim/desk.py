"""The common part of the tasks of the desktop arm: the desk, the settings, the two kinds of action, proprioception.

Actions are joint targets, or steps of the tool: metres and radians that are added to the pose last commanded (not to
the measured one, which sags and would drift), and inverted in closed form. The gripper is always an absolute angle.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..policies.core.config import LATER
from ..policies.core.errors import BurnishError, did_you_mean
from ..policies.core.ranges import check_ranges
from ..policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from . import arm
from .arrays import constant, library, put
from .guard import GuardConfig
from .randomize import RandomizeConfig
from .task import Backend, PixelConfig, Verdict

if TYPE_CHECKING:
    from .physics import Array, Physics, Rows


class ActionMode(enum.Enum):
    """The meanings of an action: targets of the joints, or displacements of the tool."""

    joint_target = "joint_target"
    ee_delta = "ee_delta"


class Observe(enum.Enum):
    """The observations of a task of the arm: numbers, pictures, or both."""

    state = "state"  # everything as numbers
    pixels = "pixels"  # cameras and the arm's own senses
    both = "both"  # cameras and everything as numbers


class Reward(enum.Enum):
    """The rewards of a task of the arm."""

    sparse = "sparse"  # 1 on success, else 0
    dense = "dense"  # how much nearer success came, in shares of the way, and 1 on success


class ArmKind(enum.Enum):
    """The arms that there are. They have the same joints and limits."""

    so101 = "so101"  # that of the SO-101
    long = "long"  # its upper arm is a quarter longer, its forearm a twentieth shorter: the same angles lead elsewhere


LINKS = {ArmKind.so101: arm.SO101, ArmKind.long: arm.LONG}
CAMERAS = ("front", "wrist")
AXES = ("x", "y", "z", "pitch", "roll", "gripper")
OPEN = 1.2  # rad, as far as an action can open the gripper


@dataclass
class DeskConfig:
    """Settings of every task of the arm."""

    action: ActionMode = ActionMode.ee_delta  # meaning of an action: targets of the joints or displacements of the tool
    observe: Observe = Observe.state  # observations: numbers, pictures or both
    image_size: int = 84  # side of the pictures, in pixels
    cameras: list[str] = field(default_factory=lambda: list(CAMERAS))  # cameras of the model that are observed
    lavish: bool = False  # shadows, reflections and smooth edges: 7 to 30 times slower on a CPU, and other pixels
    reward: Reward = Reward.sparse  # reward that the world pays
    control_hz: float = 20.0  # control ticks per second
    max_steps: int = 100
    backend: Backend = field(default=Backend.mujoco, metadata=LATER)  # physics: mujoco, in C; or warp, on the device
    arm: ArmKind = field(default=ArmKind.so101, metadata=LATER)  # arm that acts: so101 or long
    # properties of the world that are drawn anew in each episode
    randomize: RandomizeConfig = field(default_factory=RandomizeConfig)
    # the robot's guard between policy and actuators
    guard: GuardConfig = field(default_factory=GuardConfig, metadata=LATER)

    def __post_init__(self) -> None:
        check_ranges(self, {"[8, inf)": "image_size", "[1, inf)": "max_steps", "[5, 100]": "control_hz"})
        for name in self.cameras:
            if name not in CAMERAS:
                raise BurnishError(f"the desk has no camera {name!r}; {did_you_mean(name, CAMERAS)}")

    @property
    def links(self) -> arm.Links:
        return LINKS[self.arm]


def scene(things: str, *, timestep: float, arm_body: str | None = None) -> str:
    """A whole model: desk, light, cameras, the arm, and ``things`` of the task."""
    return f"""
<mujoco>
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{timestep}" integrator="implicitfast" cone="elliptic" impratio="10"/>
  <visual><headlight ambient="0.45 0.45 0.45" diffuse="0.2 0.2 0.2" specular="0 0 0"/><map znear="0.02" zfar="6"/>
    <quality shadowsize="1024"/><global offwidth="640" offheight="640"/></visual>
  <default>{arm.DEFAULTS}</default>
  <worldbody>
    <light pos="0.5 -0.5 1.5" dir="-0.3 0.5 -1" directional="true" diffuse="0.5 0.5 0.5" specular="0.1 0.1 0.1"/>
    <geom name="desk" type="box" pos="0.2 0 -0.02" size="0.4 0.4 0.02" rgba="0.35 0.40 0.45 1"
          {arm.TOUCHING["fixture"]} friction="0.6 0.01 0.0001"/>
    {arm.camera("front", (0.66, 0.0, 0.43), at=(0.16, 0.0, 0.10), fovy=42)}
    {arm.body() if arm_body is None else arm_body}
    {things}
  </worldbody>
  <actuator>{arm.actuators()}</actuator>
</mujoco>"""


class TaskArm:
    """The arm of N worlds as a task drives it: ``axes`` are the coordinates of the tool that an action moves."""

    def __init__(
        self,
        config: DeskConfig,
        axes: Sequence[str] = AXES,
        *,
        step_m: float = 0.015,
        step_rad: float = 0.15,
        low: Sequence[float] = (0.08, -0.25, 0.0, -0.5, -2.6),
        high: Sequence[float] = (0.40, 0.25, 0.40, 2.2, 2.6),
    ) -> None:
        """``low`` and ``high`` bound the commanded pose (x, y, z, pitch, roll); the steps are those of one action."""
        self.mode, self.links = config.action, config.links
        self._low, self._high = np.array(low), np.array(high)
        self._axes = [AXES.index(axis) for axis in axes]
        limit = np.array([step_m] * 3 + [step_rad] * 2 + [0.0])
        self._step = limit[:5]
        self.action_names = arm.JOINTS if self.mode is ActionMode.joint_target else tuple(axes)
        lower, upper = -limit, limit.copy()
        lower[5], upper[5] = arm.LOWER[5], OPEN
        if self.mode is ActionMode.joint_target:
            self.action = ActionSpec(tuple(arm.LOWER), (*arm.UPPER[:5], OPEN))
        else:
            self.action = ActionSpec(tuple(lower[self._axes]), tuple(upper[self._axes]))

    def bind(self, physics: Physics) -> None:
        self.arm = arm.Arm(physics)
        self.pose = physics.zeros(5)  # last commanded; its pitch may be more than the wrist can do

    def begin(self, rows: Rows, pose: Array, gripper: float) -> None:
        """At rest with the tool at ``pose`` (N, 5) and the gripper at an angle."""
        q = arm.inverse(pose, self.links)
        self.arm.begin(rows, library(q).concatenate([q, 0 * q[:, :1] + gripper], axis=1))
        put(self.pose, pose, rows)

    def commanded(self) -> Array:
        """(N, 5) the pose that the servos are heading for."""
        return arm.forward(self.arm.target, self.links) if self.mode is ActionMode.joint_target else 1.0 * self.pose

    def control(self, action: Array, rows: Rows | None) -> Array:
        if self.mode is ActionMode.joint_target:
            return self.arm.aim(action, rows)
        change = library(action).zeros_like(self.arm.target)
        for i, axis in enumerate(self._axes):
            change[:, axis] = action[:, i]
        low, high = constant(action, self._low), constant(action, self._high)
        pose = (self.pose + change[:, :5]).clip(low, high)
        gripper = change[:, 5] if 5 in self._axes else self.arm.target[:, 5]
        q = arm.inverse(pose, self.links)
        # A place out of reach is not remembered, so the way back begins where the arm is.
        pose[:, :3] = arm.forward(q, self.links)[:, :3]
        put(self.pose, pose, rows)
        return self.arm.aim(library(q).concatenate([q, gripper[:, None]], axis=1), rows)

    def holding(self) -> tuple[Array, Array]:
        """(the action that keeps the first arm where it was sent last, which of its numbers are displacements)."""
        low, high = np.array(self.action.low), np.array(self.action.high)
        if self.mode is ActionMode.joint_target:
            return np.clip(self.arm.target[0], low, high), np.zeros(6, bool)
        relative = np.array([axis < 5 for axis in self._axes])
        return np.where(relative, 0.0, np.clip(self.arm.target[0, 5], low, high)), relative

    @property
    def freedoms(self) -> int:
        """The number of coordinates of the tool that are moved, the gripper included."""
        return len(self._axes)

    def action_towards(self, pose: Array, gripper: Array | None, error: Array) -> Array:
        """(N, A) in [-1, 1]: the action that goes as far towards ``pose`` (N, 5) as one tick may. For experts, whose
        hand errs by ``error`` (N, freedoms), in shares of such a step and of half the gripper's way in either mode."""
        low, high = np.array(self.action.low), np.array(self.action.high)
        target = self.arm.target[:, 5] if gripper is None else gripper
        if self.mode is ActionMode.joint_target:
            # The tool goes as straight and as fast as by steps of its own.
            off = np.zeros((len(pose), 6))
            off[:, self._axes] = error
            now = self.commanded()
            wanted = now + np.clip(np.clip(pose, self._low, self._high) - now, -self._step, self._step)
            grip = target + off[:, 5] * (OPEN - arm.LOWER[5]) / 2
            units = np.concatenate([arm.inverse(wanted + self._step * off[:, :5], self.links), grip[:, None]], axis=1)
            return np.clip((units - low) / (high - low) * 2 - 1, -1, 1)
        change = np.concatenate([pose - self.commanded(), target[:, None]], axis=1)
        wished = np.clip((change[:, self._axes] - low) / (high - low) * 2 - 1, -1, 1)
        return np.clip(wished + error, -1, 1)

    def senses(self) -> Array:
        """(N, 20) what the arm knows of itself: joint angles, a fifth of their speeds, how far targets are ahead (in
        hundredths of a radian, clipped), and the gripper's target with the tool's height."""
        q = self.arm.q()
        ahead = (100 * (self.arm.target - q)).clip(-10, 10)
        parts = [q, 0.2 * self.arm.velocity(), ahead, self.arm.target[:, 5:], self.arm.tcp()[:, 2:]]
        return library(q).concatenate(parts, axis=1)


# Names of `Hand.senses`.
SENSES = tuple(f"{what} {joint}" for what in ("angle", "speed", "ahead") for joint in arm.JOINTS)
SENSES += ("gripper target", "tool height")


class DeskTask:
    """The plumbing of every task of the arm; a task adds its things, its quantities, and what counts.

    A subclass sets ``timestep``, calls ``super().__init__`` with its hand and the names of its state's own components,
    and defines ``mjcf``, ``bind``, ``begin``, ``facts`` and ``judge``.
    """

    version = 1
    timestep = 0.0025  # s
    derive: tuple[str, ...] = ("mj_kinematics",)  # poses are those of the end of the tick
    autoreset = False

    def __init__(self, config: DeskConfig, hand: TaskArm, facts: Sequence[str]) -> None:
        self.config, self.hand = config, hand
        self.frame_skip = round(1 / (config.control_hz * self.timestep))
        if abs(self.frame_skip * self.timestep * config.control_hz - 1) > 1e-9:
            whole = 1 / (self.frame_skip * self.timestep)
            raise BurnishError(
                f"control_hz={config.control_hz:g} is no whole number of physics steps of {self.timestep} s; "
                f"the nearest that is: {whole:g}"
            )
        blind = config.observe is Observe.pixels
        self.state_names = SENSES if blind else (*SENSES, *facts)
        self.action_names = hand.action_names
        shapes = {"state": (len(self.state_names),)}
        self.spec = EnvSpec(ObsSpec(shapes), hand.action, config.control_hz, config.action.value, config.max_steps)
        self.pixels: PixelConfig | None = None
        if config.observe is not Observe.state:
            self.pixels = PixelConfig(tuple(config.cameras), config.image_size, config.lavish)
        self.randomize: RandomizeConfig | None = config.randomize
        self.guard: GuardConfig | None = config.guard
        self.memory: dict[str, Array] = {}

    def scene(self, things: str, **hand: Any) -> str:
        """The model of the task: its arm with ``things`` around it; ``hand`` as in `arm.body`."""
        return scene(things, timestep=self.timestep, arm_body=arm.body(links=self.config.links, **hand))

    def bind(self, physics: Physics) -> None:
        self.hand.bind(physics)
        self.memory |= {"target": self.hand.arm.target, "pose": self.hand.pose, "shaped": physics.zeros() - 1.0}

    def facts(self) -> Array:
        """(N, K): what the state says of the world, beside the arm's own senses."""
        raise NotImplementedError

    def settle(self, rows: Rows) -> None:
        put(self.memory["shaped"], -1.0, rows)  # not known before the first tick, which therefore earns nothing

    def control(self, action: Array, rows: Rows | None) -> Array:
        return self.hand.control(action, rows)

    def observe(self) -> dict[str, Array]:
        senses = self.hand.senses()
        if self.config.observe is Observe.pixels:
            return {"state": senses}
        return {"state": library(senses).concatenate([senses, self.facts()], axis=1)}

    def verdict(self, success: Array, shaped: Array, failed: Array | None = None) -> Verdict:
        """Success ends an episode with reward 1, ``failed`` ends it with 0.

        ``shaped`` in [0, 1] says how near success is. A dense reward is by how much it rose in this tick (a potential:
        Ng, Harada and Russell 1999), so that what a failure earned before is lost, and nobody earns by hovering near
        success, as one would if nearness itself were paid in every tick until the end.
        """
        xp = library(success)
        lost: Array = xp.zeros_like(success) if failed is None else failed
        success = success & ~lost
        before = xp.where(self.memory["shaped"] < 0, shaped, self.memory["shaped"])
        reward = self.paid(success, shaped, lost, before)
        self.memory["shaped"][:] = shaped
        return Verdict(reward, success | lost, success, {"shaped": xp.where(success, 1.0, shaped)})

    def paid(self, success: Array, shaped: Array, failed: Array, before: Array) -> Array:
        """(N,) the reward of a tick that began at ``before``, the nearness of success then."""
        if self.config.reward is Reward.sparse:
            return 1.0 * success
        xp = library(success)
        return success + (xp.where(success, 1.0, xp.where(failed, 0.0, shaped)) - before)
