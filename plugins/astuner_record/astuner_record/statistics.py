"""Statistics of paired values: intervals and tests, each a pure function with its source.

``differences`` are b - a, one per task. Functions that draw random numbers take a seed and return the same result for
the same seed and numpy version.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astuner.contracts.statistics import wilson_interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DRAWS = 10_000
"""Resamples of a bootstrap, and random sign vectors of a permutation test."""
_EXACT_UP_TO = 16
"""Pairs up to which all 2^n sign vectors are enumerated."""
_AT_ONCE = 1 << 20
"""Random numbers drawn per batch."""


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class PairedTable:
    """Outcomes of the same n tasks on two sides: number that succeeded on both, on one only, or on neither."""

    both: int
    only_a: int
    only_b: int
    neither: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> PairedTable:
        """Count pairs.

        :param pairs: (success of a, success of b) of each task.
        """
        return cls(
            both=sum(a and b for a, b in pairs),
            only_a=sum(a and not b for a, b in pairs),
            only_b=sum(b and not a for a, b in pairs),
            neither=sum(not a and not b for a, b in pairs),
        )

    @property
    def n(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def agreement(self) -> float:
        """Share of pairs with equal outcomes on both sides; 0 without pairs."""
        return (self.both + self.neither) / self.n if self.n else 0.0


def mcnemar_exact(table: PairedTable) -> float:
    """Return the two-sided p-value of McNemar's exact test of equal change in both directions.

    p = min(1, 2 P(X <= min(only_a, only_b))), X ~ Binomial(only_a + only_b, 1/2).

    Source: McNemar, Psychometrika 12 (1947) 153-157; the exact conditional form as in Fagerland, Lydersen and Laake,
    BMC Medical Research Methodology 13:91 (2013).
    """
    changed, fewer = table.only_a + table.only_b, min(table.only_a, table.only_b)
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**changed))


def paired_success_interval(table: PairedTable) -> Interval:
    """Return the 95 % interval of the difference b - a of two success rates on the same tasks.

    Combines Wilson intervals of both rates with their correlation phi. The interval stays within [-1, 1] and has a
    positive width even if no pair changes.

    Source: method 10 of Newcombe, Statistics in Medicine 17 (1998) 2635-2650, with its correction of phi.
    """
    n = table.n
    if n == 0:
        return Interval(-1.0, 1.0)
    of_a, of_b = table.both + table.only_a, table.both + table.only_b
    a, b = of_a / n, of_b / n
    low_a, high_a = wilson_interval(of_a, n)
    low_b, high_b = wilson_interval(of_b, n)
    phi = _phi(table)
    down, up = (b - low_b, high_a - a), (high_b - b, a - low_a)
    return Interval(b - a - _joined(*down, phi), b - a + _joined(*up, phi))


def _phi(table: PairedTable) -> float:
    """Return the correlation of two outcomes, shrunk towards 0 if it is positive."""
    n = table.n
    margins = math.prod(
        (table.both + table.only_a, n - table.both - table.only_a, table.both + table.only_b,
         n - table.both - table.only_b)
    )  # fmt: skip
    if margins == 0:
        return 0.0
    product = float(table.both * table.neither - table.only_a * table.only_b)
    if product > 0:
        product = max(0.0, product - n / 2)
    return product / math.sqrt(margins)


def _joined(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))


def bootstrap_interval(differences: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> Interval:
    """Return the 95 % percentile interval of the mean difference. Tasks are resampled, pairs stay together.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    if not differences:
        return Interval(-math.inf, math.inf)
    import numpy as np

    rng, values = np.random.default_rng(seed), np.asarray(differences, float)
    means: list[float] = []
    for n in _batches(draws, values.size):
        means += rng.choice(values, (n, values.size)).mean(axis=1).tolist()
    return _percentiles(means)


