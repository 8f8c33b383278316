"""A span as plain data, and how its attributes are looked up.

AgentScope Studio stores attributes as a tree (``{"gen_ai": {"input": …}}``), OTLP sends them flat
(``"gen_ai.input.messages"``), and both send lists and objects as JSON text.  Invariant: who asks for an attribute by
its dotted name gets the same value whichever way it was written down.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INVOKE_AGENT, CHAT = "invoke_agent", "chat"
_CHATS = {"chat", "text_completion", "generate_content"}
_MODEL_CALL = "Model.__call__"  # AgentScope before 1.0.9, which had no operation names
_REPLY = ".reply"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Ids are lower-case hexadecimal; times are nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    """Empty for a root."""
    name: str = ""
    start: int = 0
    end: int = 0
    attributes: Mapping[str, Any]
    scope: str = ""
    """The instrumentation that made it."""
    scope_version: str = ""
    conversation_id: str = ""
    """As the database's own column has it."""
    model: str = ""

    def get(self, name: str) -> Any:
        """The attribute ``name``; None where there is none."""
        return lookup(self.attributes, name)

    def text(self, name: str) -> str:
        """The attribute as text; AgentScope quotes some of its texts as JSON."""
        value = decoded(self.get(name))
        return "" if value is None or isinstance(value, (dict, list)) else str(value)

    @property
    def operation(self) -> str:
        """``invoke_agent``, ``chat``, or what else the convention or an older AgentScope calls it."""
        named = self.text("gen_ai.operation.name")
        if named in _CHATS or (not named and self.name.endswith(_MODEL_CALL)):
            return CHAT
        if not named and self.name.endswith(_REPLY):
            return INVOKE_AGENT
        return named


def lookup(attributes: Mapping[str, Any], name: str) -> Any:
    """The value under a dotted name, in a tree, in a flat mapping, or in anything between."""
    if name in attributes:
        return attributes[name]
    head, _, rest = name.partition(".")
    while rest:
        inner = decoded(attributes.get(head))
        if isinstance(inner, Mapping) and (found := lookup(inner, rest)) is not None:
            return found
        part, _, rest = rest.partition(".")
        head = f"{head}.{part}"
    return None


def decoded(value: Any) -> Any:
    """What JSON text holds, if it is JSON of a list, an object or a text; else the value as it is."""
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
