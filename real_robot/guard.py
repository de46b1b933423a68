r"""The joint guard: whatever is asked, what is sent keeps position, velocity and acceleration limits. Pure NumPy.

Let q be the set-point sent last, v = (q - q_before) / h its velocity, h the period of commands. Limits: l <= q <= u,
|v| <= V, |v_k - v_(k-1)| <= A h. Braking with all of A after a tick at speed v >= 0 leads on by

    D(v) = h * sum_(i>=1) max(v - i A h, 0),       F(v) = h v + D(v)

in all. F is continuous, strictly increasing and piecewise linear: with n = floor(v / (A h)) it is
h ((n + 1) v - A h n (n + 1) / 2). So the fastest tick after which braking stays within a free distance d >= 0 is

    vmax(d) = d / (h (n + 1)) + A h n / 2,         n = floor((sqrt(1 + 8 d / (A h^2)) - 1) / 2),

because F(vmax(d)) = d. The guard sends q + h v' with v' out of

    [ max(v - A h, -V, -vmax(q - l)),  min(v + A h, V, vmax(u - q)) ].

**Theorem.** Let l <= q <= u, and let q + D(v) <= u where v >= 0, q - D(-v) >= l where v < 0. Then the interval is not
empty, and the same holds after any choice out of it. So the limits hold for ever, whatever is asked.

*Proof*, for v >= 0 (the other case is its mirror). If v >= A h, take v' = v - A h: F(v') = h v' + D(v') = D(v), which
is at most u - q, hence v' <= vmax(u - q). If v < A h, take v' = 0: F(0) = 0. In both cases v' lies between
-vmax(q - l) <= 0 and v <= V. So the interval holds v'. Whatever v' >= 0 is chosen, q' + D(v') = q + F(v') <= u because
v' <= vmax(u - q); whatever v' < 0 is chosen, q' - D(-v') = q - F(-v') >= l. It begins at rest inside the limits, where
D(0) = 0. QED.

**What is wanted.** Let u_k be the request, clipped to [l, u], and w its own velocity, clipped to V. The guard wants
w + sign(r) min(|r|, vmax(h |r|)) with r = (u_k - q) / h - w: it follows a moving request without lag, and meets one
that jumps, or moves on already, as fast as the limits allow, without overshoot. A request that keeps the limits is
sent as it is, bit for bit. A request that is not n finite numbers is a wish to be at rest, with all of A.

Everything works on rows: ``(..., n)``, each row as if it were alone, bit for bit.

**Rounding.** Positions are clipped in the end, so they exceed by nothing. Velocities and accelerations are
differences of rounded positions: they exceed by less than 1e-9 (relative to V) and 1e-6 (to A), which
tests/test_guard.py measures. A device that rounds set-points gets them from ``rounded``, and the guard a velocity limit
smaller by a quantum per period, so that what is on the wire keeps V too; there its acceleration may exceed A by two
quanta per period squared.

**Not claimed.** This is no safety-rated function. Limits of the robot's controller and an emergency stop made of
hardware are still needed: a set-point within its limits is no promise about where the motor is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .adapter import RobotSpec
from .errors import Refused

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Of a limit, which a request may exceed and still passes as it is: a request that keeps its limits does so to rounding.
SLACK = 1e-9


@dataclass(frozen=True)
class Limits:
    """All (n,), in rad, rad/s and rad/s^2."""

    lower: Array
    upper: Array
    velocity: Array
    acceleration: Array
    period_s: float

    def __post_init__(self) -> None:
        fields = (self.lower, self.upper, self.velocity, self.acceleration)
        if any(x.ndim != 1 or x.shape != self.lower.shape for x in fields):
            raise Refused(f"limits are vectors of one length, got {[x.shape for x in fields]}")
        if not (np.isfinite(fields).all() and np.isfinite(self.period_s) and self.period_s > 0):
            raise Refused("limits and the period must be finite numbers, and the period positive")
        if not ((self.lower < self.upper) & (self.velocity > 0) & (self.acceleration > 0)).all():
            raise Refused("limits need lower < upper, and a positive velocity and acceleration")

    @classmethod
    def of(cls, spec: RobotSpec, rate_hz: float, share: float = 1.0) -> Limits:
        """Those of a robot; ``share`` of its velocities and accelerations. A device that rounds keeps them too."""
        period_s, quantum = 1 / rate_hz, spec.column("quantum")
        velocity = share * spec.column("velocity") - quantum / period_s
        if not (velocity > 0).all():
            raise Refused(
                f"a velocity limit is smaller than one step of the device per period at {rate_hz:g} Hz; command more "
                "slowly, or allow more"
            )
        acceleration = share * spec.column("acceleration")
        return cls(spec.column("lower"), spec.column("upper"), velocity, acceleration, period_s)


class Intervention(StrEnum):
    BAD = "bad"  # not n finite numbers
    POSITION = "position"
    VELOCITY = "velocity"
    ACCELERATION = "acceleration"
    BRAKING = "braking"  # slowed down ahead of a limit or of the target


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a request became."""

    q: Array  # (..., n), to be sent
    changed: Bools  # (...), rows that were not sent as they were asked
    bad: Bools  # (...), of these, rows that were no numbers


