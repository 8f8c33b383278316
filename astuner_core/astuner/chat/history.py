"""The recorded replies of an agent, as a trie of messages.

A node is a history: the messages on the path from the root, for one list of tools. A node that ends in a reply of the
model refers to the turn of that reply. A request finds the turn it continues by following its own messages. Each step
compares or looks up one message; nothing is rendered or tokenized.

A reply is recognized by its text or its calls' IDs, because frameworks drop and reformat other parts. The parts that
they return must be equal. Any other message is recognized by its complete content. Replies that differ only in their
reasoning are equal for a framework that drops it. In this case the path with the longest known history is used, and the
newest of equals.

Invariant: a request reaches a turn's node only if its messages up to there are the ones that led to that turn, or an
equivalent rewriting by a known framework (`rewrites`).

`branch_reason` returns why a request continues no recorded turn, as one of a fixed set of values. It is called only for
requests that continue no turn, so its speed does not matter.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import astuner
from astuner.chat.outline import Structure
from astuner.contracts.messages import (
    Key,
    Message,
    brief,
    call_parts,
    copied,
    finish_call,
    full_key,
    has_text_arguments,
    key_of,
    normalise,
    packed,
    reasoning_of,
    role_of,
    same_arguments,
    spelling,
    text_of,
)
from astuner.contracts.types import Generation


class Context(NamedTuple):
    """The conversation in a prompt, up to the requested reply."""

    before: Said | None = None
    """The recorded reply that it continues."""
    request: Sequence[Message] = ()
    """Messages after that reply, normalized; all messages if it continues none."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools in the first prompt."""
    structure: Structure | None = None
    """Structure for comparison with other conversations; None if unknown."""

    def messages(self) -> list[Message]:
        """Return the complete conversation, normalized."""
        pieces: list[Sequence[Message]] = [self.request]
        said = self.before
        while said is not None:
            pieces += [[normalise(said.message)], said.context.request]
            said = said.context.before
        return [message for piece in reversed(pieces) for message in piece]


@dataclass(frozen=True)
class Said:
    """A recorded reply of the model."""

    turn: int
    generation: Generation
    message: Mapping[str, Any]
    approximation: str = ""
    """The gravest difference between the model's prompt and the agent's request, on the complete path to this reply."""
    context: Context = field(default=Context(), repr=False, compare=False)
    """The conversation that the model answered."""


