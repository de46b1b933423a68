"""Intervals and tests against scipy, published examples and exactly enumerated coverage."""

import math
from functools import lru_cache

import numpy as np
import pytest
from scipy import stats

from burnish.policies.core.errors import BurnishError
from burnish.policies.measure.statistics import mcnemar_exact, mean_interval, paired_difference, pooled_interval, wilson


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
@pytest.mark.parametrize("trials", [1, 2, 7, 50, 1000])
def test_wilson_equals_scipy(trials, confidence):
    for successes in {0, 1, trials // 2, trials - 1, trials}:
        reference = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
        assert wilson(successes, trials, confidence) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_wilson_at_the_borders_is_one_sided_and_has_width():
    z2 = stats.norm.ppf(0.975) ** 2
    assert wilson(0, 50) == (0.0, pytest.approx(z2 / (50 + z2)))  # the score equation at rate 0, solved by hand
    assert wilson(50, 50) == (pytest.approx(50 / (50 + z2)), 1.0)


@pytest.mark.parametrize("successes, trials", [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_what_is_no_rate(successes, trials):
    with pytest.raises(BurnishError, match="trials"):
        wilson(successes, trials)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, math.nan])
def test_confidence_out_of_range_is_refused(confidence):
    for call in (lambda: wilson(1, 2, confidence), lambda: mean_interval([1, 2], confidence)):
        with pytest.raises(BurnishError, match="confidence"):
            call()


def test_mcnemar_equals_the_exact_binomial_test():
    for wins in range(12):
        for losses in range(12):
            reference = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
            assert mcnemar_exact(wins, losses) == pytest.approx(reference, rel=1e-12)
    assert mcnemar_exact(5, 0) == 2 / 32  # by hand: two of the 32 equally likely sign patterns
    assert mcnemar_exact(0, 1000) == pytest.approx(2.0**-999, rel=1e-12, abs=0)
    with pytest.raises(BurnishError, match="negative"):
        mcnemar_exact(-1, 3)


def pairs(both, only_a, only_b, neither):
    counts = (both, only_a, only_b, neither)
    return np.repeat([True, True, False, False], counts), np.repeat([True, False, True, False], counts)


@pytest.mark.parametrize(
    "table, low, high",
    [
        # Complete response before and after therapy (Cavo et al. 2012), the worked example of chapter 8 in Fagerland,
        # Lydersen and Laake (2017, Statistical Analysis of Contingency Tables).
        ((59, 6, 16, 80), -0.1186, -0.0046),
        ((36, 12, 2, 0), 0.0569, 0.3404),  # Newcombe (1998), table II, method 10; here phi is negative
        # No discordant pair and phi undefined: minus and plus the Wilson half width z^2 / (n + z^2) of 54 of 54.
        ((54, 0, 0, 0), -0.0664, 0.0664),
        ((0, 0, 0, 54), -0.0664, 0.0664),
    ],
)
def test_paired_difference_reproduces_published_intervals(table, low, high):
    n, difference = sum(table), (table[1] - table[2]) / sum(table)
    assert paired_difference(*pairs(*table)) == pytest.approx((difference, low, high), abs=5.1e-5)  # four digits
    assert n == len(pairs(*table)[0])


def test_paired_difference_changes_sign_with_its_arguments_and_not_with_the_order_of_pairs():
    a, b = pairs(20, 7, 3, 10)
    difference, low, high = paired_difference(a, b)
    assert paired_difference(b, a) == pytest.approx((-difference, -high, -low))
    order = np.random.default_rng(0).permutation(len(a))
    assert paired_difference(a[order], b[order]) == (difference, low, high)
    # Pairing matters: the same margins without their pairs (shuffling one side) give another interval.
    assert paired_difference(a, b[order])[2] - paired_difference(a, b[order])[1] > 1.2 * (high - low)


def test_paired_difference_refuses_lists_that_are_no_pairs():
    for a, b in (([], []), ([True], [True, False]), (np.ones((2, 2)), np.ones((2, 2)))):
        with pytest.raises(BurnishError, match="pairs"):
            paired_difference(a, b)


def unpaired(table, confidence=0.95):
    """Control: square-and-add without phi, as if the two runs had nothing in common (Newcombe 1998, 17:873-890)."""
    n, a, b = sum(table), table[0] + table[1], table[0] + table[2]
    (low_a, high_a), (low_b, high_b) = wilson(a, n, confidence), wilson(b, n, confidence)
    down, up = math.hypot(a / n - low_a, high_b - b / n), math.hypot(high_a - a / n, b / n - low_b)
    return (a - b) / n, (a - b) / n - down, (a - b) / n + up


def wald(table):
    """Control: the textbook interval, which has no width without discordant pairs."""
    n, difference = sum(table), (table[1] - table[2]) / sum(table)
    half = stats.norm.ppf(0.975) * math.sqrt((table[1] + table[2]) / n - difference**2) / math.sqrt(n)
    return difference, difference - half, difference + half


PAIRS = 24


@lru_cache
def every_table():
    """All 2925 ways to put 24 pairs into four cells, with the logarithms of their multinomial coefficients."""
    n = PAIRS
    tables = [(i, j, k, n - i - j - k) for i in range(n + 1) for j in range(n + 1 - i) for k in range(n + 1 - i - j)]
    log_count = [math.lgamma(n + 1) - sum(math.lgamma(c + 1) for c in t) for t in tables]
    return tables, np.array(log_count)


@lru_cache
def intervals(method):
    return np.array([method(table) for table in every_table()[0]])


def coverage_and_width(method, truth):
    """Exact: the sum over all tables of their probability, so no threshold needs room for sampling error."""
    tables, log_count = every_table()
    weight = np.exp(log_count + np.array(tables) @ np.log(truth))
    assert weight.sum() == pytest.approx(1.0)
    _, low, high = intervals(method).T
    difference = truth[1] - truth[2]
    return weight @ ((low <= difference) & (difference <= high)), weight @ (high - low)


def ours(table):
    return paired_difference(*pairs(*table))


# Cells: both succeed, only a, only b, neither. The pairs agree strongly in all of them.
TRUTHS = [(0.60, 0.05, 0.05, 0.30), (0.55, 0.20, 0.02, 0.23), (0.45, 0.10, 0.05, 0.40), (0.75, 0.12, 0.03, 0.10)]


@pytest.mark.parametrize("truth", TRUTHS)
def test_paired_difference_covers_at_its_level(truth):
    # Counts are discrete, so 0.95 cannot be met exactly; two points below it are allowed (measured: 0.954 to 0.996).
    coverage, width = coverage_and_width(ours, truth)
    assert coverage >= 0.93
    # Control: an interval that ignores the pairs is much wider on the same data (measured: by 1.20 to 1.74).
    assert coverage_and_width(unpaired, truth)[1] > 1.15 * width


def test_control_the_textbook_interval_fails_where_discordant_pairs_are_rare():
    truth = (0.60, 0.04, 0.01, 0.35)
    assert coverage_and_width(ours, truth)[0] >= 0.93
    assert coverage_and_width(wald, truth)[0] < 0.80


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 31, 200])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_mean_interval_equals_scipy(count, confidence):
    x = np.random.default_rng(count).normal(3.0, 2.0, count)
    reference = stats.t.interval(confidence, count - 1, x.mean(), stats.sem(x))
    # The quantile comes from a finite series, so only rounding remains.
    assert mean_interval(x, confidence) == pytest.approx(reference, rel=1e-10)


