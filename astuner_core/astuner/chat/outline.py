"""The structure of a conversation, as far as a chat template can depend on it.

The text that a template writes after a reply can depend on all earlier messages: on their roles, on the call that a
result belongs to, on a word such as ``/no_think`` in the first message. Two conversations with the same structure
differ
only in text that the template copies, so a result for one of them is valid for the other (`ChatTemplate.follow`).

Structures are equal if the conversations have

- the same kinds of adjacent messages, anywhere (`Structure.pairs`),
- the same texts at the same positions, for texts in which the template finds one of its words (`Structure.words`),
- the same kinds of messages and the same such texts since the last reply (`Structure.recent`),
- about the same length, or exactly the same if the template compares numbers.

A structure is computed from the one before the last reply, at the cost of the new messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from astuner.chat.literals import Literals
from astuner.contracts.messages import Message, spelling

_SHORT = 16
"""Number of messages up to which the length counts exactly; longer conversations have two lengths per doubling."""


class Structure(NamedTuple):
    """One structure; also the basis of the next one."""

    tools: int = 0
    """Hash of whether tools are shown, and of their words."""
    pairs: frozenset[int] = frozenset()
    """Which kinds of messages follow each other."""
    words: int = 0
    recent: int = 0
    last: int = 0
    """Kind of the last message."""
    length: int = 0

    def key(self, *, exactly: bool) -> tuple[int, frozenset[int], int, int, int]:
        """Return a key that is equal for equal structures.

        :param exactly: Whether the length counts exactly.
        """
        n = self.length
        size = n if exactly or n < _SHORT else -2 * (n * n).bit_length() - n % 2
        return self.tools, self.pairs, self.words, self.recent, size


class Outlines:
    """Structures of conversations, for one chat template."""

    def __init__(self, literals: Literals) -> None:
        self._held = literals.pattern()
        self._equal = literals.equal
        self.counts = literals.counts
        """Whether the exact length of a conversation may matter."""

    def begin(self, tools: Sequence[Mapping[str, Any]]) -> Structure:
        """Return the structure of an empty conversation with these tools."""
        spelled = spelling(list(tools)) if tools and self._held else ""
        return Structure(hash((bool(tools), spelled if self._holds(spelled) else "")))

    def extend(self, structure: Structure | None, messages: Iterable[Message]) -> Structure | None:
        """Return the structure of a conversation after more messages (normalized).

        :param structure: None if it cannot be compared with another conversation's.
        :param messages: The model's last reply first, so that tool results may follow it.
        :return: None if a tool result belongs to none of the preceding calls.
        """
        if structure is None:
            return None
        tools, pairs, words, _, last, length = structure
        calls: list[str | None] = []
        kinds: list[int] = []
        recent = 0
        for message in messages:
            if message["role"] == "tool":
                label = message.get("tool_call_id")
                if label is not None and label not in calls:
                    return None
                link = -1 if label is None else calls.index(label)
            else:
                calls = [call.get("id") for call in message.get("tool_calls") or ()]
                link = 0
            kind, found = self._outline(message)
            kinds.append(hash((kind, link)))
            recent = hash((recent, kinds[-1], *found))
            if found:
                words = hash((words, length + len(kinds), *found))
        for kind in kinds:
            pair = hash((last, kind))
            pairs = pairs if pair in pairs else pairs | {pair}
            last = kind
        return Structure(tools, pairs, words, recent, last, length + len(kinds))

    def _outline(self, message: Message) -> tuple[int, list[str]]:
        """Return the kind of a message, and its texts that contain words of the template."""
        content, thought, name = message["content"], message.get("reasoning_content"), message.get("name")
        calls = (
            tuple(_of_function(call["function"]) for call in message["tool_calls"]) if "tool_calls" in message else ()
        )
        kind = hash((message["role"], _emptiness(content), thought and _emptiness(thought), bool(name), calls))
        texts = (content, thought, name) if thought or name else (content,)
        return kind, [text for text in texts if text and self._holds(text)]

    def _holds(self, text: str) -> bool:
        return text.strip() in self._equal or (self._held is not None and self._held.search(text) is not None)


def _emptiness(text: str | None) -> int:
    """Return 0 for no text, 1 for blank text, 2 for other text."""
    return 0 if not text else 1 if text.isspace() else 2


def _of_function(function: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a call's tool, the first character of its arguments, and whether they are empty."""
    arguments = function["arguments"].strip()
    return function["name"], arguments[:1], arguments == "{}"
