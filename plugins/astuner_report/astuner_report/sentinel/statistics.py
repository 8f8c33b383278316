"""Statistical tests that separate a trend or a difference from chance.

The rules that use them state the resulting error rates.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection

from astuner.contracts.statistics import percent as percent
from astuner.contracts.statistics import wilson_interval

SIGNIFICANT = 2.326
"""z of a one-sided test at 1 %."""
SURE = 3.090232
"""z of a one-sided test at 0.1 %, for rules that are evaluated in every step."""
VERY_SURE = 3.719016
"""z of a one-sided test at 0.01 %, for rules that are evaluated in every step with little new data."""


LARGEST = 1e12
"""Counts above this do not occur in a run; tests on them return no finding."""


def normal_tail(z: float) -> float:
    """Return P(Z > z) of a standard normal variable Z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def trend(values: Collection[float]) -> float:
    """Return z of the Mann-Kendall test for a trend; above 0 when the values rise, 0 for fewer than 4 values.

    The statistic is the number of rising pairs minus the number of falling pairs, divided by its standard deviation
    without a trend, corrected for ties. The test assumes neither a shape nor normal noise, and is robust against single
    outliers.

    Source: Mann, Econometrica 13 (1945) 245-259; ties as in Kendall, Rank Correlation Methods (1948).
    """
    n = len(values)
    if n < 4:
        return 0.0
    rising, earlier = 0, list[float]()
    for value in values:
        rising += bisect_left(earlier, value) - (len(earlier) - bisect_right(earlier, value))
        insort(earlier, value)
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if not rising or variance <= 0:
        return 0.0
    return (rising - math.copysign(1, rising)) / math.sqrt(variance)


def two_proportions(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return z of the pooled test that two independent shares are equal; above 0 when the second is larger.

    Each share is given as (successes, tries). Source: e.g. Fleiss, Levin and Paik, Statistical Methods for Rates and
    Proportions (2003), section 3.1.
    """
    (a, n), (b, m) = first, second
    if not n or not m:
        return 0.0
    pooled = (a + b) / (n + m)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return (b / m - a / n) / error if error else 0.0


def exact_tail(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the p-value of Fisher's exact test that the second share is not larger; each is (successes, tries).

    Exact for small counts too, where the normal approximation of `two_proportions` rejects too often. Counts are
    rounded to integers. Source: Fisher, Journal of the Royal Statistical Society 98 (1935) 39-82.
    """
    if not all(0 <= k <= LARGEST and 0.5 < tries < LARGEST for k, tries in (first, second)):
        return 1.0
    (a, n), (b, m) = ((round(k), round(tries)) for k, tries in (first, second))
    a, b = min(max(a, 0), n), min(max(b, 0), m)
    hits = a + b
    scale = _log_choose(n + m, hits)
    logs = (_log_choose(m, x) + _log_choose(n, hits - x) - scale for x in range(max(b, hits - n), min(m, hits) + 1))
    return min(1.0, math.fsum(map(math.exp, logs)))


def lower_bound(successes: float, tries: float, z: float = SURE) -> float:
    """Return Wilson's lower confidence bound of a share; 0 for no tries. One-sided 0.1 % by default."""
    if not 1 <= tries < LARGEST or not 0 <= successes <= LARGEST:
        return 0.0
    return wilson_interval(min(successes, tries), round(tries), z)[0]


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
