"""Intervals and tests for success rates and returns, in closed form.

``wilson`` is the score interval of Wilson (1927); ``paired_difference`` is method 10 of Newcombe (1998, Statistics in
Medicine 17:2635-2650), square-and-add of two Wilson intervals with a corrected phi; ``unpaired_difference`` is method
10 of its companion (1998, Statistics in Medicine 17:873-890), the same without phi; ``mcnemar_exact`` is the exact
conditional form of McNemar (1947), and ``fisher_exact`` the test of Fisher (1935) for outcomes that are no pairs;
``holm`` corrects several tests (Holm 1979); ``mean_interval`` is Student's (1908), ``unpaired_mean_difference`` Welch's
(1947), and ``pooled_interval`` adds two of Student's in squares, for runs and seeds that are crossed;
``interquartile_mean`` with ``stratified_bootstrap`` is what Agarwal et al. (2021, arXiv 2108.13264) report of few runs.

**Departures.** The degrees of freedom of Welch's interval are rounded down to a whole number, so it is rather too wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from ..core.errors import BurnishError


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise BurnishError(f"confidence={confidence} must lie strictly between 0 and 1; the usual choice is 0.95")


def wilson(successes: float, trials: float, confidence: float = 0.95) -> tuple[float, float]:
    """(low, high) for a probability. Stays in [0, 1], and has width even at 0 of n and n of n. A mean of several counts
    may be a fraction."""
    _check_confidence(confidence)
    if trials < 1 or not 0 <= successes <= trials:
        raise BurnishError(
            f"{successes} successes of {trials} trials give no success rate; at least one trial is needed"
        )
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At the borders one limit is the rate itself, which rounding would miss by an ulp.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == trials else (centre + half) / scale
    return low, high


def mcnemar_exact(wins: int, losses: int) -> float:
    """Two-sided p of at least so uneven a split if each discordant pair were a fair coin. 1 without such pairs."""
    if wins < 0 or losses < 0:
        raise BurnishError(f"wins={wins} and losses={losses} are counts and cannot be negative")
    pairs = wins + losses
    term = tail = 1  # binomial coefficients as exact integers: no underflow, however many pairs there are
    for k in range(min(wins, losses)):
        term = term * (pairs - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**pairs)


def _phi(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Correlation of the pairs, shrunk towards zero by half a pair where it is positive; 0 where it is undefined."""
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if margins == 0:
        return 0.0
    product = both * neither - only_a * only_b
    if product > 0:
        product = max(product - (both + only_a + only_b + neither) / 2, 0.0)
    return product / math.sqrt(margins)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) correction: p-values of several tests, so that all of them together err as rarely as one."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def paired_difference(
    a: Sequence[bool] | np.ndarray, b: Sequence[bool] | np.ndarray, confidence: float = 0.95
) -> tuple[float, float, float]:
    """(difference, low, high) of P(a) - P(b), where a[i] and b[i] are two outcomes on the same seed."""
    x, y = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    if x.ndim != 1 or x.shape != y.shape or len(x) == 0:
        raise BurnishError(f"pairs need two lists of one length, at least 1; got shapes {x.shape} and {y.shape}")
    n, in_a, in_b, both = len(x), int(x.sum()), int(y.sum()), int((x & y).sum())
    phi = _phi(both, in_a - both, in_b - both, n - in_a - in_b + both)
    return _square_and_add((in_a, n), (in_b, n), phi, confidence)


def unpaired_difference(a: tuple[int, int], b: tuple[int, int], confidence: float = 0.95) -> tuple[float, float, float]:
    """(difference, low, high) of P(a) - P(b), where ``a`` and ``b`` are (successes, trials) that are independent."""
    return _square_and_add(a, b, 0.0, confidence)


def _square_and_add(
    a: tuple[int, int], b: tuple[int, int], phi: float, confidence: float
) -> tuple[float, float, float]:
    """The difference of two rates (successes, trials) whose outcomes are correlated by ``phi``."""
    (low_a, high_a), (low_b, high_b) = wilson(*a, confidence), wilson(*b, confidence)
    rate_a, rate_b = a[0] / a[1], b[0] / b[1]
    difference = (a[0] * b[1] - b[0] * a[1]) / (a[1] * b[1])  # rounded once
    down_a, up_a, down_b, up_b = rate_a - low_a, high_a - rate_a, rate_b - low_b, high_b - rate_b
    # Law of cosines: two half widths combine with the cosine phi. Rounding may leave a tiny negative square at phi = 1.
    low = difference - math.sqrt(max(down_a**2 + up_b**2 - 2 * phi * down_a * up_b, 0.0))
    high = difference + math.sqrt(max(up_a**2 + down_b**2 - 2 * phi * up_a * down_b, 0.0))
    return difference, low, high


