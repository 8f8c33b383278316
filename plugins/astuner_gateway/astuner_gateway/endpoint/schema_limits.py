"""What a client's JSON schema may contain, so that checking an answer against it takes a bounded time.

Looked at without validating anything: its size, how deep it is, how large it gets when every ``$ref`` is written out,
and its regular expressions.  Invariant: a ``$ref`` of a schema that passes leads to a place that was looked at too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from astuner_gateway.endpoint.errors import refused
from astuner_gateway.endpoint.patterns import MOST_WORK, work_of

MOST_BYTES = 64 << 10
MOST_LEVELS = 50
MOST_EXPANDED = 10_000
"""Schemas, when every ``$ref`` is written out; one that leads back to itself counts once."""
LONGEST_KEY = 200
"""Characters of a key that is compared with the patterns of ``patternProperties``."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("additionalProperties", "items", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else"),
    *("extends", "disallow", "type"),
)
_DEFINITIONS = ("$defs", "definitions")
_NEVER = {
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), "$ref"),
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "$recursiveAnchor"), "a $ref such as #/$defs/name"),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), "additionalProperties: false"),
}
_ONLY_AT_THE_TOP = ("$schema", "$id", "id")

Pointer = tuple[str, ...]


def check(schema: dict[str, Any], path: str) -> None:
    """
    :param path: the field it came in.
    :raises ApiError: 400 with the path inside the schema.
    """
    if len(json.dumps(schema)) > MOST_BYTES:
        raise refused(path, f"is a schema of more than {MOST_BYTES >> 10} KiB")
    nodes: dict[Pointer, Any] = {}
    left: list[tuple[Pointer, Any, int]] = [((), schema, 0)]
    while left:
        pointer, node, level = left.pop()
        nodes[pointer] = node
        if not isinstance(node, dict):
            continue
        if level >= MOST_LEVELS:
            raise refused(path, f"is a schema that is nested more than {MOST_LEVELS} levels deep")
        _check_keywords(node, pointer, path)
        left += [(pointer + step, child, level + 1) for step, child in _children(node)]
    sizes: dict[Pointer, int] = {}
    try:
        size = _size((), nodes, sizes, path)
    except RecursionError:
        raise refused(path, "is a schema with too long a chain of $ref") from None
    if size > MOST_EXPANDED:
        raise refused(path, f"is a schema of more than {MOST_EXPANDED} parts when its $ref are written out")


def _check_keywords(node: dict[str, Any], pointer: Pointer, path: str) -> None:
    at = ".".join((path, *pointer))
    for name, instead in _NEVER.items():
        if name in node:
            raise refused(f"{at}.{name}", f"is not supported; use {instead}")
    for name in _ONLY_AT_THE_TOP:
        if pointer and isinstance(node.get(name), str):
            raise refused(f"{at}.{name}", "is only possible at the top of a schema; leave it out")
    if isinstance(pattern := node.get("pattern"), str):
        _check_pattern(pattern, f"{at}.pattern", 0)
    if isinstance(patterns := node.get("patternProperties"), dict):
        for pattern in patterns:
            _check_pattern(pattern, f"{at}.patternProperties", LONGEST_KEY)


def _check_pattern(pattern: str, at: str, length: int) -> None:
    try:
        work = work_of(pattern)
    except ValueError as e:
        raise refused(at, f"is a pattern that {e}") from None
    if work.steps(length) > MOST_WORK:
        raise refused(at, "is a pattern that can take too long; use fewer repetitions, and begin with ^")


def _children(node: dict[str, Any]) -> Iterator[tuple[Pointer, Any]]:
    """The schemas directly in this one, and where."""
    for name in _NAMED:
        if isinstance(named := node.get(name), dict):
            yield from (((name, key), child) for key, child in named.items())
    for name in (*_LISTED, *_SINGLE):
        value = node.get(name)
        if isinstance(value, list):
            yield from (((name, str(i)), child) for i, child in enumerate(value) if isinstance(child, (dict, bool)))
        elif isinstance(value, dict):
            yield (name,), value


def _size(pointer: Pointer, nodes: dict[Pointer, Any], sizes: dict[Pointer, int], path: str) -> int:
    """Schemas in this one, with what it refers to."""
    if pointer in sizes:
        return sizes[pointer]
    sizes[pointer] = 1  # for a reference back to here
    node, total = nodes[pointer], 1
    if isinstance(node, dict):
        for step, _ in dict(_children(node)).items():
            size = _size(pointer + step, nodes, sizes, path)
            total += 0 if step[0] in _DEFINITIONS else size
        if isinstance(reference := node.get("$ref"), str):
            total += _size(_target(reference, nodes, ".".join((path, *pointer))), nodes, sizes, path)
    sizes[pointer] = total
    return total


def _target(reference: str, nodes: dict[Pointer, Any], at: str) -> Pointer:
    steps = unquote(reference[1:]).split("/")
    pointer = tuple(step.replace("~1", "/").replace("~0", "~") for step in steps[1:])
    if not reference.startswith("#") or steps[0] or pointer not in nodes:
        raise refused(f"{at}.$ref", f"is {reference[:80]!r}, which is no schema in here; use such as #/$defs/name")
    return pointer
