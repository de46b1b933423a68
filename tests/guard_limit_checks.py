"""What is refused as limits, and what those of a device that rounds do: the other half of `guard_checks`."""

from __future__ import annotations

from typing import Any

import numpy as np
from guard_lab import Excess, SomeRobot, arm, refused

from hostile import mixed

Array = np.ndarray


def check_refusals(guard: Any) -> None:
    """Limits that are no limits, and a beginning that is no position."""
    bad = [
        {"lower": np.full(7, 4.0)},
        {"lower": np.linspace(-3, -1, 7)[None]},
        {"upper": np.ones(6)},
        {name: np.full((7, 1), x) for name, x in [("lower", 0), ("upper", 1), ("velocity", 1), ("acceleration", 1)]},
        {"upper": np.linspace(-3, -1, 7)},
        {"velocity": np.zeros(7)},
        {"velocity": np.append(np.ones(6), -1)},
        {"acceleration": np.append(np.ones(6), 0)},
        {"acceleration": np.append(np.ones(6), np.inf)},
        {"lower": np.append(np.zeros(6), np.nan)},
        {"period_s": 0.0},
        {"period_s": -0.01},
        {"period_s": float("nan")},
        {"period_s": float("inf")},
    ]
    for change in bad:
        refused(guard, lambda change=change: arm(guard, **change), "limits")
    for name in ("lower", "upper", "velocity", "acceleration"):
        change = {name: np.append(np.ones(6), 1e100) * (-1 if name == "lower" else 1)}
        refused(guard, lambda change=change: arm(guard, **change), "below 1e100")
    for name in ("velocity", "acceleration"):
        change = {name: np.append(np.ones(6), 1 / 1e100)}
        refused(guard, lambda change=change: arm(guard, **change), "positive velocity")
    for period_s in (1e100, 1 / 1e100):
        refused(guard, lambda period_s=period_s: arm(guard, period_s=period_s), "below 1e100")
    # Limits of limits, from their other side: room in rad, V, A and h.
    for room, *rest in [(1e-95, 9e99, 9e99, 1.5e-100), (1e-5, 1.5e-100, 1, 1e90), (1e-5, 1, 1.5e-100, 9e99)]:
        guard.Limits(np.full(1, -room), np.full(1, room), *(np.full(1, x) for x in rest[:2]), rest[2])
    one = guard.JointGuard(arm(guard), (2,))
    one.reset(np.zeros(7))
    start = np.zeros((2, 7))
    start[1, 3] = np.nan
    refused(guard, lambda: one.reset(start), "position that is known")
    refused(guard, lambda: one.reset(start, np.array([False, True])), "position that is known")
    assert (one.reset(np.ones(7), np.array([True, False])) == np.array([[1.0], [0.0]])).all()
    assert (one.reset(np.ones(7, object)) == 1).all(), "numbers of whatever kind are a position"
    # Far outside float64 is coarse: of joint 3, s / 2 is more than 0.9e-9 of V h from 2^18 on.
    limits = arm(guard)
    for far, fine in ((2.0**18 - 1, True), (2.0**18, False)):
        start[1] = 0.0
        start[1, 3] = far
        assert (np.spacing(far) <= guard.finest(limits)[3]) == fine
        if fine:
            assert one.reset(start)[1, 3] == far
        else:
            refused(guard, lambda: one.reset(start), "fine enough")
            assert (one.reset(start, np.array([True, False]))[0] == 0).all()


def check_limits_stay(guard: Any) -> None:
    """Who writes into the arrays of limits changes nothing for a guard that was made: its promise began with them."""
    kept, limits = arm(), arm(guard)
    one = guard.JointGuard(limits)
    for values in (limits.lower, limits.upper, limits.velocity, limits.acceleration):
        values *= 3
    excess = Excess(kept, one.reset(kept.lower))
    for request in (kept.upper * 2, kept.lower * 2):
        for _ in range(450):
            excess.add(one(request).q)
        assert (one.q == np.clip(request, kept.lower, kept.upper)).all()
    assert excess.holds(), vars(excess)


def check_rounding_at_a_limit(guard: Any) -> None:
    """Asked to come at full speed, by who can reach the limit in one tick: the step is rounded, and not beyond."""
    rng, h = np.random.default_rng(17), 0.03
    room = np.linspace(2, 6, 7)
    # Less than A h^2 away, where the request comes from farther, so it is not met as it is.
    limits = arm(guard, upper=arm().lower + room, velocity=2 * room / h, acceleration=room / (2.2 * h**2), period_s=h)
    one = guard.JointGuard(limits, (500,))
    for end, far, side in ((limits.upper, limits.lower, -1), (limits.lower, limits.upper, 1)):
        one.reset(end + side * 0.4 * room * rng.random(one.shape))
        one(np.broadcast_to(far, one.shape), 0.0)
        q = one(np.broadcast_to(end, one.shape)).q
        assert ((q >= limits.lower) & (q <= limits.upper)).all() and (np.abs(q - end) < 1e-12).mean() > 0.9


