"""Checks of model output (called "madness" in the seeds), by name.

A check is a function of one `OutputView`. It returns a description of the problem in one reply, or None. It must not
fire on ordinary text of any language, symbols, code, JSON, tables or lines of dashes: otherwise it would punish good
behavior. If degenerate and ordinary text cannot be distinguished, it must not fire.

Three checks concern tool calls, because the problems differ in severity. `wrong_toolcall` is a call that cannot be
parsed and is useless. `unknown_tool` and `wrong_arguments` are parsed calls that do not match the offered tools. Most
agent frameworks answer them with an error that the model learns from, so neither is on by default. Invariant: without
information about the tools, they never fire.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from astuner.contracts.output_check import Check, OutputView
from astuner_checks.characters import find_control_token, find_garbage
from astuner_checks.repetition import find_repetition

__all__ = [
    "Check",
    "OutputView",
    "control_tokens",
    "format_type_1",
    "garbled",
    "non_ascii",
    "nonsense",
    "repetition",
    "unknown_tool",
    "wrong_arguments",
    "wrong_toolcall",
]

_OPEN, _CLOSE = "<think>", "</think>"
_BLOCK = re.compile(r"```python[ \t]*\n")
_FENCE = "```"

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _found(name: str, view: OutputView, *finders: Callable[[str], str | None]) -> str | None:
    for text in view.written:
        for find in finders:
            if found := find(text):
                return f"{name}: {found}"
    return None


def nonsense(view: OutputView) -> str | None:
    """Check for control tokens written as text, broken characters, and endless repetition.

    Random letters are not detected: without a dictionary of every language they cannot be distinguished from names,
    hashes and abbreviations.
    """
    return _found("nonsense", view, find_control_token, find_garbage, find_repetition)


def control_tokens(view: OutputView) -> str | None:
    """Check for control tokens of a chat format, written as text and not quoted."""
    return _found("control_tokens", view, find_control_token)


def garbled(view: OutputView) -> str | None:
    """Check for broken characters, and for letters of many scripts within words."""
    return _found("garbled", view, find_garbage)


def repetition(view: OutputView) -> str | None:
    """Check for endless repetition of words, letters or lines."""
    return _found("repetition", view, find_repetition)


def format_type_1(view: OutputView) -> str | None:
    """Check that an answer is a thought (``<think>…</think>``) followed by one block of Python, and nothing else."""
    text, thought = view.text.strip(), bool(view.reasoning.strip())
    if not thought and text.startswith(_OPEN):
        inside, closed, rest = text[len(_OPEN) :].partition(_CLOSE)
        thought, text = bool(closed and inside.strip()), rest.strip()
    if not thought:
        return f"format_type_1: the answer does not start with a thought, {_OPEN}…{_CLOSE}"
    opened = _BLOCK.match(text)
    inner = text[opened.end() :].removesuffix(_FENCE) if opened else ""
    if not opened or len(inner) + len(_FENCE) != len(text) - opened.end() or _FENCE in inner:
        return "format_type_1: the thought must be followed by one ```python block and nothing else"
    return None


def non_ascii(view: OutputView) -> str | None:
    """Accept everything: this check never fires.

    In older configs, the name *disabled* a part of `nonsense` that fired on letters outside English. The current
    `nonsense` has no such part.
    """
    return None


def wrong_toolcall(view: OutputView) -> str | None:
    """Check for a tool call that cannot be parsed: broken JSON, no name, or arguments that are not an object.

    A call inside a thought that nothing follows also counts.
    """
    for text in view.unparsed_tool_calls:
        if text in view.reasoning and text not in view.text:
            return f"wrong_toolcall: {text[:120]!r} is inside the thought; a call must follow the end of the thought"
        return f"wrong_toolcall: cannot parse {text[:120]!r} as a tool call"
    for name, arguments in _calls(view):
        if not name or arguments is None:
            return f"wrong_toolcall: the arguments of the call to {name!r} are not a JSON object"
    return None


def unknown_tool(view: OutputView) -> str | None:
    """Check for a call of a tool that was not offered."""
    if view.tools is None:
        return None
    offered = _schemas(view)
    for name, _ in _calls(view):
        if name not in offered:
            return f"unknown_tool: {name!r} was not offered; the tools are {', '.join(offered) or 'none'}"
    return None


def wrong_arguments(view: OutputView) -> str | None:
    """Check for calls that lack a required argument, or have an argument of the wrong JSON type.

    Values inside arguments are not checked.
    """
    offered = _schemas(view)
    for name, arguments in _calls(view):
        schema = offered.get(name)
        if schema is None or arguments is None:
            continue
        if complaint := _misfit(schema, arguments):
            return f"wrong_arguments: the call to {name!r} {complaint}"
    return None


def _misfit(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    required, properties = schema.get("required"), schema.get("properties")
    for key in required if isinstance(required, list) else ():
        if isinstance(key, str) and key not in arguments:
            return f"lacks {key!r}"
    if not isinstance(properties, Mapping):
        return None
    for key, value in arguments.items():
        if key not in properties:
            if schema.get("additionalProperties") is False:
                return f"has {key!r}, which is not an argument of the tool"
        elif not _fits(properties[key], value):
            return f"gives {key!r} as {json.dumps(value, default=str)[:60]}; it must be {_wanted(properties[key])}"
    return None


def _fits(schema: Any, value: Any) -> bool:
    """Return whether a JSON value has a type that ``schema`` allows; without a type, everything is allowed."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable") is True):
        return True
    if branches := _branches(schema):
        return any(_fits(branch, value) for branch in branches)
    named = _types(schema)
    return not named or any(_is(kind, value) for kind in named)


def _is(kind: str, value: Any) -> bool:
    if kind not in _TYPES:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # in JSON Schema 3.0 is an integer
    return isinstance(value, _TYPES[kind])


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives of ``anyOf`` or ``oneOf``."""
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else []


def _types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type")
    return [kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)]


def _wanted(schema: Mapping[str, Any]) -> str:
    parts = [part for part in _branches(schema) or [schema] if isinstance(part, Mapping)]
    return " or ".join(kind for part in parts for kind in _types(part)) or "of another type"


def _calls(view: OutputView) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield name and arguments of each call; None for arguments that are not a JSON object."""
    for call in view.tool_calls:
        function = call.get("function")
        if not isinstance(function, Mapping):
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        yield str(function.get("name") or ""), arguments if isinstance(arguments, dict) else None


def _schemas(view: OutputView) -> dict[str, Mapping[str, Any]]:
    """Return tool name -> JSON schema of its arguments (empty without one)."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in view.tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found