class Node:
    """One history."""

    __slots__ = ("children", "key", "last", "most_calls", "parent", "replies", "said", "seen")

    def __init__(self, key: Key, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[Key, Node] = {}
        """Histories with one more message that the model did not write, by `full_key`."""
        self.replies: dict[Key, dict[str, Node]] = {}
        """Histories with one more reply: by each key it may be returned under, then by its reasoning, newest last."""
        self.most_calls = 0
        """Maximum number of calls in one of the replies."""
        self.said: Said | None = None
        self.seen: Message | None = None
        """The last message that led only here, as received: an equal message needs no further comparison."""
        self.last: Node | None = None
        """The most recently used next history, which is tried first."""

    def child(self, key: Key) -> Node:
        """Return the history with one more message, and create it if necessary."""
        if key not in self.children:
            self.children[key] = Node(key, self)
        return self.children[key]

    def path(self) -> list[Key]:
        """Return the keys (`key_of`) of the messages from the root to here."""
        keys: list[Key] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            keys.append(brief(node.key))
            node = node.parent
        return keys[::-1]


@dataclass(frozen=True)
class Place:
    """Position of a request in the trie."""

    node: Node
    """The longest known history that is a prefix of the request."""
    rest: tuple[Key, ...]
    """Full keys of the messages after it."""
    said: Said | None
    """The last recorded reply on the path."""
    new_from: int
    """Index in the request of the first message after that reply."""


class _Reached(NamedTuple):
    """A position on a path through the trie."""

    node: Node
    at: int
    said: Said | None
    new_from: int

    def after(self, node: Node, taken: int) -> _Reached:
        at = self.at + taken
        return _Reached(node, at, self.said, self.new_from) if node.said is None else _Reached(node, at, node.said, at)


class History:
    """The trie of one agent in one episode."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self.replies: dict[Key, Node] = {}
        """The newest node of each reply, independent of earlier messages."""

    def root(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Node, list[Mapping[str, Any]]]:
        """Return the start of conversations with these tools, and a copy of the tools, which the caller may modify.

        Tools are part of the prompt, so different tools mean different histories.
        """
        plain = packed(tools)
        ours, spelled = (copied(list(tools)), spelling(tools)) if plain is None else _unpacked(plain)
        if (root := self._roots.get(spelled)) is None:
            root = self._roots[spelled] = Node((), None)
        return root, ours

    @property
    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def find(self, root: Node, messages: Sequence[Message]) -> Place:
        """Follow ``messages`` from ``root`` through the known histories."""
        best = _Reached(root, 0, None, 0)
        waiting = [best]
        while waiting:  # usually once; each history is visited at most once
            end = _follow(waiting.pop(), messages, waiting)
            if (end.new_from, end.at) > (best.new_from, best.at):
                best = end
        return Place(best.node, tuple(map(full_key, messages[best.at :])), best.said, best.new_from)

    def add(self, place: Place, said: Said, *, text: str) -> None:
        """Add a reply after the history at ``place``, under every key that a framework may return it as.

        :param text: The complete reply, including reasoning and tool calls.
        """
        node = place.node
        for key in place.rest:
            node = node.child(key)
        first = not node.replies and not node.children
        exact, thought, calls = key_of(said.message), reasoning_of(said.message), said.message.get("tool_calls") or ()
        reply = node.last = Node(exact, node)
        reply.said = said
        reply.seen = copied(said.message) if first else None  # an equal message can only mean this reply
        same = node.replies.setdefault(exact, {})
        before = same.pop(thought, None)
        if before is not None:  # equal words and reasoning: keep what followed them
            reply.children, reply.replies, reply.most_calls = before.children, before.replies, before.most_calls
        same[thought] = reply
        spellings = () if calls else _spellings(said.message["content"], text)
        for key in spellings:
            others = node.replies.setdefault(key, {})
            if others.get(thought) is before:
                others.pop(thought, None)
                others[thought] = reply
        for key in (exact, *spellings):
            self.replies[key] = reply
        node.most_calls = max(node.most_calls, len(calls))


@lru_cache(maxsize=256)
def _unpacked(tools: bytes) -> tuple[list[Mapping[str, Any]], str]:
    """Return tools and their spelling, shared by all conversations with equal tools."""
    ours = marshal.loads(tools)
    return ours, spelling(ours)


def _spellings(content: str, text: str) -> list[Key]:
    return [("assistant", spelled) for spelled in (content.strip(), text, text.strip())]


def _follow(reached: _Reached, messages: Sequence[Message], waiting: list[_Reached]) -> _Reached:
    """Return the end of the path that ``messages`` take from ``reached``; alternatives are added to ``waiting``."""
    node, at, said, new_from = reached
    end = len(messages)
    while at < end:
        child = node.last
        if child is not None and child.seen == messages[at]:
            at += 1
        else:
            ways = _ways(node, messages, at)
            if not ways:
                break
            waiting += [_Reached(node, at, said, new_from).after(*way) for way in ways[:0:-1]]
            child, taken = ways[0]
            child.seen = copied(messages[at]) if taken == 1 == len(ways) and _is_telling(messages[at], node) else None
            node.last = child
            at += taken
        node = child
        if node.said is not None:
            said, new_from = node.said, at
    return _Reached(node, at, said, new_from)


def _is_telling(message: Message, node: Node) -> bool:
    """Return whether equal messages always lead to the same node. A text may also be the first part of a reply."""
    return has_text_arguments(message) if message.get("tool_calls") else not node.most_calls


def _ways(node: Node, messages: Sequence[Message], at: int) -> list[tuple[Node, int]]:
    """Return the histories that the message at ``at`` may lead to, with the number of messages used; best first."""
    message = messages[at]
    key = key_of(message)
    if key[0] not in ("assistant", "calls"):
        return [(node.children[key], 1)] if key in node.children else []
    if several := _several(node, messages, at):
        return [several]
    ways = [(reply, 1) for reply in _replies(node, message)]
    if child := node.children.get(full_key(message)):
        ways.append((child, 1))
    if not ways and key[0] == "calls" and (found := finish_call(messages, at)):
        said, taken = found
        return [(reply, taken) for reply in _replies(node, {"role": "assistant", "content": said})]
    return ways


def _replies(node: Node, message: Message) -> list[Node]:
    """Return the recorded replies after ``node`` that ``message`` may be."""
    key, thought = key_of(message), reasoning_of(message)
    for known in (key,) if key[0] == "calls" else (key, ("assistant", key[1].strip())):
        replies = node.replies.get(known, {})
        ours = list(reversed(replies.values())) if not thought else [replies[thought]] if thought in replies else []
        if key[0] == "calls":
            ours = [reply for reply in ours if _same_calls(reply, message)]
        if ours:
            return sorted(ours, key=lambda reply: reply.key != known)
    return []


def _several(node: Node, messages: Sequence[Message], at: int) -> tuple[Node, int] | None:
    """Return the recorded reply that consists of several consecutive assistant messages, and their number.

    OpenAI's responses API returns a reply's text and each of its parallel calls as separate items.
    """
    end, most = at, min(len(messages), at + 1 + node.most_calls)
    while end < most and role_of(messages[end]) == "assistant":
        end += 1
    for behind in range(end, at + 1, -1):
        pieces = messages[at:behind]
        texts = [text.strip() for piece in pieces if (text := text_of(piece.get("content")))]
        calls = [call for piece in pieces for call in piece.get("tool_calls") or ()]
        joined = {"role": "assistant", "content": "\n".join(filter(None, texts)), "tool_calls": calls}
        joined["reasoning_content"] = next(filter(None, map(reasoning_of, pieces)), "")
        if calls and (found := _replies(node, joined)):
            return found[0], behind - at
    return None


def _same_calls(node: Node, message: Message) -> bool:
    """Return whether ``message``, which has the IDs of the reply at ``node``, also has its content."""
    assert node.said is not None  # checked by the caller
    theirs = [call_parts(call) for call in message["tool_calls"]]
    content = text_of(message.get("content"))
    ours = node.said.message
    if content.strip() not in ("", ours["content"].strip()):  # some frameworks drop the text next to a call
        return False
    mine = [call_parts(call) for call in ours["tool_calls"]]
    return all(
        name == my_name and same_arguments(arguments, my_arguments)
        for (name, arguments), (my_name, my_arguments) in zip(theirs, mine, strict=True)
    )


_TELLING = 12
"""Minimum length of a text whose occurrence in another message is not a coincidence."""


def branch_reason(history: History, root: Node, place: Place, messages: Sequence[Message]) -> str:
    """Return why a request that was found at ``place``, below ``root``, continues no turn."""
    if not history.replies:
        return ""
    if not place.rest and place.node.replies:
        return "repeated_request"
    if any(history.find(other, messages).said for other in history.roots if other is not root):
        return "tools_changed"
    keys = [key_of(m) for m in messages]
    for at in range(len(keys) - 1, -1, -1):
        if reply := history.replies.get(keys[at]):
            asked, given = reply.path()[:-1], keys[:at]
            if len(given) < len(asked) and _is_subsequence(given, asked):
                return "messages_removed"
            if len(given) > len(asked) and _is_subsequence(asked, given):
                return "messages_inserted"
            return "history_rewritten"
    if any(key[0] in ("assistant", "calls") for key in keys):
        return "history_rewritten"
    return "history_retold" if _is_retold(history, keys) else "new_conversation"


def _is_retold(history: History, keys: Iterable[Key]) -> bool:
    heard = [key[1] for key in keys if key[0] == "user"]
    replies = (node.said.message["content"].strip() for node in history.replies.values() if node.said)
    return any(len(reply) >= _TELLING and reply in text for reply in replies for text in heard)


def _is_subsequence(short: Iterable[Key], long: Iterable[Key]) -> bool:
    rest = iter(long)
    return all(key in rest for key in short)


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
