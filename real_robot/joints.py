"""``env=joints``: a robot without a task. A policy sees its joints and its cameras, and says where the joints
go. For policies that were learnt from recordings of a real robot, and for those of policy servers.

    state, action    (n,) the joints in the robot's order, (n + 1,) with a gripper that is a channel of its own behind
                     them; measured angles, and set-points

in one of these, so that LeRobot's recordings need no conversion:

    units      a joint                                            the gripper's channel
    rad        radians                                            0 (closed) to 1
    deg        degrees                                            0 to 100
    range      -100 to 100 over the range where it may go         0 to 100

A joint in ``percent`` goes from 0 to 100 over its range, whatever the others do: a gripper that is one of the joints.

Success is the word of a person; where no person is asked, no success is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from ..policies.core.errors import BurnishError, did_you_mean
from ..policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from .adapter import RobotSpec, Vector

ABSOLUTE = "joint_target"
USUAL_HZ = 30.0
MOST_HZ = 1000.0
TWICE = 2.0  # a policy's set-points that need so many ranges of a joint are no angles of it
HARDLY = 0.05  # of every joint's range: nor are these


class Units(Enum):
    """The units of joints in observations and actions."""

    rad = "rad"
    deg = "deg"
    range = "range"


@dataclass
class JointsConfig:
    """Settings of env=joints: units, rate in Hz, length of episodes, and their start."""

    units: Units = Units.rad  # units of observed and commanded joints; range: 0 to 100, or -100 to 100
    percent: list[str] = field(default_factory=list)  # joints in 0 to 100 of their range
    control_hz: float | None = None  # control ticks per second; null: the policy's, or 30
    max_steps: int = 600  # control ticks until an episode is truncated
    # joints at which episodes begin, in these units; empty: those of the arm as it is
    start: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_steps < 1 or not np.isfinite(self.start).all():
            raise BurnishError(
                f"env.max_steps={self.max_steps} must be at least 1, and env.start={self.start} hold finite numbers"
            )


class Unjudged(NamedTuple):
    """The verdict where nothing judges: no reward, no end, no success."""

    reward: Vector
    terminated: np.ndarray
    success: None = None


class Model(Protocol):
    """The arm alone in a simulated world, for robots that are models. The state is MuJoCo's mjSTATE_INTEGRATION."""

    mjcf: str

    def state(self, q: Vector) -> Vector: ...


