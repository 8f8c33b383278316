"""Labelled examples: questions with answers, and what a person says they are worth; and which were learned from.

One JSON object per line, in one of three modes: an answer with a score, two answers of which one is preferred, or
several in an order.  Invariant: whatever the mode, a `Sample` has one number for each of its answers, and more is
better; what compares answers looks at those numbers only.

A rubric file holds prints of the examples that it was learned from, five numbers each: of the example (question and
answers, in whatever order), of its question, a SimHash of the words of each, and of what must be the same to the
letter: the numbers, and texts without a word.  The bits of a SimHash differ the less the more words two texts share
(Charikar, "Similarity Estimation Techniques from Rounding Algorithms", STOC 2002: the share of bits that differ is the
angle between the sets of words, divided by pi), so it hardly tells "12 rolls" from "13 rolls", which are two questions.
Invariant: a print depends on the example alone: not on the file, the place in it, the label, or the order of the
answers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from astuner.contracts.errors import DataError
from astuner_http.strict_json import parse_json

MAX_BYTES = 64 << 20
"""A longer file is refused: labels are few, and each is shown to a model."""
MAX_ANSWERS = 26
_SHOWN_ERRORS = 10

_QUESTION = ("question", "query", "prompt", "main_query", "input")
_ANSWER = ("answer", "response", "output", "completion")
_SCORE = ("score", "label", "rating", "reward")
_ANSWERS = ("answers", "responses", "candidates", "outputs")
_PREFERRED = ("preferred", "preference", "winner")
_RANKS = ("ranks", "rank", "ranking")
_REFERENCE = ("reference", "reference_answer", "gold")
_LABELS = (*_SCORE, *_PREFERRED, *_RANKS, "chosen")

LAYOUTS = """\
{"question": "…", "answer": "…", "score": 3}
{"question": "…", "answers": ["…", "…"], "preferred": 0}            0, 1 or "tie"
{"question": "…", "answers": ["…", "…", "…"], "ranks": [2, 1, 3]}   1 is the best; equal ranks are a tie"""


class Mode(str, Enum):
    """What a label says."""

    POINTWISE = "pointwise"
    """How good one answer is."""
    PAIRWISE = "pairwise"
    """Which of two answers is better."""
    LISTWISE = "listwise"
    """The order of several answers."""


@dataclass(frozen=True)
class Sample:
    """One labelled example."""

    place: str
    """``samples.jsonl:3``."""
    question: str
    answers: tuple[str, ...]
    worth: tuple[float, ...]
    """One for each answer, more is better: the score; 1, 0 or 0.5; or the negative rank."""
    reference: str | None = None
    """The right answer, for judges that compare with one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same for the same question and answers in whatever order; labels and spaces do not count."""
        return digest([plain(self.question), sorted(plain(a) for a in self.answers)])

    def by_answer(self) -> dict[str, float]:
        return {plain(a): w for a, w in zip(self.answers, self.worth, strict=True)}


@dataclass(frozen=True)
class Labels:
    """All examples of a file, of one mode."""

    name: str
    sha256: str
    mode: Mode
    samples: tuple[Sample, ...]
    repeated: tuple[str, ...] = ()
    """Places of lines that say what an earlier one says; they are left out."""


def digest(value: Any) -> str:
    """A hash of plain data, the same on every machine."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(text: str) -> str:
    """A text with its white space made one."""
    return " ".join(text.split())


