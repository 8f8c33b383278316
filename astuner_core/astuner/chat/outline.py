"""The structure of a conversation, as far as a chat template can decide by it.

What a template writes behind a reply can depend on everything before: on who spoke how often, on which tool a result
belongs to, on a word such as ``/no_think`` in the first message.  Two conversations of the same structure differ only
in what the template copies.  So what was found out about one of them is true of the other (`ChatTemplate.follow`).

A structure is a number, made of the structure without the last message and the outline of that message.  It costs what
the last message costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from astuner.chat.literals import Literals
from astuner.contracts.messages import Message, spelling


class Outlines:
    """Structures of conversations, for one chat template."""

    def __init__(self, literals: Literals) -> None:
        self._held = literals.pattern()
        self._equal = literals.equal

    def begin(self, tools: Sequence[Mapping[str, Any]]) -> int:
        """Return the structure of an empty conversation with these tools."""
        spelled = spelling(list(tools)) if tools and self._held else ""
        return hash((bool(tools), spelled if self._holds(spelled) else ""))

    def extend(self, structure: int | None, messages: Iterable[Message]) -> int | None:
        """Return the structure of a conversation after more messages (normalised).

        :param structure: None where it cannot be compared with that of another conversation.
        :param messages: the model's last reply first, whose tool results may follow.
        :return: None where a tool result belongs to none of the calls just before it.
        """
        calls: list[str | None] = []
        for message in messages:
            if structure is None:
                return None
            own = message.get("tool_calls") or ()
            link = 0
            if message["role"] == "tool":
                label = message.get("tool_call_id")
                if label is not None and label not in calls:
                    return None
                link = -1 if label is None else calls.index(label)
            else:
                calls = [call.get("id") for call in own]
            structure = hash((structure, link, self._outline(message, own)))
        return structure

    def _outline(self, message: Message, calls: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        return (
            message["role"],
            self._text(message["content"]),
            self._text(message.get("reasoning_content", "")),
            self._text(message.get("name") or ""),
            *(_of_function(call["function"]) for call in calls),
        )

    def _text(self, text: str) -> Any:
        """Return the text itself where the template looks for something in it, else whether it is empty or blank."""
        stripped = text.strip()
        return text if stripped in self._equal or self._holds(text) else (bool(text), bool(stripped))

    def _holds(self, text: str) -> bool:
        return self._held is not None and self._held.search(text) is not None


def _of_function(function: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a call's tool, and whether its arguments are an object, and empty."""
    arguments = function["arguments"].strip()
    return function["name"], arguments[:1], arguments == "{}"
