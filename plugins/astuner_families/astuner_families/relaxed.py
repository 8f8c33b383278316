"""The turn that a request goes on from by what it says alone (``astuner.rollout.merge_level: text``).

Messages are compared by role and text, white space apart.  Tools, tool calls and their ids are overlooked; what was
overlooked is reported, in a closed vocabulary.  Only the finding is relaxed: the prompt still begins with the recorded
ids, so what is trained is exactly what the engine saw.  Invariant: of the turns that fit, the one that overlooks least
is taken, then the newest.
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
    """What one agent has said so far, to be found by text."""

    def __init__(self) -> None:
        self._heard: dict[_Texts, list[tuple[Said, Sequence[Message], Sequence[Mapping[str, Any]]]]] = {}
        """The texts of a conversation up to a reply -> the turns that ended so, each with its messages and tools."""

    def add(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], said: Said, *, text: str) -> None:
        """Remember the reply to ``messages``.

        :param text: the whole reply, reasoning and tool calls included; it may come back like that.
        """
        before = tuple(map(_signature, messages))
        heard = (said, deepcopy([*messages, said.message]), deepcopy(list(tools)))
        for last in {_signature(said.message), ("assistant", _squeezed(text))}:
            self._heard.setdefault((*before, last), []).append(heard)

    def find(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """The last turn that ``messages`` go on from."""
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
    return sys.intern(" ".join(text.split()))  # it is kept again for every later turn


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
