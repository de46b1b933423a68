"""Intervals and tests against scipy, published examples and exactly enumerated coverage."""

import math
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

from burnish.policies.core.errors import BurnishError
from burnish.policies.measure.statistics import (
    fisher_exact,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    pooled_interval,
    unpaired_difference,
    unpaired_mean_difference,
    wilson,
)


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


def unpaired(table):
    """Control: as if the two runs had nothing in common."""
    n = sum(table)
    return unpaired_difference((table[0] + table[1], n), (table[0] + table[2], n))


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


@pytest.mark.parametrize(
    "a, b, low, high",  # Newcombe (1998, 17:873-890), table II, method 10
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0),
    ],
)
def test_unpaired_difference_reproduces_published_intervals(a, b, low, high):
    difference = a[0] / a[1] - b[0] / b[1]
    assert unpaired_difference(a, b) == pytest.approx((difference, low, high), abs=5.1e-5)  # four digits
    assert unpaired_difference(b, a) == pytest.approx((-difference, -high, -low), abs=5.1e-5)


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.9, 0.6), (0.97, 0.9), (0.05, 0.02)])
@pytest.mark.parametrize("trials", [(24, 24), (50, 12)])
def test_unpaired_difference_covers_at_its_level(rates, trials):
    """Exact, over all outcomes. Counts are discrete, so two points below 0.95 are allowed (measured: 0.940 to 0.999).
    Control: the textbook interval has no width where both rates are seen as 0 or 1 (measured: 0.71 in such a case)."""
    covered = dict.fromkeys(("ours", "textbook"), 0.0)
    for x in range(trials[0] + 1):
        for y in range(trials[1] + 1):
            weight = stats.binom.pmf(x, trials[0], rates[0]) * stats.binom.pmf(y, trials[1], rates[1])
            _, low, high = unpaired_difference((x, trials[0]), (y, trials[1]))
            p, q = x / trials[0], y / trials[1]
            half = stats.norm.ppf(0.975) * math.sqrt(p * (1 - p) / trials[0] + q * (1 - q) / trials[1])
            covered["ours"] += weight * (low <= rates[0] - rates[1] <= high)
            covered["textbook"] += weight * (abs(p - q - (rates[0] - rates[1])) <= half)
    assert covered["ours"] >= 0.93
    if (rates, trials) == ((0.97, 0.9), (50, 12)):
        assert covered["textbook"] < 0.75


def test_fisher_equals_scipy_and_the_sum_over_all_arrangements():
    for a in ((0, 5), (3, 5), (5, 5), (7, 12)):
        for b in ((0, 5), (2, 5), (4, 5), (12, 12), (0, 1)):
            _, reference = stats.fisher_exact([[a[0], a[1] - a[0]], [b[0], b[1] - b[0]]])
            assert fisher_exact(a, b) == fisher_exact(b, a) == pytest.approx(reference, rel=1e-10)
    # By hand: of the 70 ways to choose 4 of 8 episodes as those of a, one has all successes, and one none.
    assert fisher_exact((4, 4), (0, 4)) == 2 / 70
    # Slow: every arrangement of 3 successes among 7 episodes, of which the first 4 are those of a.
    splits = [sum(i < 4 for i in chosen) for chosen in combinations(range(7), 3)]
    ways = [splits.count(k) for k in range(4)]
    for k in range(4):
        assert fisher_exact((k, 4), (3 - k, 3)) == sum(way for way in ways if way <= ways[k]) / len(splits)
    with pytest.raises(BurnishError, match="3 of 2"):
        fisher_exact((3, 2), (0, 2))


def test_fisher_rejects_equal_rates_as_seldom_as_it_says():
    """Exact, over all outcomes of 15 and 20 episodes: an exact test is never too bold."""
    for rate in (0.3, 0.75):
        a, b = stats.binom.pmf(np.arange(16), 15, rate), stats.binom.pmf(np.arange(21), 20, rate)
        bold = sum(a[x] * b[y] for x in range(16) for y in range(21) if fisher_exact((x, 15), (y, 20)) <= 0.05)
        assert 0.005 < bold <= 0.05


@pytest.mark.parametrize("counts", [(2, 2), (2, 40), (12, 12), (30, 7)])
@pytest.mark.parametrize("spreads", [(1.0, 1.0), (0.1, 3.0)])
def test_unpaired_mean_difference_equals_a_slow_welch(counts, spreads):
    random = np.random.default_rng(sum(counts))
    a, b = (random.normal(2.0, spread, count) for spread, count in zip(spreads, counts, strict=True))
    of_a, of_b = (sum((v - sum(x) / len(x)) ** 2 for v in x) / (len(x) - 1) / len(x) for x in (a, b))
    degrees = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    exact: Any = stats.ttest_ind(a, b, equal_var=False)
    assert exact.df == pytest.approx(degrees)
    half = stats.t.ppf(0.975, math.floor(degrees)) * math.sqrt(of_a + of_b)
    difference = a.mean() - b.mean()
    expected = (difference, difference - half, difference + half)
    assert unpaired_mean_difference(a, b) == pytest.approx(expected, rel=1e-9)
    # Rounded down, so never narrower than with broken degrees of freedom.
    inside = exact.confidence_interval()
    assert expected[1] <= inside.low + 1e-12 and inside.high <= expected[2] + 1e-12


def test_unpaired_mean_difference_covers_where_the_variances_differ():
    """2,000 draws of 8 wide and 40 narrow values: 0.95 less four standard errors (0.0195). Control: Student's interval
    with one variance for both is far too narrow here."""
    random = np.random.default_rng(0)
    welch = student = 0
    for _ in range(2000):
        a, b = random.normal(1.0, 5.0, 8), random.normal(0.0, 0.5, 40)
        _, low, high = unpaired_mean_difference(a, b)
        welch += low <= 1 <= high
        inside = stats.ttest_ind(a, b).confidence_interval()
        student += inside.low <= 1 <= inside.high
    assert welch / 2000 > 0.95 - 0.0195
    assert student / 2000 < 0.8


def test_unpaired_mean_difference_at_its_edges():
    assert unpaired_mean_difference([2.0], [1.0, 1.5]) == (0.75, -math.inf, math.inf)
    assert unpaired_mean_difference([2.0, 2.0], [1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    # Its variances squared are below the smallest float.
    tiny = unpaired_mean_difference([0.0, 1e-100], [0.0, 1e-100, 0.0])
    assert all(map(math.isfinite, tiny)) and tiny[1] < tiny[0] < tiny[2]
    with pytest.raises(BurnishError, match="finite"):
        unpaired_mean_difference([], [1.0])


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
