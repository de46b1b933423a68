"""A judge of every command that a robot gets, from what is seen on its wire and from what its own states have said.

It knows neither guard nor ladder; it has their promises: limits of position, velocity and acceleration from one
set-point to the next; a period between two of them; where states are missing or lie, where the emergency stop or a
fault is reported, where nobody asks for anything or a person asks to stop, every set-point slows down by all of the
acceleration until the arm rests, and then it is stopped; and after a stop nothing moves until somebody starts it again.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from burnish.real_robot.adapter import Adapter, RobotState, StopKind
from burnish.real_robot.clock import SECOND, ns
from burnish.real_robot.control.loop import ControlLoop
from burnish.real_robot.errors import RobotError, StaleState
from burnish.real_robot.safety.safe_robot import JITTER, Safety

PROMISED = Safety()  # ages and distances; a robot that is set up otherwise is judged by these all the same
WIRE_NS = (
    700_000  # so much later than another one may a packet come out, behind 64 bytes of noise that were read away first
)


@dataclass(frozen=True)
class Failure:
    """``t_s`` since the beginning; ``tick`` of the control loop."""

    tick: int
    t_s: float
    text: str


class Judge:
    """``truth`` is where the joints are; ``true`` says whether a state was measured, given when its reading began."""

    def __init__(
        self,
        adapter: Adapter,
        rate_hz: float,
        truth: Callable[[], np.ndarray],
        true: Callable[[RobotState, int], bool],
        start_rad: float,
    ) -> None:
        self.spec, self.clock, self.truth, self.true, self.start_rad = (
            adapter.spec,
            adapter.clock,
            truth,
            true,
            start_rad,
        )
        self.h = 1 / rate_hz
        self.lower, self.upper = self.spec.column("lower"), self.spec.column("upper")
        self.velocity, self.step = self.spec.column("velocity"), self.spec.column("acceleration") * self.h
        self.rounding = self.spec.column("quantum") / self.h
        # Set-points on the way from the greatest speed to rest, and one that had been decided before.
        self.brakes = int(np.ceil((self.velocity / self.step).max())) + 2
        self.failure: Failure | None = None
        self.counts: Counter[str] = Counter()
        self.worst = np.zeros(3)  # positions (as a share of the half range), velocity, acceleration
        self.digest = blake2b(digest_size=16)
        self.began_ns = self.clock.now_ns()
        self.tick = 0
        self.plan: tuple[int, int, np.ndarray] | None = None  # when it begins, how far apart its rows are, and they
        self.q = np.full(len(self.lower), np.nan)
        self.v = np.zeros(len(self.lower))
        self.sent_ns = self.state_ns = self.followed_ns = self.stopped_ns = 0
        self.stopped, self.why, self.idle, self.blind, self.after = True, "", False, False, 0
        self._attach(adapter)

    def fail(self, text: str) -> None:
        """The first one counts; it is not raised, because whoever calls may catch everything."""
        if self.failure is None:
            self.failure = Failure(self.tick, (self.clock.now_ns() - self.began_ns) / SECOND, text)

    def note(self, *parts: Any) -> None:
        for part in parts:
            data = part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
            self.digest.update(data)

    def must_stop(self, why: str) -> None:
        """From now on every set-point brakes, until the robot is started again."""
        if not self.why and not self.stopped:
            self.why, self.after = why, 0
            self.counts[f"ramp: {why}"] += 1

    def watch(self, loop: ControlLoop) -> None:
        tick = loop.tick

        def watched() -> Any:
            self.tick += 1
            now_ns = self.clock.now_ns()
            self.idle = True
            if self.plan is not None:
                begins_ns, apart_ns, rows = self.plan
                index = (now_ns - begins_ns) // apart_ns
                self.idle = not (0 <= index < len(rows) and np.isfinite(rows[index]).all())
            return tick()

        loop.tick = watched

    # ---- what the wire says ----

    def written(self, t_ns: int, q: np.ndarray) -> None:
        """A set-point for all joints, as it came out of the wire."""
        self.digest.update(struct.pack("<q", t_ns) + q.tobytes())
        if self.stopped:
            if not np.array_equal(q, self.q):
                self.fail(f"after a stop {q - self.q} rad were added to the set-point")
            return
        self.counts["commands"] += 1
        v = (q - self.q) / self.h
        # An arm that is found outside goes in, and not farther out.
        low, high = np.fmin(self.lower, self.q), np.fmax(self.upper, self.q)
        middle, half = (high + low) / 2, (high - low) / 2
        with np.errstate(invalid="ignore"):
            shares = np.array(
                [
                    (np.abs(q - middle) / half).max(),
                    (np.abs(v) / self.velocity).max(),
                    (np.maximum(np.abs(v - self.v) - 3 * self.rounding, 0) / self.step).max(),
                ]
            )
        for share, slack, name in zip(
            shares, (1e-9, 1e-9, 1e-6), ("position", "velocity", "acceleration"), strict=True
        ):
            if not share <= 1 + slack:
                self.fail(f"{share:.9f} of the limit of {name}")
        self.worst = np.maximum(self.worst, shares)
        if self.sent_ns and t_ns - self.sent_ns < (1 - JITTER) * ns(self.h) - WIRE_NS:
            self.fail(f"only {t_ns - self.sent_ns} ns after the set-point before")
        brakes = self.why or ("states are missing" if self.blind else "nobody asks for anything" if self.idle else "")
        if brakes:
            self.counts["braking"] += 1
            left = np.maximum(np.abs(self.v) - self.step, 0) * (1 + 1e-9) + 3 * self.rounding + 1e-9
            if (np.abs(v) > left).any():
                self.fail(f"{brakes}, and the set-points do not brake: {np.abs(self.v)} and then {np.abs(v)} rad/s")
        if self.why:
            self.after += 1
            if self.after > self.brakes:
                self.fail(f"{self.why}, and after {self.after} set-points the robot is not stopped")
        self.q, self.v, self.sent_ns = q.copy(), v, t_ns

    def rests(self, speed_rad_s: np.ndarray, least_rad_s: float) -> None:
        """Somebody looks at the arm."""
        if (np.abs(speed_rad_s) > least_rad_s).any():
            stopped_s = (self.clock.now_ns() - self.stopped_ns) / SECOND
            self.fail(f"{stopped_s:.2f} s after it was stopped the arm moves with {np.abs(speed_rad_s).max():g} rad/s")

    # ---- what the adapter says ----

    def _attach(self, adapter: Adapter) -> None:
        activate, read, stop = adapter.activate, adapter.read, adapter.stop

        def activated(mode: Any) -> RobotState:
            state = activate(mode)
            away = np.abs(state.q - self.truth()).max()
            if away > self.start_rad:
                self.fail(f"activated at set-points that are {away:.4f} rad from the arm")
            now_ns = self.clock.now_ns()
            self.q, self.v, self.plan = state.q.copy(), np.zeros_like(self.v), None
            self.sent_ns, self.state_ns, self.followed_ns = 0, state.t_ns, now_ns
            self.stopped, self.why, self.blind = False, "", False
            self.counts["starts"] += 1
            return state

        def told(timeout_s: float) -> RobotState:
            began_ns = self.clock.now_ns()
            try:
                state = read(timeout_s)
            except StaleState:
                age_ns = self.clock.now_ns() - self.state_ns
                self.counts["stale"] += 1
                self.blind = age_ns > PROMISED.stale_hold_periods * ns(self.h)
                if age_ns > ns(PROMISED.stale_ramp_s):
                    self.must_stop("no state has come for too long")
                raise
            self._accepted(state, began_ns)
            return state

        def ended(kind: StopKind) -> None:
            if not self.stopped:
                self.stopped, self.stopped_ns = True, self.clock.now_ns()
                self.counts["stops"] += 1
            stop(kind)

        adapter.activate, adapter.read, adapter.stop = activated, told, ended
        for name in ("configure", "activate", "read", "write", "stop", "deactivate", "recover"):
            setattr(adapter, name, self._only_robot_errors(name, getattr(adapter, name)))

    def _only_robot_errors(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            try:
                return call(*given)
            except RobotError as error:
                self.counts[f"{name}: {type(error.__cause__ or error).__name__}"] += 1
                raise
            except Exception as error:
                self.fail(f"{name}() raised {error!r}")
                raise

        return watched

    def _accepted(self, state: RobotState, began_ns: int) -> None:
        now_ns = self.clock.now_ns()
        self.counts["states"] += 1
        self.digest.update(struct.pack("<qq", now_ns, state.t_ns) + state.q.tobytes())
        if not self.true(state, began_ns):
            self.counts["untrue"] += 1
        self.state_ns, self.blind = state.t_ns, False
        if state.estop:
            self.must_stop("the emergency stop is pressed")
        if state.fault is not None:
            self.must_stop("the robot reports a fault")
        if np.abs(state.q - self.q).max() <= PROMISED.following_rad:
            self.followed_ns = now_ns
        elif now_ns - self.followed_ns > ns(PROMISED.following_s):
            self.must_stop("the arm does not follow")