def fisher_exact(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Two-sided p of two rates (successes, trials), given how many successes there are in all: the probability of all
    splits of them that are at most as probable as this one."""
    (in_a, of_a), (in_b, of_b) = a, b
    if not (0 <= in_a <= of_a and 0 <= in_b <= of_b):
        raise BurnishError(f"{in_a} of {of_a} and {in_b} of {of_b} are no successes of trials, so they have no test")
    both = in_a + in_b
    # Whole numbers, so that splits of one probability are counted or left out together.
    ways = [math.comb(of_a, k) * math.comb(of_b, both - k) for k in range(max(0, both - of_b), min(of_a, both) + 1)]
    observed = math.comb(of_a, in_a) * math.comb(of_b, in_b)
    return sum(way for way in ways if way <= observed) / sum(ways)


def episodes_needed(
    a: float, b: float, shares: tuple[float, float] | None = None, *, confidence: float = 0.95, power: float = 0.8
) -> int | None:
    """Episodes of each of two policies by which the difference of their success rates ``a`` and ``b`` is found with
    probability ``power``; None without a difference. ``shares`` of pairs that only the first, and only the second, won
    make it the number of pairs (Miettinen 1968, Biometrics 24:339-352)."""
    _check_confidence(confidence)
    normal, difference = NormalDist(), abs(a - b)
    if difference == 0:
        return None
    doubt, hit = normal.inv_cdf(0.5 + confidence / 2), normal.inv_cdf(power)
    if shares is None:
        middle = (a + b) / 2
        root = doubt * math.sqrt(2 * middle * (1 - middle)) + hit * math.sqrt(a * (1 - a) + b * (1 - b))
    else:
        apart = sum(shares)
        root = doubt * math.sqrt(apart) + hit * math.sqrt(max(apart - difference**2, 0.0))
    return math.ceil((root / difference) ** 2)


def _t_quantile(confidence: float, degrees: int) -> float:
    """t with P(|T| < t) = confidence, from the finite series for whole degrees of freedom in theta = atan(t / sqrt(nu))
    (Abramowitz and Stegun 1964, equations 26.7.3 and 26.7.4), inverted by bisection over theta."""
    odd = degrees % 2
    # Coefficients of cos^(odd), cos^(odd + 2), ...: 1, 2/3, (2 4)/(3 5), ... or 1, 1/2, (1 3)/(2 4), ...
    k = np.arange(1, degrees // 2)
    coefficients = np.concatenate([[1.0], np.cumprod((2 * k - 1 + odd) / (2 * k + odd))])[: degrees // 2]
    powers = odd + 2 * np.arange(len(coefficients))

    def inside(theta: float) -> float:
        series = math.sin(theta) * float(coefficients @ math.cos(theta) ** powers)
        return (theta + series) * 2 / math.pi if odd else series

    low, high = 0.0, math.pi / 2
    for _ in range(60):  # pi / 2^61 is below the resolution of theta in float64
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """(low, high) for the mean of independent values. A single value says nothing of its spread: (-inf, inf)."""
    _check_confidence(confidence)
    x = _finite_list(values)
    if len(x) == 1:
        return -math.inf, math.inf
    mean = float(x.mean())
    half = _t_quantile(confidence, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean - half, mean + half


def _finite_list(values: ArrayLike) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0 or not np.isfinite(x).all():
        raise BurnishError("a mean needs a list of at least one number, all of them finite")
    return x


def unpaired_mean_difference(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
    """(difference, low, high) of the means of two lists of independent values, whose variances may differ. A single
    value says nothing of its spread: infinite bounds."""
    _check_confidence(confidence)
    x, y = _finite_list(a), _finite_list(b)
    difference = float(x.mean() - y.mean())
    if min(len(x), len(y)) == 1:
        return difference, -math.inf, math.inf
    of_x, of_y = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
    if of_x + of_y == 0:
        return difference, difference, difference
    # Welch and Satterthwaite; a share of the variance, so that tiny variances do not underflow when squared.
    share = of_x / (of_x + of_y)
    degrees = 1 / (share**2 / (len(x) - 1) + (1 - share) ** 2 / (len(y) - 1))
    # It lies between the smaller of both degrees and their sum; rounding must not take it below.
    whole = max(math.floor(degrees), min(len(x), len(y)) - 1)
    half = _t_quantile(confidence, whole) * math.sqrt(of_x + of_y)
    return difference, difference - half, difference + half


def pooled_interval(scores: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) over runs and episodes together, from ``scores`` (R, S): run r on the seed s of an episode.

    For paired comparisons the scores are differences from the baseline on the same seed. Runs and seeds are crossed,
    and both are samples: the half width adds in squares that of the mean over runs (Student, R - 1 degrees of freedom)
    and that of the mean over seeds. The noise of a single episode counts in both, so the interval is rather too wide.
    A single run says nothing of other runs: its bounds are infinite."""
    x = np.asarray(scores, dtype=np.float64)
    if x.ndim != 2 or x.size == 0 or not np.isfinite(x).all():
        raise BurnishError(f"a pooled interval needs finite scores of shape (runs, seeds), got shape {x.shape}")
    mean = float(x.mean())
    half = math.hypot(*(mean - mean_interval(x.mean(axis), confidence)[0] for axis in (0, 1)))
    return mean, mean - half, mean + half


def interquartile_mean(scores: ArrayLike) -> float:
    """The mean of the middle half: a quarter of the scores, rounded down, is left out at either end."""
    x = np.sort(np.asarray(scores, dtype=np.float64), axis=None)
    if len(x) == 0 or not np.isfinite(x).all():
        raise BurnishError("a mean needs at least one score, all of them finite")
    cut = len(x) // 4
    return float(x[cut : len(x) - cut].mean())


def stratified_bootstrap(
    strata: Sequence[ArrayLike],
    statistic: Callable[[ArrayLike], float] = interquartile_mean,
    *,
    confidence: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """(low, high) of a statistic of all scores together, by percentiles over ``draws`` in which each stratum (the runs
    on one task) is drawn anew from itself, with replacement. A stratum of one run says nothing of its spread."""
    _check_confidence(confidence)
    given = [np.asarray(x, dtype=np.float64) for x in strata]
    if not given or any(x.ndim != 1 or len(x) == 0 for x in given):
        raise BurnishError("a bootstrap needs at least one stratum, and at least one score in each")
    random = np.random.default_rng(seed)
    found = [statistic(np.concatenate([x[random.integers(0, len(x), len(x))] for x in given])) for _ in range(draws)]
    low, high = np.quantile(found, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)
