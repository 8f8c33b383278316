"""Shared statistics, so that the same episodes give the same figures everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence


def wilson_interval(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion (Wilson 1927); (0, 1) for ``n`` = 0."""
    if n == 0:
        return 0.0, 1.0
    p, zz = successes / n, z * z
    centre = (p + zz / (2 * n)) / (1 + zz / n)
    half = z * math.sqrt(p * (1 - p) / n + zz / (4 * n * n)) / (1 + zz / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 without values."""
    if not values:
        return 0.0
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum exceeds the range of a float, but the mean does not
        return math.fsum(v / len(values) for v in values)


def percent(share: float, digits: int = 0) -> str:
    """Return a share as a percentage for a message, for example ``83 %``."""
    return f"{100 * share:.{digits}f} %"
