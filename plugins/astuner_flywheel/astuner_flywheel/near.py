"""Find texts that nearly repeat earlier ones, by words or by vectors of their meaning.

Word similarity is the Jaccard index of the sets of words and pairs of adjacent words. MinHash with locality-sensitive
hashing (Broder 1997; Indyk and Motwani 1998; datasketch's) proposes candidates in time linear in the number of texts,
and each candidate is compared exactly. Invariant: near texts reach the threshold. A near text is missed with a
probability of about 1 in 100 at the threshold, 1 in 1000 at 0.05 above it, and never if the words are the same.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np

Key = TypeVar("Key")

THRESHOLD = 0.8
"""Default similarity: four fifths of the words and pairs of words are shared."""
MAX_WORDS = 10_000
"""Number of words of a text that are compared."""

_PERMUTATIONS = 128
_MISSING_COSTS = 0.98  # weight of false negatives; the rest is the cost of unnecessary comparisons
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # written without spaces: each character is a word
_WORD = re.compile(rf"\d+(?:[.,]\d+)*|[{_CJK}]|[^\W\d{_CJK}]+|[^\w\s.,;:!?'\"()\[\]{{}}…“”‘’«»、。，！？；：]")


def words(text: str) -> list[str]:
    """Return the words of a text without case, typography and punctuation, with numbers and operators.

    >>> words("Tom’s 1,5 + 2 = ?")
    ['tom', 's', '1,5', '+', '2', '=']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())[:MAX_WORDS]


class NearDuplicates(Generic[Key]):
    """Texts with keys, for finding near-duplicates of new texts. Keys may repeat.

    :param threshold: Similarity at which two texts count as the same, above 0 and at most 1.
    :param numbers_tell_apart: Treat two texts as different if each has a number that the other lacks: "12 apples and 7
        pears" asks for another sum than "12 apples and 8 pears". Leave it off if numbers are incidental, such as order
        numbers and dates of users.
    """

    def __init__(self, threshold: float = THRESHOLD, *, numbers_tell_apart: bool = False) -> None:
        from datasketch import MinHashLSH

        if not 0 < threshold <= 1:
            raise ValueError(f"the threshold must be above 0 and at most 1, not {threshold}")
        self.threshold = threshold
        self._numbers_tell_apart = numbers_tell_apart
        self._lsh = MinHashLSH(0.95 * threshold, _PERMUTATIONS, weights=(1 - _MISSING_COSTS, _MISSING_COSTS))
        self._keys: list[Key] = []
        self._features: list[tuple[frozenset[str], Counter[str]]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key, text: str) -> Key | None:
        """Return the key of the nearest earlier near-duplicate, or add the text and return None."""
        near = self.near(text)
        if near:
            return near[0][0]
        self.keep(key, text)
        return None

    def near(self, text: str) -> list[tuple[Key, float]]:
        """Return the keys of all near texts with their similarity, nearest first, then in order of addition."""
        features, numbers = _features(text)
        found = []
        for i in self._lsh.query(_minhash(features)):
            theirs, their_numbers = self._features[i]
            alike = _jaccard(features, theirs)
            each_has_own = bool(numbers - their_numbers) and bool(their_numbers - numbers)
            if alike >= self.threshold and not (self._numbers_tell_apart and each_has_own):
                found.append((i, alike))
        found.sort(key=lambda pair: (-pair[1], pair[0]))
        return [(self._keys[i], alike) for i, alike in found]

    def keep(self, key: Key, text: str) -> None:
        """Add a text, even if it is near another."""
        features = _features(text)
        self._lsh.insert(len(self._keys), _minhash(features[0]))
        self._keys.append(key)
        self._features.append(features)


class NearVectors:
    """Embedding vectors with keys. Vectors are near if their cosine reaches the threshold.

    Every vector is compared with all earlier ones: a thousand take milliseconds, a hundred thousand about a second
    each.
    """

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"the threshold must be above 0 and at most 1, not {threshold}")
        self.threshold = threshold
        self._keys: list[str] = []
        self._vectors: list[np.ndarray[Any, Any]] = []

    def near(self, vector: Sequence[float]) -> str | None:
        """Return the key of the nearest known vector that is near, or None.

        :raises ValueError: The vector has a different length than earlier ones, or is all zeros.
        """
        import numpy as np

        unit = self._unit(vector)
        if not self._vectors:
            return None
        cosines = np.stack(self._vectors) @ unit
        nearest = int(np.argmax(cosines))
        # an identical vector has a cosine of 1, except for rounding
        return self._keys[nearest] if cosines[nearest] >= self.threshold - 1e-9 else None

    def keep(self, key: str, vector: Sequence[float]) -> None:
        """Add a vector, even if it is near another."""
        unit = self._unit(vector)
        self._keys.append(key)
        self._vectors.append(unit)

    def _unit(self, vector: Sequence[float]) -> np.ndarray[Any, Any]:
        import numpy as np

        unit = np.asarray(vector, dtype=np.float64)
        length = float(np.linalg.norm(unit))
        if not (np.isfinite(length) and length > 0):
            raise ValueError("an embedding is all zeros or has no finite length")
        if self._vectors and unit.shape != self._vectors[0].shape:
            raise ValueError(f"an embedding has {unit.size} numbers, but earlier ones have {self._vectors[0].size}")
        return unit / length


def _features(text: str) -> tuple[frozenset[str], Counter[str]]:
    """Return the words and pairs of words, and the count of each number."""
    found = words(text)
    pairs = {f"{one} {other}" for one, other in itertools.pairwise(found)}
    return frozenset({*found, *pairs}), Counter(word for word in found if word[0].isdigit())


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the Jaccard index from 0 to 1. Two texts without words count as equal."""
    together = len(one | other)
    return len(one & other) / together if together else 1.0


def _minhash(features: frozenset[str]) -> Any:
    from datasketch import MinHash

    minhash = MinHash(_PERMUTATIONS)
    minhash.update_batch([feature.encode("utf-8", "backslashreplace") for feature in features or {""}])
    return minhash
