"""Finding the turn that a request goes on from by what it says alone (``merge_level: text``).

Messages are compared by role and text, white space apart.  Tools, tool calls and their ids are overlooked; what was
overlooked is reported, in a closed vocabulary.  Only the finding is relaxed: the prompt still begins with the recorded
ids, so what is trained is exactly what the engine saw.

Invariant: of the turns that fit, the one that overlooks least is taken, then the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from astuner.chat.history import Said
from astuner.contracts.messages import (
    Message,
    call_id,
    call_parts,
    reasoning_of,
    role_of,
    same_arguments,
    spelling,
    text_of,
)

APPROXIMATIONS = {
    "whitespace": "white space in a message differs",
    "names": "the name of a speaker or of a tool differs",
    "call_ids": "tool calls are the same, but have other ids",
    "reasoning": "the reasoning that comes back with a reply is another",
    "calls": "tool calls differ, in their names, arguments or number",
    "tools": "the list of tools, which is part of the prompt, is another",
}
"""What may be overlooked, the least first. Of several, the last is reported."""
_GRAVITY = {"": 0, **{name: n for n, name in enumerate(APPROXIMATIONS, start=1)}}


def gravest(overlooked: Iterable[str]) -> str:
    """The one of several approximations that is reported; empty for none."""
    return max(overlooked, key=_GRAVITY.__getitem__, default="")


class Found(NamedTuple):
    """The turn that a request goes on from."""

    said: Said
    new_from: int
    """Index in the request of the first message behind the reply."""
    approximation: str
    """One of `APPROXIMATIONS`; empty when nothing was overlooked."""


@dataclass
class _Node:
    children: dict[tuple[str, str], _Node] = field(default_factory=dict)
    heard: list[tuple[Said, Sequence[Message], Sequence[Mapping[str, Any]]]] = field(default_factory=list)
    """The turns that ended here, each with all messages up to it, its own included, and its tools."""


class Relaxed:
    """What one agent has said so far, to be found by text."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], said: Said, *, text: str) -> None:
        """Remember the reply to ``messages``.

        :param text: the whole reply, reasoning and tool calls included; it may come back like that.
        """
        node = self._root
        for message in messages:
            node = node.children.setdefault(_signature(message), _Node())
        heard = (said, deepcopy([*messages, said.message]), deepcopy(list(tools)))
        for signature in {_signature(said.message), ("assistant", _squeezed(text))}:
            node.children.setdefault(signature, _Node()).heard.append(heard)

    def find(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """The last turn that ``messages`` go on from."""
        node, deepest, length = self._root, None, 0
        for at, message in enumerate(messages, start=1):
            child = node.children.get(_signature(message))
            if child is None:
                break
            node = child
            if node.heard:
                deepest, length = node, at
        if deepest is None:
            return None
        weighed, spelled = [], spelling(list(tools))
        for order, (said, theirs, offered) in enumerate(deepest.heard):
            overlooked = list(_overlooked(messages[:length], theirs))
            if spelling(offered) != spelled:
                overlooked.append("tools")
            worst = gravest(overlooked)
            weighed.append((_GRAVITY[gravest([worst, said.approximation])], -order, worst, said))
        _, _, worst, said = min(weighed, key=lambda one: one[:2])
        return Found(said, length, worst)


def _signature(message: Message) -> tuple[str, str]:
    return role_of(message), _squeezed(text_of(message.get("content")))


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _overlooked(ours: Sequence[Message], theirs: Sequence[Message]) -> Iterable[str]:
    for one, other in zip(ours, theirs, strict=True):
        if one == other and not one.get("tool_calls"):  # for Python, a call with 1 equals one with true
            continue
        if text_of(one.get("content")) != text_of(other.get("content")):
            yield "whitespace"
        if one.get("name") != other.get("name") and role_of(one) != "assistant":
            yield "names"
        if one.get("tool_call_id") != other.get("tool_call_id"):
            yield "call_ids"
        thoughts = {reasoning_of(one), reasoning_of(other)} - {""}
        if len(thoughts) > 1:
            yield "reasoning"
        yield from _overlooked_calls(one.get("tool_calls") or (), other.get("tool_calls") or ())


def _overlooked_calls(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterable[str]:
    if len(ours) != len(theirs):
        yield "calls"
        return
    for one, other in zip(ours, theirs, strict=True):
        (name, arguments), (other_name, other_arguments) = call_parts(one), call_parts(other)
        if name != other_name or not same_arguments(arguments, other_arguments):
            yield "calls"
        elif call_id(one) != call_id(other):
            yield "call_ids"
