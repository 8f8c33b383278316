"""A conversation up to one answer: the unit that sources yield, that feedback is joined to, and that becomes a task.

An application sends its whole history with every message, so the same conversation comes in again and again, each time
with one turn more.  One goes on with another when its earlier questions and answers are exactly that one's; the id that
an application gives only narrows that down.  Invariants: a turn is yielded once, with the span that answered it where
that is known, and every turn knows its thread and the group that must not be split; nothing is left out without being
counted in the `Tally`, and with ``on_bad: stop`` the first unreadable thing raises.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from astuner.contracts.errors import DataError
from astuner_flywheel.traces.feedback import Feedback
from astuner_flywheel.traces.messages import text_of

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
            raise DataError(f"{place}: {reason}. Correct it, or leave such out with on_bad_trace: skip")
        self.bad[reason] += 1
        self.first.setdefault(reason, place)

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

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
    """Of the model's replies on the way to the answer."""
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
        after = _following(in_order)
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


def _following(turns: Sequence[_Known]) -> dict[bytes, str]:
    """What was said so far -> what the user said next."""
    return {known.chain[i]: known.said[i + 1][0] for known in turns for i in range(len(known.chain) - 1)}
