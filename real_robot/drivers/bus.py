"""An arm of servos on a serial bus, of either maker: the adapter that both families share.

`servos` has what the families do differently: packets, registers, units. `ServoArm` is what must not differ:

* a state is measured or it is not there: a lost answer is asked for once more inside the time given, and then it is
  `StaleState`; nothing is predicted and nothing is repeated;
* a position that no servo could have reached since the last one (`Gate`) is a lost answer too;
* goals become the measured position before torque is enabled, a watchdog that the device has is armed before that;
* who and what is there is verified at each activation too: servos restart when their supply breaks down for a moment;
* set-points are rounded to ticks towards the middle of the range, and what was sent is returned;
* a stop freezes the goals that were sent last, because the measured position sags below them.

The gripper may be the last servo: a channel of its own, as a fraction of its width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...policies.core.ranges import check_ranges
from ..adapter import Adapter, Command, GripperSpec, JointSpec, Mode, RobotSpec, RobotState, StopKind, Vector, sent_as
from ..clock import SECOND, Clock, ns
from ..errors import Refused, RobotError, StaleState
from ..settings import settings
from .calibration import NEAR_TICKS, QUANTUM_RAD, Calibration
from .port import Lost, Port, SerialWire, Wire, pyserial
from .servos import ANSWER_S, SEND_S, Reading, Servos, insist

UNGUARDED = "the arm keeps its last goal when this program dies"


@dataclass(frozen=True)
class ArmConfig:
    """Settings of an arm on a serial bus: port, calibration, limits of its joints, and tolerances."""

    port: str
    calibration: Calibration
    name: str = "arm"
    velocity: float = 2.0  # rad/s, of every joint
    acceleration: float = 10.0  # rad/s^2
    gripper_velocity: float = 3.0  # rad/s of its servo
    profile_share: float = 1.5  # of these limits, for the servo's own profile: it can catch up, and never leaps
    rate_hz: Sequence[float] = (10.0, 50.0, 200.0)
    baudrate: int = 1_000_000
    latency_s: float = 0.004  # of the USB adapter; set an FTDI's latency_timer to 1 ms
    quiet_s: float = 0.002  # after a loss, before the next question
    outside_rad: float = 0.1  # so far outside its range a joint may be found when the arm is activated
    margin_rad: float = 0.05  # of the gate
    watchdog_s: float = 0.1  # of servos that have one, in steps of 0.02
    without_watchdog: str = ""  # to run without: the sentence UNGUARDED, which says what that means
    safe_when_unpowered: bool = False
    mjcf: str | None = None
    tool_site: str | None = None

    def __post_init__(self) -> None:
        positive = "velocity acceleration gripper_velocity baudrate latency_s quiet_s margin_rad"
        check_ranges(self, {"(0, inf)": positive, "[0.02, 2.54]": "watchdog_s"}, refusal=Refused)
        if len(self.rate_hz) != 3:
            raise Refused(f"rate_hz={list(self.rate_hz)} must be three numbers: the least, the usual and the most")
        if self.profile_share < 1:
            raise Refused(f"profile_share={self.profile_share:g} below 1 would let the arm fall behind for good")
        if self.without_watchdog not in ("", UNGUARDED):
            raise Refused(f"to run without a watchdog set without_watchdog to the words {UNGUARDED!r}")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ArmConfig:
        """Of plain data; the calibration is a mapping, or the path of its JSON file."""
        given = config.get("calibration")
        if given is not None and not isinstance(given, Calibration):
            given = Calibration.load(given) if isinstance(given, str) else Calibration.of(given)
        return settings(cls, config if given is None else {**config, "calibration": given}, "an arm of servos")

    def spec(self, watchdog_s: float | None) -> RobotSpec:
        limits = [(j.name, *j.limits_rad) for j in self.calibration.joints]
        gripper = self.calibration.gripper
        if gripper is not None:
            turn_rad = abs(gripper.open_tick - gripper.closed_tick) * QUANTUM_RAD
            speed_m_s = gripper.width_m * self.gripper_velocity / turn_rad
        least, usual, most = self.rate_hz
        return RobotSpec(
            name=self.name,
            joints=tuple(
                JointSpec(name, low, high, self.velocity, self.acceleration, quantum=QUANTUM_RAD)
                for name, low, high in limits
            ),
            modes=frozenset({Mode.JOINT_POSITION}),
            rate_hz=(least, usual, most),
            gripper=GripperSpec(gripper.width_m, speed_m_s) if gripper is not None else None,
            device_watchdog_s=watchdog_s,
            safe_when_unpowered=self.safe_when_unpowered,
            mjcf=self.mjcf,
            tool_site=self.tool_site,
        )


class Gate:
    """No servo turns faster than it can: what has moved farther since the last position is not a position.

    After ``memory_s`` without one, and in the beginning, two in a row have to agree.
    """

    def __init__(self, fastest_rad_s: float, margin_rad: float, memory_s: float = 0.25) -> None:
        self._speed, self._margin, self._memory_ns = fastest_rad_s, margin_rad, ns(memory_s)
        self._trusted: tuple[int, Vector] | None = None
        self._candidate: tuple[int, Vector] | None = None

    def passes(self, ticks: Vector, t_ns: int) -> bool:
        known = self._fresh(self._trusted, t_ns) or self._fresh(self._candidate, t_ns)
        if known is not None:
            reach_rad = self._speed * (t_ns - known[0]) / SECOND + self._margin
            if (np.abs(ticks - known[1]) * QUANTUM_RAD <= reach_rad).all():
                self._trusted, self._candidate = (t_ns, ticks), None
                return True
        self._candidate = t_ns, ticks
        return False

    def _fresh(self, seen: tuple[int, Vector] | None, t_ns: int) -> tuple[int, Vector] | None:
        return seen if seen is not None and t_ns - seen[0] <= self._memory_ns else None


def prepared(arm: ServoArm) -> Callable[[], None]:
    """Its ``freeze``, with everything imported that takes time."""
    arm.servos.load()
    pyserial()
    return arm.freeze


class ServoArm(Adapter):
    """``wire`` opens the bytes below; by default the serial port of the configuration."""

    def __init__(
        self,
        config: ArmConfig,
        servos: Servos,
        watchdog_s: float | None,
        clock: Clock | None = None,
        wire: Callable[[], Wire] | None = None,
    ) -> None:
        super().__init__(config.spec(watchdog_s), clock)
        self.config, self.servos, self.calibration = config, servos, config.calibration
        self._wire = wire or (lambda: SerialWire(config.port, config.baudrate, self.clock))
        self._port: Port | None = None
        self._goal: list[int] | None = None  # of all servos, as sent last, while torque is on
        self._seq = -1
        self._forget()

    def freeze(self) -> None:
        """The second channel, for an arm that nobody has configured here: what is on the bus stops where it is, and
        keeps its torque. A bus has one user: while another process has the port this fails, and nothing is sent."""
        try:
            self._connect()
            self._forget()
            self.servos.freeze(lambda: insist(lambda: self._measured(self._until(ANSWER_S)))[1])
        finally:
            self._close()

    def _connect(self) -> None:
        config = self.config
        self._port = Port(self._wire(), self.clock, config.baudrate, config.latency_s, config.quiet_s)
        self.servos.connect(self._port, self.calibration.ids)

    def _open(self, revive: bool) -> None:
        try:
            self._connect()
            if revive:
                self.servos.revive()
            self._identify()
        except RobotError:
            self._close()
            raise
        self._forget()

    def _identify(self) -> None:
        delay_ns = self.servos.identify(self.calibration.offsets, self.calibration.ranges)
        assert self._port is not None, "there is a port since configure()"
        self._port.latency_ns = ns(self.config.latency_s) + delay_ns

    def _configure(self) -> None:
        self._open(revive=False)

    def strongest(self) -> Vector:
        return np.array(self.servos.stall_nm[: len(self.spec.joints)], np.float64)

    def _activate(self, mode: Mode) -> RobotState:
        # A servo that was without power meanwhile does not say so, and what it kept only until then is another number.
        self._identify()
        _, reading = insist(lambda: self._measured(self._until(ANSWER_S)))
        low, high = np.array(self.calibration.ranges, np.float64).T
        goal = np.clip(reading.ticks, *np.array(self.servos.own, np.float64).T)
        n, config = len(self.spec.joints), self.config
        outside_rad = (np.maximum(low - reading.ticks, reading.ticks - high) * QUANTUM_RAD)[:n]
        refused = np.abs(goal - reading.ticks)[:n] > NEAR_TICKS
        if (far := refused | (outside_rad > config.outside_rad)).any():
            worst = int(np.where(far, outside_rad, 0).argmax())
            why = "its servo takes no goals there" if refused[worst] else f"{config.outside_rad:g} are allowed"
            raise Refused(
                f"joint {self.spec.joints[worst].name!r} is {outside_rad[worst]:.3f} rad outside its calibrated range, "
                f"and {why}; move it back by hand, or calibrate again"
            )
        goal = goal.astype(int).tolist()
        if self.spec.device_watchdog_s is not None:
            self.servos.arm(0.0)  # one that has run out keeps goals read-only
        velocity = [config.velocity * config.profile_share] * len(self.spec.joints)
        if self.calibration.gripper:
            velocity.append(config.gripper_velocity)
        self.servos.prepare(goal, velocity, config.acceleration * config.profile_share)
        if self.spec.device_watchdog_s is not None:
            self.servos.arm(self.spec.device_watchdog_s)
        self.servos.enable()
        self._goal = goal
        return self._state(*insist(lambda: self._measured(self._until(ANSWER_S))))

    def _read(self, timeout_s: float) -> RobotState:
        deadline_ns = self._until(timeout_s)
        for attempt in (1, 2):
            try:
                return self._state(*self._measured(deadline_ns))
            except Lost as error:
                if attempt == 2 or self.clock.now_ns() >= deadline_ns:
                    raise StaleState(f"no state within {timeout_s:g} s: {error}") from error
        raise AssertionError("unreachable")

    def _write(self, command: Command) -> Command:
        before = self._goal
        assert before is not None  # since activate
        goal = self.calibration.goal_ticks(command.target, before[: len(self.spec.joints)])
        sent_rad = self.calibration.radians(np.array(goal))
        fraction = None
        if self.calibration.gripper is not None:
            wanted = command.gripper
            # One that is found closed or open beyond its range stays there until it is asked to leave.
            tick = before[-1]
            if wanted is not None and wanted != self._gripper_fraction(tick):
                tick = self._gripper_tick(wanted)
            fraction = self._gripper_fraction(tick)
            goal = [*goal, tick]
        self.servos.send(goal, self._until(SEND_S))
        self._goal = goal
        return sent_as(command, sent_rad, gripper=fraction)

    def _stop(self, kind: StopKind) -> None:
        if kind is StopKind.RELEASE:
            self.servos.release()
            self._goal = None
        elif self._goal is not None:
            self.servos.send(self._goal, self._until(SEND_S))

    def _deactivate(self) -> None:
        if self.spec.device_watchdog_s is not None:
            self.servos.disarm()

    def _recover(self) -> None:
        self._close()
        self._open(revive=True)

    def _close(self) -> None:
        if self._port is not None:
            self._port.close()

    def _measured(self, deadline_ns: int) -> tuple[int, Reading]:
        reading = self.servos.read(deadline_ns)
        now_ns = self.clock.now_ns()
        if not self._gate.passes(reading.ticks, now_ns):
            raise Lost(f"a servo cannot have come to {reading.ticks.astype(int).tolist()} since it was read last")
        return now_ns, reading

    def _state(self, t_ns: int, reading: Reading) -> RobotState:
        n, direction = len(self.spec.joints), self.calibration.direction
        self._seq += 1
        return RobotState(
            seq=self._seq,
            t_ns=t_ns,
            q=self.calibration.radians(reading.ticks[:n]),
            qd=direction * reading.speed_rad_s[:n],
            t_device_s=reading.t_device_s,
            effort=None if reading.effort_nm is None else direction * reading.effort_nm[:n],
            gripper=None if self.calibration.gripper is None else self._gripper_fraction(reading.ticks[-1]),
            fault=self.fault,
        )

    def _gripper_tick(self, fraction: float) -> int:
        gripper = self.calibration.gripper
        assert gripper is not None
        return round(gripper.closed_tick + fraction * (gripper.open_tick - gripper.closed_tick))

    def _gripper_fraction(self, tick: float) -> float:
        gripper = self.calibration.gripper
        assert gripper is not None
        return float(np.clip((tick - gripper.closed_tick) / (gripper.open_tick - gripper.closed_tick), 0, 1))

    def _until(self, seconds: float) -> int:
        return self.clock.now_ns() + ns(seconds)

    def _forget(self) -> None:
        self._gate = Gate(self.servos.fastest_rad_s, self.config.margin_rad)
