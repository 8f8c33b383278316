"""Checks on what the model wrote (the seeds' "madness"), by name.

A check is a function of one `OutputView`: it says in words what is wrong with one reply, or returns None.  It must not
fire on ordinary text of any language, on symbols, code, JSON, tables or rules made of dashes: a check that does
punishes good behaviour.  Where degenerate and ordinary text cannot be told apart, it stays silent.

What can be wrong with a tool call has three names, since they differ in how bad they are.  `wrong_toolcall` is a call
that cannot be read: nothing can be done with it.  `unknown_tool` and `wrong_arguments` are calls that can be read and
do not fit the tools that were offered: most agent frameworks answer them with an error from which the model learns, so
neither is on by default.  Invariant: where nothing is known about the tools, nothing is wrong.
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
    """Control tokens written as text, text whose bytes are broken, or the same words or letters over and over.

    Random letters are not among them: without a dictionary of every language nobody can tell them from names, hashes or
    abbreviations.
    """
    return _found("nonsense", view, find_control_token, find_garbage, find_repetition)


def control_tokens(view: OutputView) -> str | None:
    """A control token of a chat format, written as text and not quoted."""
    return _found("control_tokens", view, find_control_token)


def garbled(view: OutputView) -> str | None:
    """Broken characters, and letters of many scripts mixed within words."""
    return _found("garbled", view, find_garbage)


def repetition(view: OutputView) -> str | None:
    """The same words, letters or lines over and over."""
    return _found("repetition", view, find_repetition)


def format_type_1(view: OutputView) -> str | None:
    """An answer that is not exactly a thought (``<think>…</think>``) and then one block of Python."""
    text, thought = view.text.strip(), bool(view.reasoning.strip())
    if not thought and text.startswith(_OPEN):
        inside, closed, rest = text[len(_OPEN) :].partition(_CLOSE)
        thought, text = bool(closed and inside.strip()), rest.strip()
    if not thought:
        return f"format_type_1: the answer does not begin with a thought, {_OPEN}…{_CLOSE}"
    opened = _BLOCK.match(text)
    inner = text[opened.end() :].removesuffix(_FENCE) if opened else ""
    if not opened or len(inner) + len(_FENCE) != len(text) - opened.end() or _FENCE in inner:
        return "format_type_1: the thought is not followed by one ```python block and nothing else"
    return None


def non_ascii(view: OutputView) -> str | None:
    """Never fires.

    In the config it comes from, the name *turns off* a part of `nonsense` that fires on any letter outside English;
    here `nonsense` has no such part, so there is nothing to turn off.
    """
    return None


def wrong_toolcall(view: OutputView) -> str | None:
    """A tool call that was begun but cannot be read: broken JSON, no name, arguments that are not an object.

    Also a call inside the thought, when nothing follows the thought.
    """
    for text in view.unparsed_tool_calls:
        if text in view.reasoning and text not in view.text:
            return f"wrong_toolcall: {text[:120]!r} is inside the thought; a call must follow the end of the thought"
        return f"wrong_toolcall: cannot read {text[:120]!r} as a tool call"
    for name, arguments in _calls(view):
        if not name or arguments is None:
            return f"wrong_toolcall: the arguments of the call to {name!r} are not a JSON object"
    return None


def unknown_tool(view: OutputView) -> str | None:
    """A call to a tool that was not offered."""
    if view.tools is None:
        return None
    offered = _schemas(view)
    for name, _ in _calls(view):
        if name not in offered:
            return f"unknown_tool: {name!r} was not offered; there are {', '.join(offered) or 'no tools'}"
    return None


def wrong_arguments(view: OutputView) -> str | None:
    """A call that lacks a required argument of the offered tool, or whose argument has the wrong JSON type.

    Only the arguments themselves are looked at, not what is inside them.
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
                return f"has {key!r}, which the tool does not take"
        elif not _fits(properties[key], value):
            return f"gives {key!r} as {json.dumps(value, default=str)[:60]}; it must be {_wanted(properties[key])}"
    return None


def _fits(schema: Any, value: Any) -> bool:
    """Whether a JSON value has a type that ``schema`` names; what the schema leaves open fits."""
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
        return value.is_integer()  # JSON Schema counts 3.0 among the integers
    return isinstance(value, _TYPES[kind])


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    """The alternatives of ``anyOf`` or ``oneOf``."""
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else []


def _types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type")
    return [kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)]


def _wanted(schema: Mapping[str, Any]) -> str:
    parts = [part for part in _branches(schema) or [schema] if isinstance(part, Mapping)]
    return " or ".join(kind for part in parts for kind in _types(part)) or "of another type"


def _calls(view: OutputView) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Name and arguments of each call; None for arguments that are not a JSON object."""
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
    """Tool name -> the JSON schema of its arguments (empty when it has none)."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in view.tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found
