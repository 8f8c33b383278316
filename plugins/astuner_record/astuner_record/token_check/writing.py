"""From a reply to the token ids that a model of the family would have made.

Invariant: what is written is read back by the codec's own reader.  A reply that the family cannot give, or that reads
back as another one, says so in its note; it is never passed off as what was wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from astuner.chat.structured import STRUCTURED_TOOL
from astuner.chat.template import ChatTemplate
from astuner.contracts.chat_family import Tools
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.messages import call_parts, parse_arguments, same_arguments
from astuner.contracts.types import FinishReason
from astuner_record.token_check.arguments import SPELLINGS, find_object, make_arguments, parameters_of, respelled
from astuner_record.token_check.scenarios import Move


@dataclass(frozen=True)
class Written:
    """A reply as token ids."""

    ids: tuple[int, ...]
    finish_reason: FinishReason
    note: str = ""
    """How it differs from what was wanted, and why; empty when it does not."""


def write_move(template: ChatTemplate, move: Move, tools: Tools, number: int, prompt_ids: Sequence[int]) -> Written:
    """A scripted reply.

    :param tools: those that the request offers; with a tool for structured answers among them, that one is called.
    :param number: which reply of its agent it is; it decides which tool is called.
    """
    names = [str(tool.get("function", tool).get("name")) for tool in tools]
    note = ""
    if STRUCTURED_TOOL in names:
        move, names = Move(calls=1), [STRUCTURED_TOOL]
    if move.calls and not names:
        move, note = replace(move, calls=0, text=move.text or "Let me see."), "no tools are offered, so it says text"
    if move.thought and not template.reasons:
        move, note = (
            replace(move, thought=""),
            note or f"{template.format.name} marks no reasoning here, so there is none",
        )
    chosen = [names[(number + n) % len(names)] for n in range(move.calls)]
    calls = [
        _call(f"say{number % 1000:03d}{n:03d}", name, make_arguments(parameters_of(tools, name), move.arguments), move)
        for n, name in enumerate(chosen)
    ]
    try:
        text = _text(template, move.text, calls, move.thought)
    except UnsupportedRequest:
        if len(calls) < 2:
            raise
        calls, note = calls[:1], note or "the family makes one call in a reply, so there is one"
        text = _text(template, move.text, calls, move.thought)
    if move.end == "broken" and calls:
        text = _broken(text, calls[-1])
    elif move.end == "stop":
        note = note or misread(template, text, calls, tools, prompt_ids, said=(move.text, move.thought))
    ids = template.encode(text)
    if move.end == "cut":
        return Written(tuple(ids[: max(1, 2 * len(ids) // 3)]), FinishReason.LENGTH, note)
    return Written((*ids, _end(template, calls)), FinishReason.STOP, note)


def write_message(
    template: ChatTemplate, message: Mapping[str, Any], tools: Tools, prompt_ids: Sequence[int], *, cut: bool
) -> Written:
    """A recorded assistant message (normalised), its arguments spelled as they were.

    :param cut: a length limit ended it.
    :raises UnsupportedRequest: the family has no such replies.
    """
    calls = list(message.get("tool_calls") or ())
    text = _text(template, message["content"], calls, message.get("reasoning_content", ""))
    ids = template.encode(text)
    if cut:
        return Written(tuple(ids), FinishReason.LENGTH)
    said = message["content"], message.get("reasoning_content", "")
    note = misread(template, text, calls, tools, prompt_ids, said=said)
    return Written((*ids, _end(template, calls)), FinishReason.STOP, note)


def misread(
    template: ChatTemplate,
    text: str,
    calls: Sequence[Any],
    tools: Tools,
    prompt_ids: Sequence[int],
    *,
    said: tuple[str, str],
) -> str:
    """What the codec reads from ``text`` instead of what was meant; empty when it reads just that.

    :param said: content and reasoning.
    """
    read = template.read(text, tools, prompt_ids=prompt_ids)
    wanted = [call_parts(call) for call in calls]
    found = [(call.name, call.arguments) for call in read.calls]
    same = len(wanted) == len(found) and all(
        name == other and same_arguments(arguments, others)
        for (name, arguments), (other, others) in zip(wanted, found, strict=True)
    )
    if not same:
        return f"its calls {_names(wanted)} are read as {_names(found)}"
    for what, meant, came in zip(("text", "reasoning"), said, (read.content, read.reasoning), strict=True):
        if meant.strip() != came.strip():
            return f"the family writes such a reply otherwise: its {what} is read as {came.strip()[:40]!r}"
    return ""


def _names(calls: Sequence[tuple[str, str]]) -> str:
    return ", ".join(name for name, _ in calls) or "none"


def _text(template: ChatTemplate, content: str, calls: Sequence[Any], thought: str) -> str:
    """What the model says, with the arguments of its calls spelled as they are in ``calls``."""
    text = template.write_reply(content, calls, thought)
    if not calls:
        stripped = content.strip()  # some templates strip the content; a model may write white space all the same
        return text.replace(stripped, content, 1) if stripped and content not in text else text
    return respelled(text, [call_parts(call)[1] for call in calls])


def _broken(text: str, call: Any) -> str:
    """``text`` with a last call that cannot be read: a brace is missing, or the last tag where there are no braces."""
    value = parse_arguments(call_parts(call)[1])
    span = None if value is None else find_object(text, value)
    if span is not None:
        return text[: span[1] - 1] + text[span[1] :]
    return text[: text.rindex("<")] if "<" in text else text[:-1]


def _end(template: ChatTemplate, calls: Sequence[Any]) -> int:
    """The token that a model ends such a reply with: the one with which the template goes on behind it."""
    results = [
        {"role": "tool", "content": "r", "tool_call_id": call["id"], "name": call_parts(call)[0]} for call in calls
    ]
    try:
        first = template.continuation_ids(results or [{"role": "user", "content": "u"}], last=None, calls=calls)[0]
    except UnsupportedRequest:
        return template.end_of_turn_id
    return first if first in template.stop_token_ids else template.end_of_turn_id


def _call(label: str, name: str, arguments: Mapping[str, Any], move: Move) -> dict[str, Any]:
    text = SPELLINGS[move.spelling](arguments)
    return {"id": label, "type": "function", "function": {"name": name, "arguments": text}}
