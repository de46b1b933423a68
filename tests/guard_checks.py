"""What the joint guard promises, as checks that take the module: ``test_guard.py`` gives them the real one, which must
pass, and ``test_guard_mutants.py`` one with a mistake in it, which must not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from guard_lab import (
    Excess,
    admissible,
    arm,
    braking_travel,
    fastest,
    fewest_ticks,
    hostile_run,
    slow_tick,
    somewhere,
)

import guard_limit_checks
from hostile import SHAPELESS, mixed, random_limits

Array = np.ndarray


def check_hostile_streams(guard: Any, draws: int = 8, rows: int = 25, ticks: int = 60) -> None:
    rng = np.random.default_rng(1)
    for _ in range(draws):
        limits = random_limits(rng)
        excess = hostile_run(guard, rng, guard.Limits(**vars(limits)), (rows,), ticks)
        assert excess.holds(), vars(excess)
    assert hostile_run(guard, rng, arm(guard), (), 200).holds()


def check_every_tick(guard: Any) -> None:
    """Against the slow tick, from wherever requests of all sorts have led; ``changed`` says whether it was changed."""
    rng = np.random.default_rng(11)
    for limits in (arm(guard), arm(guard, acceleration=np.linspace(100, 1000, 7), lower=np.full(7, -0.05))):
        one, asked = guard.JointGuard(limits), np.append(np.zeros(5), [limits.lower[5] - 0.2, limits.upper[6] + 0.1])
        one.reset(asked)
        for tick in range(70):
            request = one.q + rng.choice([0.0, 1e-4, 0.01, 1.0]) * rng.normal(size=7)
            if rng.random() < 0.15:
                request = asked if rng.random() < 0.5 else np.where(rng.random(7) < 0.5, np.nan, request)
            speed = 1.0 if rng.random() < 0.8 else float(rng.random())
            before, expected = asked, slow_tick(limits, one.q, one.v, asked, request, speed)
            answer = one(request, speed)
            np.testing.assert_allclose(answer.q, expected, rtol=0, atol=1e-9, err_msg=f"{tick}")
            assert answer.changed == (not np.array_equal(answer.q, request))
            assert answer.bad == (not np.isfinite(request).all())
            asked = answer.q if answer.bad else np.clip(request, limits.lower, limits.upper)
            assert before is not asked


def check_limits_to_rounding(guard: Any) -> None:
    """Requests that exceed a limit by a little more than rounding: nothing of that is let through, not even where one
    tick is enough for full speed, so that the slack of an acceleration would be a large part of a velocity."""
    for acceleration in (1e-3, 10.0, 1e4):
        limits = arm(guard, acceleration=np.full(7, acceleration))
        for part in (1e-10, 1e-8, 1e-7, 1e-5):
            one = guard.JointGuard(limits)
            excess, q = Excess(limits, one.reset(np.zeros(7))), np.zeros(7)
            v = np.zeros(7)
            for _ in range(30):
                v = np.minimum(v + limits.acceleration * limits.period_s, limits.velocity) * (1 + part)
                q = q + v * limits.period_s
                excess.add(one(q).q)
            assert excess.holds(), (part, vars(excess))


def check_transparency(guard: Any, rows: int = 40, ticks: int = 150) -> None:
    """What keeps the limits is sent as it is, bit for bit."""
    rng = np.random.default_rng(2)
    for limits in (arm(guard), arm(guard, period_s=0.05), arm(guard, acceleration=np.full(7, 300.0))):
        one, moved = guard.JointGuard(limits, (rows,)), 0.0
        for tick, request in enumerate(admissible(rng, limits, rows, ticks)):
            if tick == 0:
                one.reset(request)
            answer = one(request)
            assert (answer.q == request).all() and not answer.changed.any() and not answer.bad.any(), tick
            moved += float(np.abs(one.v).max())
        assert moved > 0.5 * ticks * limits.velocity.max(), "the trajectories hardly move"


def check_catching_up(guard: Any) -> None:
    """A request that was too fast for a tick, and comes within reach in the next, is met to the bit."""
    rng, limits = np.random.default_rng(16), arm(guard)
    one, change = guard.JointGuard(limits, (200,)), limits.acceleration * limits.period_s**2
    start = one.reset(rng.uniform(-0.5, 0.5, one.shape))
    first = start + change * rng.uniform(1.1, 1.9, one.shape)
    assert one(first).changed.all()
    second = first + change * rng.uniform(-0.1, 0.1, one.shape)
    answer = one(second)
    assert answer.q.tobytes() == second.tobytes() and not answer.changed.any()


def check_step_response(guard: Any) -> None:
    """No overshoot, and at most a tick and a twentieth longer than the shortest time that the limits allow."""
    rng = np.random.default_rng(3)
    limits = arm(guard)
    for _ in range(12):
        start, goal = rng.uniform(limits.lower, limits.upper, (2, 7))
        if rng.random() < 0.3:
            goal = np.where(rng.random(7) < 0.5, limits.lower, limits.upper)
        bound = [
            fewest_ticks(d, v, a, limits.period_s)
            for d, v, a in zip(np.abs(goal - start), limits.velocity, limits.acceleration, strict=True)
        ]
        one, took = guard.JointGuard(limits), np.zeros(7)
        excess = Excess(limits, one.reset(start))
        for tick in range(1, int(1.05 * max(bound)) + 4):
            q = one(goal).q
            excess.add(q)
            assert ((goal - q) * np.sign(goal - start) >= -1e-9).all(), "overshoot"
            took = np.where(q == goal, took, tick + 1)
        assert excess.holds()
        assert (took <= 1.05 * np.array(bound) + 1).all() and (took >= bound).all(), (took, bound)


def check_following(guard: Any) -> None:
    """A request that moves on steadily is caught up with in about the time of a step, without overshoot, then followed
    without lag: the guard aims at where the request is going, not only at where it is."""
    limits = arm(guard, lower=np.full(7, -50.0), upper=np.full(7, 50.0))
    one = guard.JointGuard(limits)
    one.reset(np.zeros(7))
    ahead = np.array([0.5, 0.2, 0.05, -0.05, -0.2, -0.5, 1e-3])
    speed = 0.6 * limits.velocity * np.array([1, 1, 1, -1, -1, -1, 1])
    equal = np.zeros(7)
    for tick in range(250):
        request = ahead + speed * limits.period_s * tick
        q = one(request).q
        assert ((request - q) * np.sign(ahead) >= -1e-9).all(), tick
        equal = np.where(q == request, equal, tick + 1)
    # Getting up to speed takes V / A = 0.2 s; the gap then closes with 0.4 V.
    slowest = 100 * (np.abs(ahead) / (0.4 * limits.velocity) + limits.velocity / limits.acceleration)
    assert (equal <= slowest + 10).all(), (equal, slowest)


def check_speed(guard: Any) -> None:
    """A share of the speed is kept as soon as braking allows, and changes no other limit, whatever shares follow."""
    rng, limits = np.random.default_rng(7), arm(guard)
    one = guard.JointGuard(limits, (8,))
    excess, share = Excess(limits, one.reset(np.zeros(7))), 1.0
    for tick, request in enumerate(mixed(rng, limits, one.shape, 400)):
        if tick % 10 == 0:
            share = float(rng.choice([0.0, 0.01, 0.5, 1.0, rng.random()]))
        before = np.abs(one.v)
        excess.add(one(request, share).q)
        slower = np.maximum(share * limits.velocity, before - limits.acceleration * limits.period_s)
        assert (np.abs(one.v) <= slower + 1e-9).all()
    assert excess.holds()
    goal = limits.upper - 0.1
    for share in (1.0, 0.25):
        one = guard.JointGuard(limits)
        excess = Excess(limits, one.reset(limits.lower))
        top = np.zeros(7)
        for _ in range(int(120 * ((goal - limits.lower) / (share * limits.velocity)).max())):
            excess.add(one(goal, share).q)
            top = np.maximum(top, one.v)
        assert excess.holds() and (one.q == goal).all()
        np.testing.assert_allclose(top, share * limits.velocity, rtol=1e-9)


def check_share(guard: Any) -> None:
    """What is not a number in [0, 1] brakes like 0, and raises nothing."""
    rng, limits = np.random.default_rng(13), arm(guard)
    none = [np.nan, np.inf, -np.inf, -1.0, -1e-12, 1 + 1e-9, 2, -1, 10**400, None, "1", b"1", 1j, np.complex64(1)]
    none += [object(), [1.0], np.ones(1), np.ones(7), np.array(1.0), np.bool_(True), np.datetime64(1, "s"), lambda: 1.0]
    some = [0.25, np.float64(0.25), np.float32(0.25), np.float16(0.25), np.longdouble(0.25)]
    for given, meant in [
        (none, 0.0),
        (some, 0.25),
        ([1, True, np.int8(1), np.float32(1)], 1.0),
        ([0, -0.0, False], 0.0),
    ]:
        for share in given:
            one, other = guard.JointGuard(limits), guard.JointGuard(limits)
            for tick, request in enumerate(rng.uniform(limits.lower, limits.upper, (4, 7)).repeat(10, axis=0)):
                a, b = one(request, 1.0 if tick < 20 else share), other(request, 1.0 if tick < 20 else meant)
                assert a.q.tobytes() == b.q.tobytes() and a.q.dtype == np.float64, share
            assert (np.abs(one.v) > 1e-9).any() == bool(meant), "twenty ticks are enough to brake"


def check_bad_input(guard: Any) -> None:
    """Rest within v^2 / 2A + v h, in a straight line, at full braking; and every kind of it counts as bad."""
    limits = arm(guard)
    for request in [np.full(7, np.nan), np.array([0.0] * 6 + [np.inf]), None]:
        one = guard.JointGuard(limits)
        one.reset(np.zeros(7))
        for _ in range(25):
            one(limits.upper * np.array([1, -1, 1, -1, 1, -1, 1]) * 0.9)
        q, v = one.q, one.v
        assert (np.abs(v) > 0.3).all()
        allowed = v**2 / (2 * limits.acceleration) + np.abs(v) * limits.period_s
        for _ in range(int(max(np.abs(v) / limits.acceleration) / limits.period_s) + 2):
            before = one.v
            answer = one(request)
            assert answer.bad.all() and answer.changed.all()
            slower = np.maximum(np.abs(before) - limits.acceleration * limits.period_s, 0) * np.sign(v)
            np.testing.assert_allclose(one.v, slower, atol=1e-9)
        assert (one.v == 0).all()
        assert (np.abs(one.q - q) <= allowed).all() and (np.abs(one.q - q) >= 0.8 * (allowed - np.abs(v) * 0.02)).all()
        at_rest = one(request)
        assert at_rest.bad.all() and at_rest.changed.all() and (at_rest.q == one.q).all()
    one = guard.JointGuard(limits)
    one.reset(np.zeros(7))
    rng = np.random.default_rng(0)
    for make in SHAPELESS.values():
        stream = make(rng, limits, (7,))
        for _ in range(20):
            answer = one(next(stream))
            assert answer.bad.all() and answer.changed.all() and (answer.q == 0).all()
    # Numbers of other kinds are numbers.
    for good in (np.full(7, 1, np.int8), [0.001] * 7, np.full(7, 0.001, np.float32), tuple(range(7))):
        assert not one(good).bad.any()


def check_after_bad_input(guard: Any) -> None:
    """The request that comes after bad ones counts as one that stood where the guard stood: no velocity of its own is
    made up from the one before the gap, so it is met like a step."""
    limits = arm(guard)
    one, other = guard.JointGuard(limits), guard.JointGuard(limits)
    one.reset(np.zeros(7))
    one(np.full(7, 0.9))
    for _ in range(60):
        one(None)
    other.reset(one.q)
    for _ in range(80):
        np.testing.assert_allclose(one(np.full(7, 0.5)).q, other(np.full(7, 0.5)).q, atol=1e-12)
    # So one that goes on from there is admissible, after a single bad one in motion too.
    for _ in range(20):
        one(np.full(7, -0.9))
    one(None)
    following = one.q + limits.period_s * one.v
    assert np.abs(one.v).min() > 0.1 and one(following).q.tobytes() == following.tobytes()


def check_outside(guard: Any) -> None:
    """An arm that is found outside stays there as long as nothing is asked, and goes in as fast as the limits allow and
    no faster, from the first tick on, whatever is asked; once inside, a joint stays inside."""
    rng, limits = np.random.default_rng(20), arm(guard)
    middle, beyond = (limits.lower + limits.upper) / 2, np.array([1e-12, 1e-4, 0.01, 0.09, 0.3, 1.0, 2.0])
    for sign in (1, -1):
        start = np.where(sign > 0, limits.upper + beyond, limits.lower - beyond)
        for request in (start, middle, start + sign, np.where(sign > 0, limits.upper, limits.lower)):
            one = guard.JointGuard(limits)
            excess = Excess(limits, one.reset(start))
            assert (excess.q == start).all()
            for _ in range(5):
                held = one(None)
                assert (held.q == start).all() and held.bad and (one.v == 0).all()
            goal = np.clip(request, limits.lower, limits.upper)
            bound = [
                fewest_ticks(d, v, a, limits.period_s)
                for d, v, a in zip(np.abs(goal - start), limits.velocity, limits.acceleration, strict=True)
            ]
            took = np.ones(7)
            for tick in range(1, int(1.05 * max(bound)) + 4):
                answer = one(request)
                excess.add(answer.q)
                assert (answer.changed or (answer.q == request).all()) and not answer.bad
                took = np.where(answer.q == goal, took, tick + 1)
            assert excess.holds(), vars(excess)
            assert (took <= 1.05 * np.array(bound) + 1).all() and (took >= bound).all(), (took, bound)
    # Farther outside than before is nowhere, under requests of all kinds and with changing shares of the speed.
    one = guard.JointGuard(limits, (20,))
    excess = Excess(limits, one.reset(somewhere(rng, limits, one.shape)))
    for tick, request in enumerate(mixed(rng, limits, one.shape, 150)):
        excess.add(one(request, float(rng.random()) if tick % 7 else 1.0).q)
    assert excess.holds(), vars(excess)
    # Who verifies a way in may go a part of it, to the bit, and stay; not farther out.
    one, start = guard.JointGuard(limits, inward=False), limits.upper + 0.3
    excess = Excess(limits, one.reset(start))
    for goal, reached in ((start, start), (start + 0.1, start), (limits.upper + 0.1,) * 2, (middle, middle)):
        for _ in range(300):
            answer = one(goal)
            excess.add(answer.q)
        assert (answer.q == reached).all() and answer.changed == (goal[0] > start[0])
    excess.add(one(start).q)
    assert excess.holds() and (one(limits.upper).q <= limits.upper).all()
    # One row that begins outside moves no other.
    both = guard.JointGuard(limits, (2,))
    both.reset(middle)
    both.reset(limits.upper + 0.1, np.array([False, True]))
    assert (both(np.stack([middle, middle])).q[0] == middle).all()


def check_rows(guard: Any) -> None:
    """Each row as if it were alone, bit for bit, whatever the others get; ``reset`` touches only its rows."""
    rng, limits, rows = np.random.default_rng(4), arm(guard), (3, 4)
    together = guard.JointGuard(limits, rows)
    alone = {index: guard.JointGuard(limits) for index in np.ndindex(rows)}
    start = rng.uniform(limits.lower - 0.5, limits.upper + 0.5, together.shape)
    for index, one in alone.items():
        one.reset(start[index])
    assert (together.reset(start) == start).all()
    some_bad = False
    for tick, request in enumerate(mixed(rng, limits, together.shape, 80, hold=6)):
        if tick % 9 == 8:
            mask, new = rng.random(rows) < 0.3, rng.uniform(limits.lower, limits.upper, together.shape)
            new[~mask] = np.nan
            before = together.q
            after = together.reset(new, mask)
            assert (after[~mask] == before[~mask]).all() and (after[mask] == new[mask]).all()
            for index, one in alone.items():
                if mask[index]:
                    one.reset(new[index])
        answer = together(request)
        readable = isinstance(request, np.ndarray) and request.shape == together.shape
        why = together.why(request, together.q, together.v)
        for index, one in alone.items():
            same = one(request[index] if readable else None)
            assert answer.q[index].tobytes() == same.q.tobytes(), (tick, index)
            assert answer.changed[index] == same.changed and answer.bad[index] == same.bad
            for kind, x in one.why(request[index] if readable else None, one.q, one.v).items():
                assert why[kind][index] == x
        assert (together.v == np.array([alone[i].v for i in np.ndindex(rows)]).reshape(together.shape)).all()
        some_bad |= bool(answer.bad.any() and not answer.bad.all())
    assert some_bad
    answer.q[:] = 0
    together.q[:] = 0
    together.v[:] = 9
    assert together.q.any() and (together.v < 9).all(), "what a guard hands out is not what it remembers"


def check_state(guard: Any) -> None:
    """Who restores a state repeats what followed it, bit for bit, in the rows of the mask and in no other."""
    rng, limits = np.random.default_rng(12), arm(guard)
    one, stream = guard.JointGuard(limits, (3,)), list(mixed(rng, limits, (3, 7), 60, shapeless=0.0))
    one.reset(np.zeros(7))
    for request in stream[:30]:
        one(request)
    state = one.state()
    kept = {name: x.copy() for name, x in state.items()}
    one.reset(np.ones(7))
    assert all((state[name] == x).all() for name, x in kept.items()), "a state is a copy"
    one.restore(state)
    first = [one(request).q for request in stream[30:]]
    one.restore(state)
    assert np.array_equal([one(request).q for request in stream[30:]], first)
    mask, moved = np.array([True, False, True]), one.state()
    one.restore(state, mask)
    for name, now in one.state().items():
        assert (now[mask] == state[name][mask]).all() and (now[1] == moved[name][1]).all()


def check_formulae(guard: Any) -> None:
    """F(fastest(d)) = d with F by summing, and no faster tick stays within d."""
    limits = arm(guard)
    rng = np.random.default_rng(5)
    c = limits.acceleration * limits.period_s**2
    for distance in [np.zeros(7), c, 3 * c, *(10 ** rng.uniform(-12, 0.5, (60, 7)))]:
        v = fastest(guard, limits, distance)
        travel = limits.period_s * v + braking_travel(v, limits)
        np.testing.assert_allclose(travel, distance, rtol=1e-9, atol=1e-15)


def check_reasons(guard: Any) -> None:
    """``why`` names the limits that a request broke, and braking where it broke none."""
    limits, why = arm(guard), guard.Intervention
    one = guard.JointGuard(limits)
    one.reset(np.zeros(7))

    def reasons(request: Any, v: Any = 0.0) -> set[str]:
        found = one.why(request, np.zeros(7), np.broadcast_to(v, 7))
        assert list(found) == list(why) and all(x.shape == () for x in found.values())
        return {kind.value for kind, x in found.items() if x}

    tick, joint = limits.velocity * limits.period_s, np.eye(7)[3]
    fast = 0.9 * limits.velocity
    assert reasons(None) == reasons([np.nan] * 7) == {"bad"}
    assert reasons(None, fast) == {"bad"}
    assert reasons(np.zeros(7)) == reasons(0.5 * tick, 0.5 * limits.velocity) == {"braking"}
    for sign in (1, -1):
        assert reasons(sign * joint * (tick + 1e-9), sign * limits.velocity * joint) == {"velocity"}
        assert reasons(sign * joint * (tick - 1e-9), sign * limits.velocity * joint) == {"braking"}
        assert reasons(sign * joint * 0.5 * tick) == {"acceleration"}
        assert reasons(sign * joint * 0.5 * tick, sign * fast * joint) == {"acceleration"}
        change = sign * joint * limits.acceleration * limits.period_s**2
        assert reasons(change) == reasons(change * (1 + 1e-10)) == {"braking"}
        assert reasons(change * (1 + 1e-7)) == {"acceleration"}
        assert reasons(sign * joint * 100) == {"position", "velocity", "acceleration"}
    edge = one.why(limits.upper + np.eye(7)[0] * 1e-9, limits.upper, np.zeros(7))
    assert {kind.value for kind, x in edge.items() if x} == {"position"}


OWN = [value for name, value in list(globals().items()) if name.startswith("check_")]
CHECKS = [*OWN, *guard_limit_checks.CHECKS]