def read_labels(path: Path) -> Labels:
    """Read a file of labelled examples.

    :raises DataError: it cannot be read, has lines that are no examples (each is named), or mixes modes.
    """
    raw = _bytes(path)
    problems: list[str] = []
    found: list[tuple[Mode, Sample]] = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            place = f"{path.name}:{number}"
            try:
                found.append(_sample(parse_json(line), place))
            except ValueError as e:
                problems.append(f"{path}:{number}: {e}")
    if problems:
        more = f"\n… and {len(problems) - _SHOWN_ERRORS} more" if len(problems) > _SHOWN_ERRORS else ""
        raise DataError("\n".join(problems[:_SHOWN_ERRORS]) + more)
    if not found:
        raise DataError(f"{path}: there is no example in it; one JSON object per line, laid out as one of:\n{LAYOUTS}")
    modes = Counter(mode for mode, _ in found)
    if len(modes) > 1:
        each = [
            f"{count} {mode.value} (first {next(s.place for m, s in found if m is mode)})"
            for mode, count in modes.most_common()
        ]
        raise DataError(
            f"{path}: its lines are of different kinds: {', '.join(each)}; a score, a preference and an order cannot "
            "be compared with each other, so keep each kind in a file of its own"
        )
    samples, repeated = _distinct([sample for _, sample in found])
    return Labels(path.name, hashlib.sha256(raw).hexdigest(), found[0][0], samples, repeated)


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path}: {path.stat().st_size >> 20} MiB are more than the {MAX_BYTES >> 20} MiB that are read; "
                f"take some of its lines: shuf -n 200 {path.name} > few.jsonl"
            )
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from None


def _distinct(samples: list[Sample]) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    seen: set[str] = set()
    kept, repeated = [], []
    for sample in samples:
        key = digest([sample.key, sorted(sample.by_answer().items())])
        if key in seen:
            repeated.append(sample.place)
        else:
            kept.append(sample)
        seen.add(key)
    return tuple(kept), tuple(repeated)


def _sample(row: Mapping[str, Any], place: str) -> tuple[Mode, Sample]:
    """:raises ValueError: it is none, and why."""
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping) and not any(name in row for name in _LABELS):
        row = {**metadata, **row}  # a task of a task reader: everything but the question is below metadata
    question = _text(row, _QUESTION)
    if question is None:
        raise ValueError(f"has no question ({' or '.join(_QUESTION)})")
    mode, answers, worth = _labelled(row)
    if not question.strip():
        raise ValueError("its question is empty")
    reference = _text(row, _REFERENCE)
    extra = dict(metadata) if isinstance(metadata, Mapping) else {}
    return mode, Sample(place, question, answers, worth, reference, extra)


def _labelled(row: Mapping[str, Any]) -> tuple[Mode, tuple[str, ...], tuple[float, ...]]:
    """The label in whichever of its layouts; which they are is decided by the fields that are there."""
    if "chosen" in row or "rejected" in row:
        chosen, rejected = (_text(row, (name,)) for name in ("chosen", "rejected"))
        if chosen is None or rejected is None:
            raise ValueError("chosen and rejected are both needed")
        return Mode.PAIRWISE, _answers([chosen, rejected]), (1.0, 0.0)
    listed = _value(row, _ANSWERS)
    if listed is None:
        answer, score = _text(row, _ANSWER), _value(row, _SCORE)
        if answer is None:
            raise ValueError(f"has neither an answer ({' or '.join(_ANSWER)}) nor answers; the layouts are:\n{LAYOUTS}")
        if score is None:
            raise ValueError(f"has an answer without a score ({' or '.join(_SCORE)})")
        return Mode.POINTWISE, (answer,), (_number(score, "score"),)
    if not isinstance(listed, list):
        raise ValueError(f"answers must be a list of texts, not {_kind(listed)}")
    ranks = _value(row, _RANKS)
    if listed and all(isinstance(item, Mapping) for item in listed):  # [{answer, rank}]
        ranks = [_value(item, ("rank",)) for item in listed]
        listed = [_value(item, _ANSWER) for item in listed]
    answers = _answers(listed)
    preferred = _value(row, _PREFERRED)
    if preferred is not None and ranks is not None:
        raise ValueError("has both preferred and ranks; one of them")
    if ranks is not None:
        return Mode.LISTWISE, answers, _worth_of_ranks(ranks, len(answers))
    if preferred is None:
        raise ValueError(f"says neither which answer is preferred nor their ranks; the layouts are:\n{LAYOUTS}")
    return Mode.PAIRWISE, answers, _worth_of_preference(preferred, len(answers))


