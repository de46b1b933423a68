"""`SafeRobot`: the only one that makes commands. Every request of a program to a robot goes through here.

    request -> reflex (may only slow down) -> protection -> rounding by the device -> Command -> adapter

`protection` is the joint guard, and the fallback before it where ``safety`` limits the jerk or the room.

A robot is on one rung of a ladder, and each tick decides which:

    RUN   as asked
    SLOW  half of the speed limits: the control loop missed its deadlines, or was refused, several times in a row
    HOLD  a wish to be at rest, until what is missing comes back: states are too old, or nobody asks for anything
    RAMP  the same for good: braking with the guard's acceleration, then the adapter's HOLD, and out of ACTIVE

RAMP is entered where states are older than ``stale_ramp_s``, requests are bad many times in a row, deadlines are missed
or commands refused many times in a row, the arm does not follow its set-points, a sensor hangs or a joint is stuck
(`monitors`), the emergency stop or a fault is reported, or a person asks for it. The way back is a call of ``start``.

Below this stand the device's own watchdog, which ``start`` demands, and the supervisor's second channel; above it
nothing is trusted. Time is only ever that of the clock: two commands are at least a period apart (less ``JITTER``),
because the guard's promise is per command.

**A command that the device refuses** was not sent: the protection is put back, and the next command continues from what
was. Refusals in a row count as missed deadlines do (``slow_after``, ``ramp_after``); where braking is refused too, the
device is stopped at once.

Changes of a request are counted by kind (``counts``): limits of the joints (`guard.Intervention`), "jerk",
"workspace", "floor", "apart", "looks" (`collision`), "advised", and "refused". All but the first six are also
remembered in words (``events``), once a second at most.

**Departures** from a sole producer with a private token, without which no `Command` could be made: a test reads the
source of the package instead, and finds all others that make one (tests/test_safe_robot.py). In Python a token is a
word that any module may import, and `conformance`, which third parties run on adapters of theirs, has to write without
a guard.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ...policies.core.errors import reason
from ..adapter import Adapter, Command, Mode, Phase, RobotSpec, RobotState, Simulated, StopKind, Vector
from ..clock import SECOND, ns
from ..errors import DeviceFault, Refused, RobotError, StaleState
from .guard import Intervention, Limits, numbers
from .ladder import Advisor, Event, Rung, StepInfo
from .monitors import Monitors
from .protection import JERK, Protection
from .reflex import reflex_of
from .settings import Safety

JITTER = 0.02  # of a period: so much nearer may two commands be
EVENTS = 1000  # of the latest, that are remembered
USUAL = {*(kind.value for kind in Intervention), JERK}  # interventions that are only counted
CALLED = "stop() was called"


def require_watchdog(spec: RobotSpec, safety: Safety) -> None:
    """A check that the device has a watchdog, or that its absence is accepted by the settings."""
    if spec.device_watchdog_s is None and not safety.no_device_watchdog:
        raise Refused(
            f"{spec.name} has no watchdog of its own, so it would keep its last set-point if this program died; say "
            "safety.no_device_watchdog=true if that is safe here"
        )


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
        self._adapter = adapter
        self._true = adapter if isinstance(adapter, Simulated) else None  # looked up once: it is asked at every tick
        own = reflex_of(adapter.spec, safety, adapter.clock)
        self._advisors = [one for one in (advisor, own) if one is not None]
        self._protection = Protection.of(adapter.spec, self.limits, safety)
        self._monitors = Monitors(adapter.spec, safety)
        self._period_ns = ns(self.limits.period_s)
        self._rung = Rung.STOPPED
        self.stopping: Callable[[], None] = lambda: None  # called before the device is stopped, which may take its time
        self._bad = self._misses = self._refused = self._seq = 0
        self._began_ns = self._sent_ns = self._followed_ns = self._heard_ns = 0
        self._reported_ns: dict[str, int] = {}  # when a kind of intervention was put into words last
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
        """The true joint positions of a simulated robot."""
        return None if self._true is None else self._true.truth()

    def start(self) -> RobotState:
        """Open what is closed, take hold of the robot where it is, without a bump, and be on the rung RUN. One that is
        found a little outside its limits stays there until it is asked for something, and then goes in (`guard`)."""
        if self._rung is not Rung.STOPPED:
            raise Refused(f"{self.spec.name} is started already, and nothing was changed; stop it first")
        require_watchdog(self.spec, self.safety)
        if self._adapter.phase is Phase.UNCONFIGURED:
            self._adapter.configure()
        try:
            state = self._adapter.read(self.safety.stale_ramp_s)
        except StaleState as error:
            raise StaleState(f"{error}; if that stays so, look at the robot, then call recover()") from error
        self._trouble_of(state)
        self._take(state)  # what is refused here never gets power
        state = self._adapter.activate(Mode.JOINT_POSITION)
        try:
            self._sent = self._take(state)
        except Refused:
            self._finish(StopKind.HOLD)
            raise
        now_ns = self.clock.now_ns()
        self._monitors.begin(state, self._sent, self._adapter.strongest(), now_ns)
        self._state = state
        self._gripper = state.gripper
        self._bad = self._misses = self._refused = 0
        self._seq, self._asked_once = 0, False
        self._began_ns = self._followed_ns = self._heard_ns = now_ns
        self._rung = Rung.RUN
        self.note("start", f"at {np.round(state.q, 3).tolist()}")
        return state

    def step(self, request: Any, gripper: Any = None, *, late: bool = False) -> StepInfo:
        """One period: read, decide, guard, send. ``request`` is n joint angles in rad, or None for the wish to be at
        rest; ``gripper`` is a fraction of its width; ``late`` says that the loop missed this period's deadline. Of what
        is asked nothing raises; what the device does may (`DeviceFault`), and then the robot is in FAULT, stopped as
        well as its link allows."""
        if self._rung is Rung.STOPPED or self._state is None:
            raise Refused(f"{self.spec.name} is not started; call start()")
        if request is not None:  # read once: what is looked at below is what is sent
            asked = numbers(request, self._sent.shape)
            request = np.full(self._sent.shape, np.nan) if asked is None else asked
            request.flags.writeable = False  # an advisor looks at it too
        try:
            fresh = self._look()
            self._climb(request, late, fresh)
            self._send(*self._wish(request), gripper)
        except DeviceFault as error:
            self.stopping()
            self._rung = Rung.STOPPED
            self.note("fault", str(error))
            self._adapter.stop(StopKind.HOLD)
            raise
        given_up = self._refused >= min(self.safety.ramp_after, self._protection.longest)
        if self._rung is Rung.RAMP and (given_up or self._protection.resting):
            self._finish(StopKind.HOLD)
        return StepInfo(self._state, fresh, self._sent.copy(), self._rung, self._changed)

    def blend(self) -> None:
        """The speed grows anew, as after the start: another source asks from now on, and may mean another place."""
        self._began_ns = self.clock.now_ns()

    def ramp(self, why: str) -> None:
        """Come to rest over the next steps, and stay."""
        if self._rung not in (Rung.RAMP, Rung.STOPPED):
            self._rung = Rung.RAMP
            self.note("ramp", why)

    def stop(self, kind: StopKind = StopKind.RAMP, each: Callable[[], None] = lambda: None) -> None:
        """From any rung. RAMP takes as long as braking does (as much as ``velocity / acceleration``, more with a limit
        of jerk), the others no time; ``each`` is called after every step of it, for a watchdog that waits for a sign of
        life. It raises nothing: where the device fails, what is left is its own watchdog."""
        if self._rung is Rung.STOPPED:
            return
        self.ramp(CALLED)
        if kind is StopKind.RAMP:
            left = self._protection.longest
            while left > 0:
                self.clock.sleep_until_ns(self._sent_ns + self._period_ns)
                try:
                    self.step(None)
                except RobotError as error:
                    self.note("stop", str(error))
                    break
                each()
                if self.rung is Rung.STOPPED:
                    return
                left -= self._refused == 0  # a command that was refused brakes nothing
        self._finish(StopKind.HOLD if kind is StopKind.RAMP else kind)

    def close(self) -> None:
        self.stop()
        self._adapter.close()

    def recover(self) -> None:
        """Out of FAULT, or with a robot that is INACTIVE and cannot be started; a person has looked. ``start`` comes
        next."""
        self._adapter.recover()
        self.note("recover", "begun anew")

    def _finish(self, kind: StopKind) -> None:
        self.stopping()  # on the rung of before: it is not stopped yet
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

    def _climb(self, request: Vector | None, late: bool, fresh: bool) -> None:
        """Which rung, from what is known now."""
        state, safety, now_ns = self._state, self.safety, self.clock.now_ns()
        assert state is not None
        seen = self._monitors.see(state, self._sent, now_ns) if fresh else ""
        self._misses = self._misses + 1 if late else 0
        self.counts["late"] += late
        if self._rung is Rung.RAMP:
            return
        self._rung = Rung.RUN
        if max(self._misses, self._refused) >= safety.slow_after:
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
            (self._refused >= safety.ramp_after, lambda: f"{self._refused} commands in a row were refused"),
            (self._bad >= safety.bad_in_a_row, lambda: f"{self._bad} requests in a row were no numbers"),
            (
                now_ns - self._followed_ns > ns(safety.following_s),
                lambda: f"the arm is more than {safety.following_rad:g} rad from its set-points",
            ),
            (bool(seen), lambda: seen),
            (state.estop, lambda: "the emergency stop is pressed"),
            (state.fault is not None, lambda: f"the robot reports {state.fault}"),
        ]
        for holds, text in reasons:
            if holds:
                self.ramp(text())
                return

    def _wish(self, request: Vector | None) -> tuple[Vector | None, float]:
        """The request to the guard, and its speed."""
        if self._rung in (Rung.HOLD, Rung.RAMP):
            return None, 1.0
        if request is not None and not self._asked_once:
            self._meet(request)
        speed = 0.5 if self._rung is Rung.SLOW else 1.0
        blended_ns = self.clock.now_ns() - self._began_ns
        if blended_ns < ns(self.safety.blend_s):
            speed = min(speed, max(blended_ns, self._period_ns) / ns(self.safety.blend_s))
        for advisor in self._advisors:
            speed = min(speed, self._advised(advisor, request))
        return (request, speed) if speed > 0 else (None, 1.0)

    def _meet(self, request: Vector) -> None:
        """The first request must be near the robot: a policy that takes it to be elsewhere is not followed."""
        gap = float(np.abs(request - self._sent).max())
        if gap > self.safety.start_gap_rad:
            self.counts["gap"] += 1
            self.ramp(f"the first request is {gap:.2f} rad away, and {self.safety.start_gap_rad:g} are allowed")

    def _advised(self, advisor: Advisor, request: Vector | None) -> float:
        """A share in [0, 1], whatever the advisor says."""
        assert self._state is not None
        try:
            share = float(advisor(self._state, request))
        except Exception as error:  # a critic that fails is a reason to brake, not to fall over
            self.note("advisor", reason(error, named=True))
            share = 0.0
        share = share if 0 <= share <= 1 else 0.0
        if share < 1:
            self._intervened("advised", f"{share:.2f} of the speed may be used")
        return share

    def _intervened(self, kind: str, text: str) -> None:
        now_ns = self.clock.now_ns()
        if kind in USUAL or now_ns - self._reported_ns.get(kind, -SECOND) < SECOND:
            self.counts[kind] += 1
        else:
            self._reported_ns[kind] = now_ns
            self.note(kind, text)

    def _send(self, request: Vector | None, speed: float, gripper: Any) -> None:
        if self._rung is Rung.RAMP:
            request = None
        before, grip = self._protection.state(), self._gripper
        sent = self._protection(request, speed)
        self._changed = sent.changed
        if request is not None:
            self._bad = self._bad + 1 if sent.bad else 0
            self._asked_once = self._asked_once or not sent.bad  # only the guard says what a request is
            for kind in sent.kinds:
                self._intervened(kind, f"held back at {np.round(sent.q, 3).tolist()}")
        if self._protection.lost:
            self.ramp(self._protection.lost)
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
            sent.q,
            gripper=self._held(gripper),
            obs_seq=state.seq,
        )
        self._sent_ns = now_ns
        try:
            self._sent = self._adapter.write(command).target
        except Refused as error:
            self._protection.restore(before)
            self._gripper, self._changed = grip, True
            self._refused += 1
            self._intervened("refused", str(error))
            return
        self._refused = 0

    def _held(self, gripper: Any) -> float | None:
        """The gripper's channel: a fraction, no faster than the gripper is; what is no number changes nothing."""
        spec = self.spec.gripper
        if spec is None:
            return None
        now = self._gripper if self._gripper is not None else 0.0
        still = self._rung in (Rung.HOLD, Rung.RAMP)
        asked = np.array(now) if gripper is None or still else numbers(gripper, ())
        if asked is None or not np.isfinite(asked):
            self.counts["gripper"] += 1
            asked = np.array(now)
        step = spec.speed_m_s / spec.width_m * self.limits.period_s
        self._gripper = float(np.clip(np.clip(asked, now - step, now + step), 0, 1))
        return self._gripper

    def _take(self, state: RobotState) -> Vector:
        """The set-point that holds the robot where it is; `Refused` where that is too far outside its limits."""
        beyond = np.maximum(self.limits.lower - state.q, state.q - self.limits.upper)
        if beyond.max() > self.safety.outside_rad:
            worst = self.spec.joints[int(beyond.argmax())].name
            raise Refused(
                f"{worst} of {self.spec.name} is {beyond.max():.3f} rad outside its limits, and "
                f"{self.safety.outside_rad:g} are allowed; move it inside by hand, or allow more (safety.outside_rad)"
            )
        return self._protection.reset(state.q)

    def _trouble_of(self, state: RobotState) -> None:
        if state.estop:
            raise Refused("the emergency stop is pressed; release it at the robot")
        if state.fault is not None:
            raise Refused(f"{self.spec.name} reports a fault: {state.fault.text}; clear it, then call recover()")

    def note(self, kind: str, text: str) -> None:
        """Count it, and remember the words."""
        self.counts[kind] += 1
        self.events.append(Event(self.clock.now_ns(), kind, text))
