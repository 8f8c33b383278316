"""Which labelled examples rubrics were learned from, told by prints of them that a rubric file can hold.

A print is four numbers: of the example (question and answers, in whatever order), of its question, and a SimHash of the
words of each, whose bits differ the less the more words two texts share (Charikar, "Similarity Estimation Techniques
from Rounding Algorithms", STOC 2002: the share of bits that differ is the angle between the sets of words, divided by
pi).  Invariant: a print depends on the example alone: not on the file, the place in it, the label, or the order of the
answers.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from astuner_rubrics.labels import Sample, digest, plain

BITS = 128
NEAR = 19
"""Two examples nearly repeat each other if the SimHashes of their questions differ in at most so many bits, and those
of their answers too: two sets of words of one size that share four fifths of all their words (Jaccard index 0.8) have
an angle of 0.47, and so differ in 19 bits on average."""

_WORD = re.compile(r"\w+")
_HEX = 12
_SIMHASH = BITS // 4
PRINT = re.compile(rf"[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_SIMHASH}}}-[0-9a-f]{{{_SIMHASH}}}")


@dataclass(frozen=True)
class Overlap:
    """How many labels rubrics were learned from."""

    same: int
    """Examples that were learned from."""
    near: int
    """Others that nearly repeat one that was."""
    same_question: int
    """Others with a question that was learned from, and other answers."""


def print_of(sample: Sample) -> str:
    """What tells an example: twelve hexadecimal digits of it, twelve of its question, and the two SimHashes."""
    hashes = "-".join(f"{number:0{_SIMHASH}x}" for number in _simhashes(sample))
    return f"{sample.key[:_HEX]}-{_of_question(sample)}-{hashes}"


def without_known(samples: Sequence[Sample], prints: Sequence[str]) -> tuple[tuple[Sample, ...], Overlap]:
    """The examples that were not learned from, nor nearly repeat one that was; and how many are which.

    :param prints: of the examples that were learned from, as `print_of` makes them.
    """
    parts = [text.split("-") for text in prints]
    keys, asked = {key for key, *_ in parts}, {question for _, question, *_ in parts}
    hashes = {(int(question, 16), int(answers, 16)) for *_, question, answers in parts}
    kept, same, near, same_question = [], 0, 0, 0
    for sample in samples:
        mine = _simhashes(sample)
        if sample.key[:_HEX] in keys:
            same += 1
        elif any(_are_near(mine, other) for other in hashes):
            near += 1
        else:
            kept.append(sample)
            same_question += _of_question(sample) in asked
    return tuple(kept), Overlap(same, near, same_question)


def _of_question(sample: Sample) -> str:
    return digest(plain(sample.question))[:_HEX]


def _are_near(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return all((a ^ b).bit_count() <= NEAR for a, b in zip(one, other, strict=True))


def _simhashes(sample: Sample) -> tuple[int, int]:
    """Of the question, and of all answers together."""
    return _simhash([sample.question]), _simhash(sample.answers)


def _simhash(texts: Sequence[str]) -> int:
    """Each bit as most of the words and pairs of neighbouring words have it."""
    features: set[str] = set()
    for text in texts:
        words = _WORD.findall(text.casefold())
        features.update(words, (f"{one} {two}" for one, two in itertools.pairwise(words)))
    counts = [0] * BITS
    for feature in features:
        number = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=BITS // 8).digest(), "big")
        for bit in range(BITS):
            counts[bit] += 1 if number >> bit & 1 else -1
    return sum(1 << bit for bit, count in enumerate(counts) if count > 0)
