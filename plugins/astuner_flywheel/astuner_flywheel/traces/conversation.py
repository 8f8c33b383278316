"""Conversations up to one answer (the unit of sources and tasks), and users' feedback on them.

An application sends its complete history with every message, so the same conversation arrives repeatedly, each time
with one more turn. A conversation continues another if its earlier questions and answers are identical; the
application's ID only restricts the candidates. Feedback names an answer by the ID of the reply, the trace or the
conversation, or several of them; the most specific known ID counts. Feedback on one answer is merged: more specific
feedback takes precedence, then later feedback.

Invariants: a turn is yielded once, with the span that answered it if known, and every turn has its thread and the group
that must not be split; everything that is dropped is counted (see `Tally`), and with ``on_bad: stop`` the first
unreadable item raises; feedback on unknown answers is kept and counted, and never attached to a guess.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from astuner.contracts.errors import DataError
from astuner_flywheel.support import printable
from astuner_flywheel.traces.messages import text_of

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
"""Redaction patterns, names of database columns, and prompts of helper models."""
LONGEST_TEXT = 100_000
"""Maximum characters of a correction or a comment."""
LONGEST_ID = 512
LATEST = 1e18
"""Maximum time in seconds since 1970. JSON integers may have thousands of digits, which no float can represent."""
IDS = ("response_id", "trace_id", "conversation_id")
"""IDs that name an answer, most specific first."""
FIELDS = (*IDS, "rating", "thumbs", "correction", "comment", "time")
THUMBS = {"up": 1.0, "down": -1.0, "👍": 1.0, "👎": -1.0}


class BadFeedback(ValueError):
    """Feedback is invalid. ``param`` names the field."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param} {why}")
        self.param = param


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Feedback of one or several people on an answer. Empty if there is none."""

    rating: float | None = None
    """Rating from -1 (bad) to 1 (good)."""
    correction: str = ""
    """The desired answer."""
    comment: str = ""
    inferred: bool = False
    """Whether a model inferred the rating from the user's next message."""

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
        """Return both combined. ``later`` takes precedence."""
        rated = later if later.rating is not None else self
        return Feedback(
            rating=rated.rating,
            inferred=rated.inferred,
            correction=later.correction or self.correction,
            comment=later.comment or self.comment,
        )


@dataclass(frozen=True, kw_only=True)
class Given:
    """Feedback with the IDs of the answer."""

    feedback: Feedback
    response_id: str = ""
    trace_id: str = ""
    conversation_id: str = ""
    time: float = 0.0
    """Seconds since 1970, or 0 if unknown."""


def read_given(row: Mapping[str, Any]) -> Given:
    """Return feedback from a JSON object with the fields of ``POST /feedback``.

    :raises BadFeedback: A field is unknown or invalid, or a required field is missing.
    """
    if unknown := [name for name in row if name not in FIELDS]:
        raise BadFeedback(str(unknown[0])[:80], f"is not a known field; available: {', '.join(FIELDS)}")
    ids = {name: _id(row, name) for name in IDS}
    if not any(ids.values()):
        raise BadFeedback("response_id", "or trace_id or conversation_id is required to identify the answer")
    feedback = read_feedback({name: row[name] for name in row if name not in IDS and name != "time"})
    time = row.get("time")
    if time is not None and (isinstance(time, bool) or not isinstance(time, (int, float)) or not abs(time) < LATEST):
        raise BadFeedback("time", "must be a number of seconds since 1970")
    return Given(feedback=feedback, **ids, time=float(time or 0.0))


def read_feedback(row: Mapping[str, Any]) -> Feedback:
    """Return ``rating`` (or ``thumbs``), ``correction`` and ``comment``, at least one of which is required.

    :raises BadFeedback: See `read_given`.
    """
    if row.get("rating") is not None and row.get("thumbs") is not None:
        raise BadFeedback("thumbs", "has the same meaning as rating; send one of them")
    found = Feedback(
        rating=read_rating(row["rating"] if row.get("rating") is not None else row.get("thumbs")),
        correction=_text(row, "correction"),
        comment=_text(row, "comment"),
    )
    if found.is_empty:
        raise BadFeedback("rating", "or correction or comment is required")
    return found


