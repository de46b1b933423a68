"""Intervals of settings: their ends, what is no number, and the sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.ranges import check_ranges

INF, NAN = float("inf"), float("nan")
# interval: (what lies in it, what does not, the sentence)
CASES = {
    "(0, inf)": ((1e-9, 5, None), (0, -1, INF, NAN), "x=.* must be a positive number"),
    "[1, inf)": ((1, 7), (0, 0.5, INF, NAN), "x=.* must be at least 1"),
    "(2, inf)": ((3,), (2, INF), "x=.* must be more than 2"),
    "(0, 1]": ((1, 0.5, None), (0, 1.1, NAN), r"x=.* must lie in \(0, 1\]"),
    "[0, 1)": ((0, 0.5), (1, -0.1), r"x=.* must lie in \[0, 1\)"),
    "(-inf, inf)": ((-3, 0), (INF, -INF, NAN), "x=.* must be a finite number"),
}


@pytest.mark.parametrize("interval", CASES)
def test_the_ends_are_those_of_the_interval(interval):
    inside, outside, sentence = CASES[interval]
    for x in inside:
        check_ranges(SimpleNamespace(x=x, y=1), {interval: "x"})
    for x in outside:
        with pytest.raises(BurnishError, match=f"^here.{sentence}$"):
            check_ranges(SimpleNamespace(y=1, x=x), {"[0, 2]": "y", interval: "x"}, "here.")
