"""Tool calls with one tag per argument: GLM-4.5 and later, Qwen3-Coder and Qwen3.5.

Such a format does not tell the text ``5`` from the number: both stand there bare.  The tool's own JSON schema
decides.  An argument that the schema says may be text, and nothing else, is text.  Any other is the JSON value that
it spells, when that is of a type that the schema allows (or the schema names none), and text when it is not.  Qwen's
template writes True, False and None; they are read so where the schema allows the value and no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from astuner.contracts.chat_family import CLOSE, ReadCalls, ToolCall, Tools, read_blocks
from astuner.contracts.messages import parse_value

_GLM_NAME = re.compile(r"[ \t\r\n]*([^\s<>]+)[ \t\r\n]*")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>[ \t\r\n]*<arg_value>(.*?)</arg_value>[ \t\r\n]*", re.DOTALL)
_QWEN_NAME = re.compile(r"[ \t\r\n]*<function=([^\s<>]+)>[ \t\r\n]*")
_QWEN_PAIR = re.compile(r"<parameter=([^\n<>]+)>(.*?)</parameter>[ \t\r\n]*", re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}
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
    types = _types(tools, named[1])
    arguments: dict[str, Any] = {}
    at = named.end()
    while pair := pair_pattern.match(text, at):
        key, value = pair[1], pair[2]
        if end_pattern is not None:  # Qwen's template puts each value on lines of its own
            value = value.removeprefix("\n").removesuffix("\n")
        if key in arguments:
            return None
        arguments[key] = _value(value, types.get(key, set()))
        at = pair.end()
    if end_pattern is not None:
        ended = end_pattern.match(text, at)
        if ended is None:
            return None
        at = ended.end()
    if not text.startswith(CLOSE, at):
        return None
    return ToolCall(named[1], json.dumps(arguments, ensure_ascii=False)), at + len(CLOSE)


def _types(tools: Tools, name: str) -> dict[str, set[str]]:
    """The JSON types that each argument of the tool ``name`` may have; missing where the schema names none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping):
                return {key: found for key, schema in properties.items() if (found := _types_of(schema))}
    return {}


def _types_of(schema: Any) -> set[str]:
    """The types that ``schema`` names; what is not as JSON Schema has it names none."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    found = {t for t in (declared if isinstance(declared, list) else [declared]) if isinstance(t, str)}
    for word in ("anyOf", "oneOf"):
        for one in alternatives if isinstance(alternatives := schema.get(word), list) else ():
            found |= _types_of(one)
    if not found and isinstance(schema.get("enum"), list) and all(isinstance(v, str) for v in schema["enum"]):
        return {"string"}
    return found


def _value(text: str, types: set[str]) -> Any:
    if types == {"string"}:
        return text
    if "string" not in types and text.strip() in _PYTHON and _kind(_PYTHON[text.strip()]) in types:
        return _PYTHON[text.strip()]
    value = parse_value(text.strip())
    if value is None and text.strip() != "null":
        return text
    kind = _kind(value)
    if not types or kind in types or (kind == "integer" and "number" in types):
        return text if kind == "string" else value  # a quoted text is a text with quotes in it: none are written
    return text


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
