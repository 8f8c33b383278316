"""Find the turn that a request continues by text alone (``astuner.rollout.merge_level: text``).

Messages are compared by role and text, ignoring white space. Tools, tool calls and their IDs are also ignored; ignored
differences are reported as one of a fixed set of values. Only the search is relaxed: the prompt still starts with the
recorded IDs, so training uses exactly the tokens that the engine saw. Invariant: of the matching turns, the one with
the
smallest difference is used, and the newest of equals.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias

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
from astuner.contracts.parts import Found, LooserHistoryPart
from astuner.contracts.types import APPROXIMATIONS, gravest

if TYPE_CHECKING:
    from astuner import Said

_GRAVITY = ["", *APPROXIMATIONS]
_Texts: TypeAlias = tuple[tuple[str, str], ...]
"""Role and text of each message."""


class Relaxed(LooserHistoryPart):
    """The recorded replies of one agent, found by text."""

    def __init__(self) -> None:
        self._heard: dict[_Texts, list[tuple[Said, Sequence[Message], Sequence[Mapping[str, Any]]]]] = {}
        """Texts of a conversation up to a reply -> turns with this end, each with its messages and tools."""

    def add(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], said: Said, *, text: str) -> None:
        """Add the reply to ``messages``.

        :param text: The complete reply, including reasoning and tool calls, which a framework may return.
        """
        before = tuple(map(_signature, messages))
        heard = (said, deepcopy([*messages, said.message]), deepcopy(list(tools)))
        for last in {_signature(said.message), ("assistant", _squeezed(text))}:
            self._heard.setdefault((*before, last), []).append(heard)

    def find(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """Return the last turn that ``messages`` continue, or None."""
        texts, spelled = tuple(map(_signature, messages)), spelling(list(tools))
        length = next((n for n in range(len(texts), 0, -1) if texts[:n] in self._heard), 0)
        weighed = []
        for order, (said, theirs, offered) in enumerate(self._heard.get(texts[:length], ())):
            overlooked = list(_overlooked(messages[:length], theirs))
            if spelling(offered) != spelled:
                overlooked.append("tools")
            worst = gravest(overlooked)
            weighed.append((_GRAVITY.index(gravest([worst, said.approximation])), -order, Found(said, length, worst)))
        return min(weighed, key=lambda one: one[:2])[-1] if weighed else None


def _signature(message: Message) -> tuple[str, str]:
    return role_of(message), _squeezed(text_of(message.get("content")))


def _squeezed(text: str) -> str:
    return sys.intern(" ".join(text.split()))  # it is stored again for every later turn


def _overlooked(ours: Sequence[Message], theirs: Sequence[Message]) -> Iterable[str]:
    for one, other in zip(ours, theirs, strict=True):
        if one == other and not one.get("tool_calls"):  # in Python, calls with 1 and true are equal
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
