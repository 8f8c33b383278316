"""Labeled examples: questions with answers and their value, and the detection of known examples.

A file has one JSON object per line, in one of three modes: an answer with a score, two answers with a preference, or
several answers with ranks. Invariant: in every mode, a `Sample` has one number per answer, and more is better. All
comparisons use these numbers only.

A rubric file contains prints of its training examples, five numbers each: of the example (question and answers in any
order), of its question, a SimHash of the words of each, and of the parts that must match exactly: numbers, and texts
without words. The more words two texts share, the fewer bits of their SimHashes differ (Charikar, "Similarity
Estimation Techniques from Rounding Algorithms", STOC 2002: the share of differing bits is the angle between the sets of
words, divided by pi). A SimHash alone hardly distinguishes "12 rolls" from "13 rolls", which are two questions.
Invariant: a print depends only on the example, not on the file, the position, the label or the order of the answers.
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
"""Maximum size of a file. Every label is sent to a model, so files are small."""
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
    """Kind of label."""

    POINTWISE = "pointwise"
    """A score of one answer."""
    PAIRWISE = "pairwise"
    """A preference between two answers."""
    LISTWISE = "listwise"
    """Ranks of several answers."""


@dataclass(frozen=True)
class Sample:
    """A labeled example."""

    place: str
    """``samples.jsonl:3``."""
    question: str
    answers: tuple[str, ...]
    worth: tuple[float, ...]
    """One number per answer, more is better: the score; 1, 0 or 0.5; or the negative rank."""
    reference: str | None = None
    """The right answer, for judges that compare with it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return a key of the question and the set of answers. Labels and white space do not count."""
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
    """Places of lines that repeat an earlier line. They are left out."""


def digest(value: Any) -> str:
    """Return a hash of plain data, identical on every machine."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(text: str) -> str:
    """Return the text with each run of white space replaced by one space."""
    return " ".join(text.split())


def read_labels(path: Path) -> Labels:
    """Read a file of labeled examples.

    :raises DataError: The file cannot be read, has invalid lines (each is listed), or mixes modes.
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
        raise DataError(f"{path}: the file has no examples; write one JSON object per line in one of:\n{LAYOUTS}")
    modes = Counter(mode for mode, _ in found)
    if len(modes) > 1:
        each = [
            f"{count} {mode.value} (first {next(s.place for m, s in found if m is mode)})"
            for mode, count in modes.most_common()
        ]
        raise DataError(
            f"{path}: the lines are of different kinds: {', '.join(each)}; scores, preferences and ranks cannot be "
            "compared with each other, so use one file per kind"
        )
    samples, repeated = _distinct([sample for _, sample in found])
    return Labels(path.name, hashlib.sha256(raw).hexdigest(), found[0][0], samples, repeated)


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(
                f"{path}: {path.stat().st_size >> 20} MiB exceed the limit of {MAX_BYTES >> 20} MiB; "
                f"use a sample of the lines: shuf -n 200 {path.name} > few.jsonl"
            )
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as e:
        raise DataError(f"{path}: cannot read the file: {e.strerror}") from None


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
    """Return the mode and the sample of a row.

    :raises ValueError: The row is invalid.
    """
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping) and not any(name in row for name in _LABELS):
        row = {**metadata, **row}  # tasks of a task reader have everything except the question in metadata
    question = _text(row, _QUESTION)
    if question is None:
        raise ValueError(f"question is missing ({' or '.join(_QUESTION)})")
    mode, answers, worth = _labelled(row)
    if not question.strip():
        raise ValueError("the question is empty")
    reference = _text(row, _REFERENCE)
    extra = dict(metadata) if isinstance(metadata, Mapping) else {}
    return mode, Sample(place, question, answers, worth, reference, extra)


def _labelled(row: Mapping[str, Any]) -> tuple[Mode, tuple[str, ...], tuple[float, ...]]:
    """Return the label in any of its layouts. The available fields decide which layout applies."""
    if "chosen" in row or "rejected" in row:
        chosen, rejected = (_text(row, (name,)) for name in ("chosen", "rejected"))
        if chosen is None or rejected is None:
            raise ValueError("chosen and rejected are both required")
        return Mode.PAIRWISE, _answers([chosen, rejected]), (1.0, 0.0)
    listed = _value(row, _ANSWERS)
    if listed is None:
        answer, score = _text(row, _ANSWER), _value(row, _SCORE)
        if answer is None:
            raise ValueError(f"answer ({' or '.join(_ANSWER)}) or answers are missing; the layouts are:\n{LAYOUTS}")
        if score is None:
            raise ValueError(f"the answer has no score ({' or '.join(_SCORE)})")
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
        raise ValueError("preferred and ranks are both set; use one of them")
    if ranks is not None:
        return Mode.LISTWISE, answers, _worth_of_ranks(ranks, len(answers))
    if preferred is None:
        raise ValueError(f"preferred or ranks are missing; the layouts are:\n{LAYOUTS}")
    return Mode.PAIRWISE, answers, _worth_of_preference(preferred, len(answers))


def _answers(listed: list[Any]) -> tuple[str, ...]:
    if not 2 <= len(listed) <= MAX_ANSWERS:
        raise ValueError(f"{len(listed)} answers cannot be compared; use 2 to {MAX_ANSWERS}")
    for index, answer in enumerate(listed):
        if not isinstance(answer, str):
            raise ValueError(f"answer {index} must be a text, not {_kind(answer)}")
    if len({plain(answer) for answer in listed}) < len(listed):
        raise ValueError("two answers are identical, so there is nothing to compare")
    return tuple(listed)


def _worth_of_ranks(ranks: Any, count: int) -> tuple[float, ...]:
    if not isinstance(ranks, list) or len(ranks) != count:
        given = len(ranks) if isinstance(ranks, list) else _kind(ranks)
        raise ValueError(f"ranks must be a list with one rank for each of the {count} answers, not {given}")
    return tuple(-_number(rank, "rank") for rank in ranks)


def _worth_of_preference(preferred: Any, count: int) -> tuple[float, ...]:
    if count != 2:
        raise ValueError(f"preferred requires two answers, not {count}; use ranks for more")
    if preferred == "tie":
        return 0.5, 0.5
    if isinstance(preferred, bool) or preferred not in (0, 1):
        raise ValueError(f'preferred must be 0, 1 or "tie", not {json.dumps(preferred)[:40]}')
    return (1.0, 0.0) if preferred == 0 else (0.0, 1.0)


def _number(value: Any, name: str) -> float:
    """Return a number. True and false count as 1 and 0."""
    if not isinstance(value, (bool, int, float)):
        raise ValueError(f"{name} must be a number, not {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number")
    return number


def _text(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    value = _value(row, names)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{names[0]} must be a text, not {_kind(value)}")
    return value


def _value(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    there = [name for name in names if row.get(name) is not None]
    if len(there) > 1:
        raise ValueError(f"{' and '.join(there)} have the same meaning; use one of them")
    return row[there[0]] if there else None


_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "an object")


BITS = 128
NEAR = 19
"""Maximum number of differing bits in the SimHashes of the questions, and of the answers, of near duplicates. The exact
parts must match, too. Two sets of words of the same size that share four fifths of all their words (Jaccard index 0.8)
have an angle of 0.47 and therefore differ in 19 bits on average."""

_WORD = re.compile(r"\w+")
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
_HEX = 12
_SIMHASH = BITS // 4
_LETTER = 4  # short, because numbers (e.g. of an account) could be guessed from a long hash; 1 in 65,536 pairs collides
PRINT = re.compile(
    rf"[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_HEX}}}-[0-9a-f]{{{_SIMHASH}}}-[0-9a-f]{{{_SIMHASH}}}(?:-[0-9a-f]{{{_LETTER}}})?"
)
"""Prints in older files lack the fifth number, so examples with different numbers may count as near duplicates."""


@dataclass(frozen=True)
class Overlap:
    """Number of labels that the rubrics were learned from."""

    same: int
    """Training examples."""
    near: int
    """Near duplicates of training examples."""
    same_question: int
    """Other labels with a question of a training example and different answers."""


def print_of(sample: Sample) -> str:
    """Return the print of a sample: hex digits of the example, the question, both SimHashes and its numbers."""
    words = _words_of(sample)
    hashes = f"{words.question:0{_SIMHASH}x}-{words.answers:0{_SIMHASH}x}-{words.letter}"
    return f"{sample.key[:_HEX]}-{_of_question(sample)}-{hashes}"


def places_of_same(samples: Sequence[Sample], prints: Sequence[str]) -> list[str]:
    """Return the places of training examples, without near duplicates."""
    keys = {text[:_HEX] for text in prints}
    return [sample.place for sample in samples if sample.key[:_HEX] in keys]


def without_known(samples: Sequence[Sample], prints: Sequence[str]) -> tuple[tuple[Sample, ...], Overlap]:
    """Return the samples that are neither training examples nor near duplicates of them, and the overlap.

    :param prints: Prints of the training examples, as returned by `print_of`.
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
    """Data that decides whether two examples are near duplicates."""

    question: int
    """SimHash of the question's words, or 0 without words."""
    answers: int
    """SimHash of the words of all answers together."""
    letter: str = ""
    """Hash of the parts that must match exactly, or empty if the print lacks it."""


