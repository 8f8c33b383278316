"""Parsers of turns, reasoning and tool calls of model families other than ChatML, and the families as data.

To add a family, define it at the end, register it in ``plugin.toml``, and add a parser if necessary. Nothing is
repaired: arguments are the model's own characters, and text that is not exactly a call stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from astuner.contracts.chat_family import (
    CLOSE,
    HERMES,
    CallStyle,
    Family,
    Read,
    ReadCalls,
    ToolCall,
    Tools,
    members_at,
    object_at,
    read_blocks,
    skip_space,
    tool_names,
)
from astuner.contracts.messages import Message, parse_arguments
from astuner_families.typed_arguments import TypedArguments

# ---- names of tools --------------------------------------------------------------------------------------------------

_NAME = "NAME"
"""Placeholder for a name in patterns. Names of offered tools may contain characters that end other names."""


def _pattern_for(pattern: str, other: str, names: Iterable[str]) -> re.Pattern[str]:
    """Return ``pattern`` with a `_NAME` that is one of ``names`` or matches ``other``."""
    return _compiled(pattern, other, tuple(names))


@lru_cache(maxsize=1024)
def _compiled(pattern: str, other: str, names: tuple[str, ...]) -> re.Pattern[str]:
    unusual = sorted({name for name in names if name and not re.fullmatch(other, name)}, key=len, reverse=True)
    return re.compile(pattern.replace(_NAME, "|".join([*map(re.escape, unusual), other])), re.DOTALL)


# ---- JSON after a special token: Llama 3, Mistral, DeepSeek ----------------------------------------------------------

_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_A_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*".*"(?:parameters|arguments)"', re.DOTALL
)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_HEAD = r"\[TOOL_CALLS\][ \t\r\n]*(NAME)(?:\[CALL_ID\]([A-Za-z0-9]{9}))?\[ARGS\][ \t\r\n]*"
_MISTRAL_NAME = r"[^\s\[\]{}]+"
_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = r"function<｜tool▁sep｜>(NAME)[ \t]*\n```json[ \t]*\n"
_BARE = r"(NAME)<｜tool▁sep｜>[ \t\r\n]*"
_DEEPSEEK_NAME = r"[^\s<>｜]+"


def read_llama(text: str, tools: Tools) -> ReadCalls:
    """Parse a reply of Llama 3.1 or later, which is either one call or text.

    A call is one JSON object with ``name`` and ``parameters``, optionally ``"type": "function"``, and optionally
    ``<|python_tag|>`` before it. An object with other members is an answer in JSON.
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
    """Parse a reply of Mistral models until 2024: ``[TOOL_CALLS]`` and a JSON list of calls at its end."""
    lead, found, inside = text.partition(_MISTRAL)
    if not found:
        return text, [], []
    calls = _calls_of_list(inside)
    return (lead.strip(), calls, []) if calls else (text, [], [found + inside])


def _calls_of_list(text: str) -> list[ToolCall]:
    """Return the calls if ``text`` is a JSON list of calls, otherwise an empty list."""
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
    """Parse a reply of later Mistral models: ``[TOOL_CALLS]name[ARGS]{…}`` per call, optionally with ``[CALL_ID]``."""
    lead, found, _ = text.partition(_MISTRAL)
    if not found:
        return text, [], []
    calls: list[ToolCall] = []
    at = len(lead)
    head_pattern = _pattern_for(_MISTRAL_HEAD, _MISTRAL_NAME, tool_names(tools))
    while head := head_pattern.match(text, at):
        end = object_at(text, head.end())
        if end is None:
            break
        calls.append(ToolCall(head[1], text[head.end() : end], head[2] or ""))
        at = skip_space(text, end)
    return (lead.strip(), calls, []) if at == len(text) else (text, [], [text[len(lead) :]])


