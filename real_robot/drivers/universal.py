"""Universal Robots e-Series arms (UR3e, UR5e, UR10e) through ur-rtde: joint positions by ``servoj``.

The controller must be in remote control, powered, with the brakes released. ``activate`` uploads ur-rtde's program and
arms the controller's RTDE watchdog: after ``1 / watchdog_hz`` without a set-point the program stops, whichever process
died. So a loop has to write from then on.

ur-rtde does not check the following, so it is checked here (see `universal_link` for why it lives in a process of its
own):
* ``servoJ`` takes NaN, infinity, 1e9 and too short lists, and says True: targets are refused before they are sent if
  they are no numbers (the base class), outside the joints' limits, or further than the joints can move since the last.
* It says True for some time after the controller died, and samples are repeated for ever: the controller's clock has
  to advance; `StaleState` where it did not within the time given, `DeviceFault` after ``silence_s``.
* A sample that no arm can have (not finite, beyond the limits, or a jump faster than the joints) is a `DeviceFault`.
* Whether a set-point was taken is known with the samples that follow, because `write` does not wait: then the next
  call raises. The same where ur-rtde says nothing for ``silence_s``: it waits 4 s for a program that is not ready.
* ``speedJ`` is not used: without an expiry, or repeated by the program, it moves on after its client has died.

**Without power** the brakes of all joints close by springs and hold the arm, so ``safe_when_unpowered`` is True and
``stop(RELEASE)`` brakes first and powers off then. A held object may fall all the same. ``activate`` powers on
and opens the brakes again where it was ``stop`` that closed them, and in no other case: that is for a person.

Positions, speeds: data sheets of the manufacturer (speeds without payload limits). They publish no accelerations; 8
rad/s^2 is a cautious choice of ours, as is everything beyond the limits of the safety configuration, which stay in
force in the controller. This is no safety-rated function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from ...policies.core.ranges import check_ranges
from ..adapter import Adapter, Command, Fault, JointSpec, Mode, Phase, RobotSpec, RobotState, StopKind, Vector
from ..clock import SECOND, Clock, MonotonicClock, ns
from ..errors import DeviceFault, Refused, StaleState
from ..settings import settings
from .universal_dashboard import Dashboard
from .universal_link import RUNNING, Link, Sample

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
POWER_ON = 1 << 0  # robot_status_bits, as RUNNING
PROTECTIVE_STOP, SAFEGUARD_STOP, EMERGENCY_STOP, VIOLATION, FAULT = 1 << 2, 1 << 4, 0b111 << 5, 1 << 8, 1 << 9
STOPPED = {
    EMERGENCY_STOP: ("estop", "the emergency stop is pressed"),
    PROTECTIVE_STOP: ("protective_stop", "the controller made a protective stop"),
    SAFEGUARD_STOP: ("safeguard_stop", "the safeguard stop is open"),
    VIOLATION | FAULT: ("safety", "the safety system reports a violation or a fault"),
}
TOLERANCE = 0.1  # rad, beyond the limits, that a measured position may be
JUMP = 0.02  # rad, that a measured position may move beyond what the speed explains (the samples are 2 ms apart)
SWIFT = 1.5  # so many times faster than its limit may a joint be measured, or a set-point move


class Model(StrEnum):
    """The models of arm that are known."""

    UR3E = "ur3e"
    UR5E = "ur5e"
    UR10E = "ur10e"


_FAST = 2 * math.pi
SPEEDS: dict[Model, tuple[float, ...]] = {
    Model.UR3E: (math.pi, math.pi, math.pi, _FAST, _FAST, _FAST),
    Model.UR5E: (math.pi,) * 6,
    Model.UR10E: (math.pi * 2 / 3,) * 2 + (math.pi,) * 4,
}


@dataclass(frozen=True)
class UniversalConfig:
    """Settings of a Universal Robots arm: address, model, rates in Hz, servoj, and timeouts in s."""

    address: str
    model: Model = Model.UR5E
    rate_hz: float = 125.0  # of set-points and samples
    watchdog_hz: float | None = 10.0
    why_no_watchdog: str = ""  # in words, where it is None
    lookahead_s: float = 0.03  # of servoj: smoothing
    gain: float = 300.0  # of servoj: stiffness
    acceleration: float = 8.0  # rad/s^2
    deceleration: float = 10.0  # of stop(HOLD); RAMP takes half of it
    silence_s: float = 0.2  # without a new sample the link counts as dead
    open_s: float = 8.0
    stop_s: float = 0.5
    power_s: float = 30.0  # to power on and open the brakes
    serial: str = ""  # of the controller; "": any

    def __post_init__(self) -> None:
        ranges = {
            "[20, 500]": "rate_hz",
            "[0.03, 0.2]": "lookahead_s",
            "[100, 2000]": "gain",
            "(0, inf)": "acceleration deceleration silence_s open_s stop_s power_s",
        }
        check_ranges(self, ranges, refusal=Refused)
        if self.watchdog_hz is None and not self.why_no_watchdog:
            raise Refused(
                "without a watchdog the arm follows its last set-point when this program dies; set watchdog_hz, or say "
                "in why_no_watchdog why not"
            )
        if self.watchdog_hz is not None and not 1 <= self.watchdog_hz <= self.rate_hz / 2:
            raise Refused(f"watchdog_hz={self.watchdog_hz:g} is not between 1 and half of rate_hz={self.rate_hz:g}")


def spec_of(config: UniversalConfig) -> RobotSpec:
    """The specification of an arm with these settings."""
    joints = tuple(
        JointSpec(name, *((-math.pi, math.pi) if name == "elbow" else (-_FAST, _FAST)), speed, config.acceleration)
        for name, speed in zip(JOINTS, SPEEDS[config.model], strict=True)
    )
    watchdog_s = None if config.watchdog_hz is None else 1 / config.watchdog_hz
    modes, rates = frozenset({Mode.JOINT_POSITION}), (20.0, config.rate_hz, 500.0)
    # At most: all of it for ur-rtde's stop, half for each of three waits for the dashboard, all for the program's end.
    stop_s = 3.5 * config.stop_s
    return RobotSpec(
        config.model.value, joints, modes, rates, None, watchdog_s, safe_when_unpowered=True, stop_s=stop_s
    )


class UniversalFault(DeviceFault):
    """A fault of the arm or its controller, with the driver's word for it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class UniversalRobot(Adapter):
    """A Universal Robots arm, as an adapter."""

    def __init__(self, config: UniversalConfig, clock: Clock | None = None) -> None:
        super().__init__(spec_of(config), clock)
        self.config = config
        self.dashboard = Dashboard(config.address, timeout_s=config.stop_s / 2)
        self._link: Link | None = None
        self._seq = 0
        self._seen: Sample | None = None  # the last one that was examined
        self._number = self._answered = 0  # of the set-points sent, and of those that ur-rtde has dealt with
        self._answered_ns = 0
        self._sent: tuple[int, Vector] | None = None  # when and what
        self._still = self._released = False  # since a stop
        self._lower, self._upper = self.spec.column("lower"), self.spec.column("upper")
        self._velocity = self.spec.column("velocity")

    def _configure(self) -> None:
        mode, safety = self.dashboard.ask("robotmode"), self.dashboard.ask("safetystatus")
        if not (mode.endswith("RUNNING") and safety.endswith("NORMAL")):
            raise Refused(f"the robot is not ready ({mode}, {safety}); power it on, release the brakes, and try again")
        if self.dashboard.ask("is in remote control") != "true":
            raise Refused("the controller is in local control; switch it to remote control on the teach pendant")
        model, serial = self.dashboard.ask("get robot model"), self.dashboard.ask("get serial number")
        if model.upper().rstrip("E") != self.config.model.value.upper().rstrip("E"):
            raise Refused(f"model={self.config.model.value} was configured, and the controller says {model!r}")
        if self.config.serial and serial != self.config.serial:
            raise Refused(f"serial={self.config.serial} was configured, and the controller says {serial!r}")
        self._open()

    def _open(self) -> None:
        self._shut()
        self._link = Link(self.config.address, self.config.rate_hz, self.config.open_s, self.clock)
        self._seen, self._sent = None, None
        self._still = self._released = False
        self._next(self.config.silence_s)

    def _activate(self, mode: Mode) -> RobotState:
        link = self._held()
        if self._released:
            self._power_on()
        servo = (1 / self.config.rate_hz, self.config.lookahead_s, self.config.gain)
        try:
            link.request(b"a", self.config.watchdog_hz or 0.0, *servo, timeout_s=self.config.open_s)
        except DeviceFault:
            link.kill()
            self.dashboard.ask("stop")  # a program without a watchdog is not left behind
            raise
        state = self._next(self.config.silence_s)
        deadline_ns = self.clock.now_ns() + ns(self.config.silence_s)
        while not (self._seen and self._seen.status & RUNNING) and self.clock.now_ns() < deadline_ns:
            state = self._next(self.config.silence_s)  # that one was on its way before the program ran
        self._number, self._answered, self._answered_ns = 0, 0, self.clock.now_ns()
        if trouble := self._trouble(active=True):
            raise trouble
        self._still, self._sent = False, (self.clock.now_ns(), state.q.copy())
        return state

    def _read(self, timeout_s: float) -> RobotState:
        state = self._next(timeout_s)
        if self.phase is Phase.ACTIVE and (trouble := self._trouble(active=True)):
            raise trouble
        return state

    def _write(self, command: Command) -> Command:
        link, now_ns, target = self._held(), self.clock.now_ns(), command.target
        link.drain()
        link.check()
        if trouble := self._trouble(active=True):
            raise trouble
        assert self._sent is not None, "activate() has set it"
        before = self._sent[1]  # an arm that is found outside goes in, and not farther out
        if ((target < np.minimum(self._lower, before)) | (target > np.maximum(self._upper, before))).any():
            raise Refused(f"a target is outside the joints' limits: {target.tolist()} rad")
        since_s = max((now_ns - self._sent[0]) / SECOND, 1 / self.config.rate_hz)
        if (np.abs(target - before) > SWIFT * since_s * self._velocity).any():
            raise Refused(f"a target is further than the joints can move in {since_s:.3f} s: {target.tolist()} rad")
        self._number += 1
        link.servo(self._number, target.tolist())
        self._sent = now_ns, target.copy()
        return command

    def _stop(self, kind: StopKind) -> None:
        link, deceleration = self._link, self.config.deceleration * (0.5 if kind is StopKind.RAMP else 1.0)
        try:
            # Once: ur-rtde waits for a program to stop that has ended in the meantime.
            if link is not None and not self._still:
                link.request(b"h", deceleration, timeout_s=self.config.stop_s)
                self._still = True
        except DeviceFault:
            # The second way. The process that did not answer must not come to life again and send something.
            if link is not None:
                link.kill()
            self.dashboard.ask("stop")
            raise
        finally:
            if kind is StopKind.RELEASE and not self._released:
                self.dashboard.ask("power off")
                self._released = True

    def _power_on(self) -> None:
        """Undo ``stop(RELEASE)``: power, then brakes."""
        deadline_ns = self.clock.now_ns() + ns(self.config.power_s)
        for order, mode in (("power on", "IDLE"), ("brake release", "RUNNING")):
            self.dashboard.ask(order)
            while not self.dashboard.ask("robotmode").endswith((mode, "RUNNING")):
                if self.clock.now_ns() > deadline_ns:
                    raise Refused(f"the robot did not reach mode {mode} within {self.config.power_s:g} s")
                self.clock.sleep_until_ns(self.clock.now_ns() + ns(0.1))
        self._released = False

    def _deactivate(self) -> None:
        # Not by ur-rtde, which waits for 4 s where the program has just ended by its watchdog.
        link, deadline_ns = self._held(), self.clock.now_ns() + ns(self.config.stop_s)
        self.dashboard.ask("stop")
        while link.newest is not None and link.newest.status & RUNNING:
            left_s = (deadline_ns - self.clock.now_ns()) / SECOND
            if left_s <= 0:
                raise UniversalFault("program", f"the program still runs {self.config.stop_s:g} s after it was stopped")
            link.wait(left_s)
            link.check()

    def _recover(self) -> None:
        safety = self.dashboard.ask("safetystatus")
        if safety.endswith("PROTECTIVE_STOP"):
            self.dashboard.ask("close safety popup")
            answer = self.dashboard.ask("unlock protective stop")
            if "releasing" not in answer:
                raise Refused(f"the controller does not unlock its protective stop yet: {answer}")
        elif not safety.endswith("NORMAL"):
            raise Refused(f"{safety}; release the emergency stop, power on, release the brakes, and recover again")
        self.dashboard.ask("stop")  # a program that is left over has no watchdog of ours
        self._configure()

    def _close(self) -> None:
        self._shut()

    def _shut(self) -> None:
        if self._link is not None:
            with suppress(OSError):
                self._link.close()
            self._link = None

    def _held(self) -> Link:
        if self._link is None:
            raise UniversalFault("link", "there is no connection to the controller; recover() opens one")
        return self._link

    def _next(self, timeout_s: float) -> RobotState:
        """The newest sample, if it is newer than the one before, and one that an arm can have."""
        link, deadline_ns = self._held(), self.clock.now_ns() + ns(timeout_s)
        link.drain()
        while link.newest is None or link.newest is self._seen:
            now_ns = self.clock.now_ns()
            if self._seen is not None and now_ns - self._seen.t_ns > ns(self.config.silence_s):
                raise UniversalFault("silence", f"no new sample for {self.config.silence_s:g} s; check the controller")
            link.check()
            if now_ns >= deadline_ns:
                raise StaleState(f"no new sample within {timeout_s:g} s")
            link.wait((deadline_ns - now_ns) / SECOND)
        sample, before, self._seen = link.newest, self._seen, link.newest
        if self.clock.now_ns() - sample.t_ns > ns(self.config.silence_s):
            raise UniversalFault("silence", f"the newest sample is older than {self.config.silence_s:g} s")
        q, qd = np.array(sample.q), np.array(sample.qd)
        self._plausible(sample, q, qd, before)
        self._seq += 1
        trouble = self._trouble(active=False)
        return RobotState(
            seq=self._seq, t_ns=sample.t_ns, q=q, qd=qd, t_device_s=sample.t_device_s,
            tcp_pos=np.array(sample.tcp[:3]), tcp_quat=quaternion(np.array(sample.tcp[3:])),
            wrench=np.array(sample.wrench), estop=bool(sample.safety & EMERGENCY_STOP),
            fault=Fault(trouble.code, str(trouble), sample.t_ns) if trouble else None,
        )  # fmt: skip

    def _plausible(self, sample: Sample, q: Vector, qd: Vector, before: Sample | None) -> None:
        every = (sample.t_device_s, *sample.q, *sample.qd, *sample.tcp, *sample.wrench)
        if not np.isfinite(every).all():
            raise UniversalFault("sample", "the controller sent something that is not a number")
        if ((q < self._lower - TOLERANCE) | (q > self._upper + TOLERANCE)).any():
            raise UniversalFault("sample", f"no joint can be there: {q.tolist()} rad")
        if (np.abs(qd) > SWIFT * self._velocity).any():
            raise UniversalFault("sample", f"no joint is so fast: {qd.tolist()} rad/s")
        if before is not None:
            passed_s = sample.t_device_s - before.t_device_s
            if passed_s <= 0:
                raise UniversalFault("clock", "the controller's clock went back: it was started anew")
            # A package is late by less than that, so no more time can have passed there than here.
            if passed_s > (sample.t_ns - before.t_ns) / SECOND + self.config.silence_s:
                raise UniversalFault("clock", f"the controller's clock jumped ahead, by {passed_s:.3f} s")
            if (np.abs(q - before.q) > SWIFT * self._velocity * passed_s + JUMP).any():
                raise UniversalFault("sample", f"a position jumped within {passed_s:.3f} s, to {q.tolist()} rad")

    def _trouble(self, active: bool) -> UniversalFault | None:
        """The objection of the newest sample to going on."""
        sample = self._held().newest
        if sample is None:
            return None
        for bits, (code, text) in STOPPED.items():
            if sample.safety & bits:
                return UniversalFault(code, f"{text}; look at the robot, then recover()")
        if not sample.status & POWER_ON and not self._released:
            return UniversalFault("power", "the robot is off; power it on and release the brakes, then recover()")
        if active and not sample.status & RUNNING:
            return UniversalFault(
                "program", "the control program stopped: its watchdog saw no set-point, or a person ended it"
            )
        if active and sample.refused:
            return UniversalFault("servo", "the controller did not take a set-point")
        if sample.answered > self._answered or self._number == self._answered:
            self._answered, self._answered_ns = sample.answered, sample.t_ns
        if active and sample.t_ns - self._answered_ns > ns(self.config.silence_s):
            return UniversalFault("servo", f"the controller took no set-point for {self.config.silence_s:g} s")
        return None


