"""How much a set of criteria says that is not the same: the coding rate of their vectors.

R(Z, eps) = 1/2 log det(I + d / (n eps^2) Z^T Z) for n unit vectors of d dimensions: the bits that it takes to write
them down up to eps.  n times the same criterion take few, n different ones many.  Source: Yu, Chan, You, Song and Ma,
"Learning Diverse and Discriminative Representations via the Principle of Maximal Coding Rate Reduction" (arXiv
2006.08558), section 2.1; in the n x n form, which has the same determinant (Sylvester) and needs no more than the
cosines.

The vectors are embeddings where a helper has them, and otherwise the words of each criterion, rare ones counting more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

EPS = 0.5
"""How exactly vectors are written down; the paper's value."""

_WORD = re.compile(r"\w+")

Gram = tuple[tuple[float, ...], ...]
"""The cosine of every two."""


def gram(vectors: Sequence[Sequence[float]]) -> Gram:
    """:raises ValueError: a vector is zero or not finite, or they are of different lengths."""
    units = []
    for vector in vectors:
        length = math.hypot(*vector)
        if not math.isfinite(length) or length == 0 or len(vector) != len(vectors[0]):
            raise ValueError("an embedding is zero, not finite or of another length than the others")
        units.append([x / length for x in vector])
    return tuple(tuple(math.fsum(map(float.__mul__, a, b)) for b in units) for a in units)


def gram_of_words(texts: Sequence[str]) -> Gram:
    """The cosines of the texts' words, each weighing log((1 + n) / (1 + texts that have it)) + 1."""
    bags = [Counter(_WORD.findall(text.lower())) for text in texts]
    having = Counter(word for bag in bags for word in bag)
    rare = {word: math.log((1 + len(texts)) / (1 + count)) + 1 for word, count in having.items()}
    units = []
    for bag in bags:
        weights = {word: count * rare[word] for word, count in bag.items()}
        length = math.sqrt(math.fsum(w * w for w in weights.values())) or 1.0
        units.append({word: w / length for word, w in weights.items()})
    return tuple(
        tuple(math.fsum(w * b.get(word, 0.0) for word, w in a.items()) if a is not b else 1.0 for b in units)
        for a in units
    )


def coding_rate(cosines: Gram, chosen: Sequence[int], *, dimensions: int) -> float:
    """The coding rate of the chosen ones, in nats; 0 for none."""
    n = len(chosen)
    if n == 0:
        return 0.0
    a = dimensions / (n * EPS * EPS)
    matrix = [[a * cosines[i][j] + (i == j) for j in chosen] for i in chosen]
    return 0.5 * _log_det(matrix)


def most_diverse(cosines: Gram, count: int, *, dimensions: int) -> list[int]:
    """Up to ``count`` of them, each the one that adds most to the coding rate of those before."""
    chosen: list[int] = []
    left = list(range(len(cosines)))
    while left and len(chosen) < count:
        best = max(left, key=lambda i: coding_rate(cosines, [*chosen, i], dimensions=dimensions))
        chosen.append(best)
        left.remove(best)
    return chosen


def _log_det(matrix: list[list[float]]) -> float:
    """Of a symmetric positive definite matrix, by Cholesky's decomposition."""
    n, total = len(matrix), 0.0
    rows: list[list[float]] = []
    for i in range(n):
        row: list[float] = []
        for j in range(i + 1):
            rest = matrix[i][j] - math.fsum(x * y for x, y in zip(row, rows[j] if j < i else row, strict=False))
            row.append(math.sqrt(max(rest, 1e-12)) if i == j else rest / rows[j][j])
        rows.append(row)
        total += 2 * math.log(row[i])
    return total