def read_deepseek_fenced(text: str, tools: Tools) -> ReadCalls:
    """Parse a reply of DeepSeek V3 or R1: arguments in a fenced block after ``function`` and the name."""
    return _read_deepseek(text, tools, _FENCED, "\n```")


def read_deepseek_bare(text: str, tools: Tools) -> ReadCalls:
    """Parse a reply of DeepSeek V3.1: arguments after the name."""
    return _read_deepseek(text, tools, _BARE, "")


def _read_deepseek(text: str, tools: Tools, head: str, behind: str) -> ReadCalls:
    lead, found, _ = text.partition(_CALLS)
    if not found:
        return text, [], []
    head_pattern = _pattern_for(head, _DEEPSEEK_NAME, tool_names(tools))
    calls: list[ToolCall] = []
    at = skip_space(text, len(lead) + len(found))
    while text.startswith(_CALL, at):
        named = head_pattern.match(text, at + len(_CALL))
        end = object_at(text, named.end()) if named else None
        if named is None or end is None:
            break
        closing = skip_space(text, end) if not behind else end
        if not text.startswith(behind + _END_CALL, closing):
            break
        calls.append(ToolCall(named[1], text[named.end() : end]))
        at = skip_space(text, closing + len(behind) + len(_END_CALL))
    if calls and text.startswith(_END_CALLS, at) and not text[at + len(_END_CALLS) :].strip():
        return lead.strip(), calls, []
    return text, [], [text[len(lead) :]]


# ---- one tag per argument: GLM-4.5 and later, Qwen3-Coder and Qwen3.5 ------------------------------------------------

# The values have no quotes: `typed_arguments` reads them with the tool's JSON schema.


@dataclass(frozen=True)
class _Tags:
    """The format of one call between ``<tool_call>`` and ``</tool_call>``."""

    head: str
    """Pattern of the tool's name and its surroundings."""
    name: str
    """Pattern of a name."""
    pair: str
    """Pattern of an argument's name and its value."""
    key: str
    """Pattern of an argument's name."""
    end: str = ""
    """Pattern of the text after the arguments."""
    values_on_lines: bool = False
    """Whether the template writes each value on separate lines."""
    python_literals: bool = False
    """Whether the template writes values as Python's ``str`` does, not as JSON."""


_GLM_FORMAT = _Tags(
    head=r"[ \t\r\n]*(NAME)(?=[ \t\r\n<])[ \t\r\n]*",
    name=r"[^\s<>]+",
    pair=r"<arg_key>(NAME)</arg_key>[ \t\r\n]*<arg_value>(.*?)</arg_value>[ \t\r\n]*",
    key=r".*?",
)
_QWEN_FORMAT = _Tags(
    head=r"[ \t\r\n]*<function=(NAME)>[ \t\r\n]*",
    name=r"[^\s<>]+",
    pair=r"<parameter=(NAME)>(.*?)</parameter>[ \t\r\n]*",
    key=r"[^\n<>]+",
    end=r"</function>[ \t\r\n]*",
    values_on_lines=True,
    python_literals=True,
)


def read_glm(text: str, tools: Tools) -> ReadCalls:
    """Split a reply in GLM's format; see `astuner.contracts.chat_family.read_blocks`."""
    return read_blocks(text, lambda whole, at: _block(whole, at, tools, _GLM_FORMAT))


def read_qwen(text: str, tools: Tools) -> ReadCalls:
    """Split a reply in the format of Qwen3-Coder and Qwen3.5."""
    return read_blocks(text, lambda whole, at: _block(whole, at, tools, _QWEN_FORMAT))


