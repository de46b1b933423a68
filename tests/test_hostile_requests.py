"""Of what is asked of a robot nothing raises: whatever it is becomes finite numbers, or is held against."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.real_robot.adapter import GripperSpec
from burnish.real_robot.safety.guard import numbers
from burnish.real_robot.safety.safe_robot import Rung, SafeRobot, Safety
from robot_lab import Puppet, spec

ERRORS = [ValueError, TypeError, OverflowError, ZeroDivisionError, RecursionError, MemoryError, RuntimeError, OSError]


class Hostile:
    """Fails at whatever it is asked to be."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def fail(self, *given: Any, **named: Any) -> Any:
        raise self.error("no")

    __array__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = __bool__ = fail
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __abs__ = __neg__ = __sub__ = __rsub__ = fail
    __hash__ = object.__hash__


class Float(Hostile):
    """A number to those who only look at its class."""

    def __float__(self) -> Any:
        return "no float"


class Changes:
    """Near when it is looked at first, and far away afterwards."""

    def __init__(self) -> None:
        self.asked = 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.asked += 1
        return np.zeros(2) if self.asked == 1 else np.full(2, 0.9)


def boxed(pair: tuple[Any, Any]) -> np.ndarray:
    box = np.empty(2, object)
    box[0], box[1] = pair
    return box


SCALARS = st.one_of(
    st.floats(width=64),
    st.integers(-(10**400), 10**400),
    st.sampled_from([10**400, -(10**400), 2**64, 2**63, 1e308, -0.0, 5e-324, True, None, 1j, "0.5", "nan", b"1", ...]),
    st.sampled_from(
        [np.float16(0.5), np.float32("nan"), np.longdouble("1e4000"), np.datetime64(1, "s"), Fraction(1, 3)]
    ),
    st.sampled_from(ERRORS).map(Hostile),
    st.sampled_from(ERRORS).map(Float),
    st.builds(object),
)
REQUESTS = st.recursive(
    st.one_of(SCALARS, st.binary(max_size=16), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.tuples(inner, inner).map(boxed),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=6,
)


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    """As a program may have it: then what NumPy only warns of is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def running(**more: Any) -> tuple[SafeRobot, Puppet]:
    puppet = Puppet(robot=spec(gripper=GripperSpec(width_m=0.08, speed_m_s=0.08)))
    safe = SafeRobot(puppet, Safety(blend_s=0.0, start_gap_rad=2.0, **more))
    safe.start()
    return safe, puppet


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(REQUESTS, SCALARS), min_size=1, max_size=8))
def test_whatever_is_asked_nothing_escapes_and_limits_hold(asked: list[tuple[Any, Any]]):
    safe, puppet = running()
    for request, gripper in asked:
        if safe.rung is not Rung.STOPPED:
            safe.step(request, gripper)
    safe.close()
    sent = np.array([[0.0, 0.0], *(command.target for command in puppet.written)])
    v = np.diff(sent, axis=0, prepend=sent[:1]) * 100
    assert np.isfinite(sent).all() and (np.abs(sent) <= 1).all() and (np.abs(v) <= 2 * (1 + 1e-9)).all()
    assert (np.abs(np.diff(v, axis=0)) * 100 <= 10 * (1 + 1e-6)).all()
    opened = np.array([0.5, *(command.gripper for command in puppet.written)])
    assert ((opened >= 0) & (opened <= 1)).all() and (np.abs(np.diff(opened)) <= 0.01 + 1e-12).all()


@pytest.mark.parametrize(
    "bad",
    [10**400, Hostile(ZeroDivisionError), Float(OSError), "wide", "0.5", [1.0, 2.0], np.ones(1), 1j, np.nan, ...],
    ids=range(10),
)
def test_a_gripper_that_is_no_number_stays(bad: Any):
    safe, puppet = running()
    for wish in (0.9, bad, bad, 0.9):
        safe.step([0.0, 0.0], wish)
    assert [command.gripper for command in puppet.written] == pytest.approx([0.51, 0.51, 0.51, 0.52])
    assert safe.counts["gripper"] == 2 and safe.rung is Rung.RUN


def test_a_request_is_read_once():
    """What was near when it was compared with the robot must not be far when it is sent."""
    safe, puppet = running()
    one = Changes()
    safe.step(one)
    assert one.asked == 1 and (puppet.written[-1].target == 0).all()


def test_an_advisor_cannot_write_into_a_request():
    def vandal(state: Any, request: Any) -> float:
        request[:] = 0.9
        return 1.0

    puppet = Puppet()
    safe = SafeRobot(puppet, Safety(blend_s=0.0), vandal)
    safe.start()
    safe.step([0.0, 0.0])
    assert (puppet.written[-1].target == 0).all() and safe.counts["advisor"] == 1


def test_numbers_are_a_copy_of_real_numbers():
    mine = np.zeros(2)
    found = numbers(mine, (2,))
    mine[:] = 1
    assert found is not None and not found.any()
    assert numbers(3, ()) == 3.0 and numbers([1, 2]) is not None and numbers([1, 2], (3,)) is None
    assert numbers(np.array("1e4000", np.longdouble), ()) == np.inf
    for bad in (None, True, [True, False], "1", 10**400, [[1], [1, 2]], Hostile(ValueError)):
        assert numbers(bad) is None
