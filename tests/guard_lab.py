"""What the joint guard is measured with: a yardstick for positions that were sent, and references by brute force,
braking by summing tick by tick and the fastest step by counting ticks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from burnish.real_robot.safety.guard import Limits
from hostile import mixed

Array = np.ndarray


def arm(guard: Any = None, **change: Any) -> Any:
    """Limits like those of a seven-joint arm at 100 Hz."""
    n = 7
    values = {
        "lower": np.linspace(-3, -1, n),
        "upper": np.linspace(1, 3, n),
        "velocity": np.linspace(1, 3, n),
        "acceleration": np.linspace(5, 15, n),
        "period_s": 0.01,
    }
    return (guard.Limits if guard else Limits)(**{**values, **change})


def braking_travel(v: Array, limits: Any) -> Array:
    """D(v) as its sum, for v >= 0."""
    step, travel = limits.acceleration * limits.period_s, np.zeros_like(v)
    while (v > 0).any():
        v = np.maximum(v - step, 0)
        travel = travel + v
    return limits.period_s * travel


def fastest(guard: Any, limits: Any, distance: Array) -> Array:
    """The guard's vmax(d)."""
    step, h = limits.acceleration * limits.period_s, limits.period_s
    return guard.fastest(distance, 2 / (step * h), h, step / 2)


def fastest_by_bisection(distance: float, step: float, period_s: float) -> float:
    """The largest speed whose tick, with all of the braking after it, leads no farther than ``distance``."""
    low, high = 0.0, distance / period_s
    for _ in range(40):
        v = (low + high) / 2
        travel, slower = v, v
        while slower > step:
            slower -= step
            travel += slower
        low, high = (v, high) if period_s * travel <= distance else (low, v)
    return low


def slow_tick(limits: Any, q: Array, v: Array, asked: Array, request: Array, speed: float) -> Array:
    """One tick of a guard at (q, v), asked for ``asked`` before: the text of its module, joint by joint. A request with
    anything in it that is not finite is a wish to be at rest."""
    sent, h = np.empty_like(q), limits.period_s
    bad = not np.isfinite(request).all()
    for i in range(len(q)):
        lower, upper, most, step = limits.lower[i], limits.upper[i], limits.velocity[i], limits.acceleration[i] * h
        if bad:
            want = 0.0
        else:
            target = min(max(request[i], lower), upper)
            own = min(max((target - asked[i]) / h, -most), most)
            rest = (target - q[i]) / h - own
            want = own + float(np.sign(rest)) * min(abs(rest), fastest_by_bisection(h * abs(rest), step, h))
        share = max(speed * most, min(most, abs(v[i]) - step))
        low = max(v[i] - step, -share, -fastest_by_bisection(q[i] - min(lower, q[i]), step, h))
        high = min(v[i] + step, share, fastest_by_bisection(max(upper, q[i]) - q[i], step, h))
        sent[i] = q[i] + h * min(max(want, low), high)
    return sent


class Excess:
    """The worst that positions by themselves show, relative to each limit; ``start`` is at rest. Outside, a position
    exceeds by as much as it is farther outside than the one before."""

    def __init__(self, limits: Any, start: Array) -> None:
        self.limits, self.q, self.v = limits, start, np.zeros_like(start)
        self.position_m, self.velocity, self.acceleration, self.finite = 0.0, -1.0, -1.0, True

    def add(self, q: Array) -> None:
        limits, h = self.limits, self.limits.period_s
        v = (q - self.q) / h
        a = (v - self.v) / h
        self.finite &= bool(np.isfinite(q).all())
        low, high = np.minimum(limits.lower, self.q), np.maximum(limits.upper, self.q)
        self.position_m = max(self.position_m, float((q - high).max()), float((low - q).max()))
        self.velocity = max(self.velocity, float((np.abs(v) / limits.velocity).max()) - 1)
        self.acceleration = max(self.acceleration, float((np.abs(a) / limits.acceleration).max()) - 1)
        self.q, self.v = q, v

    def holds(self) -> bool:
        return self.finite and self.position_m == 0 and self.velocity <= 1e-9 and self.acceleration <= 1e-6


def somewhere(rng: np.random.Generator, limits: Any, shape: tuple[int, ...]) -> Array:
    """Of three joints one is inside, one at a limit, one outside, by anything between a nanoradian and the range."""
    width = limits.upper - limits.lower
    side = np.where(rng.random(shape) < 0.5, limits.lower, limits.upper)
    beyond = side + np.sign(side - (limits.lower + limits.upper) / 2) * width * 10 ** rng.uniform(-9, 0, shape)
    return np.choose(rng.integers(3, size=shape), [rng.uniform(limits.lower, limits.upper, shape), side, beyond])


