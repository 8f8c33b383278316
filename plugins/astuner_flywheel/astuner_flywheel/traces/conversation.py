"""A conversation up to one answer: the unit that sources yield, that feedback is joined to, and that becomes a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner_flywheel.traces.feedback import Feedback
from astuner_flywheel.traces.messages import text_of

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