def _answers(listed: list[Any]) -> tuple[str, ...]:
    if not 2 <= len(listed) <= MAX_ANSWERS:
        raise ValueError(f"has {len(listed)} answers; 2 to {MAX_ANSWERS} can be compared")
    for index, answer in enumerate(listed):
        if not isinstance(answer, str):
            raise ValueError(f"answer {index} must be a text, not {_kind(answer)}")
    if len({plain(answer) for answer in listed}) < len(listed):
        raise ValueError("two of its answers are the same, so there is nothing to compare")
    return tuple(listed)


def _worth_of_ranks(ranks: Any, count: int) -> tuple[float, ...]:
    if not isinstance(ranks, list) or len(ranks) != count:
        given = len(ranks) if isinstance(ranks, list) else _kind(ranks)
        raise ValueError(f"ranks must be a list of one rank for each of its {count} answers, not {given}")
    return tuple(-_number(rank, "rank") for rank in ranks)


def _worth_of_preference(preferred: Any, count: int) -> tuple[float, ...]:
    if count != 2:
        raise ValueError(f"prefers one of {count} answers; preferred is for two, ranks are for more")
    if preferred == "tie":
        return 0.5, 0.5
    if isinstance(preferred, bool) or preferred not in (0, 1):
        raise ValueError(f'preferred must be 0, 1 or "tie", not {json.dumps(preferred)[:40]}')
    return (1.0, 0.0) if preferred == 0 else (0.0, 1.0)


def _number(value: Any, name: str) -> float:
    """A number; true and false are 1 and 0."""
    if not isinstance(value, (bool, int, float)):
        raise ValueError(f"its {name} must be a number, not {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"its {name} is no finite number")
    return number


def _text(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    value = _value(row, names)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"its {names[0]} must be a text, not {_kind(value)}")
    return value


def _value(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    there = [name for name in names if row.get(name) is not None]
    if len(there) > 1:
        raise ValueError(f"has both {' and '.join(there)}, which mean the same; one of them")
    return row[there[0]] if there else None


_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "an object")


BITS = 128
NEAR = 19
"""Two examples nearly repeat each other if the SimHashes of their questions differ in at most so many bits, and those
of their answers too, and their numbers are the same. Two sets of words of one size that share four fifths of all their
words (Jaccard index 0.8) have an angle of 0.47, and so differ in 19 bits on average."""

_WORD = re.compile(r"\w+")
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
_HEX = 12
_SIMHASH = BITS // 4
_LETTER = 4  # few, as numbers (of an account, say) are guessed from a long hash; one pair in 65,536 is taken for equal
PRINT = re.compile(
    rf"[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_SIMHASH}}}-[0-9a-f]{{{_SIMHASH}}}(?:-[0-9a-f]{{{_LETTER}}})?"
)
"""Of older files, prints lack the fifth number: by them, examples with other numbers may count as near."""


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
    return _NUMBERS.findall(text) if _WORD.search(text) else [plain(text)]


def _simhash(texts: Sequence[str]) -> int:
    """Each bit as most of the words and pairs of neighbouring words have it; 0 where there is no word."""
    features: set[str] = set()
    for text in texts:
        words = _WORD.findall(text.casefold())
        features.update(words, (f"{one} {two}" for one, two in itertools.pairwise(words)))
    hashes = (hashlib.blake2b(feature.encode(), digest_size=BITS // 8).digest() for feature in features)
    bits = [f"{int.from_bytes(each, 'big'):0{BITS}b}" for each in hashes]
    most = ("1" if 2 * column.count("1") > len(bits) else "0" for column in zip(*bits, strict=True))
    return int("".join(most) or "0", 2)