def _block(text: str, at: int, tools: Tools, tags: _Tags) -> tuple[ToolCall, int] | None:
    named = _pattern_for(tags.head, tags.name, tool_names(tools)).match(text, at)
    if named is None:
        return None
    typed = TypedArguments(_parameters(tools, named[1]), python_literals=tags.python_literals)
    pair_pattern = _pattern_for(tags.pair, tags.key, typed.names)
    texts: dict[str, str] = {}
    at = named.end()
    while pair := pair_pattern.match(text, at):
        key, value = pair[1], pair[2]
        if tags.values_on_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        if key in texts:
            return None
        texts[key] = value
        at = pair.end()
    ended = re.compile(tags.end).match(text, at)
    if ended is None or not text.startswith(CLOSE, ended.end()):
        return None
    return ToolCall(named[1], json.dumps(typed.read(texts), ensure_ascii=False)), ended.end() + len(CLOSE)


def _parameters(tools: Tools, name: str) -> Any:
    """Return the JSON schema of the tool ``name``, or None if it is not offered."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            return function.get("parameters")
    return None


# ---- gpt-oss: a sequence of messages, each with a channel (harmony) --------------------------------------------------

# ``analysis`` is reasoning, ``final`` is the answer, ``commentary`` is text for the user or, with a recipient
# ``functions.NAME``, a tool call. The generation prompt contains the start of the first message's header.

_START, _MESSAGE, _END = "<|start|>", "<|message|>", "<|end|>"
_HEADER = (
    r"(?:<\|start\|>)?(?:assistant)?[ ]*(?:to=(?P<to>NAME))?[ ]*<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?:[ ]+to=(?P<later>NAME))?[ ]*(?P<kind>(?:<\|constrain\|>)?json)?[ ]*"
)
_RECIPIENT = r"[^\s<]+"
_FUNCTIONS = "functions."
_CALL_INSIDE = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?[ ]*(?:to=functions\.[^<]*<\|channel\|>|<\|channel\|>[^<]*to=functions\.)"
    r".*?<\|message\|>",
    re.DOTALL,
)


def read_harmony(text: str, tools: Tools) -> Read:
    """Parse a reply. Without ``tools``, calls stay text, as does everything that cannot be parsed."""
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    broken: list[str] = []
    header_pattern = _pattern_for(_HEADER, _RECIPIENT, (f"{_FUNCTIONS}{name}" for name in tool_names(tools)))
    for raw in _messages(text):
        header, begun, body = raw.partition(_MESSAGE)
        body = body.removesuffix(_END)
        found = header_pattern.fullmatch(header) if begun else None
        to = (found["to"] or found["later"] or "") if found else ""
        if found is None:
            said.append(raw)
            if tools and ("to=" in header or _START in header):
                broken.append(raw)
        elif to:
            name = to.removeprefix(_FUNCTIONS)
            if tools and name != to and name and parse_arguments(body) is not None:
                calls.append(ToolCall(name, body.strip()))
            else:
                said.append(raw)
                if tools:
                    broken.append(raw)
        elif found["channel"] == "analysis":
            thoughts.append(body)
        else:
            said.append(body)
            if tools:
                broken += _calls_inside(body)
    if tools and not (said or calls or broken):
        broken = [call for thought in thoughts for call in _calls_inside(thought)]
    return Read("\n".join(filter(None, thoughts)), "\n".join(filter(None, said)), calls, broken)


def _calls_inside(body: str) -> list[str]:
    """Return the unfinished call inside the body of another message, as a list of at most one text."""
    found = _CALL_INSIDE.search(body)
    return [body[found.start() :].strip()] if found else []


def _messages(text: str) -> list[str]:
    """Return the messages of ``text``, including their start and end tokens."""
    return [piece for piece in re.split(r"(?<=<\|end\|>)|(?=<\|start\|>)", text) if piece]


# ---- forms of messages that chat templates require -------------------------------------------------------------------

SHORT = 9
"""Length of a call's ID in Mistral's templates."""


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return ``messages`` with call IDs of nine letters or digits, and with tool names in results, as v2 requires."""
    names = {call.get("id"): {"name": call["function"]["name"]} for m in messages for call in m.get("tool_calls") or ()}
    results = ({**names.get(m.get("tool_call_id"), {}), **m} if m["role"] == "tool" else m for m in messages)
    return [_with_short_ids(message) for message in results]