def read_rating(value: Any) -> float | None:
    """Return a number from -1 to 1 from a number or a thumb. None stays None.

    :raises BadFeedback: The value is neither.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in THUMBS:
        return THUMBS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:  # also rejects NaN
        raise BadFeedback("rating", 'must be a number from -1 (bad) to 1 (good), "up" or "down"')
    return float(value)


@dataclass
class Opinions:
    """All feedback: first added, then filed by ID, then looked up for each answer."""

    _given: list[Given] = field(default_factory=list)
    _by: dict[str, dict[str, list[Given]]] = field(default_factory=lambda: {name: {} for name in IDS})
    _joined: set[int] = field(default_factory=set)

    def add(self, given: Iterable[Given]) -> None:
        self._given.extend(given)

    def file(self, seen: Mapping[str, Container[str]]) -> None:
        """File all added feedback under the most specific known ID.

        :param seen: IDs of the conversations that were read, for each of `IDS`.
        """
        for each in self._given:
            named = [name for name in IDS if getattr(each, name)]
            closest = next((name for name in named if getattr(each, name) in seen[name]), named[0])
            self._by[closest].setdefault(getattr(each, closest), []).append(each)

    def about(
        self, *, response_ids: Iterable[str] = (), trace_id: str = "", conversation_id: str = "", is_last: bool = True
    ) -> Feedback:
        """Return the feedback on one answer.

        :param is_last: Whether it is the last answer of its conversation. A correction that names only the conversation
            applies to that answer.
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


MOST_REASONS = 200
"""Maximum number of separately counted reasons. Some contain names that senders choose."""
OnBad = Literal["stop", "skip"]


@dataclass
class Tally:
    """Counts by reason, each with its first place."""

    on_bad: OnBad = "skip"
    read: Counter[str] = field(default_factory=Counter)
    """Items read by kind: spans, traces, conversations, lines, feedback."""
    bad: Counter[str] = field(default_factory=Counter)
    """Unreadable items by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Readable items that were dropped, by reason."""
    first: dict[str, str] = field(default_factory=dict)
    """First place of each reason."""

    def unreadable(self, reason: str, place: str) -> None:
        """Count an unreadable item.

        :raises DataError: It occurs with ``on_bad: stop``.
        """
        if self.on_bad == "stop":
            raise DataError(printable(f"{place}: {reason}. Correct it, or skip such data with on_bad_trace: skip"))
        self._count(self.bad, reason, place)

    def drop(self, reason: str, place: str) -> None:
        self._count(self.dropped, reason, place)

    def _count(self, counts: Counter[str], reason: str, place: str) -> None:
        reason = printable(reason)
        if reason not in counts and len(counts) >= MOST_REASONS:
            reason = "other reasons"
        counts[reason] += 1
        self.first.setdefault(reason, printable(place))

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON."""

        def reasons(counts: Counter[str]) -> dict[str, Any]:
            return {reason: {"count": n, "first": self.first.get(reason, "")} for reason, n in counts.most_common()}

        return {"read": dict(self.read), "unreadable": reasons(self.bad), "dropped": reasons(self.dropped)}


Said = tuple[tuple[str, str], ...]
"""Pairs of a user message and its answer, oldest first."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A question, its history and its answer."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI messages, oldest first. The last one is the answered user message."""
    answer: str
    source: str
    """The file, with the line if it has lines."""
    trace_id: str = ""
    span_id: str = ""
    conversation_id: str = ""
    """The application's conversation ID, or empty if it is missing or unusable."""
    session: str = ""
    """Common ID of several conversations: AgentScope 1.x sends its process, for all of its users."""
    response_ids: tuple[str, ...] = ()
    """IDs of the model's replies that led to the answer, and of their spans."""
    model: str = ""
    started: float | None = None
    """Seconds since 1970."""
    after: str = ""
    """The user's next message, or empty if unknown."""
    feedback: Feedback = field(default_factory=Feedback)
    """Feedback on the answer."""

    @property
    def query(self) -> str:
        return text_of(self.messages[-1])

    @property
    def before(self) -> Sequence[Mapping[str, Any]]:
        return self.messages[:-1]

    @property
    def place(self) -> str:
        return f"{self.source}, trace {self.trace_id}" if self.trace_id else self.source

    @property
    def task_id(self) -> str:
        """Return an ID that is the same for the same question after the same history."""
        text = json.dumps(list(self.messages), ensure_ascii=False, sort_keys=True)
        return f"trace-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:16]}"


def said(messages: Sequence[Mapping[str, Any]], answer: str) -> Said:
    """Return questions and answers, without intermediate steps and instructions."""
    pairs: list[tuple[str, str]] = []
    for message in messages:
        if message["role"] == "user":
            pairs.append((text_of(message).strip(), ""))
        elif message["role"] == "assistant" and pairs and (text := text_of(message).strip()):
            pairs[-1] = (pairs[-1][0], text)
    if pairs:
        pairs[-1] = (pairs[-1][0], answer.strip())
    return tuple(pairs)


