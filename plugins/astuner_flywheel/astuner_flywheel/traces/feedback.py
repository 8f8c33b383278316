"""What users thought of an answer: a rating, a correction, a comment; and which answer each piece is about.

Feedback names the answer by the id of the reply, the trace, or the conversation, or by several of them: then the
closest one that was seen counts.  What is known about one answer is merged: what names it more closely counts more,
then what came later.  Invariant: feedback that names nothing that was seen is kept and counted, never attached to a
guess.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LONGEST_TEXT = 100_000
"""Characters of a correction or a comment."""
LONGEST_ID = 512
IDS = ("response_id", "trace_id", "conversation_id")
"""What names an answer, closest first."""
FIELDS = (*IDS, "rating", "thumbs", "correction", "comment", "time")
THUMBS = {"up": 1.0, "down": -1.0, "👍": 1.0, "👎": -1.0}


class BadFeedback(ValueError):
    """Feedback that cannot be taken; ``param`` names the field."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param} {why}")
        self.param = param


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """What one person, or several, said about an answer; empty where nobody did."""

    rating: float | None = None
    """From -1 (bad) to 1 (good)."""
    correction: str = ""
    """What the answer should have been."""
    comment: str = ""
    inferred: bool = False
    """Whether the rating is a model's reading of what the user said next."""

    @property
    def is_empty(self) -> bool:
        return self.rating is None and not self.correction and not self.comment

    @property
    def liked(self) -> bool:
        return self.rating is not None and self.rating > 0

    @property
    def disliked(self) -> bool:
        return self.rating is not None and self.rating < 0

    def merged(self, later: Feedback) -> Feedback:
        """Both, ``later`` counting more where both say something."""
        rated = later if later.rating is not None else self
        return Feedback(
            rating=rated.rating,
            inferred=rated.inferred,
            correction=later.correction or self.correction,
            comment=later.comment or self.comment,
        )


@dataclass(frozen=True, kw_only=True)
class Given:
    """Feedback with the answer that it names."""

    feedback: Feedback
    response_id: str = ""
    trace_id: str = ""
    conversation_id: str = ""
    time: float = 0.0
    """Seconds since 1970; 0 where nobody wrote it down."""


def read_given(row: Mapping[str, Any]) -> Given:
    """Feedback from a JSON object with the fields of ``POST /feedback``.

    :raises BadFeedback: a field is unknown or wrong, or it says nothing about anything.
    """
    if unknown := [name for name in row if name not in FIELDS]:
        raise BadFeedback(str(unknown[0])[:80], f"is not known here; there are {', '.join(FIELDS)}")
    ids = {name: _id(row, name) for name in IDS}
    if not any(ids.values()):
        raise BadFeedback("response_id", "or trace_id or conversation_id must say which answer this is about")
    feedback = read_feedback({name: row[name] for name in row if name not in IDS and name != "time"})
    return Given(feedback=feedback, **ids, time=_time(row.get("time")))


def read_feedback(row: Mapping[str, Any]) -> Feedback:
    """``rating`` (or ``thumbs``), ``correction``, ``comment``; one of them at least.

    :raises BadFeedback: see `read_given`.
    """
    if row.get("rating") is not None and row.get("thumbs") is not None:
        raise BadFeedback("thumbs", "says the same as rating; send one of the two")
    found = Feedback(
        rating=read_rating(row["rating"] if row.get("rating") is not None else row.get("thumbs")),
        correction=_text(row, "correction"),
        comment=_text(row, "comment"),
    )
    if found.is_empty:
        raise BadFeedback("rating", "or correction or comment must say something")
    return found


def read_rating(value: Any) -> float | None:
    """A number from -1 to 1, or a thumb; None stays None.

    :raises BadFeedback: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in THUMBS:
        return THUMBS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:  # NaN is not either
        raise BadFeedback("rating", 'must be a number from -1 (bad) to 1 (good), "up" or "down"')
    return float(value)


@dataclass
class Opinions:
    """All feedback there is: first added, then filed, then to be asked about one answer after the other."""

    _given: list[Given] = field(default_factory=list)
    _by: dict[str, dict[str, list[Given]]] = field(default_factory=lambda: {name: {} for name in IDS})
    _joined: set[int] = field(default_factory=set)

    def add(self, given: Iterable[Given]) -> None:
        self._given.extend(given)

    def file(self, seen: Mapping[str, Container[str]]) -> None:
        """File everything that was added under the one id that it is joined by.

        :param seen: for each of `IDS` those of the conversations that were read.
        """
        for each in self._given:
            named = [name for name in IDS if getattr(each, name)]
            closest = next((name for name in named if getattr(each, name) in seen[name]), named[0])
            self._by[closest].setdefault(getattr(each, closest), []).append(each)

    def about(
        self, *, response_ids: Iterable[str] = (), trace_id: str = "", conversation_id: str = "", is_last: bool = True
    ) -> Feedback:
        """What is known about one answer.

        :param is_last: whether it is the last answer of its conversation: a correction that names only the
            conversation is of that one.
        """
        found = Feedback()
        names = [("conversation_id", [conversation_id]), ("trace_id", [trace_id]), ("response_id", [*response_ids])]
        for kind, ids in names:
            given = [each for name in ids if name for each in self._by[kind].get(name, ())]
            for each in sorted(given, key=lambda each: each.time):
                self._joined.add(id(each))
                feedback = each.feedback
                if kind == "conversation_id" and not is_last:
                    feedback = replace(feedback, correction="", comment="")
                found = found.merged(feedback)
        return found

    def report(self) -> dict[str, int]:
        given, joined = len(self._given), len(self._joined)
        return {"given": given, "joined": joined, "about nothing seen": given - joined}


def _id(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID:
        raise BadFeedback(name, f"must be a text of 1 to {LONGEST_ID} characters")
    return value.lower() if name == "trace_id" else value


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise BadFeedback(name, f"must be a text of at most {LONGEST_TEXT:,} characters")
    return value.strip()


def _time(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadFeedback("time", "must be a number of seconds since 1970")
    return float(value)
