"""What an agent has said so far, as a trie of messages.

A node is a history: the messages on the way to it from the root, under one list of tools.  A node that ends in a
reply of the model remembers the turn that made it.  So a request finds the turn it continues by walking its own
messages; a step compares or looks up one message, and nothing is rendered or tokenised on the way.

A reply is recognised by its text or its calls' ids, since frameworks drop and respell the rest; what they do give back
must be what it said.  Any other message is recognised by all it says.  Replies that differ in their reasoning only are
one to a framework that drops it: then the way on which most is known is taken, and of equals the newest.

Invariant: a request reaches a turn's node only if its messages up to there are those that led to that turn, or a
known framework's rewriting of them that means the same (`rewrites`).

`branch_reason` says why a request continues nothing that was recorded, in a closed vocabulary.  It is asked only when a
request has already failed to continue a turn, so it may take its time.
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
    """The conversation that a prompt holds, up to the reply that it asks for."""

    before: Said | None = None
    """The recorded reply that it continues."""
    request: Sequence[Message] = ()
    """The messages behind that reply, normalised; all of them where it continues none."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that its first prompt shows."""
    structure: Structure | None = None
    """None where it is not known whether another conversation has the same."""

    def messages(self) -> list[Message]:
        """Return the complete conversation, normalised."""
        pieces: list[Sequence[Message]] = [self.request]
        said = self.before
        while said is not None:
            pieces += [[normalise(said.message)], said.context.request]
            said = said.context.before
        return [message for piece in reversed(pieces) for message in piece]


@dataclass(frozen=True)
class Said:
    """A reply of the model that was recorded."""

    turn: int
    generation: Generation
    message: Mapping[str, Any]
    approximation: str = ""
    """The gravest difference between what the model was asked with and what the agent asked, on the whole way here."""
    context: Context = field(default=Context(), repr=False, compare=False)
    """What the model was asked with."""


class Node:
    """One history."""

    __slots__ = ("children", "key", "last", "most_calls", "parent", "replies", "said", "seen")

    def __init__(self, key: Key, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[Key, Node] = {}
        """The histories with one message more that the model did not say, by `full_key`."""
        self.replies: dict[Key, dict[str, Node]] = {}
        """Those with one reply more: by each key it may come back under, then by its reasoning, the newest last."""
        self.most_calls = 0
        """How many calls one of the replies has at most."""
        self.said: Said | None = None
        self.seen: Message | None = None
        """The last message that led here and nowhere else, as it was spelled: its equal needs no closer look."""
        self.last: Node | None = None
        """The next history that was gone to last, which is tried first."""

    def child(self, key: Key) -> Node:
        """The history with one message more, made if there is none yet."""
        if key not in self.children:
            self.children[key] = Node(key, self)
        return self.children[key]

    def path(self) -> list[Key]:
        """What the messages from the root to here are recognised by (`key_of`)."""
        keys: list[Key] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            keys.append(brief(node.key))
            node = node.parent
        return keys[::-1]


@dataclass(frozen=True)
class Place:
    """Where a request stands in the trie."""

    node: Node
    """The longest history known so far that the request begins with."""
    rest: tuple[Key, ...]
    """The full keys of the messages behind it."""
    said: Said | None
    """The last recorded reply on the way."""
    new_from: int
    """Index in the request of the first message behind that reply."""


class _Reached(NamedTuple):
    """A place on the way through the trie."""

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
        """The newest node of each reply, whatever came before it."""

    def root(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Node, list[Mapping[str, Any]]]:
        """Where conversations with these tools begin: tools are part of the prompt, so they part histories.

        Beside it a copy of the tools, since the caller may go on editing its own.
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
        """Follow ``messages`` from ``root`` as far as they are known."""
        best = _Reached(root, 0, None, 0)
        waiting = [best]
        while waiting:  # usually once; each history is come to once at most
            end = _follow(waiting.pop(), messages, waiting)
            if (end.new_from, end.at) > (best.new_from, best.at):
                best = end
        return Place(best.node, tuple(map(full_key, messages[best.at :])), best.said, best.new_from)

    def add(self, place: Place, said: Said, *, text: str) -> None:
        """Put a reply behind the history at ``place``, under every key that a framework may return it as.

        :param text: the whole reply, reasoning and tool calls included.
        """
        node = place.node
        for key in place.rest:
            node = node.child(key)
        first = not node.replies and not node.children
        exact, thought, calls = key_of(said.message), reasoning_of(said.message), said.message.get("tool_calls") or ()
        reply = node.last = Node(exact, node)
        reply.said = said
        reply.seen = copied(said.message) if first else None  # nothing else can be meant by its equal
        same = node.replies.setdefault(exact, {})
        before = same.pop(thought, None)
        if before is not None:  # the same words and thoughts again: what followed them stays known
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
    """The tools of all conversations that have the same, and how they are spelled."""
    ours = marshal.loads(tools)
    return ours, spelling(ours)


def _spellings(content: str, text: str) -> list[Key]:
    return [("assistant", spelled) for spelled in (content.strip(), text, text.strip())]


def _follow(reached: _Reached, messages: Sequence[Message], waiting: list[_Reached]) -> _Reached:
    """Where ``messages`` lead from ``reached``; other ways that they may go are put to those ``waiting``."""
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
    """Whether an equal of ``message`` always leads to the same place: a text may also be the first piece of a reply."""
    return has_text_arguments(message) if message.get("tool_calls") else not node.most_calls


def _ways(node: Node, messages: Sequence[Message], at: int) -> list[tuple[Node, int]]:
    """The histories that the message at ``at`` may lead to, and how many messages that takes; the best first."""
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
    """The recorded replies behind ``node`` that ``message`` may be."""
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
    """The recorded reply that several assistant messages in a row are together, and how many.

    OpenAI's responses keep a reply's text and each of its parallel calls as items of their own.
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


_TELLING = 12
"""Characters from which on a text in another's message is no chance."""


def branch_reason(history: History, root: Node, place: Place, messages: Sequence[Message]) -> str:
    """The reason why a request that was found at ``place``, below ``root``, continues no turn."""
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
