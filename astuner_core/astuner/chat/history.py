"""What an agent has said so far, as a trie of messages.

A node is a history: the messages on the way to it from the root, under one list of tools.  A node that ends in a
reply of the model remembers the turn that made it.  So a request finds the turn it continues by walking its own
messages; a step compares or looks up one message, and nothing is rendered or tokenised on the way.

Invariant: a request reaches a turn's node only if its messages up to there are those that led to that turn, or a
known framework's rewriting of them that means the same (`rewrites`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from astuner.chat.messages import Key, Message, call_id, call_parts, key_of, role_of, same_arguments, text_of
from astuner.chat.rewrites import finish_call
from astuner.types import Generation


@dataclass(frozen=True)
class Said:
    """A reply of the model that was recorded."""

    turn: int
    generation: Generation
    message: Mapping[str, Any]


class Node:
    """One history."""

    __slots__ = ("children", "key", "last", "parent", "said", "seen")

    def __init__(self, key: Key, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.said: Said | None = None
        self.seen: Message | None = None
        """The last message that led here, as it was spelled: one that equals it needs no closer look."""
        self.last: Node | None = None
        """The child that was gone to last, which is tried first."""

    def child(self, key: Key) -> Node:
        """The history with one message more, made if there is none yet."""
        if key not in self.children:
            self.children[key] = Node(key, self)
        return self.children[key]

    def path(self) -> list[Key]:
        """The keys from the root to here."""
        keys: list[Key] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return keys[::-1]


@dataclass(frozen=True)
class Place:
    """Where a request stands in the trie."""

    node: Node
    """The longest history known so far that the request begins with."""
    rest: tuple[Key, ...]
    """The keys of the messages behind it."""
    said: Said | None
    """The last recorded reply on the way."""
    new_from: int
    """Index in the request of the first message behind that reply."""


class History:
    """The trie of one agent in one episode."""

    def __init__(self) -> None:
        self._roots: list[tuple[list[Mapping[str, Any]], Node]] = []
        self.replies: dict[Key, Node] = {}
        """The newest node of each reply, whatever came before it."""

    def root(self, tools: Sequence[Mapping[str, Any]]) -> Node:
        """Where conversations with these tools begin: tools are part of the prompt, so they part histories."""
        offered = list(tools)
        for known, node in self._roots:
            if known == offered:
                return node
        new = Node((), None)
        self._roots.append((deepcopy(offered), new))  # a copy: the caller may go on editing its list
        return new

    @property
    def roots(self) -> list[Node]:
        return [node for _, node in self._roots]

    def find(self, root: Node, messages: Sequence[Message]) -> Place:
        """Follow ``messages`` from ``root`` as far as they are known."""
        node, said, new_from, at = root, root.said, 0, 0
        while at < len(messages):
            child, taken = node.last, 1
            if child is None or child.seen != messages[at]:
                child, taken = _step(node, messages, at)
                if child is None:
                    break
                child.seen = deepcopy(messages[at]) if taken == 1 else None
                node.last = child
            node, at = child, at + taken
            if node.said is not None:
                said, new_from = node.said, at
        rest = [key_of(m) for m in messages[at:]]
        if rest and rest[0] in node.children:  # the ids of a reply, but not what it said: a history of its own
            rest[0] = _retold(messages[at])
        return Place(node, tuple(rest), said, new_from)

    def add(self, place: Place, said: Said, *, text: str) -> None:
        """Put a reply behind the history at ``place``, under every key that a framework may return it as.

        :param text: the whole reply, reasoning and tool calls included.
        """
        node = place.node
        for key in place.rest:
            node = node.child(key)
        exact = key_of(said.message)
        reply = Node(exact, node)
        reply.said = said
        if before := node.children.get(exact):  # the same words again: what followed them stays known
            reply.children = before.children
        keys = [exact] if said.message.get("tool_calls") else [exact, *_spellings(said.message["content"], text)]
        node.children[exact] = node.last = reply
        for key in keys:
            node.children.setdefault(key, reply)
            self.replies[key] = reply


def _spellings(content: str, text: str) -> list[Key]:
    return [("assistant", spelling) for spelling in (content.strip(), text, text.strip())]


def _step(node: Node, messages: Sequence[Message], at: int) -> tuple[Node | None, int]:
    """The child that the message at ``at`` leads to, and how many messages that takes."""
    message = messages[at]
    key = key_of(message)
    if key[0] in ("assistant", "calls") and (several := _several(node, messages, at)):
        return several
    child = node.children.get(key)
    if child is not None:
        if key[0] == "calls" and child.said is not None and not _same_calls(child, message):
            return node.children.get(_retold(message)), 1
        return child, 1
    if key[0] == "assistant":
        return node.children.get(("assistant", key[1].strip())), 1
    if key[0] == "calls" and (found := finish_call(messages, at)):
        said, taken = found
        child = node.children.get(("assistant", said))
        return (child, taken) if child is not None and child.said is not None else (None, 0)
    return None, 0


def _retold(message: Message) -> Key:
    """The key of a message that has the ids of a recorded reply and says something else."""
    calls = tuple(call_parts(call) for call in message["tool_calls"])
    return ("calls", *(call_id(call) for call in message["tool_calls"]), calls, text_of(message.get("content")))


def _several(node: Node, messages: Sequence[Message], at: int) -> tuple[Node, int] | None:
    """The recorded reply that several assistant messages in a row are together, and how many.

    OpenAI's responses keep a reply's text and each of its parallel calls as items of their own.
    """
    end = at
    while end < len(messages) and role_of(messages[end]) == "assistant":
        end += 1
    for behind in range(end, at + 1, -1):
        pieces = messages[at:behind]
        texts = [text.strip() for piece in pieces if (text := text_of(piece.get("content")))]
        calls = [call for piece in pieces for call in piece.get("tool_calls") or ()]
        joined = {"role": "assistant", "content": "\n".join(filter(None, texts)), "tool_calls": calls}
        child = node.children.get(key_of(joined))
        if child is not None and child.said is not None and (not calls or _same_calls(child, joined)):
            return child, behind - at
    return None


def _same_calls(node: Node, message: Message) -> bool:
    """Whether ``message``, which has the ids of the reply at ``node``, also says what that reply said."""
    assert node.said is not None  # the caller looked
    theirs = [call_parts(call) for call in message["tool_calls"]]
    content = text_of(message.get("content"))
    ours = node.said.message
    if content.strip() not in ("", ours["content"].strip()):  # some frameworks drop the text beside a call
        return False
    mine = [call_parts(call) for call in ours["tool_calls"]]
    return all(
        name == my_name and same_arguments(arguments, my_arguments)
        for (name, arguments), (my_name, my_arguments) in zip(theirs, mine, strict=True)
    )
