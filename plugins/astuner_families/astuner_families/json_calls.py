"""Tool calls that are JSON after a token of their own: Llama 3, Mistral, DeepSeek.

As everywhere, nothing is repaired: arguments are the model's own characters, and text that is not exactly a call
stays text.
"""

from __future__ import annotations

import json
import re

from astuner.contracts.chat_family import ReadCalls, ToolCall, Tools, members_at, object_at, skip_space
from astuner.contracts.messages import parse_arguments

_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_A_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*".*"(?:parameters|arguments)"', re.DOTALL
)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"\[TOOL_CALLS\][ \t\r\n]*([^\s\[\]{}]+)(?:\[CALL_ID\]([A-Za-z0-9]{9}))?\[ARGS\][ \t\r\n]*")
_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"function<｜tool▁sep｜>([^\s<>｜]+)[ \t]*\n```json[ \t]*\n")
_BARE = re.compile(r"([^\s<>｜]+)<｜tool▁sep｜>[ \t\r\n]*")


def read_llama(text: str, tools: Tools) -> ReadCalls:
    """A reply of Llama 3.1 or later: it is one call, or it is text.

    A call is one JSON object with ``name`` and ``parameters`` and perhaps ``"type": "function"``, and nothing else
    beside it but ``<|python_tag|>`` in front.  An object with other members is an answer in JSON.
    """
    inside = text.strip().removeprefix(_PYTHON_TAG)
    members = members_at(inside, 0)
    if members is not None and inside[members[1] :].strip() == "":
        slices = members[0]
        kind = slices.pop("type", '"function"')
        if slices.keys() == {"name", "parameters"} and kind == '"function"':
            name, arguments = json.loads(slices["name"]), slices["parameters"]
            if isinstance(name, str) and name and parse_arguments(arguments) is not None:
                return "", [ToolCall(name, arguments)], []
    begun = text.strip().startswith(_PYTHON_TAG) or _LOOKS_LIKE_A_CALL.match(inside)
    return text, [], [text] if begun else []


def read_mistral_list(text: str, tools: Tools) -> ReadCalls:
    """A reply of Mistral up to 2024: ``[TOOL_CALLS]`` and a JSON list of calls, at its end."""
    lead, found, inside = text.partition(_MISTRAL)
    if not found:
        return text, [], []
    calls = _calls_of_list(inside)
    return (lead.strip(), calls, []) if calls else (text, [], [found + inside])


def _calls_of_list(text: str) -> list[ToolCall]:
    """The calls of a JSON list that ``text`` is; empty where it is none."""
    calls: list[ToolCall] = []
    at = skip_space(text, 0)
    separator = "["
    while text.startswith(separator, at):
        members = members_at(text, at + 1)
        if members is None:
            return []
        slices, at = members
        if not {"name", "arguments"} <= slices.keys() <= {"name", "arguments", "id"}:
            return []
        name, call_id = json.loads(slices["name"]), json.loads(slices.get("id", '""'))
        if not (isinstance(name, str) and name and isinstance(call_id, str)):
            return []
        if parse_arguments(slices["arguments"]) is None:
            return []
        calls.append(ToolCall(name, slices["arguments"], call_id))
        at, separator = skip_space(text, at), ","
    return calls if text.startswith("]", at) and not text[at + 1 :].strip() else []


def read_mistral_args(text: str, tools: Tools) -> ReadCalls:
    """A reply of later Mistral models: ``[TOOL_CALLS]name[ARGS]{…}`` for each call, perhaps with ``[CALL_ID]``."""
    lead, found, _ = text.partition(_MISTRAL)
    if not found:
        return text, [], []
    calls: list[ToolCall] = []
    at = len(lead)
    while head := _MISTRAL_HEAD.match(text, at):
        end = object_at(text, head.end())
        if end is None:
            break
        calls.append(ToolCall(head[1], text[head.end() : end], head[2] or ""))
        at = skip_space(text, end)
    return (lead.strip(), calls, []) if at == len(text) else (text, [], [text[len(lead) :]])


def read_deepseek_fenced(text: str, tools: Tools) -> ReadCalls:
    """A reply of DeepSeek V3 or R1: arguments in a fenced block behind ``function`` and the name."""
    return _read_deepseek(text, _FENCED, "\n```")


def read_deepseek_bare(text: str, tools: Tools) -> ReadCalls:
    """A reply of DeepSeek V3.1: arguments behind the name."""
    return _read_deepseek(text, _BARE, "")


def _read_deepseek(text: str, head_pattern: re.Pattern[str], behind: str) -> ReadCalls:
    lead, found, _ = text.partition(_CALLS)
    if not found:
        return text, [], []
    calls: list[ToolCall] = []
    at = skip_space(text, len(lead) + len(found))
    while text.startswith(_CALL, at):
        head = head_pattern.match(text, at + len(_CALL))
        end = object_at(text, head.end()) if head else None
        if head is None or end is None:
            break
        closing = skip_space(text, end) if not behind else end
        if not text.startswith(behind + _END_CALL, closing):
            break
        calls.append(ToolCall(head[1], text[head.end() : end]))
        at = skip_space(text, closing + len(behind) + len(_END_CALL))
    if calls and text.startswith(_END_CALLS, at) and not text[at + len(_END_CALLS) :].strip():
        return lead.strip(), calls, []
    return text, [], [text[len(lead) :]]
