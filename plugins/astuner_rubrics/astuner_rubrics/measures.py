"""Statistics of a judge: agreement with labels, ties and length bias, each a line of its card.

Statistics are pure functions with their sources. ``verdicts`` and ``labels`` are numbers of the same answers; more is
better. None means that a value does not exist, such as a correlation with a constant. Invariant: a value based on too
few answers is never graded good: it is `unknown`, with the number of answers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from scipy import stats

from astuner.contracts.statistics import wilson_interval
from astuner_rubrics.labels import Mode, Sample


@dataclass(frozen=True)
class Verdict:
    """Verdict of a judge on answers to one question."""

    rewards: tuple[float, ...]
    successes: tuple[bool, ...]


Grade = Literal["good", "care", "bad", "unknown", "info"]

FEWEST = 10
"""Minimum number of answers for a meaningful value."""


@dataclass(frozen=True)
class Limits:
    """Limits at which a value requires care, and at which the judge should not be used."""

    care: float
    bad: float

    @property
    def more_is_better(self) -> bool:
        return self.care > self.bad

    def __str__(self) -> str:
        return f"{'≥' if self.more_is_better else '≤'} {self.care:g}"


@dataclass(frozen=True)
class Measure:
    """A line of the card."""

    name: str
    """Description for people."""
    key: str
    """Key for programs."""
    value: float | None
    interval: tuple[float, float] | None
    n: int
    """Number of verdicts or pairs."""
    limits: Limits | None = None
    """None for values that are reported and not graded."""
    note: str = ""
    """Reason for a missing value, such as ``not measured``."""
    is_difference: bool = False
    """Whether the value is the difference of two shares: its interval decides, and no difference is always good."""

    @property
    def grade(self) -> Grade:
        if self.limits is None:
            return "info"
        if self.value is None or self.n < FEWEST:
            return "unknown"
        if self.is_difference:
            low = self.interval[0] if self.interval else 0.0
            is_care = low > 0 and self.value > self.limits.care
            return "bad" if low > self.limits.bad else "care" if is_care else "good"
        size = self.value if self.limits.more_is_better else -abs(self.value)
        bad, care = (x if self.limits.more_is_better else -x for x in (self.limits.bad, self.limits.care))
        return "bad" if size < bad else "care" if size < care else "good"


AGREEMENT = Limits(care=0.8, bad=0.65)
FLIPS = Limits(care=0.1, bad=0.3)
LENGTH = Limits(care=0.3, bad=0.6)
RISES = Limits(care=0.2, bad=0.5)
CONSISTENCY = Limits(care=0.9, bad=0.7)
SUCCESSES = Limits(care=0.05, bad=0.3)
NOISE = Limits(care=0.05, bad=1.0)
"""Noise alone never disqualifies a judge, because its cost shows in the agreement."""
ABSTENTIONS = Limits(care=0.05, bad=0.3)


T = TypeVar("T")

DRAWS = 500
"""Number of bootstrap resamples."""


def concordance(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """Return the probability that the better of two differently labeled answers gets the better verdict (ties: half).

    With two labels it is the area under the ROC curve: Hanley and McNeil, Radiology 143 (1982) 29-36.
    """
    differ = _pairs(len(labels)) - _tied(labels)
    if not differ:
        return None
    tau = kendall_tau_b(verdicts, labels) or 0.0  # which is (right - wrong) / sqrt(differ * untied verdicts)
    return round(0.5 + 0.5 * tau * math.sqrt((_pairs(len(verdicts)) - _tied(verdicts)) / differ), 12)


def tied_share(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """Return the share of differently labeled pairs with equal verdicts."""
    differ = _pairs(len(labels)) - _tied(labels)
    return (_tied(verdicts) - _tied(list(zip(verdicts, labels, strict=True)))) / differ if differ else None


def _pairs(n: int) -> int:
    return math.comb(n, 2)


def _tied(values: Sequence[Hashable]) -> int:
    """Return the number of pairs of equal values."""
    return sum(map(_pairs, Counter(values).values()))


def kendall_tau_b(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """Return the agreement of two orders with ties (Kendall, Biometrika 33 (1945) 239-251)."""
    if not (_varies(verdicts) and _varies(labels)):
        return None
    return float(stats.kendalltau(verdicts, labels).statistic)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation; ties have mean ranks (Spearman, American Journal of Psychology 15 (1904) 72-101)."""
    return float(stats.spearmanr(a, b).statistic) if _varies(a) and _varies(b) else None


def _varies(values: Sequence[float]) -> bool:
    return len(set(values)) > 1