def _with_short_ids(message: Message) -> Message:
    if message["role"] == "tool":
        return {**message, "tool_call_id": short_id(message.get("tool_call_id"))}
    calls = [{**call, "id": short_id(call.get("id"))} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message


def short_id(label: str | None) -> str:
    """Return the ID of nine letters or digits for ``label``: the model's own ID of the call, if there is one."""
    text = label or ""
    own = text.rpartition("_")[2]
    if len(own) == SHORT and own.isalnum():
        return own
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which parallel calls are sequential: each is followed by its own result."""
    at, shaped = 0, list[Message]()
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            shaped.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        ids = [call.get("id") for call in calls]
        for n, call in enumerate(calls):
            shaped.append({**message, "content": message["content"] if n == 0 else "", "tool_calls": [call]})
            own = [r for r in results if r.get("tool_call_id") == ids[n]]
            own = own[:1] if ids[n] in ids[n + 1 :] else own  # calls with equal or missing IDs: in order
            shaped += own
            results = [r for r in results if not any(r is taken for taken in own)]
        shaped += results
    return shaped


def one_text_beside_a_call(messages: Sequence[Message]) -> list[Message]:
    """Apply `one_call_each`; gpt-oss's template accepts either content or reasoning next to a call."""
    return [
        {k: v for k, v in m.items() if k != "reasoning_content"} if m.get("tool_calls") and m["content"] else m
        for m in one_call_each(messages)
    ]


# ---- the families ----------------------------------------------------------------------------------------------------

_QWEN_TAGS = CallStyle("Qwen3.5's XML tool calls", read_qwen)
_GLM_TAGS = CallStyle("GLM's XML tool calls", read_glm)

QWEN_XML = Family(
    "ChatML",
    "<|im_start|>assistant",
    closes=("<|im_end|>",),
    stops=("<|im_end|>",),
    styles=(_QWEN_TAGS, _GLM_TAGS),
)
LLAMA3 = Family(
    "Llama 3",
    "<|start_header_id|>assistant<|end_header_id|>",
    closes=("<|eot_id|>", "<|eom_id|>"),
    stops=("<|eot_id|>", "<|eom_id|>"),
    styles=(
        CallStyle("Llama's JSON tool calls", read_llama, one_call=True, reshape=one_call_each),
        HERMES,
        _QWEN_TAGS,
        _GLM_TAGS,
    ),
)
MISTRAL = Family(
    "Mistral",
    "",
    asked="[/INST]",
    closes=("</s>",),
    stops=("</s>",),
    styles=(
        CallStyle("Mistral's list of tool calls", read_mistral_list, reshape=short_ids),
        CallStyle("Mistral's [ARGS] tool calls", read_mistral_args, reshape=short_ids),
    ),
)
DEEPSEEK = Family(
    "DeepSeek",
    "<｜Assistant｜>",
    closes=("<｜end▁of▁sentence｜>",),
    stops=("<｜end▁of▁sentence｜>",),
    styles=(
        CallStyle("DeepSeek V3's tool calls", read_deepseek_fenced),
        CallStyle("DeepSeek V3.1's tool calls", read_deepseek_bare),
    ),
)
GLM = Family(
    "GLM",
    "<|assistant|>",
    follows=("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    styles=(_GLM_TAGS,),
)
GPT_OSS = Family(
    "gpt-oss",
    "<|start|>assistant",
    closes=("<|end|>", "<|return|>", "<|call|>"),
    stops=("<|return|>", "<|call|>"),
    styles=(CallStyle.of_replies("harmony tool calls", read_harmony, one_call=True, reshape=one_text_beside_a_call),),
    channels=read_harmony,
)
GEMMA = Family("Gemma", "<start_of_turn>model", closes=("<end_of_turn>",), stops=("<end_of_turn>",))
