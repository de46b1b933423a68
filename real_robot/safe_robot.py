"""`SafeRobot`: the only one that makes commands. Whatever a program asks of a robot goes through here.

    request -> reflex (may only slow down) -> guard -> rounding by the device -> Command -> adapter

A robot is on one rung of a ladder, and each tick decides which:

    RUN   as asked
    SLOW  half of the speed limits: the control loop missed its deadlines several times in a row
    HOLD  a wish to be at rest, until what is missing comes back: states are too old, or nobody asks for anything
    RAMP  the same for good: braking with the guard's acceleration, then the adapter's HOLD, and out of ACTIVE

RAMP is entered where states are older than ``stale_ramp_s``, requests are bad many times in a row, deadlines are missed
many times in a row, the arm does not follow its set-points, the emergency stop or a fault is reported, or a person asks
for it. The way back is ``start``, called by somebody.

Below this stand the device's own watchdog, which ``start`` demands, and the supervisor's second channel; above it
nothing is trusted. Time is only ever that of the clock: two commands are at least a period apart (less ``JITTER``),
because the guard's promise is per command.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from .adapter import Adapter, Command, Mode, Phase, RobotState, Simulated, StopKind, Vector
from .clock import SECOND, ns
from .errors import DeviceFault, Refused, RobotError, StaleState
from .guard import JointGuard, Limits

JITTER = 0.02  # of a period: so much nearer may two commands be
EVENTS = 1000  # of the latest, that are remembered


class Rung(StrEnum):
    RUN = "run"
    SLOW = "slow"
    HOLD = "hold"
    RAMP = "ramp"
    STOPPED = "stopped"


@dataclass
class Safety:
    """How much is allowed. Limits of positions are the robot's own."""

    rate_hz: float = 100.0
    share: float = 1.0  # of the robot's velocities and accelerations
    outside_rad: float = 0.1  # so far outside its limits a robot may be found at the start
    start_gap_rad: float = 0.5  # so far from the robot may the first request be
    blend_s: float = 1.0  # until all of the speed may be used
    stale_hold_periods: float = 3.0  # age of the newest state
    stale_ramp_s: float = 0.1
    silent_ramp_s: float = 1.0  # without a request, once there was one
    bad_in_a_row: int = 5  # requests that are no numbers
    slow_after: int = 3  # missed deadlines in a row
    ramp_after: int = 10
    following_rad: float = 0.35  # between set-point and measurement
    following_s: float = 0.3
    no_device_watchdog: bool = False  # said aloud: if this program dies, the robot keeps its last set-point

    def __post_init__(self) -> None:
        times = ("stale_hold_periods", "stale_ramp_s", "silent_ramp_s", "following_s")
        for name in ("rate_hz", "start_gap_rad", "following_rad", *times):
            if not 0 < getattr(self, name) < np.inf:
                raise Refused(f"safety.{name}={getattr(self, name)} must be a positive number")
        if not 0 < self.share <= 1:
            raise Refused(f"safety.share={self.share} must lie in (0, 1]")
        if self.outside_rad < 0 or self.blend_s < 0:
            raise Refused("safety.outside_rad and safety.blend_s must not be negative")
        if min(self.bad_in_a_row, self.slow_after, self.ramp_after) < 1 or self.slow_after > self.ramp_after:
            raise Refused("safety counts must be at least 1, and slow_after at most ramp_after")


@dataclass(frozen=True, slots=True)
class Event:
    t_ns: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class StepInfo:
    state: RobotState  # the newest; old if ``fresh`` is False
    fresh: bool
    sent: Vector  # the set-point that the device has
    rung: Rung
    changed: bool  # what was sent is not what was asked


class Advisor(Protocol):
    """A reflex: the share in [0, 1] of the speed limits that may be used, 0 to brake. It can only be more careful."""

    def __call__(self, state: RobotState, request: Any) -> float: ...