def partial_spearman(a: Sequence[float], b: Sequence[float], given: Sequence[float]) -> float | None:
    """Return the rank correlation of a and b given a third variable, or 0 if that determines one of them.

    Formula: (r_ab - r_ac r_bc) / sqrt((1 - r_ac^2)(1 - r_bc^2)). Source: Yule, Proceedings of the Royal Society A 79
    (1907) 182-193, with Spearman's ranks.
    """
    ab, ac, bc = spearman(a, b), spearman(a, given), spearman(b, given)
    if ab is None:
        return None
    ac, bc = ac or 0.0, bc or 0.0  # a constant explains nothing
    left = (1 - ac * ac) * (1 - bc * bc)
    return (ab - ac * bc) / math.sqrt(left) if left > 1e-9 else 0.0


def kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> float | None:
    """Return the agreement on classes beyond chance, (p_o - p_e) / (1 - p_e).

    Source: Cohen, Educational and Psychological Measurement 20 (1960) 37-46.
    """
    n = len(pairs)
    if not n:
        return None
    one, other = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    observed = sum(a == b for a, b in pairs) / n
    expected = sum(one[name] * other[name] for name in one) / (n * n)
    return (observed - expected) / (1 - expected) if expected < 1 else None


def bootstrap(
    items: Sequence[T], statistic: Callable[[Sequence[T]], float | None], *, seed: int, draws: int = DRAWS
) -> tuple[float, float] | None:
    """Return a 95 % percentile interval of resamples with replacement. Resamples without a value do not count.

    Return None for fewer than two items or if most resamples have no value. Source: Efron and Tibshirani, An
    Introduction to the Bootstrap (1993), chapter 13.
    """
    if len(items) < 2:
        return None
    rng = random.Random(seed)
    found = [v for v in (statistic(rng.choices(items, k=len(items))) for _ in range(draws)) if v is not None]
    if len(found) < draws / 2:
        return None
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Judged:
    """A sample with the judge's verdict."""

    sample: Sample
    verdict: Verdict

    def signs(self) -> list[tuple[int, int]]:
        """Return (label, verdict) of every pair of answers: 1, 0 or -1 for which of the two is better."""
        worth, rewards = self.sample.worth, self.verdict.rewards
        pairs = itertools.combinations(range(len(worth)), 2)
        return [(_sign(worth[i] - worth[j]), _sign(rewards[i] - rewards[j])) for i, j in pairs]


Statistic = Callable[[Sequence[float], Sequence[float]], float | None]


def agreement(mode: Mode, judged: Sequence[Judged], seed: int) -> list[Measure]:
    """Return measures of agreement. The first is the same for all modes and decides the verdict.

    It is the probability that the better of two answers gets the better verdict; ties count half, chance is 0.5.
    """
    if mode is Mode.POINTWISE:
        return _of_scores(judged, seed)
    each = [c for j in judged if (c := concordance(j.verdict.rewards, j.sample.worth)) is not None]
    signs = [sign for one in judged for sign in one.signs()]
    name = "agreement: the better answer gets the better verdict"
    if mode is Mode.PAIRWISE:
        found = [share_of(name, "concordance", each, AGREEMENT)]
        right = [label == verdict for label, verdict in signs]
        found.append(share_of("accuracy (ties count if the label is a tie)", "accuracy", right))
        found.append(_bootstrapped("Cohen's kappa (first, second, tie)", "kappa", signs, kappa, seed))
    else:
        found = [_bootstrapped(name, "concordance", each, mean_of, seed, AGREEMENT)]
        taus = [t for j in judged if (t := kendall_tau_b(j.verdict.rewards, j.sample.worth)) is not None]
        found.append(_bootstrapped("Kendall's tau-b per list, mean", "kendall_tau_b", taus, mean_of, seed))
        found.append(share_of("best answer ranked first", "best_first", [_is_best_first(j) for j in judged]))
    different = [verdict == 0 for label, verdict in signs if label]
    equal = [verdict == 0 for label, verdict in signs if not label]
    found.append(share_of("ties between different labels", "ties", different))
    if equal:
        found.append(share_of("ties between equal labels", "ties_right", equal))
    return found


def length_bias(mode: Mode, judged: Sequence[Judged], seed: int) -> Measure:
    """Return the rank correlation of verdict and length given the label, within samples that have several answers."""
    rows = [_lengths(j, centred=mode is not Mode.POINTWISE) for j in judged]

    def correlation(items: Sequence[list[tuple[float, float, float]]]) -> float | None:
        flat = [row for rows in items for row in rows]
        if not flat:
            return None
        rewards, lengths, worth = (list(column) for column in zip(*flat, strict=True))
        return partial_spearman(rewards, lengths, worth)

    found = _bootstrapped(
        "length: correlation with the verdict, given the label", "length_correlation", rows, correlation, seed, LENGTH
    )
    return replace(found, note="positive: the judge prefers longer answers")


