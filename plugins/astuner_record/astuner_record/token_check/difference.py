"""Which message of a request broke the continuation, and how: for people, from the requests alone.

The codec has already said that a request continues nothing, and why (`astuner.chat.branches`); here the turn that it
was meant to go on from is found, and the first message, or tool, in which the two differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from astuner.chat.rewrites import finish_call
from astuner.contracts.messages import call_parts, key_of, same_arguments

NOTHING = "(nothing)"
_BEFORE, _SHOWN = 30, 120
"""Characters shown before the first difference, and in all."""
_TELLING = 12
"""Characters from which on it is no accident that a message holds what the model said."""


class Answered(Protocol):
    """A request that was answered; `scripted.Asked` is one."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def turn(self) -> int: ...
    @property
    def reply(self) -> Mapping[str, Any]: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a request leaves the turn that it was meant to continue."""

    turn: int
    """That turn."""
    message: int | None
    """Index in the request of the first message that differs; None when the tools do."""
    before: str
    """What stood there, shortened around the difference; ``(nothing)`` behind the end."""
    after: str
    """What stands there now."""


def find_difference(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], earlier: Sequence[Answered]
) -> Difference | None:
    """What keeps a request from continuing one of ``earlier``, its agent's turns in order; None without any.

    :param messages: normalised, as are those of ``earlier``.
    """
    if not earlier:
        return None
    given = _steps(messages)
    found = [(one, _steps([*one.messages, one.reply])) for one in earlier]
    shared = [_shared(expected, given, one) for one, expected in found]
    meant = [n for n, (one, _) in enumerate(found) if any(_same(one.reply, m, one) for _, m in given)]
    best = meant[-1] if meant else max(range(len(found)), key=lambda n: (shared[n], n))
    one, expected = found[best]
    at = shared[best]
    if at == len(expected):
        if list(one.tools) != list(tools):
            before, after = _tools(one.tools, tools)
            return Difference(turn=one.turn, message=None, before=before, after=after)
        index = given[at][0] if at < len(given) else len(messages)
        now = _written(given[at][1]) if at < len(given) else NOTHING
        return Difference(turn=one.turn, message=index, before=NOTHING, after=_shortened(now, 0))
    was = _written(expected[at][1])
    now = _written(given[at][1]) if at < len(given) else NOTHING
    differs = next((n for n, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    return Difference(
        turn=one.turn,
        message=given[at][0] if at < len(given) else len(messages),
        before=_shortened(was, differs),
        after=_shortened(now, differs),
    )


def quoted_turn(messages: Sequence[Mapping[str, Any]], earlier: Sequence[Answered]) -> int | None:
    """The last of ``earlier`` whose words stand in a message that is not the model's, as in a retold history."""
    others = [message["content"] for message in messages if message["role"] != "assistant"]
    for one in reversed(earlier):
        said = one.reply["content"].strip()
        if len(said) >= _TELLING and any(said in other for other in others):
            return one.turn
    return None


def _steps(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """The messages with their indices, those together that mean one reply."""
    steps: list[tuple[int, Mapping[str, Any]]] = []
    at = 0
    while at < len(messages):
        message, taken = messages[at], 1
        if message.get("tool_calls") and (fake := finish_call(messages, at)):
            said, taken = fake
            message = {"role": "assistant", "content": said}
        else:
            while message["role"] == "assistant" and at + taken < len(messages):
                piece = messages[at + taken]
                if piece["role"] != "assistant":
                    break
                message, taken = _joined(message, piece), taken + 1
        steps.append((at, message))
        at += taken
    return steps


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    texts = [m["content"].strip() for m in (one, other) if m["content"].strip()]
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return {"role": "assistant", "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}


def _shared(
    expected: Sequence[tuple[int, Mapping[str, Any]]], given: Sequence[tuple[int, Mapping[str, Any]]], one: Answered
) -> int:
    """How many steps both begin with."""
    for n, ((_, was), (_, now)) in enumerate(zip(expected, given, strict=False)):
        if not _same(was, now, one):
            return n
    return min(len(expected), len(given))


def _same(was: Mapping[str, Any], now: Mapping[str, Any], one: Answered) -> bool:
    """Whether the codec takes one message for the other."""
    if was["role"] == now["role"] == "assistant" and not (was.get("tool_calls") or now.get("tool_calls")):
        spellings = {was["content"].strip()} | ({one.text.strip()} if was is one.reply else set())
        return now["content"].strip() in spellings
    if key_of(was) != key_of(now):
        return False
    calls = zip(was.get("tool_calls", ()), now.get("tool_calls", ()), strict=True)
    pairs = [(call_parts(a), call_parts(b)) for a, b in calls]
    if not all(a == b and same_arguments(x, y) for (a, x), (b, y) in pairs):
        return False
    return not pairs or now["content"].strip() in ("", was["content"].strip())


def _written(message: Mapping[str, Any]) -> str:
    calls = [call_parts(call) for call in message.get("tool_calls") or ()]
    label = message.get("tool_call_id") or message.get("name")
    head = message["role"] + (f" ({label})" if label else "")
    ids = [call.get("id") for call in message.get("tool_calls") or ()]
    said = [f"{name}({arguments}) [{label}]" for (name, arguments), label in zip(calls, ids, strict=True)]
    return f"{head}: {' '.join(filter(None, [message['content'], *said]))}"


def _tools(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The names of both lists, or where the names are the same, the first tool that differs."""
    names = [[str(tool.get("function", tool).get("name")) for tool in tools] for tools in (was, now)]
    if names[0] != names[1]:
        return tuple("tools " + (", ".join(n) or "(none)") for n in names)  # type: ignore[return-value]
    first = next((a, b) for a, b in zip(was, now, strict=True) if a != b)
    one, other = (json.dumps(tool, ensure_ascii=False, sort_keys=True) for tool in first)
    differs = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return _shortened(f"tool {one}", differs + 5), _shortened(f"tool {other}", differs + 5)


def _shortened(text: str, at: int) -> str:
    """One line of ``text`` around its character ``at``."""
    start = max(0, at - _BEFORE) if len(text) > _SHOWN else 0
    shown = text[start : start + _SHOWN]
    return ("…" if start else "") + shown.replace("\n", "⏎") + ("…" if start + _SHOWN < len(text) else "")
