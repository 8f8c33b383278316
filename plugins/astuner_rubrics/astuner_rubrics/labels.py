"""Labelled examples: questions with answers, and what a person says they are worth.

One JSON object per line, in one of three modes: an answer with a score, two answers of which one is preferred, or
several in an order.  Invariant: whatever the mode, a `Sample` has one number for each of its answers, and more is
better; what compares answers looks at those numbers only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from astuner.contracts.errors import DataError
from astuner.support.strict_json import parse

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

    @property
    def scale(self) -> tuple[float, float]:
        """The smallest and largest number that any answer has."""
        numbers = [w for sample in self.samples for w in sample.worth]
        return min(numbers), max(numbers)


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
                found.append(_sample(parse(line), place))
            except ValueError as e:
                problems.append(f"{path}:{number}: {e}")
    if problems:
        more = f"\n… and {len(problems) - _SHOWN_ERRORS} more" if len(problems) > _SHOWN_ERRORS else ""
        raise DataError("\n".join(problems[:_SHOWN_ERRORS]) + more)
    if not found:
        raise DataError(f"{path}: there is no example in it; one JSON object per line, laid out as one of:\n{LAYOUTS}")
    mode = _one_mode(path, found)
    samples, repeated = _distinct([sample for _, sample in found])
    return Labels(path.name, hashlib.sha256(raw).hexdigest(), mode, samples, repeated)


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


def _one_mode(path: Path, found: list[tuple[Mode, Sample]]) -> Mode:
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
    return found[0][0]


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
        return Mode.POINTWISE, (_one_answer(row),), (_score(row),)
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


def _one_answer(row: Mapping[str, Any]) -> str:
    answer = _text(row, _ANSWER)
    if answer is None:
        raise ValueError(f"has neither an answer ({' or '.join(_ANSWER)}) nor answers; the layouts are:\n{LAYOUTS}")
    return answer


def _score(row: Mapping[str, Any]) -> float:
    score = _value(row, _SCORE)
    if score is None:
        raise ValueError(f"has an answer without a score ({' or '.join(_SCORE)})")
    return _number(score, "score")


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


_KINDS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda v: v is None, "null"),
    (lambda v: isinstance(v, bool), "true or false"),
    (lambda v: isinstance(v, (int, float)), "a number"),
    (lambda v: isinstance(v, str), "a text"),
    (lambda v: isinstance(v, list), "a list"),
)


def _kind(value: Any) -> str:
    return next((name for test, name in _KINDS if test(value)), "an object")
