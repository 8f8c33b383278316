"""Which criteria, with which weights: those that together give the training examples their labels.

First greedily, one pick after the other, each the criterion that adds most to the mean credit of the verdicts
(`Rule.credit`); between criteria that add the same, the one that says something new (`coding_rate`).  A criterion may
be picked again, and its weight is how often it was: forward selection with replacement, after Caruana, Niculescu-Mizil,
Crew and Ksikes, "Ensemble Selection from Libraries of Models" (ICML 2004).  Then one weight after the other is moved to
where the credit is largest, as long as that helps: a pick at a time cannot get from 2 : 1 to 4 : 2 : 1.

How much a set of criteria says that is not the same is the coding rate of their vectors,
R(Z, eps) = 1/2 log det(I + d / (n eps^2) Z^T Z) for n unit vectors of d dimensions: the bits that it takes to write
them down up to eps.  n times the same criterion take few, n different ones many.  Source: Yu, Chan, You, Song and Ma,
"Learning Diverse and Discriminative Representations via the Principle of Maximal Coding Rate Reduction" (arXiv
2006.08558), section 2.1; in the n x n form, which has the same determinant (Sylvester) and needs no more than the
cosines.  The vectors are embeddings where a helper has them, and otherwise the words of each criterion, rare ones
counting more.

Invariant: weights are whole numbers, which a person can edit, and each criterion adds `MIN_GAIN` or it is not there.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from astuner_rubrics.agreement import Rule
from astuner_rubrics.grading import Matrix, overall
from astuner_rubrics.labels import Sample

EPS = 0.5
"""How exactly vectors are written down; the paper's value."""

_WORD = re.compile(r"\w+")

Gram = NDArray[np.float64]
"""The cosine of every two, n x n."""


def gram(vectors: Sequence[Sequence[float]]) -> Gram:
    """:raises ValueError: a vector is zero or not finite, or they are of different lengths."""
    if len({len(vector) for vector in vectors}) == 1:
        array = np.asarray(vectors, dtype=np.float64)
        lengths = np.linalg.norm(array, axis=1, keepdims=True)
        if np.isfinite(lengths).all() and lengths.all():
            return cast(Gram, (array / lengths) @ (array / lengths).T)
    raise ValueError("an embedding is zero, not finite or of another length than the others")


def gram_of_words(texts: Sequence[str]) -> Gram:
    """The cosines of the texts' words, each weighing log((1 + n) / (1 + texts that have it)) + 1."""
    bags = [Counter(_WORD.findall(text.lower())) for text in texts]
    having = Counter(word for bag in bags for word in bag)
    rare = {word: math.log((1 + len(texts)) / (1 + count)) + 1 for word, count in having.items()}
    weights = np.array([[bag[word] * rare[word] for word in having] for bag in bags]).reshape(len(texts), len(having))
    lengths = np.linalg.norm(weights, axis=1, keepdims=True)
    units = weights / np.where(lengths == 0, 1.0, lengths)
    found = units @ units.T
    np.fill_diagonal(found, 1.0)
    return cast(Gram, found)


def coding_rate(cosines: Gram, chosen: Sequence[int], *, dimensions: int) -> float:
    """The coding rate of the chosen ones, in nats; 0 for none."""
    n = len(chosen)
    if n == 0:
        return 0.0
    matrix = np.eye(n) + dimensions / (n * EPS * EPS) * cosines[np.ix_(chosen, chosen)]
    return 0.5 * float(np.linalg.slogdet(matrix).logabsdet)


def most_diverse(cosines: Gram, count: int, *, dimensions: int) -> list[int]:
    """Up to ``count`` of them, each the one that adds most to the coding rate of those before."""
    chosen: list[int] = []
    while len(chosen) < min(count, len(cosines)):
        left = [i for i in range(len(cosines)) if i not in chosen]
        chosen.append(max(left, key=lambda i: coding_rate(cosines, [*chosen, i], dimensions=dimensions)))
    return chosen


MOST = 10
"""The largest weight that is tried."""

