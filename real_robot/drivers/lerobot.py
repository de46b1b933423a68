"""Any LeRobot robot as an `Adapter`, by what it can do: nothing of LeRobot is imported here.

Asked of it: ``connect``, ``disconnect``, ``is_connected``, ``get_observation``, ``send_action``, and the dictionaries
``observation_features`` and ``action_features``, with positions under "<motor>.pos" and pictures under the names of its
cameras. LeRobot speaks of degrees or of -100..100 (0..100) of a calibrated range; a table (`Motor`) says what that is
in radians.

Why a bridge: LeRobot's own limiter is off by default and lets NaN pass, and its -100..100 rule turns NaN into -100, so
one bad number sends every joint to the end of its range. Numbers that are none are refused here before they are sent
(by the base class), as is what lies outside the joints' limits; measurements that are none are a `DeviceFault`.

Its calls may block for as long as they like, so they are made in a thread of their own, one at a time, and waited for
with limits. A call that never returns leaves its thread behind.

**Departures** from the seam, which LeRobot's interface leaves no way around: ``connect`` may enable torque; velocities
are differences of two positions; LeRobot has no watchdog, so the device has none here either; ``disconnect`` releases
torque by default, so an arm that falls has to be brought to rest before ``close``, and RELEASE is not offered. For
the same reason ``recover`` connects anew only where the robot does not answer: that a servo restarted, and gives no
torque any more, LeRobot does not tell; support the arm then, close this adapter, and open another one.
"""

from __future__ import annotations

import inspect
import math
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from ...policies.core.ranges import check_ranges
from ..adapter import (
    Adapter,
    Command,
    GripperSpec,
    JointSpec,
    Mode,
    Phase,
    RobotSpec,
    RobotState,
    StopKind,
    Vector,
    sent_as,
)
from ..camera import Frame, frame
from ..clock import SECOND, Clock, ns
from ..errors import DeviceFault, Refused, StaleState

ROUNDING_RAD = 1e-9


class Unit(StrEnum):
    """The units in which LeRobot gives the position of a motor."""

    DEGREES = "degrees"
    HUNDRED = "-100..100"
    PERCENT = "0..100"


@dataclass(frozen=True)
class Motor:
    """One joint and its motor. ``ends_rad`` are the angles at the ends of the calibrated range (the second may be the
    smaller one), for -100..100 and 0..100; ``sign`` and ``zero_rad`` turn degrees into the joint's angle."""

    name: str  # LeRobot's
    joint: JointSpec
    unit: Unit = Unit.DEGREES
    ends_rad: tuple[float, float] | None = None
    sign: int = 1
    zero_rad: float = 0.0  # the joint's angle where LeRobot says 0 degrees

    def __post_init__(self) -> None:
        if self.unit is Unit.DEGREES:
            if self.ends_rad is not None or self.sign not in (-1, 1) or not math.isfinite(self.zero_rad):
                raise Refused(f"motor {self.name!r} in degrees needs sign 1 or -1, a finite zero_rad, and no ends_rad")
            return
        ends = self.ends_rad
        if ends is None or not all(map(math.isfinite, ends)) or ends[0] == ends[1]:
            raise Refused(f"motor {self.name!r} in {self.unit.value} needs ends_rad, the two angles of its range")
        if not min(ends) <= self.joint.lower < self.joint.upper <= max(ends):
            raise Refused(
                f"the limits {self.joint.lower:g}..{self.joint.upper:g} rad of joint {self.joint.name!r} are not in "
                f"the calibrated range {min(ends):g}..{max(ends):g} rad of motor {self.name!r}"
            )

    @property
    def key(self) -> str:
        return f"{self.name}.pos"

    def to_rad(self, x: float) -> float:
        slope, offset = self._line()
        return offset + slope * x

    def from_rad(self, q: float) -> float:
        slope, offset = self._line()
        return (q - offset) / slope

    def _line(self) -> tuple[float, float]:
        if self.ends_rad is None:
            return self.sign * math.pi / 180, self.zero_rad
        low, high = self.ends_rad
        if self.unit is Unit.PERCENT:
            return (high - low) / 100, low
        return (high - low) / 200, (high + low) / 2


