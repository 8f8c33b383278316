"""Which labelled examples rubrics were learned from, told by prints of them that a rubric file can hold.

A print is five numbers: of the example (question and answers, in whatever order), of its question, a SimHash of the
words of each, and of what must be the same to the letter: the numbers, and texts without a word.  The bits of a SimHash
differ the less the more words two texts share (Charikar, "Similarity Estimation Techniques from Rounding Algorithms",
STOC 2002: the share of bits that differ is the angle between the sets of words, divided by pi), so it hardly tells "12
rolls" from "13 rolls", which are two questions.  Invariant: a print depends on the example alone: not on the file, the
place in it, the label, or the order of the answers.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from astuner_rubrics.labels import Sample, digest, plain

BITS = 128
NEAR = 19
"""Two examples nearly repeat each other if the SimHashes of their questions differ in at most so many bits, and those
of their answers too, and their numbers are the same. Two sets of words of one size that share four fifths of all their
words (Jaccard index 0.8) have an angle of 0.47, and so differ in 19 bits on average."""

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_HEX = 12
_SIMHASH = BITS // 4
_LETTER = 4  # few, as numbers (of an account, say) are guessed from a long hash; one pair in 65,536 is taken for equal
PRINT = re.compile(
    rf"[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_SIMHASH}}}-[0-9a-f]{{{_SIMHASH}}}(?:-[0-9a-f]{{{_LETTER}}})?"
)
"""Of older files, prints lack the fifth number: by them, examples with other numbers may count as near."""

_ONES = [bytes(byte >> bit & 1 for byte in range(256)) for bit in range(8)]
"""For each bit, the bytes that have it."""


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
    """What tells an example: hexadecimal digits of it, of its question, the two SimHashes, and of its numbers."""
    words = _words_of(sample)
    hashes = f"{words.question:0{_SIMHASH}x}-{words.answers:0{_SIMHASH}x}-{words.letter}"
    return f"{sample.key[:_HEX]}-{_of_question(sample)}-{hashes}"


def places_of_same(samples: Sequence[Sample], prints: Sequence[str]) -> list[str]:
    """Where the examples stand that were learned from, those that nearly repeat one not among them."""
    keys = {text[:_HEX] for text in prints}
    return [sample.place for sample in samples if sample.key[:_HEX] in keys]


def without_known(samples: Sequence[Sample], prints: Sequence[str]) -> tuple[tuple[Sample, ...], Overlap]:
    """The examples that were not learned from, nor nearly repeat one that was; and how many are which.

    :param prints: of the examples that were learned from, as `print_of` makes them.
    """
    parts = [text.split("-") for text in prints]
    keys, asked = {key for key, *_ in parts}, {question for _, question, *_ in parts}
    learned: dict[str, set[_Words]] = defaultdict(set)
    for _, _, question, answers, *letter in parts:
        learned[letter[0] if letter else ""].add(_Words(int(question, 16), int(answers, 16), *letter))
    kept, same, near, same_question = [], 0, 0, 0
    for sample in samples:
        if sample.key[:_HEX] in keys:
            same += 1
        elif _is_near_one(sample, learned):
            near += 1
        else:
            kept.append(sample)
            same_question += _of_question(sample) in asked
    return tuple(kept), Overlap(same, near, same_question)


class _Words(NamedTuple):
    """What tells whether two examples are near."""

    question: int
    """The SimHash of its words; 0 where it has none."""
    answers: int
    """That of the words of all answers together."""
    letter: str = ""
    """Of what must be the same to the letter; nothing where a print lacks it."""


def _of_question(sample: Sample) -> str:
    return digest(plain(sample.question))[:_HEX]


def _is_near_one(sample: Sample, learned: Mapping[str, Set[_Words]]) -> bool:
    """Whether the example is near one of those, which are kept by what must be the same to the letter."""
    mine = _words_of(sample)
    if any(_are_alike(mine, other) for other in learned.get(mine.letter, ())):
        return True
    return any(
        # nothing without words is near, since what it says instead is not known of these
        mine.question and mine.answers and other.question and other.answers and _are_alike(mine, other)
        for other in learned.get("", ())
    )


def _are_alike(one: _Words, other: _Words) -> bool:
    return (one.question ^ other.question).bit_count() <= NEAR and (one.answers ^ other.answers).bit_count() <= NEAR


def _words_of(sample: Sample) -> _Words:
    letter = digest([_to_the_letter(sample.question), sorted(map(_to_the_letter, sample.answers))])
    return _Words(_simhash([sample.question]), _simhash(sample.answers), letter[:_LETTER])


def _to_the_letter(text: str) -> list[str]:
    """The numbers of a text, as they stand in it; the text itself where it has no word."""
    return _NUMBER.findall(text) if _WORD.search(text) else [plain(text)]


def _simhash(texts: Sequence[str]) -> int:
    """Each bit as most of the words and pairs of neighbouring words have it; 0 where there is no word."""
    features: set[str] = set()
    for text in texts:
        words = _WORD.findall(text.casefold())
        features.update(words, (f"{one} {two}" for one, two in itertools.pairwise(words)))
    size = BITS // 8
    hashes = b"".join(hashlib.blake2b(feature.encode(), digest_size=size).digest() for feature in features)
    found = 0
    for place in range(size):  # the first byte of each hash, the second of each, and so on: counted by `bytes` itself
        column = hashes[place::size]
        for bit, ones in enumerate(_ONES):
            if 2 * column.translate(ones).count(1) > len(features):
                found |= 1 << 8 * (size - 1 - place) + bit
    return found
