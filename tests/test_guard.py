"""The joint guard: its theorem by brute force, hostile streams without end, transparency, steps, rows, and its price.

The promises themselves are `guard_checks.py`, small enough for the mutants; here they run at their full size.
``BURNISH_SOAK=1`` makes it ten million hostile calls.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import guard_checks
import numpy as np
import pytest
from conftest import Require
from guard_lab import Excess, admissible, arm, braking_travel, excesses, fastest, hostile_run

from burnish.real_robot.errors import Refused
from burnish.real_robot.safety import guard
from burnish.real_robot.safety.guard import JointGuard, Limits
from hostile import KINDS, mixed, random_limits
from soak import Progress, often

CALLS = often(200_000, 10_000_000)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """A program that turns warnings into errors must not be stopped by a request."""
    with warnings.catch_warnings(), np.errstate(divide="warn", invalid="warn", over="warn"):
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("check", guard_checks.CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_promise(check: Callable):
    check(guard)


def test_hostile_streams_find_nothing():
    """Rows count as calls, because a row is bit-equal to a guard of its own (`check_rows`)."""
    rng, calls, rows, ticks = np.random.default_rng(0), 0, 50, 100
    worst, progress = np.full(2, -1.0), Progress("hostile calls", CALLS)
    while calls < CALLS:
        progress(calls)
        limits = random_limits(rng)
        excess = hostile_run(guard, rng, limits, (rows,), ticks)
        assert excess.holds(), (calls, vars(excess))
        worst = np.maximum(worst, [excess.velocity, excess.acceleration])
        calls += rows * ticks
    # The stream is at the limits all the time, or it would prove nothing.
    assert (worst > -1e-9).all(), worst


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(kind: str):
    rng, limits = np.random.default_rng(0), arm()
    one = JointGuard(limits)
    excess, stream = Excess(limits, one.reset(np.zeros(7))), KINDS[kind](rng, limits, (7,))
    for _ in range(500):
        excess.add(one(next(stream)).q)
    assert excess.holds(), vars(excess)


def clip_box(limits: Limits, asked: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """What environments do with an action: into the box, and off it goes."""
    return np.clip(asked, limits.lower, limits.upper)


def clamp_to_the_measured(limits: Limits, asked: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """No farther than a tick at full speed from where the robot is (here: exactly where it was sent)."""
    most = limits.velocity * limits.period_s
    return sent + np.clip(asked - sent, -most, most)


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        (clip_box, {"finite", "velocity", "acceleration"}),
        (clamp_to_the_measured, {"finite", "position", "acceleration"}),
    ],
)
def test_other_rules_break_limits_on_the_same_stream(rule: Callable, breaks: set[str]):
    """The negative control: the stream is hostile, and the yardstick sees it. Neither rule was made for all limits."""
    rng, limits, broken = np.random.default_rng(0), arm(), set()
    excess = Excess(limits, np.zeros(7))
    for request in mixed(rng, limits, (7,), 2000, shapeless=0.0):
        sent = rule(limits, request, excess.q)
        if not np.isfinite(sent).all():
            broken.add("finite")
            sent = np.where(np.isfinite(sent), sent, excess.q)
        excess.add(sent)
    broken |= {"position"} if excess.position_m > 0 else set()
    broken |= {"velocity"} if excess.velocity > 1e-9 else set()
    broken |= {"acceleration"} if excess.acceleration > 1e-6 else set()
    assert broken == breaks


def test_a_thousand_admissible_trajectories_pass_bit_equal():
    rng = np.random.default_rng(8)
    for period_s in (0.001, 0.005, 0.01, 0.05):
        limits = arm(period_s=period_s)
        one = JointGuard(limits, (250,))
        for tick, request in enumerate(admissible(rng, limits, 250, 200)):
            if tick == 0:
                one.reset(request)
            answer = one(request)
            assert answer.q.tobytes() == request.tobytes() and not answer.changed.any(), tick


def test_the_theorem_by_brute_force():
    """From thousands of states that braking keeps inside, the interval of the proof holds a speed, and braking after
    any choice out of it keeps inside again: all by sums over ticks, of which the module knows nothing."""
    rng = np.random.default_rng(9)
    for _ in range(8):
        limits = random_limits(rng)
        step, h = limits.acceleration * limits.period_s, limits.period_s
        v = np.clip(rng.normal(size=(200, 7)), -1, 1) * limits.velocity
        q = rng.uniform(limits.lower, limits.upper, v.shape)
        travel = np.sign(v) * braking_travel(np.abs(v), limits)
        inside = (q + travel <= limits.upper) & (q + travel >= limits.lower)
        low = np.maximum(np.maximum(v - step, -limits.velocity), -fastest(guard, limits, q - limits.lower))
        high = np.minimum(np.minimum(v + step, limits.velocity), fastest(guard, limits, limits.upper - q))
        assert (low <= high + 1e-9 * step)[inside].all()
        assert inside.mean() > 0.02
        for share in (0.0, rng.random(v.shape), 1.0):
            chosen = low + share * (high - low)
            end = q + h * chosen + np.sign(chosen) * braking_travel(np.abs(chosen), limits)
            tolerance = 1e-12 + 1e-9 * step * h
            assert ((end <= limits.upper + tolerance) & (end >= limits.lower - tolerance))[inside].all()
        # The control: a tick that is faster by a tenth of A h leads out, for some.
        end = q + h * (high + 0.1 * step) + braking_travel(np.maximum(high + 0.1 * step, 0), limits)
        assert (end > limits.upper + 1e-12)[inside].any() or (
            fastest(guard, limits, limits.upper - q) > limits.velocity
        )[inside].all()


def test_the_closed_form_of_the_braking_travel():
    """F(v) = h ((n + 1) v - A h n (n + 1) / 2) with n = floor(v / (A h)), against its sum."""
    rng = np.random.default_rng(10)
    limits = random_limits(rng)
    step, h = limits.acceleration * limits.period_s, limits.period_s
    v = np.concatenate([limits.velocity * rng.random((100, 7)), step * np.arange(5)[:, None] * np.ones(7)])
    n = np.floor(v / step)
    closed = h * ((n + 1) * v - step * n * (n + 1) / 2)
    np.testing.assert_allclose(closed, h * v + braking_travel(v, limits), rtol=1e-9, atol=1e-15)


def extreme(rng: np.random.Generator, velocity: float, acceleration: float, joints: int = 30) -> dict:
    """Limits at scales from 1e-40 to 1e40, where a rounding of positions is up to these parts of V and of A."""
    largest, h = 10 ** rng.uniform(-40, 40, joints), float(10 ** rng.uniform(-20, 20))
    width = largest * 10 ** rng.uniform(-13, 0.3, joints)
    side, spacing = rng.choice([-1.0, 1.0], joints), np.spacing(largest)
    ends = np.sort([side * largest, side * np.maximum(largest - width, -0.999 * largest)], axis=0)
    share_v, share_a = 10 ** rng.uniform(-3, 0, (2, joints))
    v = spacing / 2 / (velocity * share_v) / h
    a = spacing * 3 / 2 / (acceleration * share_a) / h / h
    return {"lower": ends[0], "upper": ends[1], "velocity": v, "acceleration": a, "period_s": h}


def test_what_float64_can_express_is_kept_at_every_scale():
    """At all scales, up to the very edge of what is refused. Measured: at worst half of the spacing for velocities, as
    proved, and 1.17 of the 1.5 spacings for accelerations."""
    rng = np.random.default_rng(14)
    worst = []
    for _ in range(often(6, 300)):
        fast, strong = excesses(guard, rng, Limits(**extreme(rng, 0.999 * 9e-10, 0.999e-6)), 240)
        assert fast.max() <= 1e-9 and strong.max() <= 1e-6
        worst.append([fast.max(), strong.max()])
    assert (np.max(worst, axis=0) > [4e-10, 3e-7]).all(), "the edge was not reached, so this shows little"


def test_what_is_refused_breaks_the_promise():
    """The control: where limits are refused for a rounding of four times as much, some joint does exceed."""
    rng, broken = np.random.default_rng(15), np.zeros(2, bool)
    for velocity, acceleration in [(4e-9, 1e-9), (1e-12, 4e-6)] * 3:
        limits = extreme(rng, velocity, acceleration)
        with pytest.raises(Refused, match="float64"):
            Limits(**limits)
        fast, strong = excesses(guard, rng, SimpleNamespace(**limits), 240)
        broken |= [fast.max() > 1e-9, strong.max() > 1e-6]
    assert broken.all()


def cpu_us(call: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls * 1e6


def test_a_call_costs_little(record_property: Callable[[str, object], None]):
    """40 microseconds for seven joints is the promise, where the smaller of two vectors costs 0.3: on the two shared
    cores of an EPYC where it was given. Machines differ, so 133 such calls is what is asserted: both are measured in
    turn, in CPU time, and the best of many rounds counts, because what a round costs more was not the guard's. Measured
    70 (21 microseconds)."""
    rng, limits = np.random.default_rng(0), arm()
    one, a, b = JointGuard(limits), np.zeros(7), np.ones(7)
    one.reset(np.zeros(7))
    requests = iter(rng.uniform(limits.lower, limits.upper, (20_000, 7)))
    rounds = [(cpu_us(lambda: one(next(requests)), 200), cpu_us(lambda: np.minimum(a, b), 2000)) for _ in range(100)]
    guarded, simple = np.min(rounds, axis=0)
    record_property("guard_us", float(guarded))  # xdist sends plain numbers only
    assert guarded <= 40 / 0.3 * simple, f"{guarded:.1f} us a call, where a NumPy call costs {simple:.3f} us"


COVERED = """
import sys, coverage
seen = coverage.Coverage(branch=True, data_file=None, config_file=False, include=["*/real_robot/safety/guard.py"])
seen.start()
import guard_checks
from burnish.real_robot.safety import guard
for check in guard_checks.CHECKS:
    if check.__name__ not in sys.argv[1:]:
        check(guard)
seen.stop()
sys.exit(seen.report(file=sys.stderr, show_missing=True) < 100)
"""


@pytest.mark.parametrize("without", [[], ["check_coarse_limits"]])
def test_no_branch_goes_untested(without: list[str], require: Require):
    """In a process of its own, where nothing else counts; quick checks are enough. The control leaves out the one
    whose limits are too coarse."""
    require("coverage")
    slow = ["check_hostile_streams", "check_every_tick", "check_step_response", "check_speed", "check_transparency"]
    command = [sys.executable, "-c", COVERED, *slow, *without]
    ran = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert "real_robot/safety/guard.py" in ran.stderr
    assert (ran.returncode == 0) == (not without), ran.stderr