class SafeRobot:
    """Holds the only reference to the adapter. ``start``, then ``step`` every period, then ``stop`` and ``close``."""

    def __init__(self, adapter: Adapter, safety: Safety, advisor: Advisor | None = None) -> None:
        least, _, most = adapter.spec.rate_hz
        if not least <= safety.rate_hz <= most:
            raise Refused(f"{adapter.spec.name} takes commands at {least:g} to {most:g} Hz, not at {safety.rate_hz:g}")
        self.spec, self.clock, self.safety = adapter.spec, adapter.clock, safety
        self.limits = Limits.of(adapter.spec, safety.rate_hz, safety.share)
        self.counts: Counter[str] = Counter()  # interventions and troubles, by kind
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self._adapter, self._advisor = adapter, advisor
        self._guard = JointGuard(self.limits)
        self._period_ns = ns(self.limits.period_s)
        self._rung = Rung.STOPPED
        self._bad = self._misses = self._seq = 0
        self._began_ns = self._sent_ns = self._followed_ns = self._heard_ns = 0
        self._asked_once = False
        self._gripper: float | None = None
        self._state: RobotState | None = None
        self._sent = np.zeros(len(adapter.spec.joints))

    @property
    def rung(self) -> Rung:
        return self._rung

    @property
    def phase(self) -> Phase:
        return self._adapter.phase

    def truth(self) -> Vector | None:
        """Where the joints are, of a robot that is simulated."""
        return self._adapter.truth() if isinstance(self._adapter, Simulated) else None

    def start(self) -> RobotState:
        """Open what is closed, take hold of the robot where it is, without a bump, and be on the rung RUN."""
        if self.spec.device_watchdog_s is None and not self.safety.no_device_watchdog:
            raise Refused(
                f"{self.spec.name} has no watchdog of its own, so it would keep its last set-point if this program "
                "died; say safety.no_device_watchdog=true if that is safe here"
            )
        if self._adapter.phase is Phase.UNCONFIGURED:
            self._adapter.configure()
        state = self._adapter.read(self.safety.stale_ramp_s)
        beyond = np.maximum(self.limits.lower - state.q, state.q - self.limits.upper)
        if beyond.max() > self.safety.outside_rad:
            worst = self.spec.joints[int(beyond.argmax())].name
            raise Refused(
                f"{worst} of {self.spec.name} is {beyond.max():.3f} rad outside its limits; move it inside by hand"
            )
        self._trouble_of(state)
        state = self._adapter.activate(Mode.JOINT_POSITION)
        now_ns = self.clock.now_ns()
        self._state, self._sent = state, self._guard.reset(state.q)
        self._gripper = state.gripper
        self._bad = self._misses = 0
        self._seq, self._asked_once = 0, False
        self._began_ns = self._followed_ns = self._heard_ns = now_ns
        self._rung = Rung.RUN
        self.note("start", f"at {np.round(state.q, 3).tolist()}")
        return state

    def step(self, request: Any, gripper: Any = None, *, late: bool = False) -> StepInfo:
        """One period: read, decide, guard, send. ``request`` is n joint angles in rad, or None for the wish to be at
        rest; ``late`` says that the loop missed this period's deadline. Of what is asked nothing raises; what the
        device does may (`DeviceFault`), and then the robot is in FAULT, stopped as well as its link allows."""
        if self._rung is Rung.STOPPED or self._state is None:
            raise Refused(f"{self.spec.name} is not started; call start()")
        try:
            fresh = self._look()
            self._climb(request, late)
            self._send(*self._wish(request), gripper)
        except DeviceFault as error:
            self._rung = Rung.STOPPED
            self.note("fault", str(error))
            self._adapter.stop(StopKind.HOLD)
            raise
        if self._rung is Rung.RAMP and not self._guard.v.any():
            self._finish(StopKind.HOLD)
        return StepInfo(self._state, fresh, self._sent.copy(), self._rung, self._changed)

    def ramp(self, why: str) -> None:
        """Come to rest over the next steps, and stay."""
        if self._rung not in (Rung.RAMP, Rung.STOPPED):
            self._rung = Rung.RAMP
            self.note("ramp", why)

    def stop(self, kind: StopKind = StopKind.RAMP) -> None:
        """From any rung. RAMP takes as long as braking does (as much as ``velocity / acceleration``), the others no
        time. It raises nothing: where the device fails, what is left is its own watchdog."""
        if self._rung is Rung.STOPPED:
            return
        self.ramp("stop() was called")
        if kind is StopKind.RAMP:
            slowest_s = float((self.limits.velocity / self.limits.acceleration).max())
            for _ in range(int(slowest_s / self.limits.period_s) + 3):
                self.clock.sleep_until_ns(self._sent_ns + self._period_ns)
                try:
                    self.step(None)
                except RobotError as error:
                    self.note("stop", str(error))
                    break
                if self.rung is Rung.STOPPED:
                    return
        self._finish(StopKind.HOLD if kind is StopKind.RAMP else kind)

    def close(self) -> None:
        self.stop()
        self._adapter.close()

    def recover(self) -> None:
        """Out of FAULT; a person has looked. ``start`` comes next."""
        self._adapter.recover()
        self.note("recover", "out of FAULT")

    def _finish(self, kind: StopKind) -> None:
        self._rung = Rung.STOPPED
        self._adapter.stop(kind)
        self.note("stopped", kind.value)
        if self._adapter.phase is Phase.STOPPING:
            try:
                self._adapter.deactivate()
            except RobotError as error:
                self.note("deactivate", str(error))

    def _look(self) -> bool:
        """Has a new state come? It is waited for no longer than half a period."""
        try:
            self._state = self._adapter.read(self.limits.period_s / 2)
        except StaleState:
            self.counts["stale"] += 1
            return False
        return True

    def _climb(self, request: Any, late: bool) -> None:
        """Which rung, from what is known now."""
        state, safety, now_ns = self._state, self.safety, self.clock.now_ns()
        assert state is not None
        self._misses = self._misses + 1 if late else 0
        self.counts["late"] += late
        if self._rung is Rung.RAMP:
            return
        self._rung = Rung.RUN
        if self._misses >= safety.slow_after:
            self._rung = Rung.SLOW
        age_ns = now_ns - state.t_ns
        if request is None or age_ns > safety.stale_hold_periods * self._period_ns:
            self._rung = Rung.HOLD
        if np.abs(state.q - self._sent).max() <= safety.following_rad:
            self._followed_ns = now_ns
        if request is not None or not self._asked_once:
            self._heard_ns = now_ns
        reasons: list[tuple[bool, Callable[[], str]]] = [
            (age_ns > ns(safety.stale_ramp_s), lambda: f"the newest state is {age_ns / SECOND:.3f} s old"),
            (
                now_ns - self._heard_ns > ns(safety.silent_ramp_s),
                lambda: f"nobody has asked for anything in {safety.silent_ramp_s:g} s",
            ),
            (self._misses >= safety.ramp_after, lambda: f"{self._misses} deadlines in a row were missed"),
            (self._bad >= safety.bad_in_a_row, lambda: f"{self._bad} requests in a row were no numbers"),
            (
                now_ns - self._followed_ns > ns(safety.following_s),
                lambda: f"the arm is more than {safety.following_rad:g} rad from its set-points",
            ),
            (state.estop, lambda: "the emergency stop is pressed"),
            (state.fault is not None, lambda: f"the robot reports {state.fault}"),
        ]
        for holds, text in reasons:
            if holds:
                self.ramp(text())
                return

    def _wish(self, request: Any) -> tuple[Any, float]:
        """What the guard is asked for, and how fast."""
        if self._rung in (Rung.HOLD, Rung.RAMP):
            return None, 1.0
        if not self._asked_once:
            self._meet(request)
        speed = 0.5 if self._rung is Rung.SLOW else 1.0
        blended_ns = self.clock.now_ns() - self._began_ns
        if blended_ns < ns(self.safety.blend_s):
            speed = min(speed, max(blended_ns, self._period_ns) / ns(self.safety.blend_s))
        if self._advisor is not None:
            speed = min(speed, self._advised(request))
        return (request, speed) if speed > 0 else (None, 1.0)

    def _meet(self, request: Any) -> None:
        """The first request must be near the robot: a policy that thinks it is elsewhere is not followed."""
        try:
            gap = float(np.abs(np.asarray(request, np.float64) - self._sent).max())
        except Exception:  # whatever it does when it is read: the guard says what it is
            return
        if gap > self.safety.start_gap_rad:
            self.counts["gap"] += 1
            self.ramp(f"the first request is {gap:.2f} rad away, and {self.safety.start_gap_rad:g} are allowed")
        elif gap <= self.safety.start_gap_rad:
            self._asked_once = True

    def _advised(self, request: Any) -> float:
        assert self._advisor is not None and self._state is not None
        try:
            share = float(self._advisor(self._state, request))
        except Exception as error:  # a critic that fails is a reason to brake, not to fall over
            self.note("advisor", f"{type(error).__name__}: {error}")
            share = 0.0
        share = share if 0 <= share <= 1 else 0.0
        self.counts["advised"] += share < 1
        return share

    def _send(self, request: Any, speed: float, gripper: Any) -> None:
        if self._rung is Rung.RAMP:
            request = None
        before_q, before_v = self._guard.q, self._guard.v
        guarded = self._guard(request, speed)
        self._changed = bool(guarded.changed)
        if request is not None:
            self._bad = self._bad + 1 if guarded.bad else 0
            if self._changed:
                for kind, holds in self._guard.why(request, before_q, before_v).items():
                    self.counts[kind.value] += bool(holds)
        state = self._state
        assert state is not None
        self.clock.sleep_until_ns(self._sent_ns + round((1 - JITTER) * self._period_ns))
        now_ns = self.clock.now_ns()
        self._seq += 1
        command = Command(
            Mode.JOINT_POSITION,
            self._seq,
            now_ns,
            now_ns + self._period_ns,
            guarded.q,
            gripper=self._held(gripper),
            obs_seq=state.seq,
        )
        self._sent_ns = now_ns
        self._sent = self._adapter.write(command).target

    def _held(self, gripper: Any) -> float | None:
        """The gripper's channel: a fraction, no faster than the gripper is; what is no number changes nothing."""
        spec = self.spec.gripper
        if spec is None:
            return None
        now = self._gripper if self._gripper is not None else 0.0
        still = self._rung in (Rung.HOLD, Rung.RAMP)
        try:
            wanted = float(gripper) if gripper is not None and not still else now
        except (TypeError, ValueError):
            wanted = np.nan
        if not np.isfinite(wanted):
            self.counts["gripper"] += 1
            wanted = now
        step = spec.speed_m_s / spec.width_m * self.limits.period_s
        self._gripper = float(np.clip(np.clip(wanted, now - step, now + step), 0, 1))
        return self._gripper

    def _trouble_of(self, state: RobotState) -> None:
        if state.estop:
            raise Refused("the emergency stop is pressed; release it at the robot")
        if state.fault is not None:
            raise Refused(f"{self.spec.name} reports a fault: {state.fault.text}; clear it, then call recover()")

    def note(self, kind: str, text: str) -> None:
        """Count it, and remember the words."""
        self.counts[kind] += 1
        self.events.append(Event(self.clock.now_ns(), kind, text))
