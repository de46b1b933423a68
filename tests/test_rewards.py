"""The one shaping term."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.sim.rewards import tolerance

number = st.floats(-10, 10)


def test_values_by_hand():
    """[1, 2] with margin 0.5: 1 inside, 0.1 half a unit away, and 0.1^4 a whole unit away."""
    x = np.array([1.0, 1.5, 2.0, 0.5, 2.5, 0.0, 3.0])
    assert tolerance(x, 1, 2, 0.5) == pytest.approx([1, 1, 1, 0.1, 0.1, 1e-4, 1e-4])
    assert tolerance(x, 1, 2).tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert tolerance(np.array([0.3]), margin=0.3, at_margin=0.25) == pytest.approx([0.25])


@given(number, number, st.floats(0, 5), number, st.floats(0, 3))
def test_it_is_in_0_1_and_falls_with_the_distance(a, b, margin, x, further):
    low, high = min(a, b), max(a, b)
    away = np.array([x, x + further if x > high else x - further if x < low else x])
    near, far = tolerance(away, low, high, margin)
    assert 0 <= far <= near <= 1
    assert (near == 1) == (low <= x <= high) or margin > 1e6 * max(low - x, x - high)


@given(number)
def test_it_is_even_about_the_middle(x):
    assert tolerance(np.array([x]), -1, 1, 2) == tolerance(np.array([-x]), -1, 1, 2)


def test_nan_is_no_success():
    assert not (tolerance(np.array([np.nan]), margin=1.0) > 0).any()


@pytest.mark.parametrize("wrong", [{"low": 2, "high": 1}, {"margin": -1}, {"at_margin": 0}, {"at_margin": 1}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="are needed"):
        tolerance(np.zeros(1), **wrong)