def _of_question(sample: Sample) -> str:
    return digest(plain(sample.question))[:_HEX]


def _is_near_one(sample: Sample, learned: Mapping[str, Set[_Words]]) -> bool:
    """Return whether a sample is a near duplicate of a training example. ``learned`` is keyed by the exact parts."""
    mine = _words_of(sample)
    if any(_are_alike(mine, other) for other in learned.get(mine.letter, ())):
        return True
    return any(
        # texts without words are never near duplicates of older prints, which lack the exact parts
        mine.question and mine.answers and other.question and other.answers and _are_alike(mine, other)
        for other in learned.get("", ())
    )


def _are_alike(one: _Words, other: _Words) -> bool:
    return (one.question ^ other.question).bit_count() <= NEAR and (one.answers ^ other.answers).bit_count() <= NEAR


def _words_of(sample: Sample) -> _Words:
    letter = digest([_to_the_letter(sample.question), sorted(map(_to_the_letter, sample.answers))])
    return _Words(_simhash([sample.question]), _simhash(sample.answers), letter[:_LETTER])


def _to_the_letter(text: str) -> list[str]:
    """Return the numbers of a text in order, or the text itself if it has no words."""
    return _NUMBERS.findall(text) if _WORD.search(text) else [plain(text)]


def _simhash(texts: Sequence[str]) -> int:
    """Return the SimHash over words and pairs of adjacent words, or 0 without words."""
    features: set[str] = set()
    for text in texts:
        words = _WORD.findall(text.casefold())
        features.update(words, (f"{one} {two}" for one, two in itertools.pairwise(words)))
    hashes = (hashlib.blake2b(feature.encode(), digest_size=BITS // 8).digest() for feature in features)
    bits = [f"{int.from_bytes(each, 'big'):0{BITS}b}" for each in hashes]
    most = ("1" if 2 * column.count("1") > len(bits) else "0" for column in zip(*bits, strict=True))
    return int("".join(most) or "0", 2)