def _batches(draws: int, size: int) -> list[int]:
    """Split ``draws`` draws of ``size`` numbers into batch sizes."""
    most = max(1, _AT_ONCE // size)
    return [min(most, draws - done) for done in range(0, draws, most)]


def crossed_bootstrap_interval(
    b: Sequence[Sequence[float]], a: Sequence[Sequence[float]], *, seed: int = 0, draws: int = DRAWS
) -> Interval:
    """Return `crossed_bootstrap_intervals` for a single measure."""
    return crossed_bootstrap_intervals([b], [a], seed=seed, draws=draws)[0]


def crossed_bootstrap_intervals(
    b: Sequence[Sequence[Sequence[float]]],
    a: Sequence[Sequence[Sequence[float]]],
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> list[Interval]:
    """Return the 95 % percentile interval of mean(b) - mean(a) for each measure, with several runs on each side.

    Every draw resamples the runs of ``a``, the runs of ``b`` and the tasks independently: all runs see the same tasks,
    so the two factors are crossed. With one run on each side, only tasks are resampled.

    Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1 (2007) 386-411.

    :param a: [measure][run][task] -> mean, with the tasks in the same order in all runs of both sides.
    """
    if not a[0] or not b[0] or not len(a[0][0]):
        return [Interval(-math.inf, math.inf)] * len(a)
    import numpy as np

    rng, sides = np.random.default_rng(seed), [np.asarray(side, float) for side in (a, b)]
    means: list[list[float]] = [[] for _ in a]
    for n in _batches(draws, len(a[0][0])):
        tasks = _drawn(rng, n, len(a[0][0]))
        runs = [_drawn(rng, n, side.shape[1]) for side in sides]
        for of_measure, *both in zip(means, *sides, strict=True):
            of_a, of_b = (((of @ m) * tasks).sum(axis=1) / m.size for of, m in zip(runs, both, strict=True))
            of_measure += (of_b - of_a).tolist()
    return [_percentiles(found) for found in means]


def _drawn(rng: np.random.Generator, draws: int, size: int) -> NDArray[np.int64]:
    """Return how many times each of ``size`` items is drawn in ``size`` tries, for each draw."""
    import numpy as np

    places = rng.integers(size, size=(draws, size)) + size * np.arange(draws)[:, None]
    return np.bincount(places.ravel(), minlength=draws * size).reshape(draws, size)


def _percentiles(means: Sequence[float]) -> Interval:
    """Interpolate linearly (type 7 of Hyndman and Fan, The American Statistician 50 (1996) 361-365)."""
    low, *_, high = statistics.quantiles(means, n=40, method="inclusive")
    return Interval(low, high)


def sign_flip_test(differences: Sequence[float], *, seed: int = 0, draws: int = DRAWS) -> float:
    """Return the two-sided p-value of the paired permutation test.

    If both sides were equal, each difference could have had the other sign. The p-value is the share of sign vectors
    whose mean is at least as far from 0. Up to 16 differing pairs, all 2^n sign vectors are enumerated. Otherwise
    random ones are drawn, and p = (1 + hits) / (1 + draws), which is never 0.

    Source: Fisher, The Design of Experiments (1935), section 21; for random signs Phipson and Smyth, Statistical
    Applications in Genetics and Molecular Biology 9:39 (2010).
    """
    sizes = [abs(d) for d in differences if d]  # a difference of 0 has no sign
    if not sizes:
        return 1.0
    seen = abs(math.fsum(differences))
    reached = seen - 1e-9 * math.fsum(sizes)  # tolerance for rounding: the order of summation differs
    if len(sizes) <= _EXACT_UP_TO:
        return _all_signs(sizes, reached)
    import numpy as np

    rng, steps = np.random.default_rng(seed), np.asarray(sizes)
    drawn = (abs(rng.choice((-1.0, 1.0), (n, steps.size)) @ steps) for n in _batches(draws, steps.size))
    return (1 + sum(int((sums >= reached).sum()) for sums in drawn)) / (1 + draws)


def _all_signs(sizes: Sequence[float], reached: float) -> float:
    sums = [0.0]
    for size in sizes:
        sums = [s + sign * size for s in sums for sign in (1.0, -1.0)]
    return sum(abs(s) >= reached for s in sums) / len(sums)


def cohens_kappa(table: PairedTable) -> float | None:
    """Return the agreement of two judges beyond chance: 1 is perfect, 0 is the agreement expected by chance.

    kappa = (p_o - p_e) / (1 - p_e). None if both judges always give the same constant answer.

    Source: Cohen, Educational and Psychological Measurement 20 (1960) 37-46.
    """
    if table.n == 0:
        return None
    yes_a, yes_b = (table.both + table.only_a) / table.n, (table.both + table.only_b) / table.n
    chance = yes_a * yes_b + (1 - yes_a) * (1 - yes_b)
    return None if chance >= 1 else (table.agreement - chance) / (1 - chance)


def spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n - 1), or None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None