class Joints:
    """The body of a robot without a task: its joints, in the units of a policy."""

    def __init__(
        self, config: JointsConfig, robot: RobotSpec, policy: PolicySpec | None = None, model: Model | None = None
    ) -> None:
        self.config, self._model = config, model
        self.mjcf = "" if model is None else model.mjcf
        self.joints = tuple(joint.name for joint in robot.joints)
        self.grips = robot.gripper is not None
        lower, upper = robot.column("lower"), robot.column("upper")
        self.ranges = np.stack([lower, upper], axis=1)
        self._zero, self._unit = self._scale(lower, upper)
        ends = np.sort(self._said(np.stack([self._wide(lower, 0.0), self._wide(upper, 1.0)])), axis=0)
        if policy is not None and policy.action.dim == len(self._zero):  # if not, others refuse it
            self._require_same_units(policy.action, *ends)
            # A person may move the robot where the policy does not.
            ends = np.stack([np.minimum(ends[0], policy.action.low), np.maximum(ends[1], policy.action.high)])
        action = ActionSpec(tuple(ends[0]), tuple(ends[1]))
        policy_hz = None if policy is None else policy.control_hz
        hz = next(x for x in (config.control_hz, policy_hz, USUAL_HZ) if x is not None)
        if not 0 < hz <= MOST_HZ:
            raise BurnishError(f"control_hz={hz:g} must lie in (0, {MOST_HZ:g}]; give env.control_hz=...")
        self.spec = EnvSpec(ObsSpec({"state": (len(self._zero),)}), action, float(hz), ABSOLUTE, config.max_steps)
        # LeRobot's recordings of such robots name them so.
        self.state_names = self.action_names = [f"{name}.pos" for name in (*self.joints, *["gripper"] * self.grips)]
        self._now = self._rest = self._wide(np.clip(0.0, lower, upper), 0.0)
        self._asked: Vector | None = None  # in this episode
        self._start: Vector | None = None
        if config.start:
            if len(config.start) != len(self._zero):
                raise BurnishError(
                    f"env.start has {len(config.start)} numbers, and {robot.name} {len(self._zero)}: {self._names()}"
                )
            self._start = self._heard(np.array(config.start, np.float64))
            if self.grips and not 0 <= self._start[-1] <= 1:
                raise BurnishError(f"env.start={config.start} ends with a gripper that is wider open than it can be")

    def begin(self, seed: int) -> Vector:
        self._asked = None
        self._now = self._now if self._model is None else self._rest  # a model begins each time as it did
        return self.where if self._model is None else self._model.state(self.where)

    @property
    def where(self) -> Vector:
        """The start of an episode, the gripper's fraction behind the joints."""
        return self._now if self._start is None else self._start

    @property
    def start(self) -> Vector:
        return self.where[: len(self.joints)]

    def layout(self) -> str:
        return ""

    def see(self, q: Vector, qd: Vector) -> None:
        self._now = np.asarray(q, np.float64).copy()

    def follow(self, q: Vector) -> None:
        self._asked = np.asarray(q, np.float64).copy()

    def observe(self) -> dict[str, Vector]:
        return {"state": self._said(self._now)[None]}

    def targets(self, action: Vector) -> Vector:
        self._asked = self._heard(np.asarray(action, np.float64))
        return self._asked.copy()

    def judge(self, action: Vector) -> Unjudged:
        return Unjudged(np.zeros(1), np.zeros(1, bool))

    def holding(self) -> tuple[Vector, np.ndarray]:
        """(the action that keeps the arm where it was sent last, which of its numbers are displacements)."""
        held = self._now if self._asked is None else self._asked
        return self._said(held), np.zeros(len(held), bool)

    def _scale(self, lower: Vector, upper: Vector) -> tuple[Vector, Vector]:
        """A number of ours is ``zero + unit * theirs``."""
        config, n = self.config, len(lower)
        unknown = [name for name in config.percent if name not in self.joints]
        if unknown:
            raise BurnishError(
                f"env.percent names {unknown[0]!r}, which is no joint here; {did_you_mean(unknown[0], self.joints)}"
            )
        if config.units is Units.range:
            zero, unit = (lower + upper) / 2, (upper - lower) / 200
        else:
            zero, unit = np.zeros(n), np.full(n, np.pi / 180 if config.units is Units.deg else 1.0)
        percent = np.array([name in config.percent for name in self.joints])
        zero, unit = np.where(percent, lower, zero), np.where(percent, (upper - lower) / 100, unit)
        return self._wide(zero, 0.0), self._wide(unit, 1.0 if config.units is Units.rad else 0.01)

    def _wide(self, joints: Vector, gripper: float) -> Vector:
        return np.append(joints, gripper) if self.grips else np.asarray(joints, np.float64)

    def _said(self, ours: Vector) -> Vector:
        return (ours - self._zero) / self._unit

    def _heard(self, theirs: Vector) -> Vector:
        return self._zero + self._unit * theirs

    def _names(self) -> str:
        return ", ".join([*self.joints, *(["the gripper"] if self.grips else [])])

    def _require_same_units(self, action: ActionSpec, low: Vector, high: Vector) -> None:
        """Degrees that are taken for radians would send an arm to the ends of its ranges. Degrees and -100 to 100 are
        of one size, and cannot be told apart."""
        names, width = self._names().split(", "), high - low
        least, most = np.array(action.low), np.array(action.high)
        beyond = np.maximum(low - least, most - high) / width
        here = f"env.units={self.config.units.value}"
        if beyond.max() > TWICE:
            i = int(beyond.argmax())
            raise BurnishError(
                f"the policy's set-points of {names[i]} go from {least[i]:.4g} to {most[i]:.4g}, and with {here} "
                f"it goes from {low[i]:.4g} to {high[i]:.4g}; it was made for other units"
            )
        # A joint that may turn twice around needs few of its radians; nothing needs so few of its degrees.
        n = len(self.joints)
        if self.config.units is not Units.rad and ((most - least) / width)[:n].max() < HARDLY:
            raise BurnishError(
                f"the policy's set-points of all joints need less than {HARDLY:.0%} of their ranges with {here} "
                f"({self.joints[0]}: {least[0]:.4g} to {most[0]:.4g} of {low[0]:.4g} to {high[0]:.4g}); it was made "
                "for other units"
            )