def test_pooled_interval_covers_where_runs_and_seeds_both_vary():
    """1,000 tables of 5 runs on 40 seeds: at least 95 % must cover, less four standard errors (0.028). Controls: the
    interval over seeds alone, and the one over all episodes as if they were independent, forget that runs vary."""
    effect = 0.3
    random = np.random.default_rng(0)
    covered = dict.fromkeys(("pooled", "seeds", "episodes"), 0)
    for _ in range(1000):
        run, seed = random.normal(0, 0.3, (5, 1)), random.normal(0, 0.3, (1, 40))
        table = effect + run + seed + random.normal(0, 0.5, (5, 40))
        bounds = {"pooled": pooled_interval(table)[1:], "seeds": mean_interval(table.mean(0))}
        bounds["episodes"] = mean_interval(table.ravel())
        for name, (low, high) in bounds.items():
            covered[name] += low <= effect <= high
    assert covered["pooled"] / 1000 > 0.95 - 0.028
    assert covered["seeds"] / 1000 < 0.8 and covered["episodes"] / 1000 < 0.8


def test_pooled_interval_of_a_single_run_says_nothing_of_others():
    mean, low, high = pooled_interval([[0.0, 1.0, 1.0]])
    assert mean == pytest.approx(2 / 3) and low == -math.inf and high == math.inf
    for wrong in ([], [0.0, 1.0], [[math.nan, 1.0]]):
        with pytest.raises(BurnishError, match="runs, seeds"):
            pooled_interval(wrong)


def test_mean_interval_at_its_edges():
    assert mean_interval([2.0]) == (-math.inf, math.inf)
    assert mean_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    for bad in ([], [1.0, math.nan], [1.0, math.inf], [[1.0, 2.0]]):
        with pytest.raises(BurnishError, match="finite"):
            mean_interval(bad)