def _of_scores(judged: Sequence[Judged], seed: int) -> list[Measure]:
    pairs = [(j.verdict.rewards[0], j.sample.worth[0]) for j in judged]

    def of(statistic: Statistic) -> Callable[[Sequence[tuple[float, float]]], float | None]:
        return lambda items: statistic([a for a, _ in items], [b for _, b in items])

    labels = sorted({b for _, b in pairs})
    name = "agreement: the better answer gets the better verdict" + (" (AUC)" if len(labels) == 2 else "")
    found = [_bootstrapped(name, "concordance", pairs, of(concordance), seed, AGREEMENT)]
    if len(labels) == 2:
        yes = [(j.verdict.successes[0], j.sample.worth[0] == labels[1]) for j in judged]
        found.append(share_of("accuracy of success", "accuracy", [a == b for a, b in yes]))
        found.append(_bootstrapped("Cohen's kappa of success", "kappa", yes, kappa, seed))
    else:
        found.append(_bootstrapped("Spearman's rank correlation", "spearman", pairs, of(spearman), seed))
        found.append(_bootstrapped("Kendall's tau-b", "kendall_tau_b", pairs, of(kendall_tau_b), seed))
    found.append(_bootstrapped("ties between different labels", "ties", pairs, of(tied_share), seed))
    return found


def _is_best_first(one: Judged) -> bool:
    """Return whether the answers ranked first by the judge are among those ranked first by the label."""
    rewards, worth = one.verdict.rewards, one.sample.worth
    return all(w == max(worth) for r, w in zip(rewards, worth, strict=True) if r == max(rewards))


def _lengths(one: Judged, *, centred: bool) -> list[tuple[float, float, float]]:
    """Return (verdict, length, label) of each answer; centered: as ranks in the sample minus their mean.

    A preference states which answer is better and not by how much, so only ranks of verdicts are used.
    """
    columns = [list(one.verdict.rewards), [float(len(a)) for a in one.sample.answers], list(one.sample.worth)]
    if centred:
        columns = [list(stats.rankdata(column) - (len(column) + 1) / 2) for column in columns]
    return list(zip(*columns, strict=True))


def _bootstrapped(
    name: str, key: str, items: Sequence[object], statistic: Callable[..., float | None], seed: int,
    limits: Limits | None = None,
) -> Measure:  # fmt: skip
    value = statistic(items) if items else None
    return Measure(name, key, value, bootstrap(items, statistic, seed=seed), len(items), limits)


def share_of(name: str, key: str, outcomes: Sequence[float], limits: Limits | None = None) -> Measure:
    """Return the mean of outcomes from 0 to 1 with Wilson's interval."""
    n = len(outcomes)
    return Measure(name, key, mean_of(outcomes), wilson_interval(math.fsum(outcomes), n) if n else None, n, limits)


def excess(name: str, key: str, tried: Sequence[float], baseline: Sequence[float], limits: Limits) -> Measure:
    """Return how much more often an event occurs than in a baseline, with the interval of the difference of two shares.

    Source: method 10 of Newcombe, Statistics in Medicine 17 (1998) 873-890, with Wilson's intervals.
    """
    n = min(len(tried), len(baseline))
    if not n:
        return Measure(name, key, None, None, n, limits, is_difference=True)
    p, q = math.fsum(tried) / len(tried), math.fsum(baseline) / len(baseline)
    low_p, high_p = wilson_interval(math.fsum(tried), len(tried))
    low_q, high_q = wilson_interval(math.fsum(baseline), len(baseline))
    interval = (p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q))
    return Measure(name, key, p - q, interval, n, limits, is_difference=True)


def sign_test(ways: Sequence[int]) -> float:
    """Return the two-sided p-value of the exact sign test. Values of 0 are ties and do not count.

    Source: Dixon and Mood, Journal of the American Statistical Association 41 (1946) 557-566.
    """
    up, down = sum(way > 0 for way in ways), sum(way < 0 for way in ways)
    return float(stats.binomtest(up, up + down).pvalue) if up + down else 1.0


def holm(p_values: Sequence[float], error_rate: float) -> list[bool]:
    """Return which hypotheses are rejected, with at most this probability that any rejected one is true.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979) 65-70.
    """
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > error_rate / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return math.fsum(values) / len(values) if values else None


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
