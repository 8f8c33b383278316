"""A conversation up to one answer: the unit that sources yield and that becomes a task; and what users thought of it.

An application sends its whole history with every message, so the same conversation comes in again and again, each time
with one turn more.  One goes on with another when its earlier questions and answers are exactly that one's; the id that
an application gives only narrows that down.  Feedback names the answer by the id of the reply, the trace, or the
conversation, or by several of them: then the closest one that was seen counts.  What is known about one answer is
merged: what names it more closely counts more, then what came later.

Invariants: a turn is yielded once, with the span that answered it where that is known, and every turn knows its thread
and the group that must not be split; nothing is left out uncounted (see `Tally`), and with ``on_bad: stop``
the first unreadable thing raises; feedback that names nothing that was seen is kept and counted, never attached to a
guess.
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
"""What is redacted, what databases call their columns, and what helper models are asked."""
LONGEST_TEXT = 100_000
"""Characters of a correction or a comment."""
LONGEST_ID = 512
LATEST = 1e18
"""Seconds since 1970: JSON has whole numbers of thousands of digits, which no float holds."""
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
    time = row.get("time")
    if time is not None and (isinstance(time, bool) or not isinstance(time, (int, float)) or not abs(time) < LATEST):
        raise BadFeedback("time", "must be a number of seconds since 1970")
    return Given(feedback=feedback, **ids, time=float(time or 0.0))


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


MOST_REASONS = 200
"""Reasons that are counted each by itself: what a sender calls its spans is in some."""
OnBad = Literal["stop", "skip"]


@dataclass
class Tally:
    """Counts by reason, each with the first place."""

    on_bad: OnBad = "skip"
    read: Counter[str] = field(default_factory=Counter)
    """What was read, by kind: spans, traces, conversations, lines, feedback."""
    bad: Counter[str] = field(default_factory=Counter)
    """What cannot be read, by reason."""
    dropped: Counter[str] = field(default_factory=Counter)
    """What could be read and was left out, by reason."""
    first: dict[str, str] = field(default_factory=dict)
    """Reason -> where it came up first."""

    def unreadable(self, reason: str, place: str) -> None:
        """
        :raises DataError: with ``on_bad: stop``.
        """
        if self.on_bad == "stop":
            raise DataError(printable(f"{place}: {reason}. Correct it, or leave such out with on_bad_trace: skip"))
        self._count(self.bad, reason, place)

    def drop(self, reason: str, place: str) -> None:
        self._count(self.dropped, reason, place)

    def _count(self, counts: Counter[str], reason: str, place: str) -> None:
        reason = printable(reason)
        if reason not in counts and len(counts) >= MOST_REASONS:
            reason = "something else, of too many kinds to name"
        counts[reason] += 1
        self.first.setdefault(reason, printable(place))

    def report(self) -> dict[str, Any]:
        """As JSON."""

        def reasons(counts: Counter[str]) -> dict[str, Any]:
            return {reason: {"count": n, "first": self.first.get(reason, "")} for reason, n in counts.most_common()}

        return {"read": dict(self.read), "unreadable": reasons(self.bad), "dropped": reasons(self.dropped)}


Said = tuple[tuple[str, str], ...]
"""Pairs of a user's message and the answer to it, oldest first."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Someone asked, and something answered."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI messages, oldest first; the last one is the user's that was answered."""
    answer: str
    source: str
    """The file, and where it has lines, the line."""
    trace_id: str = ""
    span_id: str = ""
    conversation_id: str = ""
    """What the application calls the conversation; empty where it says nothing of use."""
    session: str = ""
    """What several conversations have in common: AgentScope 1.x names its process, whoever it talks to."""
    response_ids: tuple[str, ...] = ()
    """Of the model's replies on the way to the answer, and of their spans."""
    model: str = ""
    started: float | None = None
    """Seconds since 1970."""
    after: str = ""
    """What the user said next; empty where nothing is known."""
    feedback: Feedback = field(default_factory=Feedback)
    """What is known of how good the answer was."""

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
        """The same for the same question after the same history, wherever it was asked."""
        text = json.dumps(list(self.messages), ensure_ascii=False, sort_keys=True)
        return f"trace-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:16]}"


def said(messages: Sequence[Mapping[str, Any]], answer: str) -> Said:
    """What was asked and answered, without what the agent did in between and without what it was told beforehand."""
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
    """A conversation up to one answer, and where it belongs."""

    conversation: Conversation
    thread: int
    """The conversation that it is a turn of; counted from 0."""
    group: str
    """What must stay on one side: the application's conversation, or else the thread."""
    is_last: bool
    """Whether it is the last turn of its thread."""


@dataclass(frozen=True)
class _Known:
    """A conversation and what was said in it."""

    conversation: Conversation

    @cached_property
    def said(self) -> Said:
        return said(self.conversation.messages, self.conversation.answer)

    @cached_property
    def chain(self) -> tuple[bytes, ...]:
        """What stands for the first, the first two … pairs of question and answer."""
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
    """What was said so far -> the conversation that ends there; the latest, where it was answered twice."""
    length: int = 0
    """Pairs of its longest conversation."""


def turns_of(conversations: Iterable[Conversation], which: Turns) -> list[Turn]:
    """The turns of all conversations, oldest conversation first; of each the last one, or every one."""
    found: list[Turn] = []
    for thread in _threads([_Known(conversation) for conversation in conversations]):
        if which == "every":
            _fill_in(thread)
        in_order = sorted(thread.turns.values(), key=lambda known: (len(known.said), known.started))
        after = {k.chain[i]: k.said[i + 1][0] for k in in_order for i in range(len(k.chain) - 1)}  # what was said next
        group = "\n".join(thread.scope) if thread.scope[0] else f"thread {thread.number}"
        for known in in_order if which == "every" else in_order[-1:]:
            of = known.conversation
            of = replace(of, after=after.get(known.chain[-1]) or of.after)
            found.append(Turn(conversation=of, thread=thread.number, group=group, is_last=known is in_order[-1]))
    return found


def shared_ids(turns: Iterable[Turn]) -> set[str]:
    """The conversation ids that several threads have."""
    of: dict[str, set[int]] = {}
    for turn in turns:
        of.setdefault(turn.conversation.conversation_id or turn.conversation.session, set()).add(turn.thread)
    return {name for name, threads in of.items() if len(threads) > 1}


def _threads(conversations: Sequence[_Known]) -> list[_Thread]:
    threads: list[_Thread] = []
    ends: dict[tuple[_Scope, bytes], list[_Thread]] = {}
    # Shorter ones first, so that what comes out does not depend on the order in which spans were written.
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
    """The thread that a conversation goes on with; of several the latest that nobody went on with yet."""
    if scope[0] and (same := ends.get((scope, chain[-1]))):
        return same[-1]  # the application says that it is the same conversation, and so it was answered again
    for length in range(len(chain) - 1, 0, -1):
        if candidates := ends.get((scope, chain[length - 1])):
            fresh = [thread for thread in candidates if thread.length == length]
            return (fresh or candidates)[-1]
    return None


def _fill_in(thread: _Thread) -> None:
    """Add the turns that are only known from the history of a later one."""
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