def hostile_run(guard: Any, rng: np.random.Generator, limits: Any, rows: tuple[int, ...], ticks: int) -> Excess:
    """The guard under a mixed hostile stream, from rest somewhere, often at a limit, often outside."""
    one = guard.JointGuard(limits, rows)
    start = somewhere(rng, limits, one.shape)
    excess = Excess(limits, one.reset(start))
    assert (excess.q == start).all()
    for request in mixed(rng, limits, one.shape, ticks):
        answer = one(request)
        excess.add(answer.q)
        assert (answer.changed | ~answer.bad).all(), "a request that was no numbers passed as unchanged"
        assert (one.q == answer.q).all() and (one.v == excess.v).all()
    return excess


def admissible(rng: np.random.Generator, limits: Any, rows: int, ticks: int) -> Iterator[Array]:
    """Set-points that keep the limits and begin at rest, from brute force: random accelerations, often the largest,
    unless braking from there would pass a limit, where it brakes; so it grazes limits of all three kinds."""
    shape, h = (rows, len(limits.lower)), limits.period_s
    q, v = rng.uniform(limits.lower, limits.upper, shape), np.zeros(shape)
    a = np.zeros(shape)
    for tick in range(ticks):
        if tick == 0:
            yield q
        if tick % 10 == 0:
            a = (
                limits.acceleration
                * np.clip(rng.normal(size=shape), -1, 1)
                * rng.choice([0.0, 1.0], shape, p=[0.2, 0.8])
            )
        wish = np.clip(v + h * a, -limits.velocity, limits.velocity)
        low, high = q + h * wish - braking_travel(-wish, limits), q + h * wish + braking_travel(wish, limits)
        slower = np.sign(v) * np.maximum(np.abs(v) - limits.acceleration * h, 0)
        v = np.where((low < limits.lower) | (high > limits.upper), slower, wish)
        # The sum of a braking run may miss the limit by its rounding.
        following = np.clip(q + h * v, limits.lower, limits.upper)
        yield following
        v, q = (following - q) / h, following


def fewest_ticks(distance: float, velocity: float, acceleration: float, period_s: float) -> int:
    """From rest to rest: the least N for which sum_(k=1..N) min(k A h, (N + 1 - k) A h, V) h reaches the distance."""
    step, count = acceleration * period_s, 0
    while True:
        k = np.arange(1, count + 1)
        if period_s * np.minimum(np.minimum(k, count + 1 - k) * step, velocity).sum() >= distance * (1 - 1e-12):
            return count
        count += 1


def lively(rng: np.random.Generator, one: Any) -> Array:
    """A request at whatever scale the limits have: the far ends, or as fast as allowed and a little faster."""
    limits, v = one.limits, one.v
    if rng.random() < 0.4:
        return np.where(rng.random(one.shape) < 0.5, limits.lower, limits.upper)
    faster = v + rng.choice([-1, 0, 1], one.shape) * limits.acceleration * limits.period_s
    most = limits.velocity * (1 + 2e-9 * rng.random())
    return one.q + limits.period_s * np.minimum(np.maximum(faster, -most), most)


def excesses(guard: Any, rng: np.random.Generator, limits: Any, ticks: int) -> tuple[Array, Array]:
    """By how much each joint exceeded its velocity and its acceleration; of its position, by nothing."""
    one = guard.JointGuard(limits, (8,))
    one._finest[:] = np.inf  # of limits that are refused, every beginning would be
    q, v, h = one.reset(rng.uniform(limits.lower, limits.upper, one.shape)), np.zeros(one.shape), limits.period_s
    fast, strong = np.zeros(one.shape), np.zeros(one.shape)
    for _ in range(ticks // 4):
        request = lively(rng, one)
        for _ in range(4):
            sent = one(request).q
            assert ((sent >= limits.lower) & (sent <= limits.upper)).all()
            v_before, v, q = v, (sent - q) / h, sent
            fast = np.maximum(fast, np.abs(v) / limits.velocity)
            strong = np.maximum(strong, np.abs((v - v_before) / h) / limits.acceleration)
    return fast.max(axis=0) - 1, strong.max(axis=0) - 1


class SomeRobot:
    """As much of a RobotSpec as limits ask for: two joints, of which one rounds."""

    def column(self, name: str) -> Array:
        columns = {"lower": [-1, -2], "upper": [1, 2], "velocity": [2, 3], "acceleration": [10, 20]}
        return np.array({**columns, "quantum": [0, 0.001]}[name], np.float64)


def refused(guard: Any, call: Any, words: str) -> None:
    try:
        call()
    except guard.Refused as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused")
