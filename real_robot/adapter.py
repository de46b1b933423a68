"""The interface of a robot: a spec that can be read before anything is opened, six phases, eight calls.

Units are SI (rad, rad/s, Nm, m, N, s), quaternions wxyz of unit norm, time is that of a `clock.Clock` in integer
nanoseconds, arrays are float64 of shape (n,) in the order of ``spec.joints``.

    UNCONFIGURED --configure--> INACTIVE --activate--> ACTIVE --stop--> STOPPING --deactivate--> INACTIVE
    any --fault--> FAULT --recover--> INACTIVE --recover--> INACTIVE            any --close--> CLOSED, for good

`Adapter` keeps this table (`TRANSITIONS`) and checks what goes through it in both directions, so a driver writes only
what its hardware needs: the methods with a leading underscore. Programs do not call ``write``: `SafeRobot`
does, and is the only one that makes a `Command`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..policies.core.errors import reason
from ..policies.core.ranges import check_ranges
from .clock import Clock, MonotonicClock
from .errors import DeviceFault, IllegalTransition, Refused, StaleState

API_VERSION = 1

Vector = NDArray[np.float64]
T = TypeVar("T")


class Mode(StrEnum):
    """The quantity that a command sets. The gripper is a channel of its own."""

    JOINT_POSITION = "joint_position"  # rad
    JOINT_VELOCITY = "joint_velocity"  # rad/s
    JOINT_TORQUE = "joint_torque"  # Nm
    CARTESIAN_IMPEDANCE = "cartesian_impedance"  # position in m and quaternion: 7 numbers


class Phase(StrEnum):
    """The phases of an adapter, from unconfigured to closed."""

    UNCONFIGURED = "unconfigured"
    INACTIVE = "inactive"  # the link is open, and no command is taken
    ACTIVE = "active"
    STOPPING = "stopping"
    FAULT = "fault"
    CLOSED = "closed"


class StopKind(StrEnum):
    """Weaker than a safety-rated stop of any category: it needs this program and the link."""

    RAMP = "ramp"  # brake as the device can, and stay powered
    HOLD = "hold"  # freeze the set-point now, and stay powered
    RELEASE = "release"  # torque off, only where the robot is safe without power


@dataclass(frozen=True, slots=True)
class JointSpec:
    """The limits of one joint, in rad, s and Nm."""

    name: str
    lower: float  # rad
    upper: float
    velocity: float  # rad/s, either way
    acceleration: float  # rad/s^2
    jerk: float | None = None  # rad/s^3
    effort: float | None = None  # Nm
    quantum: float = 0.0  # rad, the smallest step of a set-point that the device can represent

    def __post_init__(self) -> None:
        numbers = [self.lower, self.upper, self.velocity, self.acceleration, self.jerk, self.effort, self.quantum]
        if not all(np.isfinite(x) for x in numbers if x is not None):
            raise Refused(f"the limits of joint {self.name!r} must be finite, got {numbers}")
        if not self.lower < self.upper:
            raise Refused(f"joint {self.name!r} has no room between lower={self.lower:g} and upper={self.upper:g} rad")
        ranges = {"(0, inf)": "velocity acceleration jerk effort", "[0, inf)": "quantum"}
        check_ranges(self, ranges, f"joint {self.name!r}: ", Refused)


@dataclass(frozen=True, slots=True)
class GripperSpec:
    """Commands and states are fractions of the width: 0 closed, 1 open."""

    width_m: float
    speed_m_s: float


@dataclass(frozen=True, slots=True)
class RobotSpec:
    """The specification of a robot: joints, modes of command, rates in Hz, gripper, and watchdog."""

    name: str
    joints: tuple[JointSpec, ...]
    modes: frozenset[Mode]
    rate_hz: tuple[float, float, float]  # least, usual, most
    gripper: GripperSpec | None = None
    device_watchdog_s: float | None = None  # after so long a silence the hardware itself stops; None: it never does
    safe_when_unpowered: bool = False  # False for arms that fall
    mjcf: str | None = None  # a MuJoCo model, for the workspace and self-collision
    tool_site: str | None = None
    api_version: int = API_VERSION
    stop_s: float = 0.5  # so long may `stop` and `deactivate` take together; then a watchdog takes them for hung

    def __post_init__(self) -> None:
        if self.api_version != API_VERSION:
            raise Refused(
                f"robot {self.name!r} speaks version {self.api_version} of this interface, and this is version "
                f"{API_VERSION}; install a driver for this version"
            )
        check_ranges(self, {"[0, inf)": "stop_s"}, f"robot {self.name!r}: ", Refused)
        least, usual, most = self.rate_hz
        if not (self.joints and self.modes and 0 < least <= usual <= most):
            raise Refused(f"robot {self.name!r} needs joints, modes and rates with 0 < least <= usual <= most")
        if len({joint.name for joint in self.joints}) < len(self.joints):
            raise Refused(f"two joints of robot {self.name!r} have one name")

    def width(self, mode: Mode) -> int:
        """So many numbers has a target."""
        return 7 if mode is Mode.CARTESIAN_IMPEDANCE else len(self.joints)

    def column(self, name: str) -> Vector:
        """One number per joint: "lower", "velocity", ..."""
        return np.array([getattr(joint, name) for joint in self.joints], np.float64)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a device or its driver reports, with its time in ns."""

    code: str  # one word of the driver's, "link", "overload", ...
    text: str
    t_ns: int


