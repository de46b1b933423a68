"""The guard with the fallback before it: under hostile streams the joint limits hold as those of the guard alone, jerk
and constraints hold too, nothing is faster than was allowed, and a fallback that is broken changes none of this."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from guard_lab import Excess, arm

from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.guard import JointGuard, rounded
from burnish.real_robot.safety.protection import Protection
from fallback_lab import JERK, JerkExcess, random_limits
from hostile import SOAK, mixed


class Ball:
    """In the place of a `Collision`: no joint vector may come near the middle."""

    refused = "ball"

    def __init__(self, radius: float = 0.6) -> None:
        self.radius = radius

    def __call__(self, path: np.ndarray) -> bool:
        return bool((np.linalg.norm(path, axis=1) >= self.radius).all())


def test_alone_it_is_the_guard_bit_for_bit():
    rng, limits = np.random.default_rng(0), arm()
    one, guard = Protection(limits), JointGuard(limits)
    for x in (one, guard):
        x.reset(np.zeros(7))
    for request in mixed(rng, limits, (7,), 400):
        before, sent, other = (guard.q, guard.v), one(request, 0.7), guard(request, 0.7)
        assert sent.q.tobytes() == other.q.tobytes() and (sent.changed, sent.bad) == (other.changed, other.bad)
        why = guard.why(request, *before)
        broken = {kind.value for kind, holds in why.items() if holds}
        assert set(sent.kinds) == (broken if sent.changed and request is not None else set())


@pytest.mark.parametrize("jerk", [False, True])
def test_hostile_streams(jerk: bool):
    """Of all kinds, with shares of the speed that change, at limits drawn anew."""
    rng = np.random.default_rng(1)
    for _ in range(200 if SOAK else 5):
        limits, most = random_limits(rng)
        one = Protection(limits, most) if jerk else Protection(limits, None, Ball(0.0))
        excess = JerkExcess(limits, one._fallback.jerk, one.reset((limits.lower + limits.upper) / 2))
        share = 1.0
        for tick, request in enumerate(mixed(rng, limits, (7,), 150)):
            if tick % 20 == 0:
                share = float(rng.choice([0.0, 0.1, 1.0, rng.random()]))
            excess.add(one(request, share).q)
        assert excess.holds(), vars(excess)
        assert not one.lost and (one._fallback.q == excess.q).all()


def test_a_constraint_holds_and_what_is_free_passes():
    """Requests that aim through a ball, between hostile ones; the guard alone enters it (the control)."""
    rng, limits = np.random.default_rng(2), arm()
    one, guard = Protection(limits, None, Ball()), JointGuard(limits)
    excess = Excess(limits, one.reset(np.full(7, 0.5)))
    guard.reset(np.full(7, 0.5))
    nearest, through, kinds = np.inf, np.inf, set()
    for tick, request in enumerate(mixed(rng, limits, (7,), 400)):
        request = np.full(7, -0.5 if tick % 160 < 80 else 0.5) if tick % 80 < 50 else request
        sent = one(request)
        excess.add(sent.q)
        kinds |= set(sent.kinds)
        nearest = min(nearest, float(np.linalg.norm(sent.q)))
        through = min(through, float(np.linalg.norm(guard(request).q)))
    assert excess.holds() and not one.lost and "ball" in kinds
    assert nearest >= 0.6 > through

    free, guard = Protection(limits, None, Ball(0.0)), JointGuard(limits)
    for x in (free, guard):
        x.reset(np.zeros(7))
    for request in mixed(rng, limits, (7,), 300, shapeless=0.0):
        if np.isfinite(request).all():
            np.testing.assert_allclose(free(request).q, guard(request).q, rtol=0, atol=1e-9)


@pytest.mark.parametrize("jerk", [None, JERK])
def test_a_share_of_the_speed_is_kept(jerk: Any):
    """From rest with the share s nothing is faster than s V; where it falls while the robot moves, the robot is as slow
    after the longest stop, and never faster than it was."""
    rng, limits = np.random.default_rng(3), arm()
    one = Protection(limits, jerk, Ball(0.0))
    h, before = limits.period_s, one.reset(np.zeros(7))
    for share, ticks in [(0.3, 90), (1.0, 60), (0.2, 120)]:
        fastest = np.zeros(7)
        for tick in range(ticks):
            if tick % 25 == 0:
                goal = rng.choice([-1, 1], 7) * 0.9
            sent = one(goal, share).q
            if share != 0.2 or tick > one.longest:
                fastest = np.maximum(fastest, np.abs(sent - before) / h)
            before = sent
        assert (fastest <= share * limits.velocity * (1 + 1e-9)).all()
        assert (fastest >= 0.9 * share * limits.velocity).any(), "it never used what was allowed"


def test_a_wish_to_be_at_rest_keeps_the_jerk():
    """And takes no more ticks than it says at most; the guard alone would break the limit (the control)."""
    limits = arm()
    one, guard = Protection(limits, JERK), JointGuard(limits)
    excess = JerkExcess(limits, JERK, one.reset(np.zeros(7)))
    alone = JerkExcess(limits, JERK, guard.reset(np.zeros(7)))
    for request in [np.full(7, 0.9)] * 25 + [None] * one.longest:
        excess.add(one(request).q)
        alone.add(guard(request).q)
    assert excess.holds() and one.resting and not excess.v.any()
    assert alone.jerk > 1


def test_nothing_is_wound_up_behind_a_constraint():
    """After three seconds of asking for the other side of the ball, the way back is taken at once."""
    limits = arm()
    one = Protection(limits, JERK, Ball())
    one.reset(np.full(7, 0.5))
    held = back = np.zeros(7)
    for _ in range(300):
        held = one(np.full(7, -0.9)).q
    assert np.linalg.norm(held) < 0.8
    for _ in range(12):
        back = one(np.full(7, 0.9)).q
    assert (back > held).all()


def far(request: np.ndarray, speed: float) -> Any:
    return SimpleNamespace(q=np.full(7, 1e9), share=1.0, changed=True)


def nan(request: np.ndarray, speed: float) -> Any:
    return SimpleNamespace(q=np.full(7, np.nan), share=1.0, changed=True)


def raises(request: np.ndarray, speed: float) -> Any:
    raise FloatingPointError("no model")


@pytest.mark.parametrize("vandal", [far, nan, raises])
def test_a_fallback_that_is_broken_ends_in_rest(vandal: Any):
    """It takes the place of the real one in full motion. The limits hold on: the guard has the last word."""
    limits = arm()
    one = Protection(limits, JERK)
    excess = Excess(limits, one.reset(np.zeros(7)))
    for tick in range(80):
        if tick == 20:
            one._fallback = vandal
            assert excess.v.any()
        excess.add(one(np.full(7, 0.9)).q)
    assert one.lost and excess.holds() and not excess.v.any() and one.resting
    assert "failed" in one.lost if vandal is raises else "forbid" in one.lost


def test_what_the_guard_rounds_is_followed():
    """Where the last bits differ the fallback goes on from what was sent."""
    limits = arm()
    one = Protection(limits, JERK)
    excess = JerkExcess(limits, JERK, one.reset(np.zeros(7)))
    real = one._guard

    class Rounds:
        """A guard that sends the next number below."""

        def __call__(self, request: Any) -> Any:
            answer = real(request)
            real.restore({**real.state(), "q": np.nextafter(answer.q, -9)})
            return SimpleNamespace(q=real.q)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    rounding: Any = Rounds()
    one._guard = rounding
    for _ in range(60):
        excess.add(one(np.full(7, 0.5)).q)
        assert (one._fallback.q == excess.q).all()
    assert not one.lost and excess.holds() and (excess.q > 0.4).any()


def test_it_refuses_what_it_could_not_keep():
    with pytest.raises(Refused, match=r"does not hold.*\(ball\)"):
        Protection(arm(), None, Ball(1.0)).reset(np.zeros(7))
    with pytest.raises(Refused, match="position that is known"):
        Protection(arm(), JERK).reset(np.full(7, np.nan))


def test_a_device_s_grid_is_met_inside_the_limits():
    """Towards the middle, by less than one step; to the nearest step it would leave the limits (the control)."""
    rng, limits, quantum, origin = np.random.default_rng(4), arm(), np.full(7, 0.0015), np.full(7, 0.0004)
    for q in [limits.lower, limits.upper, *rng.uniform(limits.lower, limits.upper, (50, 7))]:
        on_grid = rounded(q, limits, quantum, origin)
        steps = (on_grid - origin) / quantum
        assert (on_grid >= limits.lower).all() and (on_grid <= limits.upper).all()
        assert np.abs(steps - np.round(steps)).max() < 1e-9 and np.abs(on_grid - q).max() < 0.0015
    assert (origin + np.round((limits.upper - origin) / quantum) * quantum > limits.upper).any()
