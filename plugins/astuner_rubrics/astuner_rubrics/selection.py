"""Select criteria and weights that together reproduce the labels of the training examples.

First, criteria are picked greedily: each pick adds most to the mean credit of the verdicts (`Rule.credit`), and among
equals the most novel one is picked (`coding_rate`). A criterion may be picked again; its weight is the number of picks:
forward selection with replacement, after Caruana, Niculescu-Mizil, Crew and Ksikes, "Ensemble Selection from Libraries
of Models" (ICML 2004). Then single weights are moved to the value with the largest credit while that helps, because
single picks cannot get from 2 : 1 to 4 : 2 : 1.

The diversity of a set of criteria is the coding rate of their vectors, R(Z, eps) = 1/2 log det(I + d / (n eps^2) Z^T Z)
for n unit vectors of d dimensions: the bits required to encode them up to eps. It is small for n copies of one
criterion and large for n different ones. Source: Yu, Chan, You, Song and Ma, "Learning Diverse and Discriminative
Representations via the Principle of Maximal Coding Rate Reduction" (arXiv 2006.08558), section 2.1, in the n x n form,
which has the same determinant (Sylvester) and needs only the cosines. The vectors are embeddings if available,
otherwise the words of each criterion, weighted by rarity.

Invariant: weights are integers, which users can edit, and each selected criterion adds at least `MIN_GAIN`.
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
"""Precision of the encoding; the paper's value."""

_WORD = re.compile(r"\w+")

Gram = NDArray[np.float64]
"""Cosines of all pairs, n x n."""


def gram(vectors: Sequence[Sequence[float]]) -> Gram:
    """Return the cosines of all pairs.

    :raises ValueError: A vector is zero or not finite, or the lengths differ.
    """
    if len({len(vector) for vector in vectors}) == 1:
        array = np.asarray(vectors, dtype=np.float64)
        lengths = np.linalg.norm(array, axis=1, keepdims=True)
        if np.isfinite(lengths).all() and lengths.all():
            return cast(Gram, (array / lengths) @ (array / lengths).T)
    raise ValueError("an embedding is zero, not finite or has a different length than the others")


def gram_of_words(texts: Sequence[str]) -> Gram:
    """Return the cosines of the texts' words. The weight of a word is log((1 + n) / (1 + texts with the word)) + 1."""
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
    """Return the coding rate of the chosen vectors in nats, or 0 for none."""
    n = len(chosen)
    if n == 0:
        return 0.0
    matrix = np.eye(n) + dimensions / (n * EPS * EPS) * cosines[np.ix_(chosen, chosen)]
    return 0.5 * float(np.linalg.slogdet(matrix).logabsdet)


def most_diverse(cosines: Gram, count: int, *, dimensions: int) -> list[int]:
    """Return up to ``count`` indices. Each adds most to the coding rate of the previous ones."""
    chosen: list[int] = []
    while len(chosen) < min(count, len(cosines)):
        left = [i for i in range(len(cosines)) if i not in chosen]
        chosen.append(max(left, key=lambda i: coding_rate(cosines, [*chosen, i], dimensions=dimensions)))
    return chosen


MOST = 10
"""Largest weight to try."""

PATIENCE = 2
"""Number of batches without novelty before proposing ends, and of picks without gain before selection ends."""
MIN_GAIN = 0.001
"""Minimum contribution of a criterion to the mean credit over the training examples."""
_PICKS_PER_RUBRIC = 3
_SWEEPS = 5
_NEW = 1e-3
"""Value of complete novelty compared with the credit. It decides only between equals."""


def select(
    rule: Rule, samples: Sequence[Sample], grades: Sequence[Matrix], cosines: Gram, dimensions: int, max_rubrics: int
) -> dict[int, int]:
    """Return the selected criteria with their weights, in the order of selection.

    :param grades: Grades by sample, criterion and answer, of all candidates.
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
    """Return the weights after moving each to the largest credit, until none moves."""
    if not weights:
        return {}
    found = {c: 2 * w for c, w in weights.items()}  # finer steps between existing weights
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
    """Return 1 for each sample that the criterion alone decides rightly, -1 wrongly, 0 not at all."""
    alone = [(row[criterion], s.worth) for row, s in zip(grades, samples, strict=True)]
    return [1 if rule.is_right(w, v) else -1 if rule.is_wrong(w, v) else 0 for v, w in alone]


def verdicts(grades: Sequence[Matrix], weights: Mapping[int, int]) -> list[tuple[float, ...]]:
    """Return the verdicts of weighted criteria on each sample."""
    kept = list(weights)
    return [overall(tuple(row[c] for c in kept), [weights[c] for c in kept]) for row in grades]


def _credit(rule: Rule, samples: Sequence[Sample], grades: Sequence[Matrix], weights: Mapping[int, int]) -> float:
    said = verdicts(grades, weights)
    return math.fsum(rule.credit(s.worth, v) for s, v in zip(samples, said, strict=True)) / len(samples)


def _novelty(cosines: Gram, chosen: Sequence[int], criterion: int, dimensions: int) -> float:
    """Return the contribution of a criterion to the coding rate of the chosen ones, relative to its own rate."""
    if criterion in chosen:
        return 0.0
    alone = coding_rate(cosines, [criterion], dimensions=dimensions)
    more = coding_rate(cosines, [*chosen, criterion], dimensions=dimensions)
    return (more - coding_rate(cosines, chosen, dimensions=dimensions)) / alone