@dataclass(slots=True)
class RobotState:
    """One measured state: positions (rad) and velocities (rad/s) of the joints, and the rest if known."""

    seq: int  # grows with every state that the device has sent
    t_ns: int  # when it arrived
    q: Vector
    qd: Vector
    t_device_s: float | None = None  # the device's own clock
    effort: Vector | None = None
    tcp_pos: Vector | None = None
    tcp_quat: Vector | None = None
    wrench: Vector | None = None
    gripper: float | None = None
    fault: Fault | None = None
    estop: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One command to a robot, with the time until which it may be sent."""

    mode: Mode
    seq: int
    t_ns: int
    valid_until_ns: int  # not sent later than that
    target: Vector
    stiffness: Vector | None = None
    damping: Vector | None = None
    gripper: float | None = None
    obs_seq: int = -1  # of the state that caused it


CALLS = ("configure", "activate", "read", "write", "stop", "deactivate", "recover", "close")
_STAY: Mapping[str, Phase | None] = {"stop": None, "close": Phase.CLOSED}
# phase -> call -> the phase after it (None: the same). Other calls are illegal.
TRANSITIONS: Mapping[Phase, Mapping[str, Phase | None]] = {
    Phase.UNCONFIGURED: {**_STAY, "configure": Phase.INACTIVE},
    Phase.INACTIVE: {**_STAY, "activate": Phase.ACTIVE, "read": None, "recover": None},
    Phase.ACTIVE: {**_STAY, "read": None, "write": None, "stop": Phase.STOPPING},
    Phase.STOPPING: {**_STAY, "read": None, "deactivate": Phase.INACTIVE},
    Phase.FAULT: {**_STAY, "read": None, "recover": Phase.INACTIVE},
    Phase.CLOSED: _STAY,
}


@dataclass
class _Past:
    """The reference for the next state and the next command."""

    state_seq: int = -1
    state_t_ns: int = -1
    command_seq: int = -1
    mode: Mode | None = None
    troubles: list[str] = field(default_factory=list)  # that a stop met, and must not raise


class Adapter(ABC):
    """A driver's methods may raise `DeviceFault`, `StaleState` (reading) and `Refused` (before anything was sent); any
    other exception of theirs, the SDK's or the system's, becomes a `DeviceFault`. Constructing one opens nothing."""

    def __init__(self, spec: RobotSpec, clock: Clock | None = None) -> None:
        self.spec = spec
        self.clock: Clock = clock or MonotonicClock()
        self.fault: Fault | None = None
        self._phase = Phase.UNCONFIGURED
        self._past = _Past()

    @property
    def phase(self) -> Phase:
        return self._phase

    def configure(self) -> None:
        """Open the link, verify who and what is there, and drain what is stale. Nothing moves, no torque."""
        self._call("configure", self._configure)

    def activate(self, mode: Mode) -> RobotState:
        """Without a bump: the set-point is what is measured before torque is enabled. Arms the device's watchdog.
        Settings that a driver relies on are written or verified here, because the device may have restarted since
        ``configure``."""
        self._require("activate")
        if mode not in self.spec.modes:
            known = ", ".join(sorted(m.value for m in self.spec.modes))
            raise Refused(f"robot {self.spec.name!r} has no mode {mode.value!r}; choices: {known}")
        state = self._call("activate", lambda: self._examined(self._activate(mode)))
        self._past.mode, self._past.command_seq = mode, -1
        return state

    def read(self, timeout_s: float) -> RobotState:
        """The newest state, never one twice and never one that was not measured; `StaleState` after ``timeout_s``."""
        return self._call("read", lambda: self._examined(self._read(timeout_s)))

    def write(self, command: Command) -> Command:
        """Send, in less than a period; returns what was really sent, after rounding to what the device represents."""
        self._require("write")
        if command.mode is not self._past.mode:
            raise Refused(f"the robot was activated for {self._past.mode}, and this command is of {command.mode}")
        if command.seq <= self._past.command_seq:
            raise Refused(f"command {command.seq} is not newer than command {self._past.command_seq}")
        if command.target.shape != (self.spec.width(command.mode),) or not np.isfinite(command.target).all():
            raise Refused(f"a target of {self.spec.width(command.mode)} finite numbers is needed: {command.target}")
        if command.gripper is not None and not 0 <= command.gripper <= 1:
            raise Refused(f"gripper={command.gripper:g} is not a fraction of the width between 0 and 1")
        late_ns = self.clock.now_ns() - command.valid_until_ns
        if late_ns > 0:
            raise Refused(f"command {command.seq} expired {late_ns} ns ago")
        sent = self._call("write", lambda: self._write(command))
        self._past.command_seq = command.seq
        return sent

    def strongest(self) -> Vector:
        """(n,) Nm, the greatest effort of each joint, NaN where it is unknown. A driver that learns it from the device
        says it from ``configure`` on."""
        return self.spec.column("effort")

    def stop(self, kind: StopKind) -> None:
        """In any phase, as often as one likes; it raises nothing, and takes a bounded time."""
        if self._phase in (Phase.UNCONFIGURED, Phase.CLOSED):
            return
        if kind is StopKind.RELEASE and not self.spec.safe_when_unpowered:
            kind = StopKind.HOLD  # an arm that falls is not let go
        try:
            self._stop(kind)
        except Exception as error:  # whatever a driver raises: a stop goes on
            self._past.troubles.append(f"stop({kind.value}): {reason(error)}")
            self._fail("stop", error)
            return
        self._phase = TRANSITIONS[self._phase]["stop"] or self._phase

    def deactivate(self) -> None:
        """No more commands. The robot stays as the stop has left it; the device's watchdog is disarmed."""
        self._call("deactivate", self._deactivate)

    def recover(self) -> None:
        """Begin anew with a device that may have lost all that it was told, after a person has looked; nothing calls
        this by itself. Out of FAULT, or where a robot that is INACTIVE does not answer as it should: its supply may
        have broken down for a moment. Nothing moves, and torque comes with ``activate`` alone."""
        self._call("recover", self._recover)
        self.fault = None

    def close(self) -> None:
        """From any phase, and again. A robot that is active is stopped first."""
        if self._phase is Phase.CLOSED:
            return
        if self._phase in (Phase.ACTIVE, Phase.STOPPING):
            self.stop(StopKind.HOLD)
        configured, self._phase = self._phase is not Phase.UNCONFIGURED, Phase.CLOSED
        if configured:
            with suppress(Exception):  # the device may be gone; what is closed stays closed
                self._close()

    def _require(self, call: str) -> None:
        if call not in TRANSITIONS[self._phase]:
            allowed = [name for name in CALLS if name in TRANSITIONS[self._phase]]
            raise IllegalTransition(
                f"{call}() in phase {self._phase.value} of robot {self.spec.name!r}; allowed: {', '.join(allowed)}"
            )

    def _call(self, call: str, function: Callable[[], T]) -> T:
        self._require(call)
        try:
            result = function()
        except (Refused, StaleState):
            raise
        except Exception as error:
            raise self._fail(call, error) from error
        self._phase = TRANSITIONS[self._phase][call] or self._phase
        return result

    def _fail(self, call: str, error: Exception) -> DeviceFault:
        text = str(error) or type(error).__name__
        self.fault = Fault(getattr(error, "code", call), text, self.clock.now_ns())
        self._phase = Phase.FAULT
        return error if isinstance(error, DeviceFault) else DeviceFault(f"{self.spec.name} failed in {call}(): {text}")

    def _examined(self, state: RobotState) -> RobotState:
        """A driver that repeats a state, or makes one up, is found out here."""
        n, past = len(self.spec.joints), self._past
        if state.seq <= past.state_seq or state.t_ns < past.state_t_ns:
            raise StaleState(f"state {state.seq} is not newer than state {past.state_seq}")
        if state.q.shape != (n,) or state.qd.shape != (n,):
            raise DeviceFault(f"{n} joints were expected, and positions of {state.q.shape} came")
        if not (np.isfinite(state.q).all() and np.isfinite(state.qd).all()):
            raise DeviceFault("a measured position or velocity is not a number")
        past.state_seq, past.state_t_ns = state.seq, state.t_ns
        return state

    @abstractmethod
    def _configure(self) -> None: ...
    @abstractmethod
    def _activate(self, mode: Mode) -> RobotState: ...
    @abstractmethod
    def _read(self, timeout_s: float) -> RobotState: ...
    @abstractmethod
    def _write(self, command: Command) -> Command: ...
    @abstractmethod
    def _stop(self, kind: StopKind) -> None: ...
    @abstractmethod
    def _deactivate(self) -> None: ...
    @abstractmethod
    def _recover(self) -> None: ...
    @abstractmethod
    def _close(self) -> None: ...


@runtime_checkable
class Simulated(Protocol):
    """An adapter that knows more than it measures: for those who judge, not for those who act."""

    def truth(self) -> Vector:
        """(n,) rad, without noise, rounding or latency."""
        ...


def sent_as(command: Command, target: Vector, **changes: Any) -> Command:
    """``command`` as the device got it."""
    return replace(command, target=target, **changes)
