"""The statistics of the rules: is it a trend, is it more than chance; pure functions, each with its source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def normal_tail(z: float) -> float:
    """P(Z > z) of a standard normal Z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def trend(values: Sequence[float]) -> float:
    """Mann and Kendall's test for a trend: its z, above 0 when the values rise; 0 for fewer than 4.

    Of all pairs, how many rise less how many fall, over the standard deviation of that without a trend, ties counted.
    It asks for no shape and no normal noise, and one outlier moves it little.

    Source: Mann, Econometrica 13 (1945) 245-259; ties as in Kendall, Rank Correlation Methods (1948).
    """
    n = len(values)
    if n < 4:
        return 0.0
    rising = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if not rising or variance <= 0:
        return 0.0
    return (rising - math.copysign(1, rising)) / math.sqrt(variance)


def two_proportions(first: tuple[float, float], second: tuple[float, float]) -> float:
    """z of the pooled test that two independent shares are one, each (successes, tries); above 0: the second is larger.

    Source: e.g. Fleiss, Levin and Paik, Statistical Methods for Rates and Proportions (2003), section 3.1.
    """
    (a, n), (b, m) = first, second
    if not n or not m:
        return 0.0
    pooled = (a + b) / (n + m)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return (b / m - a / n) / error if error else 0.0


def median(values: Sequence[float]) -> float:
    """Of one value or more."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
