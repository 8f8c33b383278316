"""Statistics of verdicts and labels, each a pure function with its source.

``verdicts`` and ``labels`` are numbers of the same answers, more is better.  None where a number does not exist, such
as the correlation with something that never changes.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")

DRAWS = 500
"""Resamples of a bootstrap."""


def concordance(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """How likely the better of two answers with different labels gets the better verdict; a tie counts half.

    With two labels it is the area under the ROC curve: Hanley and McNeil, Radiology 143 (1982) 29-36.
    """
    more, less, tied = _pairs(verdicts, labels)
    pairs = more + less + tied
    return (more + tied / 2) / pairs if pairs else None


def kendall_tau_b(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """(C - D) / sqrt((n0 - n1)(n0 - n2)): agreement of two orders, ties in either allowed for.

    Source: Kendall, Biometrika 33 (1945) 239-251.
    """
    more, less, _ = _pairs(verdicts, labels)
    n0 = math.comb(len(labels), 2)
    free = [n0 - sum(math.comb(count, 2) for count in Counter(values).values()) for values in (verdicts, labels)]
    return (more - less) / math.sqrt(free[0] * free[1]) if all(free) else None


def tied_share(verdicts: Sequence[float], labels: Sequence[float]) -> float | None:
    """The share of pairs with different labels whose verdicts are the same."""
    more, less, tied = _pairs(verdicts, labels)
    return tied / (more + less + tied) if more + less + tied else None


def _pairs(verdicts: Sequence[float], labels: Sequence[float]) -> tuple[int, int, int]:
    """Pairs with different labels whose better one has the better, the worse or the same verdict."""
    by_label: dict[float, list[float]] = defaultdict(list)
    for verdict, label in zip(verdicts, labels, strict=True):
        by_label[label].append(verdict)
    levels = [sorted(by_label[label]) for label in sorted(by_label)]
    more = less = tied = 0
    for high in range(1, len(levels)):
        for low in levels[:high]:
            for verdict in levels[high]:
                below, upto = bisect.bisect_left(low, verdict), bisect.bisect_right(low, verdict)
                more, tied, less = more + below, tied + upto - below, less + len(low) - upto
    return more, less, tied


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The correlation of ranks, ties at their mean rank.

    Source: Spearman, American Journal of Psychology 15 (1904) 72-101.
    """
    return _pearson(ranks(a), ranks(b))


def partial_spearman(a: Sequence[float], b: Sequence[float], given: Sequence[float]) -> float | None:
    """The correlation of ranks of a and b beyond what both owe to a third:
    (r_ab - r_ac r_bc) / sqrt((1 - r_ac^2)(1 - r_bc^2)); 0 where the third says everything about one of them.

    Source: Yule, Proceedings of the Royal Society A 79 (1907) 182-193, with Spearman's ranks.
    """
    ab, ac, bc = spearman(a, b), spearman(a, given), spearman(b, given)
    if ab is None:
        return None
    ac, bc = ac or 0.0, bc or 0.0  # what never changes explains nothing
    left = (1 - ac * ac) * (1 - bc * bc)
    return (ab - ac * bc) / math.sqrt(left) if left > 1e-9 else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    order = sorted(values)
    place = {v: (bisect.bisect_left(order, v) + 1 + bisect.bisect_right(order, v)) / 2 for v in set(values)}
    return [place[v] for v in values]


def _pearson(a: Sequence[float], b: Sequence[float]) -> float | None:
    n = len(a)
    if n < 2:
        return None
    mean_a, mean_b = math.fsum(a) / n, math.fsum(b) / n
    cross = math.fsum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = math.fsum((x - mean_a) ** 2 for x in a) * math.fsum((y - mean_b) ** 2 for y in b)
    return max(-1.0, min(1.0, cross / math.sqrt(spread))) if spread > 1e-12 else None


def kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> float | None:
    """Agreement on classes beyond chance, (p_o - p_e) / (1 - p_e).

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
    """A 95 % percentile interval: items are drawn with replacement; draws without the statistic do not count.

    None where there are fewer than two items, or most draws have none.  Source: Efron and Tibshirani, An Introduction
    to the Bootstrap (1993), chapter 13.
    """
    if len(items) < 2:
        return None
    rng = random.Random(seed)
    found = sorted(v for v in (statistic(rng.choices(items, k=len(items))) for _ in range(draws)) if v is not None)
    if len(found) < draws / 2:
        return None
    return quantile(found, 0.025), quantile(found, 0.975)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between neighbours (type 7 of Hyndman and Fan, The American Statistician 50 (1996) 361-365)."""
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