def check_coarse_limits(guard: Any) -> None:
    """What float64 rounds too coarsely is refused, to a thousandth: s / 2 is more than 0.9e-9 of V h, or 3 s / 2 more
    than 1e-6 of A h^2, with s the spacing at the farther of the two limits."""
    for lower, upper in [(-1.5, 1.0), (-1.0, 1.5), (1000.0, 1001.0), (-1e-3, -0.9e-3), (-1e6, 7e7)]:
        s, h = np.spacing(max(abs(lower), abs(upper))), 0.02
        ends = {"lower": np.array([-1e-9, lower]), "upper": np.array([1e-9, upper]), "period_s": h}
        velocity, acceleration = s / 2 / 9e-10 / h, 1.5 * s / 1e-6 / h**2
        for v, a in [(1.001, 1.001), (1e6, 1.001), (1.001, 1e6)]:
            numbers = {"velocity": np.full(2, v * velocity), "acceleration": np.full(2, a * acceleration)}
            assert guard.Limits(**ends, **numbers).period_s == h
        for v, a in [(0.999, 1e6), (1e6, 0.999)]:
            numbers = {"velocity": np.array([1, v * velocity]), "acceleration": np.array([1, a * acceleration])}
            refused(guard, lambda ends=ends, numbers=numbers: guard.Limits(**ends, **numbers), "joint 1: float64")


def check_limits_of_a_robot(guard: Any) -> None:
    robot = SomeRobot()
    limits = guard.Limits.of(robot, 50.0, share=0.5)
    assert limits.period_s == 0.02 and (limits.lower == [-1, -2]).all() and (limits.upper == [1, 2]).all()
    np.testing.assert_allclose(limits.velocity, [1, 1.5 - 0.05])
    assert (limits.acceleration == [5, 10]).all()
    assert (guard.Limits.of(robot, 50.0).acceleration == [10, 20]).all()
    assert guard.Limits.of(robot, 0.5).period_s == 2 and guard.Limits.of(robot, 50, 1).period_s == 0.02
    refused(guard, lambda: guard.Limits.of(robot, 3000.0), "3000 Hz")
    refused(guard, lambda: guard.Limits.of(robot, 3100.0), "step of the device")
    for rate_hz, share in [
        (0, 1),
        (-1, 1),
        (np.nan, 1),
        (np.inf, 1),
        (1e100, 1),
        (50, 0),
        (50, -1),
        (50, 1.01),
        (50, np.nan),
    ]:
        refused(guard, lambda rate_hz=rate_hz, share=share: guard.Limits.of(robot, rate_hz, share), "a share in")

    class Narrow(SomeRobot):
        def column(self, name: str) -> Array:
            ends = {"lower": [-1, 1], "upper": [1, 1 + room]}
            return np.array(ends[name]) if name in ends else super().column(name)

    room = 0.002
    assert guard.Limits.of(Narrow(), 50.0).upper[1] == 1.002
    room = 0.0019
    refused(guard, lambda: guard.Limits.of(Narrow(), 50.0), "nearer than two steps")


def check_rounding_to_a_device(guard: Any) -> None:
    """On the grid, inside, less than a quantum away; velocity on the wire keeps the limit that the quantum was taken
    from, acceleration exceeds by at most two quanta per period squared."""
    rng, quantum, origin = np.random.default_rng(6), np.full(7, 2 * np.pi / 4096), np.linspace(-0.1, 0.1, 7)
    whole = arm()
    limits = arm(guard, velocity=whole.velocity - quantum / whole.period_s)
    one = guard.JointGuard(limits)
    middle = (limits.lower + limits.upper) / 2
    excess = Excess(whole, guard.rounded(one.reset(middle), limits, quantum, origin))
    for request in mixed(rng, limits, (7,), 300):
        q = one(request).q
        wire = guard.rounded(q, limits, quantum, origin)
        steps = (wire - origin) / quantum
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-6)
        assert (np.abs(wire - middle) <= np.abs(q - middle) + 1e-12).all() or (np.abs(q - middle) < quantum).any()
        assert (np.abs(wire - q) < quantum * (1 + 1e-9)).all()
        excess.add(wire)
    assert excess.position_m == 0 and excess.velocity <= 1e-9
    assert excess.acceleration <= float((2 * quantum / whole.period_s**2 / whole.acceleration).max())
    edge = guard.rounded(np.stack([limits.lower, limits.upper]), limits, quantum, origin)
    assert (edge >= limits.lower).all() and (edge <= limits.upper).all()
    assert (edge[0] < limits.lower + quantum).all() and (edge[1] > limits.upper - quantum).all()


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