def quaternion(rotation: Vector) -> Vector:
    """wxyz of a rotation vector (axis times angle)."""
    angle = float(np.linalg.norm(rotation))
    # sin(x / 2) / x, with its limit 1/2 at zero.
    return np.concatenate([[math.cos(angle / 2)], rotation * (0.5 * np.sinc(angle / (2 * math.pi)))])


def make(config: Mapping[str, Any]) -> UniversalRobot:
    """The adapter of a Universal Robots arm, from plain settings."""
    return UniversalRobot(_config_of(config))


def second_channel(config: Mapping[str, Any]) -> Callable[[], None]:
    """The dashboard, which needs neither ur-rtde nor the process that had it: it ends the program, and the arm brakes.
    A set-point that is still under way finds no program then."""
    found = _config_of(config)
    dashboard, clock = Dashboard(found.address, timeout_s=found.stop_s / 2), MonotonicClock()

    def stop_now() -> None:
        dashboard.ask("stop")
        deadline_ns = clock.now_ns() + ns(found.stop_s)
        while not dashboard.ask("running").endswith("false"):
            if clock.now_ns() > deadline_ns:
                raise UniversalFault("program", f"the program still runs {found.stop_s:g} s after it was stopped")

    return stop_now


def _config_of(config: Mapping[str, Any]) -> UniversalConfig:
    return settings(UniversalConfig, config, "a Universal Robots arm")
