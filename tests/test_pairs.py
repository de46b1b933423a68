"""Two evaluations on one seed list, compared pair by pair: by success, and by returns."""

import json
from dataclasses import replace

import pytest

from burnish.policies.core.errors import BurnishError
from burnish.policies.measure.evaluate import (
    Comparison,
    Evaluation,
    ReturnComparison,
    compare,
    compare_returns,
    compare_two,
)
from burnish.policies.measure.statistics import (
    fisher_exact,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    unpaired_difference,
    unpaired_mean_difference,
    wilson,
)


def outcome(success):
    n = len(success)
    return Evaluation(list(range(n)), [0.0] * n, [1] * n, [True] * n, [False] * n, success, success)


def test_compare_two():
    a = outcome([True] * 12 + [True] * 7 + [False] * 2 + [False] * 4)
    b = outcome([True] * 12 + [False] * 7 + [True] * 2 + [False] * 4)
    result = compare_two(a, b)
    assert (result.wins, result.losses, result.ties, result.episodes) == (7, 2, 16, 25)
    assert (result.a_rate, result.b_rate) == (19 / 25, 14 / 25)
    assert ((result.a_low, result.a_high), (result.b_low, result.b_high)) == (wilson(19, 25), wilson(14, 25))
    assert (result.difference, result.difference_low, result.difference_high) == paired_difference(a.success, b.success)
    assert result.p_value == mcnemar_exact(7, 2)
    sentence = result.sentence("refined", "base")
    assert "\n" not in sentence and "refined succeeds in 76.0%" in sentence and "7 wins, 2 losses, 16 ties" in sentence
    json.dumps(result.to_dict(), allow_nan=False)


OTHER_WORLD = "not paired: equal seeds begin different episodes in this world; "
OTHER_SEEDS = "not paired: the two evaluations ran different seed lists; "


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, "a succeeds"),  # control: pairs
        ({"repeatable": False}, OTHER_WORLD),
        ({"seeds": [*range(24), 99]}, OTHER_SEEDS),
        ({"seeds": list(range(25))[::-1]}, OTHER_SEEDS),  # another order would pair the wrong rows
    ],
)
def test_what_is_no_pair_is_compared_as_independent_episodes(changes, begins):
    b = outcome([True] * 12 + [False] * 7 + [True] * 2 + [False] * 4)
    a = replace(outcome([True] * 19 + [False] * 6), **changes)
    result, turned = compare_two(a, b), compare_two(b, a)
    assert result.sentence().startswith(begins) and turned.unpaired == result.unpaired
    if not changes:
        assert result.unpaired == "" and result.wins == 7
        return
    assert (result.difference, result.difference_low, result.difference_high) == unpaired_difference((19, 25), (14, 25))
    assert result.p_value == fisher_exact((19, 25), (14, 25)) != mcnemar_exact(7, 2)
    assert result.wins is result.losses is result.ties is None
    assert " of 25 and b in 56.0%" in result.sentence() and "wins" not in result.sentence()
    assert "Fisher's exact p = " in result.sentence()
    json.dumps(result.to_dict(), allow_nan=False)


def test_evaluations_of_different_length_are_compared_without_pairs():
    sentence = compare(outcome([True] * 4), outcome([True, False, False])).sentence()
    assert sentence.startswith(OTHER_SEEDS) and "of 4 and b in 33.3%" in sentence and "of 3 episodes" in sentence


def test_a_comparison_by_success_needs_success():
    a = outcome([True, False, True])
    with pytest.raises(BurnishError, match="needs success"):
        compare_two(a, replace(a, success=None, success_at_end=None))


def returning(returns):
    n = len(returns)
    return Evaluation(list(range(n)), returns, [1] * n, [False] * n, [True] * n)


def test_returns_are_compared_by_pairs():
    """Pairing removes what a seed does to both: the means' intervals overlap, that of the difference is narrow."""
    seeds = [float(10 * (i % 7)) for i in range(30)]
    a, b = returning([x + 1 + 0.1 * (i % 3) for i, x in enumerate(seeds)]), returning(seeds)
    result = compare(a, b)
    assert isinstance(result, ReturnComparison)
    assert (result.a_low, result.a_high) == mean_interval(a.returns) and result.b_low < result.a_low < result.b_high
    differences = [x - y for x, y in zip(a.returns, b.returns, strict=True)]
    assert (result.difference_low, result.difference_high) == mean_interval(differences)
    assert result.difference == pytest.approx(1.1) and 1 < result.difference_low < result.difference_high < 1.2
    swapped = compare(b, a)
    assert (swapped.difference_low, swapped.difference_high) == (-result.difference_high, -result.difference_low)
    assert "over 30 paired seeds: difference +1.1 [" in result.sentence()
    json.dumps(result.to_dict(), allow_nan=False)
    assert isinstance(compare(outcome([True] * 30), outcome([False] * 30)), Comparison)
    alone = compare_returns(a, replace(b, repeatable=False))
    assert (alone.difference, alone.difference_low, alone.difference_high) == unpaired_mean_difference(
        a.returns, b.returns
    )
    assert alone.sentence().startswith(OTHER_WORLD) and alone.difference_low < 0
    with pytest.raises(BurnishError, match="at least 2 seeds"):
        compare_returns(returning([1.0]), returning([2.0]))