PATIENCE = 2
"""Batches that may bring nothing new before proposing ends; picks that may gain nothing before selecting does."""
MIN_GAIN = 0.001
"""A criterion stays if it adds this to the mean credit over the training examples."""
_PICKS_PER_RUBRIC = 3
_SWEEPS = 5
_NEW = 1e-3
"""What saying something entirely new is worth beside the credit: it decides between equals only."""


def select(
    rule: Rule, samples: Sequence[Sample], grades: Sequence[Matrix], cosines: Gram, dimensions: int, max_rubrics: int
) -> dict[int, int]:
    """Choose criteria: those that count, and how much each does, in the order in which they were picked.

    :param grades: sample -> criterion -> answer -> grade, of all candidates.
    """
    count = len(cosines)
    picks: list[int] = []
    credits: list[float] = []
    best_length, best, idle = 0, 0.0, 0
    while count and len(picks) < max_rubrics * _PICKS_PER_RUBRIC and idle < PATIENCE + 1:
        distinct = list(dict.fromkeys(picks))
        able = range(count) if len(distinct) < max_rubrics else distinct
        now = {c: _credit(rule, samples, grades, Counter([*picks, c])) for c in able}
        chosen = max(able, key=lambda c: now[c] + _NEW * _novelty(cosines, distinct, c, dimensions))
        picks.append(chosen)
        credits.append(now[chosen])
        if credits[-1] > best + MIN_GAIN:
            best_length, best, idle = len(picks), credits[-1], 0
        else:
            idle += 1
    return _polished(rule, samples, grades, Counter(picks[:best_length]), max_rubrics)


def _polished(
    rule: Rule, samples: Sequence[Sample], grades: Sequence[Matrix], weights: Mapping[int, int], max_rubrics: int
) -> dict[int, int]:
    """The weights, each moved to where the credit is largest while the others stay, until none moves."""
    if not weights:
        return {}
    found = {c: 2 * w for c, w in weights.items()}  # finer steps between the weights that there are
    best = _credit(rule, samples, grades, found) - MIN_GAIN * len(found)
    for _ in range(_SWEEPS):
        before = best
        for c in range(len(grades[0])):
            for weight in range(MOST + 1):
                tried = {k: w for k, w in {**found, c: weight}.items() if w}
                if not tried or len(tried) > max_rubrics:
                    continue
                worth = _credit(rule, samples, grades, tried) - MIN_GAIN * len(tried)
                if worth > best + 1e-9:
                    found, best = tried, worth
        if best <= before:
            break
    common = math.gcd(*found.values())
    return {c: w // common for c, w in found.items()}


def right(rule: Rule, samples: Sequence[Sample], grades: Sequence[Matrix], criterion: int) -> list[int]:
    """1 for each sample that the criterion alone decides rightly, -1 wrongly, 0 not at all."""
    alone = [(row[criterion], s.worth) for row, s in zip(grades, samples, strict=True)]
    return [1 if rule.is_right(w, v) else -1 if rule.is_wrong(w, v) else 0 for v, w in alone]


def verdicts(grades: Sequence[Matrix], weights: Mapping[int, int]) -> list[tuple[float, ...]]:
    """What weighted criteria say about each sample."""
    kept = list(weights)
    return [overall(tuple(row[c] for c in kept), [weights[c] for c in kept]) for row in grades]


def _credit(rule: Rule, samples: Sequence[Sample], grades: Sequence[Matrix], weights: Mapping[int, int]) -> float:
    said = verdicts(grades, weights)
    return math.fsum(rule.credit(s.worth, v) for s, v in zip(samples, said, strict=True)) / len(samples)


def _novelty(cosines: Gram, chosen: Sequence[int], criterion: int, dimensions: int) -> float:
    """What a criterion adds to the coding rate of those chosen, as a share of what one alone has."""
    if criterion in chosen:
        return 0.0
    alone = coding_rate(cosines, [criterion], dimensions=dimensions)
    more = coding_rate(cosines, [*chosen, criterion], dimensions=dimensions)
    return (more - coding_rate(cosines, chosen, dimensions=dimensions)) / alone
