"""Chats from a JSON Lines file: one conversation a line, ``{"messages": [...]}`` as OpenAI writes messages.

What else a line may have: ``feedback`` (an object, a number or a thumb) or its fields beside the messages;
``conversation_id`` (or ``id``), ``response_id``, ``trace_id``, ``model``, ``created`` (seconds since 1970).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from astuner_flywheel.traces.conversation import Conversation
from astuner_flywheel.traces.feedback import BadFeedback, Feedback, Given, read_feedback, read_given
from astuner_flywheel.traces.lines import objects
from astuner_flywheel.traces.messages import Message, Unreadable, read_messages, text_of
from astuner_flywheel.traces.tally import Tally

_OPINIONS = ("rating", "thumbs", "correction", "comment")


def chats(path: Path, limit: int, tally: Tally) -> Iterator[Conversation]:
    """The answered conversations of a file; lines that hold none are counted.

    :param limit: bytes of a line.
    :raises DataError: the file cannot be read, or (on_bad: stop) a line is bad.
    """
    for place, row in objects(path, limit, tally):
        if "messages" not in row:
            tally.unreadable(f"no messages (its fields: {', '.join(list(row)[:8]) or 'none'})", place)
            continue
        try:
            messages, feedback = read_messages(row["messages"]), _feedback(row)
        except (Unreadable, BadFeedback) as e:
            tally.unreadable(str(e), place)
            continue
        end, answer, after = _last_answered(messages)
        if not answer:
            has_user = any(m["role"] == "user" and text_of(m).strip() for m in messages)
            tally.drop("no answer in words" if has_user else "no user's message", place)
            continue
        yield Conversation(
            messages=tuple(messages[: end + 1]),
            answer=answer,
            source=place,
            trace_id=_text(row, "trace_id"),
            conversation_id=_text(row, "conversation_id") or _text(row, "id"),
            response_ids=tuple(filter(None, [_text(row, "response_id")])),
            model=_text(row, "model"),
            started=_seconds(row.get("created")),
            after=after,
            feedback=feedback,
        )


def feedback_file(path: Path, limit: int, tally: Tally) -> Iterator[Given]:
    """Feedback from a JSON Lines file with the fields of ``POST /feedback``.

    :raises DataError: as `chats`.
    """
    for place, row in objects(path, limit, tally):
        try:
            given = read_given(row)
        except BadFeedback as e:
            tally.unreadable(f"feedback: {e}", place)
            continue
        tally.read["feedback"] += 1
        yield given


def _last_answered(messages: list[Message]) -> tuple[int, str, str]:
    """Where the last user's message with an answer is, the answer, and what the user said next."""
    after = ""
    for i in range(len(messages) - 1, -1, -1):
        if messages[i]["role"] != "user":
            continue
        reply = []
        for message in messages[i + 1 :]:
            if message["role"] == "user":
                break
            reply.append(message)
        last = next((m for m in reversed(reply) if m["role"] == "assistant"), None)
        if last is not None and not last.get("tool_calls") and text_of(last).strip() and text_of(messages[i]).strip():
            return i, text_of(last), after
        after = text_of(messages[i])
    return 0, "", ""


def _feedback(row: Mapping[str, Any]) -> Feedback:
    given = row.get("feedback")
    if given is None:
        beside = {name: row[name] for name in _OPINIONS if row.get(name) is not None}
        return read_feedback(beside) if beside else Feedback()
    if not isinstance(given, Mapping):
        return read_feedback({"rating": given})
    if unknown := [name for name in given if name not in _OPINIONS]:
        raise BadFeedback(f"feedback.{str(unknown[0])[:80]}", f"is not known here; there are {', '.join(_OPINIONS)}")
    return read_feedback(given) if any(value is not None for value in given.values()) else Feedback()


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _seconds(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return float(value)
    return None
