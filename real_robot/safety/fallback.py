r"""Verified fallback: limits that have no closed form, kept by never losing a way to stop. Pure NumPy.

At every tick a stopping plan is in hand: set-points that lead from what was sent last to rest, known to satisfy every
constraint. A candidate is sent only if a stopping plan from *it* satisfies them too, and that plan is then the one in
hand; otherwise the next set-point of the old plan is sent, whose remainder is the plan in hand. By induction everything
that is ever sent satisfies the constraints, whatever they are: limits of jerk, a box for the tool, a distance between
bodies. It begins at rest, where the plan is to stay.

**The brake.** With a_k = (v_k - v_(k-1)) / h and j_k = (a_k - a_(k-1)) / h, a plan brings (v, a) to (0, 0) with
|a| <= A and |j| <= J. In units of J h, b = a / (J h) must go to 0 in steps of at most 1 and add up to
T = -v / (J h^2). Of N ticks that end in 0 the greatest sum has

    b_k = min(b_0 + k, A / (J h), N - k)            up by J, hold A, down by J

(everything mirrored where T is less than what releasing at once adds up to). N is the first for which it reaches T, and
the plan is the mixture of it and its like for N - 1 (for which it does not, or of releasing at once) that adds up to T.
Both keep the limits, which are convex, so the mixture does; it is exact in discrete time, needs the fewest ticks, and
differs from hardest braking in its last ticks only. With J = 2 A / h, which is no limit, it is D(v) of `guard`.

**The candidate.** Joint by joint: a request that keeps the limits is taken as it is, bit for bit. Otherwise it is the
acceleration from which braking to the request's own velocity ends on the request. If constraints of the whole arm
forbid it, the largest of a few shares of the way from the old plan's next set-point to it is taken.

**Speed.** With a share s of the speed limits, a candidate is one whose plan is nowhere faster than s V, or than the
plan in hand where that still has to brake: so nothing is faster than s V or the hardest braking allows.

**From outside** the limits of position, where a robot may be found, a path goes in: each of its set-points is inside,
or not farther outside than the one before it. The rest of such a path after its first set-point is one too, so the
induction holds, and staying is one to begin with.

It belongs behind `JointGuard`, whose output is its request, and keeps the same limits by itself; `protection` says how
both are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import Refused
from .guard import Limits

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Relative excess that a request may have and still is taken as it is. Rounded positions show velocities, accelerations
# and jerks with errors that grow like 1/h, 1/h^2 and 1/h^3.
SLACK_V, SLACK_A, SLACK_J = 1e-10, 1e-8, 1e-7
LAST_BITS = 16  # of a position, that the end of a braking path may be off
GRID = 7  # accelerations tried at once for every joint


class Constraint(Protocol):
    """Of the whole arm. A path is (m, n) set-points, one period apart; the first was sent already, the last is rest."""

    def __call__(self, path: Array) -> bool: ...


@dataclass(frozen=True, slots=True)
class FallbackResult:
    """The result of a request."""

    q: Array  # (n,), to be sent
    share: float  # of the way to the candidate that the constraints allowed; 0: the stopping plan was followed
    changed: bool  # not what was asked


def brake(v: Array, a: Array, limits: Limits, jerk: Array) -> tuple[Array, Bools]:
    """Accelerations (m, ..., n) that bring (..., n) velocities and accelerations to rest in the fewest ticks, and
    whether each such column does; it always does where |a| <= A."""
    unit = jerk * limits.period_s
    most = limits.acceleration / unit
    total, start = -v / (unit * limits.period_s), a / unit
    size = np.abs(start)
    whole = np.floor(size)
    release = np.copysign(whole * size - whole * (whole + 1) / 2, start)
    side = np.where(total < release, -1.0, 1.0)
    total, start, release = side * total, side * start, side * release

    # Were N real, the peak would be the root; from there, the first whole N that reaches the total.
    half = start * (start + 1) / 2
    peak = np.sqrt(np.maximum(total + half, 0))
    real = np.where(peak <= most, 2 * peak, 2 * most + (total + half - most**2) / most) - start
    least = np.ceil(size)
    first = np.maximum(np.ceil(real) - 2, least)
    tries = first + np.arange(5.0).reshape(5, *(1,) * first.ndim)
    short = _sum(tries, start, most) < total - 1e-12 * (1 + np.abs(total))
    count = first + short.sum(axis=0)

    k = np.arange(1.0, max(float(count.max()), 1.0) + 1).reshape(-1, *(1,) * count.ndim)
    up = np.minimum(start + k, most)
    high = np.minimum(up, np.maximum(count - k, 0))
    low = np.minimum(up, np.maximum(count - 1 - k, 0))
    released = np.copysign(np.maximum(size - k, 0), start)
    low = np.where(count - 1 >= least, low, released)
    below, above = low.sum(axis=0), high.sum(axis=0)
    room = above - below
    share = np.divide(total - below, room, out=np.zeros_like(room), where=room > 1e-12)
    kept = (share > -1e-6) & (share < 1 + 1e-6) & (np.abs(below + share * room - total) <= 1e-9 * (1 + np.abs(total)))
    return side * unit * (low + np.minimum(np.maximum(share, 0), 1) * (high - low)), kept


def _sum(count: Array, start: Array, most: Array) -> Array:
    """Of min(start + k, most, count - k) over k = 1 ... count, for count >= |start|."""
    rising = np.floor((count - start) / 2)
    falling = count - rising - 1
    whole = rising * start + rising * (rising + 1) / 2 + falling * (falling + 1) / 2
    for top in (start + rising - most, falling - most):
        terms = np.maximum(np.floor(top) + 1, 0)
        whole = whole - (terms * top - terms * (terms - 1) / 2)
    return whole


class Fallback:
    """For one robot. ``reset`` before the first call, at rest. Without ``jerk`` only the constraints are added."""

    def __init__(
        self,
        limits: Limits,
        jerk: Array | None = None,
        constraints: Sequence[Constraint] = (),
        shares: Sequence[float] = (0.5, 0.25, 0.125),
    ) -> None:
        h = limits.period_s
        free = 2 * limits.acceleration / h  # as much as two accelerations can differ within a tick
        jerk = free if jerk is None else jerk
        if jerk.shape != limits.lower.shape or not (jerk > 0).all():
            raise Refused(f"a limit of jerk is a positive number for each of {len(limits.lower)} joints, got {jerk}")
        self.limits, self.jerk = limits, np.minimum(jerk, free)
        self.constraints, self._shares = tuple(constraints), tuple(shares)
        self._begin(np.zeros(len(limits.lower)))

    @property
    def resting(self) -> bool:
        return len(self._plan) == 1 and not self._v.any()

    @property
    def longest(self) -> int:
        """So many ticks take the longest stopping plans: at first they gain speed, up to V, while they release."""
        v, jerk = self.limits.velocity, self.jerk
        a = np.minimum(self.limits.acceleration, np.sqrt(2 * v * jerk))
        return 2 + len(brake(v - a**2 / (2 * jerk), a, self.limits, jerk)[0])

    @property
    def q(self) -> Array:
        """The set-point sent last."""
        return self._q.copy()

    @property
    def plan(self) -> Array:
        """The stopping plan in hand, (m, n)."""
        return self._plan.copy()

    def reset(self, q: Any) -> Array:
        """At rest at ``q``, inside the limits or not. Constraints must hold there, or nothing ever could be sent."""
        q = np.asarray(q, np.float64)
        if q.shape != self.limits.lower.shape or not np.isfinite(q).all():
            raise Refused(f"a fallback begins at a position that is known, not at {q.tolist()}")
        if not all(constraint(np.stack([q, q])) for constraint in self.constraints):
            raise Refused("the robot stands where a constraint does not hold; move it by hand to a free place first")
        self._begin(q)
        return self.q

    def __call__(self, request: Array, speed: float = 1.0) -> FallbackResult:
        """``request`` (n,) is what a guard has passed; what is not finite means to stop. ``speed`` in [0, 1] is the
        share of the velocity limits that may be used now."""
        asked = np.asarray(request, np.float64)
        self._most = self.limits.velocity
        if speed < 1:
            planned = np.abs(np.diff(self._plan, axis=0, prepend=self._q[None])).max(axis=0) / self.limits.period_s
            self._most = np.minimum(np.maximum(planned, speed * self._most), self._most)
        if asked.shape != self._q.shape or not np.isfinite(asked).all():
            self._asked = self._plan[0]
            return self._send(self._plan, 0.0, asked)
        target = np.minimum(np.maximum(asked, self.limits.lower), self.limits.upper)
        path = self._candidate(target)
        self._asked = target
        if self._allowed(path):
            return self._send(path, 1.0, asked)
        base, wanted = self._plan[0], path[0]
        for share in self._shares:
            path, kept = self._stopping(base + share * (wanted - base))
            if kept.all() and self._allowed(path):
                return self._send(path, share, asked)
        return self._send(self._plan, 0.0, asked)

    def _begin(self, q: Array) -> None:
        farthest = np.abs([self.limits.lower, self.limits.upper, q]).max(axis=0)
        self._last_bits = LAST_BITS * np.spacing(farthest)
        self._q, self._v, self._a = q.copy(), np.zeros_like(q), np.zeros_like(q)
        self._asked = self._q
        self._plan = self._q[None]
        self._most = self.limits.velocity

    def state(self) -> tuple[Array, ...]:
        """All that decides what is sent next; none of these arrays is ever written into."""
        return self._q, self._v, self._a, self._asked, self._plan

    def restore(self, state: tuple[Array, ...]) -> None:
        """Put back what ``state`` gave."""
        self._q, self._v, self._a, self._asked, self._plan = state

    def follow(self, q: Array) -> None:
        """The set-point that was sent differs from the last request by rounding."""
        h = self.limits.period_s
        before = self._v - h * self._a
        start = self._q - h * self._v
        self._q, self._v = q.copy(), (q - start) / h
        self._a = (self._v - before) / h

    def _send(self, path: Array, share: float, asked: Array) -> FallbackResult:
        """The first set-point of a path whose remainder becomes the plan; at its end it stays."""
        q, h = path[0], self.limits.period_s
        v = (q - self._q) / h
        self._q, self._v, self._a = q, v, (v - self._v) / h
        self._plan = path[1:] if len(path) > 1 else path
        return FallbackResult(q.copy(), share, not np.array_equal(q, asked))

    def _allowed(self, path: Array) -> bool:
        if not self.constraints:
            return True
        whole = np.concatenate([self._q[None], path])
        return all(constraint(whole) for constraint in self.constraints)

    def _stopping(self, q: Array) -> tuple[Array, Bools]:
        """The path (m, ..., n) that begins with the set-points ``q`` (..., n) and comes to rest, and for each joint
        whether all of it keeps the limits."""
        limits, h = self.limits, self.limits.period_s
        v = (q - self._q) / h
        a = (v - self._v) / h
        rates, kept = brake(v, a, limits, self.jerk)
        speeds = v + h * np.cumsum(rates, axis=0)
        # The last velocity is zero but for rounding, and so is what follows it in shorter columns.
        speeds = np.where(np.abs(speeds) <= 1e-12 * limits.velocity, 0.0, speeds)
        path = np.concatenate([q[None], q + h * np.cumsum(speeds, axis=0)])
        # A joint that brakes as late as it can ends on the limit, give or take the rounding of a sum.
        low, high = self._room(path)
        inside = np.minimum(np.maximum(path, low), high)
        kept = kept & (np.abs(path - inside) <= self._last_bits).all(axis=0)
        path = inside
        kept &= (np.abs(speeds) <= self._most * (1 + SLACK_V)).all(axis=0)
        return path, kept & self._reached(v, a)

    def _room(self, path: Array) -> tuple[Array, Array]:
        """The limits of position for each set-point of a path: those of the robot, or how far outside it was before."""
        limits, q = self.limits, self._q
        if ((limits.lower <= q) & (q <= limits.upper)).all():
            return limits.lower, limits.upper
        before = np.concatenate([np.broadcast_to(q, path[:1].shape), path[:-1]])
        low = np.minimum(limits.lower, np.maximum.accumulate(before))
        return low, np.maximum(limits.upper, np.minimum.accumulate(before))

    def _reached(self, v: Array, a: Array) -> Bools:
        """Whether the limits allow this velocity and this acceleration in the next tick."""
        fast = np.abs(v) <= self._most * (1 + SLACK_V)
        strong = np.abs(a) <= self.limits.acceleration * (1 + SLACK_A)
        return fast & strong & (np.abs(a - self._a) <= self.jerk * self.limits.period_s * (1 + SLACK_J))

    def _candidate(self, target: Array) -> Array:
        """A stopping path whose first set-point is each joint's best; joints without a better one keep their plan."""
        own = np.minimum(np.maximum((target - self._asked) / self.limits.period_s, -self._most), self._most)
        asis = self._met(target, own)
        if asis.all():
            path, kept = self._stopping(target)
            if kept.all():
                return path
        else:
            path, kept = self._stopping(np.where(asis, target, self._plan[0]))
        other, able = self._stopping(self._aimed(target, own))
        # A joint takes the request, or else what aims at it, or else its plan.
        return _columns([(path, kept & asis), (other, able), (self._plan, np.ones_like(able))])

    def _met(self, target: Array, own: Array) -> Bools:
        """Whether a joint can be on its request in the next tick, and stay there: one that is on it stays, one that is
        not yet must be able to take over the request's velocity within two ticks more."""
        h, unit = self.limits.period_s, self.jerk * self.limits.period_s
        v = (target - self._q) / h
        a, after = (v - self._v) / h, (own - v) / h
        stays = (self._q == self._asked) | ((np.abs(after) <= unit) & (np.abs(after - a) <= unit))
        return stays & self._reached(v, a)

    def _aimed(self, target: Array, own: Array) -> Array:
        """Next set-points from which braking to the velocity ``own`` ends on the target, as far as limits allow."""
        limits, h, unit = self.limits, self.limits.period_s, self.jerk * self.limits.period_s
        planned = ((self._plan[0] - self._q) / h - self._v) / h
        low = np.maximum(np.maximum(self._a - unit, -limits.acceleration), (-self._most - self._v) / h)
        high = np.minimum(np.minimum(self._a + unit, limits.acceleration), (self._most - self._v) / h)
        low, high = np.minimum(low, planned), np.maximum(high, planned)
        a = low + np.linspace(0, 1, GRID)[:, None] * (high - low)
        v = self._v + h * a
        q = self._q + h * v
        _, kept = self._stopping(q)
        # In the frame that moves with the request, the way that braking still needs.
        speeds = v - own + h * np.cumsum(brake(v - own, a, limits, self.jerk)[0], axis=0)
        miss = q + h * speeds.sum(axis=0) - target
        # It grows with the acceleration; what the limits forbid is as if it missed by ever so much.
        best = _crossing(a, miss)
        allowed = np.where(kept, a, np.nan)
        bottom, top = (
            np.nan_to_num(np.fmin.reduce(allowed), nan=np.inf),
            np.nan_to_num(np.fmax.reduce(allowed), nan=-np.inf),
        )
        best = np.where(bottom <= top, np.minimum(np.maximum(best, bottom), top), planned)
        return self._q + h * (self._v + h * best)


def _crossing(x: Array, y: Array) -> Array:
    """Where columns of y (m, n), that grow with x, are zero, between straight lines; the nearer end where nowhere."""
    above = np.minimum(np.maximum((y < 0).sum(axis=0), 1), len(x) - 1)
    column = np.arange(x.shape[1])
    x0, x1, y0, y1 = x[above - 1, column], x[above, column], y[above - 1, column], y[above, column]
    share = np.divide(-y0, y1 - y0, out=np.zeros_like(y0), where=y1 > y0)
    return x0 + np.minimum(np.maximum(share, 0), 1) * (x1 - x0)


def _columns(choices: list[tuple[Array, Bools]]) -> Array:
    """Each joint's column from the first path that has it; shorter paths stay at their end."""
    longest = max(len(path) for path, _ in choices)
    result = np.empty((longest, choices[0][0].shape[1]))
    for path, has in reversed(choices):
        result[: len(path), has] = path[:, has]
        result[len(path) :, has] = path[-1, has]
    return result
