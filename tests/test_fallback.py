"""The verified fallback: the brake is exact and shortest, limits of jerk hold under hostile streams, constraints of the
whole arm hold whatever they are, and what is admissible passes bit-equal."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from guard_lab import arm

from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.fallback import Fallback, brake
from burnish.real_robot.safety.guard import JointGuard
from fallback_lab import JERK, JerkExcess, random_limits
from hostile import SOAK, mixed


@pytest.mark.parametrize("jerk", [20.0, 100.0, 1000.0, None])
def test_the_brake_is_exact_and_keeps_its_limits(jerk: float | None):
    """From any velocity and acceleration of either sign, to rest without a remainder."""
    rng, limits = np.random.default_rng(0), arm()
    h = limits.period_s
    most = 2 * limits.acceleration / h if jerk is None else np.full(7, jerk)
    v = rng.normal(size=(400, 7)) * rng.choice([0, 1e-3, 0.1, 1], (400, 1))
    a = limits.acceleration * np.clip(rng.normal(size=v.shape) * rng.choice([0, 0.1, 0.5, 2], (400, 1)), -1, 1)
    rates, kept = brake(v, a, limits, most)
    assert kept.all()
    np.testing.assert_allclose(v + h * rates.sum(axis=0), 0, atol=1e-12)
    assert not rates[-1].any()
    assert (np.abs(rates) <= limits.acceleration * (1 + 1e-12)).all()
    assert (np.abs(np.diff(np.concatenate([a[None], rates]), axis=0)) <= most * h * (1 + 1e-12)).all()
    # A column ends when it is at rest, and the least number of ticks is one in which rest can be reached at all: one
    # tick earlier, even the greatest sums on either side fall short.
    for i, j in rng.integers(0, (400, 7), (300, 2)):
        moving = np.flatnonzero(rates[:, i, j])
        count = int(moving[-1]) + 2 if len(moving) else 0  # with the tick in which the acceleration becomes 0
        if count > 1:
            assert not _reachable(v[i, j], a[i, j], count - 1, limits.acceleration[j], most[j], h)
            assert _reachable(v[i, j], a[i, j], count, limits.acceleration[j], most[j], h)


def _reachable(v: float, a: float, ticks: int, acceleration: float, jerk: float, h: float) -> bool:
    """Whether (v, a) can come to rest in so many ticks: the sum of accelerations must lie between its extremes."""
    highest, lowest = a, a
    high, low = [], []
    for left in range(ticks - 1, -1, -1):
        highest = min(highest + jerk * h, acceleration, left * jerk * h)
        lowest = max(lowest - jerk * h, -acceleration, -left * jerk * h)
        high.append(highest)
        low.append(lowest)
    tolerance = 1e-9 * jerk * h
    connected = high[0] >= a - jerk * h - tolerance and low[0] <= a + jerk * h + tolerance
    return connected and sum(low) - tolerance <= -v / h <= sum(high) + tolerance


def test_without_a_limit_of_jerk_the_brake_is_that_of_the_guard():
    """All of A until the last tick, which takes the rest."""
    limits = arm()
    step = limits.acceleration * limits.period_s
    rates, kept = brake(3.3 * step, np.zeros(7), limits, 2 * limits.acceleration / limits.period_s)
    assert kept.all()
    expected = np.array([-1, -1, -1, -0.3, 0])[:, None] * limits.acceleration
    np.testing.assert_allclose(rates[:5], expected, atol=1e-9)


def test_hostile_streams_behind_the_guard():
    rng, worst = np.random.default_rng(1), -1.0
    for _ in range(200 if SOAK else 6):
        limits, jerk = random_limits(rng)
        guard, one = JointGuard(limits), Fallback(limits, jerk)
        excess = JerkExcess(limits, jerk, one.reset(guard.reset((limits.lower + limits.upper) / 2)))
        for request in mixed(rng, limits, (7,), 120):
            excess.add(one(guard(request).q).q)
            assert (one.q == excess.q).all()
        assert excess.holds(), vars(excess)
        worst = max(worst, excess.jerk)
    assert worst > -1e-3, "the limit of jerk was never reached"


def test_hostile_streams_without_the_guard():
    """It keeps the same limits by itself, and a request that is not finite makes it follow its plan."""
    rng, limits = np.random.default_rng(2), arm()
    one = Fallback(limits, JERK)
    excess = JerkExcess(limits, JERK, one.reset(np.zeros(7)))
    for request in mixed(rng, limits, (7,), 300, shapeless=0.0):
        excess.add(one(request).q)
    assert excess.holds(), vars(excess)
    plan = one.plan
    for expected in [*plan, plan[-1], plan[-1]]:
        held = one(np.full(7, np.nan))
        assert (held.q == expected).all() and held.changed and held.share == 0


def test_the_guard_alone_breaks_the_limit_of_jerk():
    """The negative control."""
    rng, limits = np.random.default_rng(2), arm()
    guard = JointGuard(limits)
    excess = JerkExcess(limits, JERK, guard.reset(np.zeros(7)))
    for request in mixed(rng, limits, (7,), 500):
        excess.add(guard(request).q)
    assert excess.velocity <= 1e-9 and excess.acceleration <= 1e-6 and excess.jerk > 1


def smooth(ticks: int = 1000) -> np.ndarray:
    """From rest, well within limits of all orders."""
    t, w = 0.01 * np.arange(ticks)[:, None], np.linspace(0.5, 2, 7)
    begin = np.clip(t, 0, 1) ** 4 * (
        35 - 84 * np.clip(t, 0, 1) + 70 * np.clip(t, 0, 1) ** 2 - 20 * np.clip(t, 0, 1) ** 3
    )
    return begin * np.minimum(0.5, 3 / w**2) * (1 - np.cos(w * t))


def test_what_is_admissible_passes_bit_equal():
    one = Fallback(arm(), JERK)
    one.reset(smooth()[0])
    for request in smooth():
        held = one(request)
        assert held.q.tobytes() == request.tobytes() and not held.changed and held.share == 1


def test_a_step_takes_hardly_longer_than_the_limits_demand():
    """The shortest profile with seven phases takes d / V + V / A + A / J where V and A are reached; ticks cost a little
    more. Overshoot stays under one tick of jerk: J h^3."""
    limits = arm()
    one = Fallback(limits, JERK)
    one.reset(np.zeros(7))
    goal, took, over = np.full(7, 0.9), np.zeros(7), 0.0
    for tick in range(1, 200):
        q = one(goal).q
        over = max(over, float(((q - goal) / (JERK * limits.period_s**3)).max()))
        took = np.where(q == goal, took, tick + 1)
    ideal = 0.9 / limits.velocity + limits.velocity / limits.acceleration + limits.acceleration / JERK
    assert (took <= 1.1 * ideal / limits.period_s + 5).all(), (took, ideal / limits.period_s)
    assert over <= 1, over


def test_a_moving_request_is_caught_up_with_and_then_followed_without_lag():
    one, path = Fallback(arm(), JERK), smooth()
    one.reset(np.full(7, 0.3))
    away = [np.abs(one(request).q - request).max() for request in path]
    assert max(away[200:]) == 0


class Ball:
    """No joint vector may come near the middle: a constraint of all joints together, that no box could say."""

    def __init__(self, radius: float) -> None:
        self.radius, self.calls = radius, 0

    def __call__(self, path: np.ndarray) -> bool:
        self.calls += 1
        return bool((np.linalg.norm(path, axis=1) >= self.radius).all())


@pytest.mark.parametrize("jerk", [None, JERK])
def test_a_constraint_of_the_whole_arm_holds(jerk: Any):
    """Requests that aim through it, from all sides; the guard alone goes through (the control)."""
    rng, limits, ball = np.random.default_rng(3), arm(), Ball(0.6)
    one, alone = Fallback(limits, jerk, [ball]), JointGuard(limits)
    start = np.full(7, 0.5)
    excess = JerkExcess(limits, one.jerk, one.reset(start))
    alone.reset(start)
    nearest, through, shares = np.inf, np.inf, set()
    for tick in range(360):
        if tick % 60 == 0:
            goal = rng.normal(size=7) * 0.3 if tick % 120 == 0 else rng.uniform(limits.lower, limits.upper)
        held = one(goal)
        excess.add(held.q)
        shares.add(held.share)
        nearest = min(nearest, float(np.linalg.norm(held.q)))
        through = min(through, float(np.linalg.norm(alone(goal).q)))
    assert excess.holds() and nearest >= 0.6 > through
    assert nearest < 0.65 and {0.0, 1.0} < shares, "it was never near, or knew only all and nothing"
    assert (np.abs(one.plan[-1] - one.q) < 1).all()


def test_it_refuses_what_it_could_not_keep():
    limits = arm()
    with pytest.raises(Refused, match="does not hold"):
        Fallback(limits, JERK, [Ball(1.0)]).reset(np.zeros(7))
    with pytest.raises(Refused, match="position that is known"):
        Fallback(limits, JERK).reset(np.full(7, np.nan))
    for jerk in (np.zeros(7), np.ones(6), np.full(7, np.nan)):
        with pytest.raises(Refused, match="limit of jerk"):
            Fallback(limits, jerk)


def test_a_tick_costs_little():
    """Measured: 0.14 ms where the request is taken as it is, 0.74 ms where it is not (one core, shared). A tenth of a
    period at 100 Hz would be 1 ms; the bound leaves room for a slower machine."""
    rng, limits = np.random.default_rng(0), arm()
    one = Fallback(limits, JERK)
    one.reset(np.zeros(7))
    costs = []
    for requests in [list(smooth(500)), list(rng.uniform(limits.lower, limits.upper, (200, 7)))]:
        start = time.process_time()
        for request in requests:
            one(request)
        costs.append((time.process_time() - start) / len(requests))
    assert costs[0] < 1e-3 and costs[1] < 4e-3, costs


def test_what_runs_into_a_limit_is_left_in_time():
    """Every request keeps velocity, acceleration and jerk, and in the end no braking would be soft enough."""
    limits = arm()
    one, h = Fallback(limits, JERK), limits.period_s
    excess = JerkExcess(limits, JERK, one.reset(np.zeros(7)))
    q, v, a = np.zeros((3, 7))
    for _ in range(240):
        a = np.minimum(a + 0.9 * JERK * h, 0.9 * limits.acceleration)
        a = np.minimum(v + h * a, 0.95 * limits.velocity) / h - v / h
        v = v + h * a
        q = q + h * v
        excess.add(one(q).q)
    assert excess.holds() and (q > limits.upper).all(), vars(excess)
    np.testing.assert_allclose(excess.q, limits.upper, atol=1e-6)