class JointGuard:
    """Remembers what was sent. ``reset`` before the first call, at the set-point that holds the robot where it is."""

    def __init__(self, limits: Limits, rows: Sequence[int] = ()) -> None:
        self.limits = limits
        self.shape = (*rows, len(limits.lower))
        self._h = limits.period_s
        self._step = limits.acceleration * limits.period_s  # A h, rad/s
        self._eighth = 8 / (self._step * limits.period_s)  # 8 / c
        self._half = self._step / 2
        self._slack = SLACK * np.minimum(self._step, limits.velocity)
        self._q = np.zeros(self.shape)
        self._v = np.zeros(self.shape)
        self._asked = np.zeros(self.shape)  # clipped; of a row that was bad, what was sent
        self._free = np.zeros((3, *self.shape))  # distances to the upper limit, the lower one, and the target

    @property
    def q(self) -> Array:
        """The set-point sent last."""
        return self._q.copy()

    @property
    def v(self) -> Array:
        return self._v.copy()

    def reset(self, q: Any, mask: Bools | None = None) -> Array:
        """At rest at ``q`` (..., n), clipped to the limits; only the rows of ``mask``. Returns all set-points."""
        q = np.broadcast_to(np.asarray(q, np.float64), self.shape)
        rows = np.ones(self.shape[:-1], bool) if mask is None else mask
        if not np.isfinite(q[rows]).all():
            raise Refused(f"a guard begins at a position that is known, not at {q.tolist()}")
        inside = np.minimum(np.maximum(q, self.limits.lower), self.limits.upper)
        for mine, new in ((self._q, inside), (self._asked, inside), (self._v, np.zeros(self.shape))):
            mine[rows] = new[rows]
        return self.q

    def __call__(self, request: Any, speed: float = 1.0) -> Guarded:
        """``speed`` in [0, 1] is the share of the velocity limits that may be used now; a robot that is faster than
        that slows down with all of A, so the theorem holds for any sequence of shares."""
        asked, bad = self._understood(request)
        limits, h, q, v = self.limits, self._h, self._q, self._v
        target = np.minimum(np.maximum(asked, limits.lower), limits.upper)
        own = np.minimum(np.maximum((target - self._asked) / h, -limits.velocity), limits.velocity)
        wish = (target - q) / h
        rest = wish - own
        free = self._free
        np.subtract(limits.upper, q, out=free[0])
        np.subtract(q, limits.lower, out=free[1])
        np.abs(h * rest, out=free[2])
        up, down, reach = self.fastest(free)
        # vmax(h |r|) is |r| up to A h; said so, a request that keeps the limits is wanted as it is, to the bit.
        want = np.where(np.abs(rest) <= self._step, wish, own + np.copysign(reach, rest))
        if bad.any():
            want[bad] = 0.0

        most = limits.velocity
        if speed < 1:
            most = np.minimum(np.maximum(np.abs(v) - self._step, speed * most), most)
        low = np.maximum(np.maximum(v - self._step, -most), -down)
        high = np.minimum(np.minimum(v + self._step, most), up)
        # Where rounding makes the interval empty the distance decides, so the limits of position are kept.
        chosen = np.maximum(np.minimum(want, high), np.minimum(low, up))
        sent = np.minimum(np.maximum(q + h * chosen, limits.lower), limits.upper)
        asis = (want == wish) & (np.abs(chosen - wish) <= self._slack)
        sent = np.where(asis, target, sent)

        changed = bad | ~(sent == asked).all(axis=-1)
        self._v = (sent - q) / h
        self._asked = np.where(bad[..., None], sent, target)
        self._q = sent
        return Guarded(sent.copy(), changed, bad)

    def state(self) -> dict[str, Array]:
        """All that decides what is sent next."""
        return {"q": self._q.copy(), "v": self._v.copy(), "asked": self._asked.copy()}

    def restore(self, state: dict[str, Array], mask: Bools | None = None) -> None:
        """Put back what ``state`` gave, in the rows of ``mask``; other states hold no promise."""
        rows = np.ones(self.shape[:-1], bool) if mask is None else mask
        for mine, x in ((self._q, state["q"]), (self._v, state["v"]), (self._asked, state["asked"])):
            mine[rows] = x[rows]

    def fastest(self, distance: Array) -> Array:
        """vmax(d), for (..., n) distances that are not negative."""
        count = np.floor((np.sqrt(1 + self._eighth * distance) - 1) * 0.5)
        return distance / (self._h * (count + 1)) + self._half * count

    def why(self, request: Any, q: Array, v: Array) -> dict[Intervention, Bools]:
        """For the books: which limits a request broke, row by row, where the guard was at ``q`` and ``v``."""
        asked, bad = self._understood(request)
        limits = self.limits
        target = np.minimum(np.maximum(asked, limits.lower), limits.upper)
        speed = (target - q) / self._h
        broken = {
            Intervention.POSITION: target != asked,
            Intervention.VELOCITY: np.abs(speed) > limits.velocity,
            Intervention.ACCELERATION: np.abs(speed - v) > self._step + self._slack,
        }
        found = {kind: x.any(axis=-1) & ~bad for kind, x in broken.items()}
        found[Intervention.BRAKING] = ~(bad | np.any(list(found.values()), axis=0))
        return {Intervention.BAD: bad, **found}

    def _understood(self, request: Any) -> tuple[Array, Bools]:
        """Numbers for every row, and which rows were not such; nothing that is asked raises."""
        rows = self.shape[:-1]
        try:
            given = np.asarray(request)
        except Exception:  # an object that fails at being an array, in whatever way
            given = np.empty(0, object)
        if given.shape != self.shape or given.dtype.kind not in "fiu":
            return self._q.copy(), np.ones(rows, bool)
        with np.errstate(all="ignore"):  # what overflows in the cast, or is a signalling NaN, is found by the next line
            asked = given.astype(np.float64)
        bad = np.asarray(~np.isfinite(asked).all(axis=-1))
        if bad.any():
            asked[bad] = self._q[bad]
        return asked, bad


def rounded(q: Array, limits: Limits, quantum: Array, origin: Array) -> Array:
    """The set-points on a device's grid ``origin + k * quantum``, towards the middle of the range, so never outside it.
    ``quantum`` must be positive; joints that a device does not round stay out of this."""
    steps = (q - origin) / quantum
    above = q > (limits.lower + limits.upper) / 2
    return origin + np.where(above, np.floor(steps), np.ceil(steps)) * quantum