Turns = Literal["last", "every"]
_Scope = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A conversation up to one answer, with its thread and group."""

    conversation: Conversation
    thread: int
    """Number of its thread, from 0."""
    group: str
    """Group that must stay on one side of a split: the application's conversation, or else the thread."""
    is_last: bool
    """Whether it is the last turn of its thread."""


@dataclass(frozen=True)
class _Known:
    """A conversation with its questions and answers."""

    conversation: Conversation

    @cached_property
    def said(self) -> Said:
        return said(self.conversation.messages, self.conversation.answer)

    @cached_property
    def chain(self) -> tuple[bytes, ...]:
        """Return hashes of the first, the first two, … pairs of question and answer."""
        found: list[bytes] = []
        for asked, answered in self.said:
            digest = hashlib.blake2b(found[-1] if found else b"", digest_size=16)
            for text in (asked, answered):
                encoded = text.encode("utf-8", "backslashreplace")
                digest.update(len(encoded).to_bytes(8, "big") + encoded)
            found.append(digest.digest())
        return tuple(found)

    @property
    def started(self) -> float:
        return math.inf if self.conversation.started is None else self.conversation.started


@dataclass
class _Thread:
    number: int
    scope: _Scope
    turns: dict[bytes, _Known] = field(default_factory=dict)
    """Conversation for each sequence of pairs. The latest one if it was answered twice."""
    length: int = 0
    """Number of pairs of its longest conversation."""


def turns_of(conversations: Iterable[Conversation], which: Turns) -> list[Turn]:
    """Return the last turn or every turn of all conversations, oldest conversation first."""
    found: list[Turn] = []
    for thread in _threads([_Known(conversation) for conversation in conversations]):
        if which == "every":
            _fill_in(thread)
        in_order = sorted(thread.turns.values(), key=lambda known: (len(known.said), known.started))
        after = {k.chain[i]: k.said[i + 1][0] for k in in_order for i in range(len(k.chain) - 1)}  # next messages
        group = "\n".join(thread.scope) if thread.scope[0] else f"thread {thread.number}"
        for known in in_order if which == "every" else in_order[-1:]:
            of = known.conversation
            of = replace(of, after=after.get(known.chain[-1]) or of.after)
            found.append(Turn(conversation=of, thread=thread.number, group=group, is_last=known is in_order[-1]))
    return found


def shared_ids(turns: Iterable[Turn]) -> set[str]:
    """Return conversation IDs that occur in several threads."""
    of: dict[str, set[int]] = {}
    for turn in turns:
        of.setdefault(turn.conversation.conversation_id or turn.conversation.session, set()).add(turn.thread)
    return {name for name, threads in of.items() if len(threads) > 1}


def _threads(conversations: Sequence[_Known]) -> list[_Thread]:
    threads: list[_Thread] = []
    ends: dict[tuple[_Scope, bytes], list[_Thread]] = {}
    # Shorter ones first, so that the result does not depend on the order of spans in the file.
    for known in sorted(conversations, key=lambda known: (len(known.said), known.started)):
        scope = (known.conversation.conversation_id, known.conversation.session)
        thread = _continued(ends, scope, known.chain)
        if thread is None:
            thread = _Thread(len(threads), scope)
            threads.append(thread)
        thread.turns[known.chain[-1]] = known
        thread.length = max(thread.length, len(known.chain))
        ends.setdefault((scope, known.chain[-1]), []).append(thread)
    return sorted(threads, key=lambda thread: (min(known.started for known in thread.turns.values()), thread.number))


def _continued(
    ends: dict[tuple[_Scope, bytes], list[_Thread]], scope: _Scope, chain: tuple[bytes, ...]
) -> _Thread | None:
    """Return the thread that a conversation continues. Of several, the latest one without a continuation."""
    if scope[0] and (same := ends.get((scope, chain[-1]))):
        return same[-1]  # same conversation according to the application, so the question was answered again
    for length in range(len(chain) - 1, 0, -1):
        if candidates := ends.get((scope, chain[length - 1])):
            fresh = [thread for thread in candidates if thread.length == length]
            return (fresh or candidates)[-1]
    return None


def _fill_in(thread: _Thread) -> None:
    """Add turns that are only known from the history of later ones."""
    for known in list(thread.turns.values()):
        messages = known.conversation.messages
        ends = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for pairs, end in enumerate(ends[:-1]):
            answer = known.said[pairs][1]
            if known.chain[pairs] in thread.turns or not answer or not text_of(messages[end]).strip():
                continue
            earlier = replace(
                known.conversation,
                messages=messages[: end + 1],
                answer=answer,
                trace_id="",
                span_id="",
                response_ids=(),
                feedback=Feedback(),
                after="",
            )
            thread.turns[known.chain[pairs]] = _Known(earlier)
