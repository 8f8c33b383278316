"""Made-up arguments for a tool, from its own JSON schema.

They are as small as the schema allows and of the types that it asks for; a tool may still refuse what they say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from astuner.contracts.chat_family import Tools
from astuner.contracts.messages import parse_arguments

PLAIN = "2 + 2"
"""A text that is also arithmetic, code and a search."""
AWKWARD = 'naïve café 你好 😀 "quoted" \\ back\nnext line </tag> 1'
"""A text that JSON may spell in several ways."""
_DEEPEST = 8


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The JSON schema of the parameters of one of ``tools``; empty if it has none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


def make_arguments(schema: Mapping[str, Any], text: str = PLAIN) -> dict[str, Any]:
    """Arguments that ``schema`` (an object's) allows.

    :param text: what every free text says.
    """
    made = _object(schema, text, schema, 0)
    return made if isinstance(made, dict) else {}


def _object(schema: Mapping[str, Any], text: str, root: Mapping[str, Any], depth: int) -> Any:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    required = schema.get("required")
    names = [n for n in properties if n in required] if isinstance(required, list) else []
    return {name: _value(properties[name], text, root, depth + 1) for name in names or list(properties)[:1]}


def _value(schema: Any, text: str, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return text
    if isinstance(reference := schema.get("$ref"), str):
        return _value(_follow(reference, root), text, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    for word in ("enum", "examples"):
        if isinstance(values := schema.get(word), list) and values:
            return values[0]
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(ways := schema.get(word), list) and ways:
            typed = [w for w in ways if isinstance(w, Mapping) and w.get("type") != "null"]
            return _value((typed or ways)[0], text, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), "null")
    if kind in ("integer", "number"):
        return _number(schema)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    if kind == "array":
        at_least = schema.get("minItems")
        n = at_least if isinstance(at_least, int) and at_least > 0 else 1
        return [_value(schema.get("items"), text, root, depth + 1) for _ in range(min(n, 4))]
    if kind == "object" or "properties" in schema:
        return _object(schema, text, root, depth)
    longest = schema.get("maxLength")
    return text[:longest] if isinstance(longest, int) else text


def _number(schema: Mapping[str, Any]) -> Any:
    for word in ("minimum", "maximum"):
        if isinstance(limit := schema.get(word), (int, float)) and not isinstance(limit, bool):
            return limit
    return 2


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    """What ``#/$defs/Name`` stands for."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


SPELLINGS: Mapping[str, Callable[[Any], str]] = {
    "compact": lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    "spaced": lambda value: json.dumps(value, ensure_ascii=False, indent=1),
    "escaped": lambda value: json.dumps(value),
}
"""Ways to write JSON: without spaces, with line breaks, and with everything but ASCII escaped."""


def respelled(text: str, spellings: Iterable[str]) -> str:
    """``text`` with JSON objects in it written as ``spellings`` write the same objects, one after the other.

    One that does not stand there as JSON (some families write arguments in another way) is passed over.
    """
    start = 0
    for spelling in spellings:
        value = parse_arguments(spelling)
        span = None if value is None else find_object(text, value, start)
        if span is not None:
            text = text[: span[0]] + spelling + text[span[1] :]
            start = span[0] + len(spelling)
    return text


def find_object(text: str, value: Mapping[str, Any], start: int = 0) -> tuple[int, int] | None:
    """Where the JSON object ``value`` first stands in ``text``, from ``start`` on."""
    decoder = json.JSONDecoder()
    at = text.find("{", start)
    while at != -1:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            found, end = None, at
        if isinstance(found, dict) and found == value:
            return at, end
        at = text.find("{", at + 1)
    return None