@dataclass(frozen=True)
class BridgeConfig:
    """Settings of the bridge to a LeRobot robot: motors, gripper, cameras and rate."""

    name: str
    motors: tuple[Motor, ...]
    gripper: str | None = None  # a motor in 0..100, 100 open
    gripper_width_m: float = 0.1
    gripper_speed_m_s: float = 0.1
    cameras: tuple[str, ...] = ()
    rate_hz: float = 30.0
    hang_s: float = 0.5  # a call that takes longer is a fault
    connect_s: float = 10.0

    def __post_init__(self) -> None:
        names = [motor.name for motor in self.motors] + [self.gripper] * (self.gripper is not None)
        if not self.motors or len(set(names)) < len(names):
            raise Refused(f"a bridge needs motors with different names, got {names}")
        check_ranges(self, {"(0, inf)": "rate_hz hang_s connect_s"}, refusal=Refused)


class _Caller:
    """Makes calls in a thread of its own, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, function))
        return future

    def end(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # of LeRobot's; the waiting thread gets it
                    future.set_exception(error)


class LeRobotBridge(Adapter):
    """A connected robot of LeRobot, as an adapter."""

    def __init__(self, robot: Any, config: BridgeConfig, clock: Clock | None = None) -> None:
        gripper = config.gripper and GripperSpec(config.gripper_width_m, config.gripper_speed_m_s)
        joints, rates = tuple(motor.joint for motor in config.motors), (1.0, config.rate_hz, config.rate_hz)
        super().__init__(
            RobotSpec(
                config.name,
                joints,
                frozenset({Mode.JOINT_POSITION}),
                rates,
                gripper or None,
                stop_s=config.hang_s,
            ),
            clock,
        )
        self.config = config
        self._robot = robot
        self._lower, self._upper = self.spec.column("lower"), self.spec.column("upper")
        self._caller: _Caller | None = None
        self._reading: Future[tuple[int, Any]] | None = None  # one that was not waited for to its end
        self._asked_ns = 0
        self._seq = 0
        self._before: RobotState | None = None
        self._aim: dict[str, float] | None = None  # the action sent last
        self._target = (self._lower + self._upper) / 2  # and what it means, or where the arm was found
        self._gripper = 0.0
        self.frames: dict[str, Frame] = {}  # the newest picture of each camera

    def camera(self, name: str) -> BridgeCamera:
        """Its pictures come with the states, so it shows what the latest ``read`` of the robot saw."""
        if name not in self.config.cameras:
            raise Refused(f"the bridge has no camera {name!r}; choices: {', '.join(self.config.cameras) or 'none'}")
        return BridgeCamera(self, name)

    def _configure(self) -> None:
        keys = {motor.key for motor in self.config.motors}
        keys |= {f"{self.config.gripper}.pos"} if self.config.gripper else set()
        actions, observations = set(self._robot.action_features), set(self._robot.observation_features)
        if keys != actions:
            raise Refused(f"the table of motors and the actions of the robot differ in {sorted(keys ^ actions)}")
        if missing := sorted((keys | set(self.config.cameras)) - observations):
            raise Refused(f"the robot does not observe {missing}")
        self._caller = self._caller or _Caller()
        takes = inspect.signature(self._robot.connect).parameters
        # Without a person there is nobody to move the arm through its range.
        self._ask(lambda: self._robot.connect(**({"calibrate": False} if "calibrate" in takes else {})), connect=True)
        if not self._robot.is_connected:
            raise DeviceFault("the robot says that it is not connected, after connect()")
        if not getattr(self._robot, "is_calibrated", True):
            self._ask(self._robot.disconnect, connect=True)
            raise Refused("the robot is not calibrated; calibrate it with LeRobot's own tool first")

    def _activate(self, mode: Mode) -> RobotState:
        self._aim = None
        state = self._read(self.config.hang_s)
        for motor, q in zip(self.config.motors, state.q.tolist(), strict=True):
            low, high = sorted(motor.ends_rad or (-math.inf, math.inf))
            if not low - ROUNDING_RAD <= q <= high + ROUNDING_RAD:
                outside_rad = max(low - q, q - high)
                raise Refused(
                    f"{motor.joint.name} is {outside_rad:.3f} rad outside the range that motor {motor.name!r} was "
                    "calibrated in, where LeRobot sends it to the end of that range; move it back by hand"
                )
        self._target = state.q.copy()
        return state

    def _read(self, timeout_s: float) -> RobotState:
        if self._reading is None:
            self._asked_ns, self._reading = self.clock.now_ns(), self._submit(self._observe)
        reading = self._reading
        if not wait({reading}, max(0.0, timeout_s))[0]:
            if self.clock.now_ns() - self._asked_ns > ns(self.config.hang_s):
                raise DeviceFault(f"an observation takes longer than {self.config.hang_s:g} s; check the bus")
            raise StaleState(f"no observation within {timeout_s:g} s")
        self._reading = None
        return self._state(*reading.result())

    def _write(self, command: Command) -> Command:
        target, before = command.target, self._target  # an arm that is found outside goes in, and not farther out
        if ((target < np.minimum(self._lower, before)) | (target > np.maximum(self._upper, before))).any():
            raise Refused(f"a target is outside the joints' limits: {target.tolist()} rad")
        if command.gripper is not None:
            self._gripper = command.gripper
        action = self._action(target)
        got = self._ask(lambda: self._robot.send_action(dict(action)))
        self._aim, self._target = action, target.copy()
        sent = {**action, **got} if isinstance(got, Mapping) else action
        return sent_as(command, self._angles(sent, "what was sent"))

    def _stop(self, kind: StopKind) -> None:
        """LeRobot knows only set-points: the last one is sent once more, and holds. Not the measured position: an arm
        that sags under its weight would sag further."""
        if self._aim is not None:
            aim = self._aim
            self._ask(lambda: self._robot.send_action(dict(aim)))

    def _deactivate(self) -> None:
        self._aim = None

    def _recover(self) -> None:
        if self.phase is Phase.INACTIVE and self._answers():
            return  # disconnect() would let go of an arm that is held
        with suppress(Exception):  # whatever a broken link says to that
            self._ask(self._robot.disconnect, connect=True)
        self._caller, self._reading, self._before = None, None, None
        self._configure()

    def _answers(self) -> bool:
        try:
            self._read(self.config.hang_s)
        except Exception:  # whatever LeRobot says to that
            return False
        return True

    def _close(self) -> None:
        try:
            self._ask(self._robot.disconnect)
        finally:
            if self._caller is not None:
                self._caller.end()

    def _action(self, target: Vector) -> dict[str, float]:
        action = {motor.key: motor.from_rad(q) for motor, q in zip(self.config.motors, target.tolist(), strict=True)}
        if self.config.gripper is not None:
            action[f"{self.config.gripper}.pos"] = 100 * self._gripper
        return action

    def _angles(self, values: Mapping[str, Any], what: str) -> Vector:
        angles = np.array([motor.to_rad(float(values[motor.key])) for motor in self.config.motors])
        if not np.isfinite(angles).all():
            raise DeviceFault(f"{what} is not a number: {angles.tolist()} rad")
        return angles

    def _observe(self) -> tuple[int, Any]:
        # The time before the call: what is measured in it is not older.
        return self.clock.now_ns(), self._robot.get_observation()

    def _state(self, t_ns: int, found: Mapping[str, Any]) -> RobotState:
        if missing := [m.key for m in self.config.motors if m.key not in found]:
            raise DeviceFault(f"the observation lacks {missing}")
        q, before = self._angles(found, "what was measured"), self._before
        passed_s = (t_ns - before.t_ns) / SECOND if before is not None else 0.0
        qd = (q - before.q) / passed_s if before is not None and passed_s > 0 else np.zeros(len(q))
        gripper = None
        if self.config.gripper is not None:
            gripper = float(found[f"{self.config.gripper}.pos"]) / 100
            if not math.isfinite(gripper):
                raise DeviceFault("the measured gripper is not a number")
            self._gripper = self._gripper if self._aim else min(max(gripper, 0.0), 1.0)
        self._seq += 1
        self.frames = {name: frame(self._seq, t_ns, found.get(name)) for name in self.config.cameras}
        self._before = RobotState(self._seq, t_ns, q, qd, gripper=gripper)
        return self._before

    def _submit(self, function: Callable[[], Any]) -> Future[Any]:
        assert self._caller is not None, "configure() has made it"
        return self._caller.submit(function)

    def _ask(self, function: Callable[[], Any], connect: bool = False) -> Any:
        limit_s = self.config.connect_s if connect else self.config.hang_s
        future = self._submit(function)
        if not wait({future}, limit_s)[0]:
            future.cancel()  # if it has not begun yet, it never will
            raise DeviceFault(f"a call of LeRobot's did not return within {limit_s:g} s; check the bus")
        return future.result()


class BridgeCamera:
    """A `Sensor` whose pictures are taken with the robot's states."""

    def __init__(self, bridge: LeRobotBridge, name: str) -> None:
        self._bridge, self._name, self._given = bridge, name, 0

    def read(self, timeout_s: float) -> Frame:
        """Waits for nobody: a picture comes when the robot is read, which its owner does."""
        found = self._bridge.frames.get(self._name)
        if found is None or found.seq <= self._given:
            raise StaleState(f"no new picture {self._name!r}: read the robot first")
        self._given = found.seq
        return found

    def close(self) -> None:
        return
