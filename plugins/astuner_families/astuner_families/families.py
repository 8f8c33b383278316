"""The ways in which model families beside ChatML write turns, reasoning and tool calls: readers, and families as data.

Adding one means adding one at the end, naming it in `plugin`, and perhaps a reader.  As everywhere, nothing is
repaired: arguments are the model's own characters, and text that is not exactly a call stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
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
)
from astuner.contracts.messages import Message, parse_arguments
from astuner_families.typed_arguments import TypedArguments

# ---- JSON after a token of its own: Llama 3, Mistral, DeepSeek -------------------------------------------------------

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


# ---- one tag per argument: GLM-4.5 and later, Qwen3-Coder and Qwen3.5 ------------------------------------------------

# The values stand without quotes: `typed_arguments` reads them by the tool's JSON schema.

_GLM_NAME = re.compile(r"[ \t\r\n]*([^\s<>]+)[ \t\r\n]*")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>[ \t\r\n]*<arg_value>(.*?)</arg_value>[ \t\r\n]*", re.DOTALL)
_QWEN_NAME = re.compile(r"[ \t\r\n]*<function=([^\s<>]+)>[ \t\r\n]*")
_QWEN_PAIR = re.compile(r"<parameter=([^\n<>]+)>(.*?)</parameter>[ \t\r\n]*", re.DOTALL)
_QWEN_END = re.compile(r"</function>[ \t\r\n]*")


def read_glm(text: str, tools: Tools) -> ReadCalls:
    """Split a reply in GLM's format; see `astuner.contracts.chat_family.read_blocks`."""
    return read_blocks(text, lambda whole, at: _block(whole, at, tools, _GLM_NAME, _GLM_PAIR, None))


def read_qwen(text: str, tools: Tools) -> ReadCalls:
    """Split a reply in the format of Qwen3-Coder and Qwen3.5."""
    return read_blocks(text, lambda whole, at: _block(whole, at, tools, _QWEN_NAME, _QWEN_PAIR, _QWEN_END))


def _block(
    text: str,
    at: int,
    tools: Tools,
    name_pattern: re.Pattern[str],
    pair_pattern: re.Pattern[str],
    end_pattern: re.Pattern[str] | None,
) -> tuple[ToolCall, int] | None:
    named = name_pattern.match(text, at)
    if named is None:
        return None
    # Qwen's template writes values as Python's str() does, GLM's as JSON
    typed = TypedArguments(_parameters(tools, named[1]), python_literals=end_pattern is not None)
    arguments: dict[str, Any] = {}
    at = named.end()
    while pair := pair_pattern.match(text, at):
        key, value = pair[1], pair[2]
        if end_pattern is not None:  # Qwen's template puts each value on lines of its own
            value = value.removeprefix("\n").removesuffix("\n")
        if key in arguments:
            return None
        arguments[key] = typed.read(key, value)
        at = pair.end()
    if end_pattern is not None:
        ended = end_pattern.match(text, at)
        if ended is None:
            return None
        at = ended.end()
    if not text.startswith(CLOSE, at):
        return None
    return ToolCall(named[1], json.dumps(arguments, ensure_ascii=False)), at + len(CLOSE)


def _parameters(tools: Tools, name: str) -> Any:
    """Return the JSON schema of the tool ``name``, or None if it is not offered."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            return function.get("parameters")
    return None


# ---- gpt-oss: a row of messages, each with a channel (harmony) -------------------------------------------------------

# ``analysis`` is reasoning, ``final`` is the answer, ``commentary`` is text for the user or, with a recipient
# ``functions.NAME``, a tool call.  The generation prompt has already begun the first message's header.

_START, _MESSAGE, _END = "<|start|>", "<|message|>", "<|end|>"
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?[ ]*(?:to=(?P<to>[^\s<]+))?[ ]*<\|channel\|>(?P<channel>analysis|commentary|final)"
    r"(?:[ ]+to=(?P<later>[^\s<]+))?[ ]*(?P<kind>(?:<\|constrain\|>)?json)?[ ]*"
)
_FUNCTIONS = "functions."
_CALL_INSIDE = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?[ ]*(?:to=functions\.[^<]*<\|channel\|>|<\|channel\|>[^<]*to=functions\.)"
    r".*?<\|message\|>",
    re.DOTALL,
)


def read_harmony(text: str, tools: Tools) -> Read:
    """Take a reply apart. Without ``tools``, calls stay in the text; so does what cannot be read, as it was written."""
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    broken: list[str] = []
    for raw in _messages(text):
        header, begun, body = raw.partition(_MESSAGE)
        body = body.removesuffix(_END)
        found = _HEADER.fullmatch(header) if begun else None
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
    """Return the text of a call inside the body of another message, which the model did not end; none or one."""
    found = _CALL_INSIDE.search(body)
    return [body[found.start() :].strip()] if found else []


def _messages(text: str) -> list[str]:
    """The messages of ``text``, each with the token that begins it and the token that ends it, where it has them."""
    return [piece for piece in re.split(r"(?<=<\|end\|>)|(?=<\|start\|>)", text) if piece]


# ---- what chat templates want of messages ----------------------------------------------------------------------------

SHORT = 9
"""Characters of a call's id in Mistral's templates."""


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """``messages`` whose calls have ids of nine letters or digits, and whose results name their tool, as v2's must."""
    names = {call.get("id"): {"name": call["function"]["name"]} for m in messages for call in m.get("tool_calls") or ()}
    results = ({**names.get(m.get("tool_call_id"), {}), **m} if m["role"] == "tool" else m for m in messages)
    return [_with_short_ids(message) for message in results]


def _with_short_ids(message: Message) -> Message:
    if message["role"] == "tool":
        return {**message, "tool_call_id": short_id(message.get("tool_call_id"))}
    calls = [{**call, "id": short_id(call.get("id"))} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message


def short_id(label: str | None) -> str:
    """The id of nine letters or digits that stands for ``label``: the one the model gave the call, if it gave one."""
    text = label or ""
    own = text.rpartition("_")[2]
    if len(own) == SHORT and own.isalnum():
        return own
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Parallel calls as the model would have made them one after another: each followed by its own result."""
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
            own = own[:1] if ids[n] in ids[n + 1 :] else own  # calls that share an id, or have none: in order
            shaped += own
            results = [r for r in results if not any(r is taken for taken in own)]
        shaped += results
    return shaped


def one_text_beside_a_call(messages: Sequence[Message]) -> list[Message]:
    """As `one_call_each`; beside a call, gpt-oss's template takes either content or reasoning."""
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
