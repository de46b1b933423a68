"""The reflex can only be more careful: whatever a critic says, the guard's limits hold and nothing is faster for it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy
from guard_lab import Excess, arm

from burnish.real_robot.adapter import RobotState
from burnish.real_robot.clock import VirtualClock
from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.guard import JointGuard
from burnish.real_robot.safety.reflex import (
    Advice,
    MlpCritic,
    Reflex,
    ReflexSettings,
    read_critic,
    write_critic,
)
from hostile import mixed

STATE = RobotState(0, 0, np.zeros(7), np.zeros(7))


def raises(state: RobotState, q: np.ndarray) -> float:
    raise OSError("no weights")


def vandal(state: RobotState, q: np.ndarray) -> float:
    """Writes into what it is shown."""
    q[:] = 1e9
    return 0.0


RNG = np.random.default_rng(0)
CRITICS: dict[str, Callable] = {
    "random": lambda state, q: float(RNG.normal()),
    "zero": lambda state, q: 0.0,
    "one": lambda state, q: 1.0,
    "nan": lambda state, q: float("nan"),
    "minus_infinity": lambda state, q: -np.inf,
    "words": lambda state, q: "safe",
    "none": lambda state, q: None,
    "raises": raises,
    "vandal": vandal,
}


@pytest.mark.parametrize("name", CRITICS)
def test_the_guard_holds_whatever_the_critic_says(name: str):
    rng, limits = np.random.default_rng(1), arm()
    guard, reflex = JointGuard(limits), Reflex(CRITICS[name], clock=VirtualClock())
    excess = Excess(limits, guard.reset(np.zeros(7)))
    for request in mixed(rng, limits, (7,), 400):
        try:
            before = np.array(request, np.float64)
        except Exception:
            before = None
        share = reflex(STATE, request)
        assert 0 <= share <= 1
        assert before is None or np.array_equal(before, np.asarray(request, np.float64), equal_nan=True)
        excess.add((guard(request, share) if share > 0 else guard(None)).q)
    assert excess.holds(), vars(excess)
    assert sum(reflex.counts[advice.value] for advice in Advice) == 400


def test_what_is_not_known_is_braking():
    for name, trouble in [("nan", "no_number"), ("raises", "raised"), ("words", "raised"), ("none", "raised")]:
        reflex = Reflex(CRITICS[name])
        assert reflex(STATE, np.zeros(7)) == 0 and reflex.counts[trouble] == 1 and reflex.advice is Advice.BRAKE


def test_a_late_critic_is_braking():
    clock = VirtualClock()

    def slow(state: RobotState, q: np.ndarray) -> float:
        clock.advance_ns(2_000_001)
        return 0.0

    reflex = Reflex(slow, clock=clock)
    assert reflex(STATE, np.zeros(7)) == 0 and reflex.counts["late"] == 1


def advices(risks: list[float], **settings: float) -> str:
    """First letters of the advices."""
    queue = iter(risks)
    reflex = Reflex(lambda state, q: next(queue), ReflexSettings(**settings), VirtualClock())
    shares = [reflex(STATE, np.zeros(7)) for _ in risks]
    names = {1.0: "p", 0.3: "s", 0.0: "b"}
    return "".join(names[share] for share in shares)


def test_hysteresis():
    """Up at once, down after three ticks in a row below 0.8 of the limit that was passed."""
    assert advices([0.1, 0.2, 0.1, 0.1, 0.1, 0.1], release_ticks=3) == "psssp" + "p"
    assert advices([0.2, 0.1, 0.17, 0.1, 0.1, 0.1], release_ticks=3) == "sssss" + "p"
    assert advices([0.6, 0.3, 0.3, 0.3, 0.1, 0.1, 0.1], release_ticks=3) == "bbbsssp"
    assert advices([0.6, 0.0, 0.0, 0.0], release_ticks=3) == "bbbp"
    assert advices([0.6, 0.45, 0.45, 0.45, 0.45], release_ticks=3) == "bbbbb"
    assert advices([0.19, 0.2, 0.49, 0.5]) == "pssb"
    assert advices([0.3, 0.19] * 4, release_ticks=1) == "s" * 8
    # Without it, a risk that wavers about its limit changes the advice at every tick (the control).
    assert advices([0.3, 0.19] * 4, release_ticks=1, release=1.0) == "sp" * 4


def test_a_small_network_is_a_critic():
    rng = np.random.default_rng(2)
    sizes = [21, 64, 64, 1]
    weights = [rng.normal(size=(a, b)) for a, b in pairwise(sizes)]
    biases = [rng.normal(size=b) for b in sizes[1:]]
    critic = MlpCritic(weights, biases)
    state = RobotState(0, 0, rng.normal(size=7), rng.normal(size=7))
    target = rng.normal(size=7)
    x = [*state.q, *state.qd, *(target - state.q)]
    for layer, (w, b) in enumerate(zip(weights, biases, strict=True)):
        x = [sum(x[i] * w[i, j] for i in range(len(x))) + b[j] for j in range(len(b))]
        x = [max(y, 0.0) for y in x] if layer < 2 else x
    assert critic(state, target) == pytest.approx(1 / (1 + np.exp(-x[0])), abs=1e-9)
    big = MlpCritic([1e300 * np.ones((21, 1))], [np.zeros(1)])
    assert big(state, np.full(7, 10.0)) in (0.0, 1.0)
    assert Reflex(critic)(state, np.zeros(3)) == 0, "a request of another size is no reason to fall over"


def test_a_critic_from_a_file(tmp_path):
    rng = np.random.default_rng(3)
    weights, biases = [rng.normal(size=(21, 8)), rng.normal(size=(8, 1))], [rng.normal(size=8), rng.normal(size=1)]
    write_critic(tmp_path / "critic.safetensors", weights, biases)
    critic, target = read_critic(tmp_path / "critic.safetensors"), rng.normal(size=7)
    assert critic.joints == 7
    assert critic(STATE, target) == pytest.approx(MlpCritic(weights, biases)(STATE, target), abs=1e-5)
    with pytest.raises(Refused, match="cannot be read"):
        read_critic(tmp_path / "none")
    (tmp_path / "noise").write_bytes(b"no safetensors at all")
    with pytest.raises(Refused, match=r"noise is no critic"):
        read_critic(tmp_path / "noise")
    other = safetensors.numpy.save({"weight.0": np.zeros((21, 1), np.float32), "bias": np.zeros(1, np.float32)})
    (tmp_path / "other").write_bytes(other)
    with pytest.raises(Refused, match=r"is no critic: it holds"):
        read_critic(tmp_path / "other")


def test_it_refuses_nonsense():
    square = np.zeros((21, 21))
    for weights, biases in [
        ([], []),
        ([square], [np.zeros(21)]),
        ([square, np.zeros((20, 1))], [np.zeros(21), np.zeros(1)]),
        ([np.zeros((20, 1))], [np.zeros(1)]),
        ([np.full((21, 1), np.nan)], [np.zeros(1)]),
        ([np.zeros((21, 1))], [np.zeros(2)]),
    ]:
        with pytest.raises(Refused):
            MlpCritic(weights, biases)
    for change in (
        {"slow_risk": 0.0},
        {"brake_risk": 0.1},
        {"release": 0.0},
        {"slow_share": 1.0},
        {"release_ticks": 0},
    ):
        with pytest.raises(Refused):
            ReflexSettings(**change)
