r"""The joint guard: whatever is asked, what is sent keeps position, velocity and acceleration limits. Pure NumPy.

Let q be the set-point sent last, v = (q - q_before) / h its velocity, h the period of commands. Limits: l <= q <= u,
|v| <= V, |v_k - v_(k-1)| <= A h. A robot may be found outside [l, u], where a hand or gravity has left it; so what is
kept of positions is, in each tick, l' = min(l, q) <= q' <= max(u, q) = u': what is inside stays inside, and what is
outside never goes farther out. Braking with all of A after a tick at speed v >= 0 leads on by

    D(v) = h * sum_(i>=1) max(v - i A h, 0),       F(v) = h v + D(v)

in all. F is continuous, strictly increasing and piecewise linear: with n = floor(v / (A h)) it is
h ((n + 1) v - A h n (n + 1) / 2). So the fastest tick after which braking stays within a free distance d >= 0 is

    vmax(d) = d / (h (n + 1)) + A h n / 2,         n = floor(sqrt(1/4 + 2 d / (A h^2)) - 1/2),

because F(vmax(d)) = d. The guard sends q + h v' with v' out of

    [ max(v - A h, -V, -vmax(q - l')),  min(v + A h, V, vmax(u' - q)) ].

**Theorem.** Let q + D(v) <= u' where v >= 0, q - D(-v) >= l' where v < 0, and |v| <= V. Then the interval is not
empty, and the same holds after any choice out of it, with the l' and u' of the new q. So the limits hold for ever,
whatever is asked.

*Proof*, for v >= 0 (the other case is its mirror). If v >= A h, take v' = v - A h: F(v') = h v' + D(v') = D(v), which
is at most u' - q, hence v' <= vmax(u' - q). If v < A h, take v' = 0: F(0) = 0. In both cases v' lies between
-vmax(q - l') <= 0 and v <= V. So the interval holds v'. Now let any v' >= 0 be chosen. Then q' + D(v') = q + F(v'),
which is at most u' because v' <= vmax(u' - q). If q <= u, this u' is u, and u <= max(u, q'). If q > u, it is q, so
v' <= vmax(0) = 0: the robot stays, and max(u, q') = q. Any v' < 0 is the mirror: q' - D(-v') = q - F(-v') >= l', which
is l where q >= l, and where q < l no such choice is in the interval. It begins at rest, wherever the robot is found:
D(0) = 0, and l' <= q <= u'. QED

**From outside** the way in is that of any request, because what is wanted lies in [l, u]: with V and A from the first
tick on. As long as nothing is asked for, the robot stays where it was found.

**The wanted velocity.** Let u_k be the request, clipped to [l, u], and w its own velocity, clipped to V. The guard
wants w + sign(r) min(|r|, vmax(h |r|)) with r = (u_k - q) / h - w: it follows a moving request without lag, and meets
one that jumps, or moves on already, as fast as the limits allow, without overshoot. A request that keeps the limits is
sent as it is, bit for bit. A request that is not n finite numbers is a wish to be at rest, with all of A.

Everything works on rows: ``(..., n)``, each row as if it were alone, bit for bit.

**Rounding.** Positions are clipped in the end, so they exceed by nothing. Velocities and accelerations are
differences of positions, each rounded by at most s / 2, with s the spacing of float64 at the largest position. So a
velocity exceeds by at most s / 2h, and an acceleration by at most 3 s / 2h^2: a third of it is the rounding of its own
tick, the rest that of the tick before, which led s / 2 too far and was s / 2h too fast, so that braking begins up to
s / h too fast, because F grows by at least h. `Limits` refuses numbers for which that is more than 1e-9 of V or 1e-6
of A; tests/test_guard.py measures that all others keep this promise, and that those break it.

A device that rounds set-points gets them from ``rounded``, and the guard a velocity limit smaller by a quantum per
period, so that what is on the wire keeps V too; there its acceleration may exceed A by three quanta per period squared.

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

from ..adapter import RobotSpec
from ..errors import Refused

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Of a limit, which a request may exceed and still passes as it is: a request that keeps its limits does so to rounding.
# Less than the promised 1e-9, because the excess is itself rounded.
SLACK = 9e-10
ACCELERATION = 1e-6  # of A, by which an acceleration may exceed
HUGE = 1e100  # numbers beyond, and below its inverse, are no limits, and their products leave float64
NUMBERS = (float, int, np.floating, np.integer)


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
        if not ((np.abs(fields) < HUGE).all() and 1 / HUGE < self.period_s < HUGE):
            raise Refused("limits and the period must be finite numbers below 1e100, and the period positive")
        if not ((self.lower < self.upper) & (self.velocity > 1 / HUGE) & (self.acceleration > 1 / HUGE)).all():
            raise Refused("limits need lower < upper, and a positive velocity and acceleration")
        spacing = np.spacing(np.abs([self.lower, self.upper]).max(axis=0))
        coarse = spacing > finest(self)
        if coarse.any():
            i = coarse.argmax()
            tick, change = self.velocity * self.period_s, self.acceleration * self.period_s * self.period_s
            raise Refused(
                f"limits of joint {i}: float64 rounds its positions to {spacing[i]:.1g} rad, too coarsely for steps of "
                f"{tick[i]:.1g} rad per period that change by {change[i]:.1g}; command more slowly, allow more, or "
                "give a smaller range"
            )

    @classmethod
    def of(cls, spec: RobotSpec, rate_hz: float, share: float = 1.0) -> Limits:
        """Those of a robot; ``share`` of its velocities and accelerations. A device that rounds keeps them too."""
        if not (0 < rate_hz < HUGE and 0 < share <= 1):
            raise Refused(f"limits need a positive rate and a share in (0, 1], got {rate_hz:g} Hz and {share:g}")
        lower, upper, quantum = spec.column("lower"), spec.column("upper"), spec.column("quantum")
        period_s = 1 / rate_hz
        velocity = share * spec.column("velocity") - quantum / period_s
        if not (velocity > 0).all():
            raise Refused(
                f"a velocity limit is smaller than one step of the device per period at {rate_hz:g} Hz; command more "
                "slowly, or allow more"
            )
        if (upper - lower < 2 * quantum).any():
            raise Refused("the limits of a joint are nearer than two steps of the device, so it may have none to take")
        return cls(lower, upper, velocity, share * spec.column("acceleration"), period_s)


class Intervention(StrEnum):
    """The reasons for which the guard changes a request."""

    BAD = "bad"  # not n finite numbers
    POSITION = "position"
    VELOCITY = "velocity"
    ACCELERATION = "acceleration"
    BRAKING = "braking"  # slowed down ahead of a limit or of the target


@dataclass(frozen=True, slots=True)
class Guarded:
    """The result of a request."""

    q: Array  # (..., n), to be sent
    changed: Bools  # (...), rows that were not sent as they were asked
    bad: Bools  # (...), of these, rows that were no numbers


class JointGuard:
    """Remembers what was sent. ``reset`` before the first call, at the set-point that holds the robot where it is, also
    where that is outside the limits. With ``inward`` the arm then goes in whatever is asked for; without, it may be
    asked to stay, or to go a part of the way."""

    def __init__(self, limits: Limits, rows: Sequence[int] = (), inward: bool = True) -> None:
        self.limits, self._inward = limits, inward
        self.shape = (*rows, len(limits.lower))
        step = limits.acceleration * limits.period_s  # A h, rad/s

        # All operands have the shape of their results: to broadcast takes NumPy longer than to compute so few numbers.
        def whole(x: Array | float, *stack: int) -> Array:
            return np.broadcast_to(x, (*stack, *self.shape)).copy()

        self._lower, self._upper = whole(limits.lower), whole(limits.upper)
        self._most, self._least = whole(limits.velocity), whole(-limits.velocity)
        self._step, self._h = whole(step), whole(limits.period_s)
        self._slack = whole(SLACK * np.minimum(step, limits.velocity))
        self._finest = whole(finest(limits))
        # Distances to the upper limit, the lower one, and the target; for these, what `fastest` needs.
        self._free = np.zeros((3, *self.shape))
        self._braking = whole(2 / (step * limits.period_s), 3), whole(limits.period_s, 3), whole(step / 2, 3)
        self._q = np.zeros(self.shape)
        self._v = np.zeros(self.shape)
        self._asked = np.zeros(self.shape)  # clipped; of a row that was bad, what was sent

    @property
    def q(self) -> Array:
        """The set-point sent last."""
        return self._q.copy()

    @property
    def v(self) -> Array:
        return self._v.copy()

    def reset(self, q: Any, mask: Bools | None = None) -> Array:
        """At rest at ``q`` (..., n), inside the limits or not; only the rows of ``mask``. Returns all set-points."""
        q = np.broadcast_to(np.asarray(q, np.float64), self.shape)
        rows = slice(None) if mask is None else mask
        if not np.isfinite(q[rows]).all():
            raise Refused(f"a guard begins at a position that is known, not at {q.tolist()}")
        if (np.spacing(np.abs(q[rows])) > self._finest[rows]).any():
            raise Refused(f"a guard begins where float64 is fine enough for its limits, not at {q.tolist()}")
        for mine, new in ((self._q, q), (self._asked, q), (self._v, np.zeros(self.shape))):
            mine[rows] = new[rows]
        return self.q

    def __call__(self, request: Any, speed: float = 1.0) -> Guarded:
        """``speed`` in [0, 1] is the share of the velocity limits that may be used now; a robot that is faster than
        that slows down with all of A, so the theorem holds for any sequence of shares. A share outside of [0, 1]
        counts as 0, which brakes, because nobody knows what it was to allow."""
        asked, bad = self._understood(request)
        h, q, v, step, free = self._h, self._q, self._v, self._step, self._free
        lower, upper = np.minimum(self._lower, q), np.maximum(self._upper, q)  # not farther outside than now
        low, high = (self._lower, self._upper) if self._inward else (lower, upper)
        target = np.minimum(np.maximum(asked, low), high)
        own = np.minimum(np.maximum((target - self._asked) / h, self._least), self._most)
        wish = (target - q) / h
        rest = wish - own
        size = np.abs(rest)
        np.subtract(upper, q, out=free[0])
        np.subtract(q, lower, out=free[1])
        np.multiply(h, size, out=free[2])
        fast = fastest(free, *self._braking)
        up, down, reach = fast[0], fast[1], fast[2]
        want = own + np.copysign(reach, rest)
        # vmax(h |r|) is |r| up to A h; said so, a request that keeps the limits is wanted as it is, to the bit.
        np.copyto(want, wish, where=size <= step)
        some_bad = np.count_nonzero(bad)
        if some_bad:
            want[bad] = 0.0

        most, least = self._most, self._least
        share = float(speed) if isinstance(speed, NUMBERS) and 0 <= speed <= 1 else 0.0
        if share < 1:
            most = np.maximum(np.abs(v) - step, share * most)
            least = -most
        low = np.maximum(np.maximum(v - step, least), -down)
        high = np.minimum(np.minimum(v + step, most), up)
        # Where rounding makes the interval empty the distance decides, so the limits of position are kept.
        chosen = np.maximum(np.minimum(want, high), np.minimum(low, up))
        sent = np.minimum(np.maximum(q + h * chosen, lower), upper)
        asis = (want == wish) & (np.abs(chosen - wish) <= self._slack)
        np.copyto(sent, target, where=asis)

        changed = bad | np.logical_or.reduce(sent != asked, axis=-1)
        self._v = (sent - q) / h
        self._asked = np.where(bad[..., None], sent, target) if some_bad else target
        self._q = sent
        return Guarded(sent.copy(), changed, bad)

    def state(self) -> dict[str, Array]:
        """All that decides what is sent next."""
        return {"q": self._q.copy(), "v": self._v.copy(), "asked": self._asked.copy()}

    def restore(self, state: dict[str, Array], mask: Bools | None = None) -> None:
        """Put back what ``state`` gave, in the rows of ``mask``; other states hold no promise."""
        rows = slice(None) if mask is None else mask
        for mine, x in ((self._q, state["q"]), (self._v, state["v"]), (self._asked, state["asked"])):
            mine[rows] = x[rows]

    def why(self, request: Any, q: Array, v: Array) -> dict[Intervention, Bools]:
        """For the books: which limits a request broke, row by row, where the guard was at ``q`` and ``v``."""
        asked, bad = self._understood(request)
        limits = self.limits
        target = np.minimum(np.maximum(asked, limits.lower), limits.upper)
        speed = (target - q) / limits.period_s
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
        rows, asked = self.shape[:-1], numbers(request, self.shape)
        if asked is None:
            return self._q, np.ones(rows, bool)
        finite = np.isfinite(asked)
        if np.count_nonzero(finite) == finite.size:
            return asked, np.zeros(rows, bool)
        bad = ~np.logical_and.reduce(finite, axis=-1)
        asked[bad] = self._q[bad]
        return asked, bad


def numbers(given: Any, shape: tuple[int, ...] | None = None) -> Array | None:
    """The one way in for requests: real numbers (of this shape) as float64, which need not be finite, or None
    where it is anything else. It raises nothing, whatever ``given`` does when it is read, and reads it once. A copy,
    because who asks may write into it at any time."""
    try:
        found = np.asarray(given)
    except Exception:  # an object that fails at being an array, in whatever way
        return None
    if shape not in (None, found.shape) or found.dtype.kind not in "fiu":
        return None
    if found.dtype == np.float64:
        return found.copy()
    with np.errstate(all="ignore"):  # what overflows, or is a signalling NaN, is not finite afterwards
        return found.astype(np.float64)


def finest(limits: Limits) -> Array:
    """So far apart may float64 be at a position, that the promise about rounding holds there."""
    tick, change = limits.velocity * limits.period_s, limits.acceleration * limits.period_s * limits.period_s
    return np.minimum(2 * SLACK * tick, 2 / 3 * ACCELERATION * change)


def fastest(distance: Array, twice: Array, h: Array, half: Array) -> Array:
    """vmax(d) of the text above, for d >= 0, from 2 / (A h^2), h and A h / 2."""
    n = np.floor(np.sqrt(0.25 + twice * distance) - 0.5)
    return distance / (h * (n + 1)) + half * n


def rounded(q: Array, limits: Limits, quantum: Array, origin: Array) -> Array:
    """The set-points on a device's grid ``origin + k * quantum``, towards the middle of the range, so never outside it.
    ``quantum`` must be positive; joints that a device does not round stay out of this."""
    steps = (q - origin) / quantum
    above = q > (limits.lower + limits.upper) / 2
    return origin + np.where(above, np.floor(steps), np.ceil(steps)) * quantum
