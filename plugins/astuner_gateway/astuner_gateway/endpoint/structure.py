"""Check structured answers against the JSON schema of a request.

Sampling is never constrained by the schema; the endpoint checks afterwards whether the model complied. `jsonschema_rs`
validates: its regular expressions take linear time (no back-references, no look-around), it evaluates a recursive
schema once for each part of an answer, and it loads nothing from the network. The remaining cost is bounded by the size
of the schema with every ``$ref`` expanded, times the size of the answer. Invariant: no schema makes the endpoint load
anything, fail or hang; a schema that cannot be used is rejected before the model is called.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from astuner.contracts.errors import MissingDependency
from astuner_gateway.endpoint.errors import refused

ANY_OBJECT: dict[str, Any] = {"type": "object"}

MOST_BYTES = 64 << 10
MOST_PARTS = 100_000
"""Maximum JSON values in a schema after expanding every ``$ref``; a recursive one counts once."""
MOST_WORK = 100_000_000
"""Maximum schema parts times answer characters; takes one or two seconds in the worst case."""
PATTERN_BYTES = 1 << 20
"""Maximum bytes of a compiled regular expression."""
_LONGEST = 1 << 20
"""Maximum characters of an answer that is checked."""
_EASY = 1_000_000
"""Work up to which all errors are listed instead of only the first."""
_MOST = 200
"""Maximum characters of one error."""
_SHOWN = 3
"""Maximum number of errors in a message."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_ALTERNATIVES = ('"anyOf"', '"oneOf"')


@dataclass(frozen=True)
class Structure:
    """A usable JSON schema."""

    schema: Mapping[str, Any]
    validator: Any
    parts: int
    """Number of JSON values after expanding every ``$ref``."""
    explains: bool
    """Whether an error can be described in bounded time, which fails for recursive alternatives."""

    @classmethod
    def of(cls, schema: Any, path: str) -> Structure:
        """Return the structure for a schema.

        :param path: Field that contains the schema.
        :raises ApiError: 400 with the path in the schema; it cannot be used.
        """
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise refused(path, "must be the JSON schema of an object")
        try:
            return cls(schema, *_compiled(json.dumps(schema, sort_keys=True), path))
        except RecursionError:
            raise refused(path, "is a schema that is nested too deeply, or has a long chain of $ref") from None

    def complaint(self, text: str) -> str | None:
        """Return why ``text`` does not match the schema; None if it does."""
        if len(text) > _LONGEST:
            return f"it has more than the {_LONGEST} characters that can be checked"
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as e:
            return f"it is not JSON ({e})"
        if not isinstance(value, dict) and self.schema == ANY_OBJECT:
            return f"it is not a JSON object, but {type(value).__name__}"
        work = self.parts * len(text)
        if work > MOST_WORK:
            return f"it cannot be checked: {len(text)} characters are too many for a schema of this size"
        try:
            return self._mistakes(value, all_of_them=work <= _EASY)
        except ValueError as e:  # nested too deeply
            return f"it cannot be checked: {e}"

    def _mistakes(self, value: Any, *, all_of_them: bool) -> str | None:
        from jsonschema_rs import ValidationError

        if self.validator.is_valid(value):
            return None
        if not self.explains:
            return "it does not match the schema"
        try:
            errors = list(self.validator.iter_errors(value)) if all_of_them else []
            self.validator.validate(value)
        except ValidationError as e:
            errors = sorted(errors or [e], key=lambda each: len(each.instance_path))
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        return "; ".join(f"{_dotted('$', e.instance_path)}: {e.message[:_MOST]}" for e in errors[:_SHOWN]) + more


@functools.lru_cache(maxsize=64)
def _compiled(schema_text: str, path: str) -> tuple[Any, int, bool]:
    """Return the validator and the attributes `parts` and `explains` of a `Structure`."""
    try:
        import jsonschema_rs
    except ImportError as e:
        raise MissingDependency(
            f"structured answers need the package jsonschema-rs ({e}). Install it with: pip install astuner-gateway"
        ) from e
    if len(schema_text) > MOST_BYTES:
        raise refused(path, f"is a schema of more than {MOST_BYTES >> 10} KiB")
    schema = json.loads(schema_text)
    walk = _Walk(schema, path)
    parts = walk.size(schema, "")
    if parts > MOST_PARTS:
        raise refused(path, f"is a schema of more than {MOST_PARTS} parts after expanding its $ref")
    kind = jsonschema_rs.validator_cls_for(schema)
    # references resolve inside the schema only; its declared identity does not matter
    for name in ("$schema", "$id", "id"):
        if isinstance(schema.get(name), str):
            del schema[name]
    limits = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES)
    try:
        validator = kind(schema, pattern_options=limits, validate_formats=False, offline=True, mask="it")
    except jsonschema_rs.ValidationError as e:
        at, why = _dotted(path, e.instance_path), e.message[:_MOST]
        if why.endswith('is not a "regex"'):
            why = f"{why}, or needs more than linear time (no back-references, no look-around, nothing very large)"
            raise refused(at, f"is a pattern that cannot be used: {why}") from None
        raise refused(at, f"is not part of a usable JSON schema: {why}") from None
    except (ValueError, jsonschema_rs.ReferencingError) as e:
        raise refused(path, f"is not a usable JSON schema: {str(e)[:_MOST]}") from None
    explains = not (walk.is_recursive and any(word in schema_text for word in _ALTERNATIVES))
    return validator, parts, explains


class _Walk:
    """Traverse a schema and the targets of its references.

    :param path: Field that contains the schema.
    """

    def __init__(self, schema: dict[str, Any], path: str) -> None:
        self._schema, self._path = schema, path
        self._sizes: dict[int, int] = {}
        self._open: list[int] = []
        self.is_recursive = False

    def size(self, node: Any, at: str, in_place: int = 0) -> int:
        """Return the number of JSON values in ``node`` and its references.

        :param in_place: Index of the first open node that describes the same part of an answer.
        :raises ApiError: 400 with the path of a reference to another document or of a circular one.
        """
        if not isinstance(node, (dict, list)):
            return 1
        if id(node) in self._open:
            self.is_recursive = True
            if id(node) in self._open[in_place:]:
                raise refused(self._path, "is a schema with a circular reference")
        if id(node) in self._sizes:
            return self._sizes[id(node)]
        self._sizes[id(node)] = 1
        self._open.append(id(node))
        total = 1
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            if at and key in ("$schema", "$id") and isinstance(child, str):
                raise refused(f"{self._path}{at}.{key}", "is supported only at the top of a schema. Leave it out")
            if key in _REFERENCES and isinstance(child, str):
                total += self.size(self._target(child, f"{at}.{key}"), f"{at}.{key}", in_place)
            else:
                same = isinstance(node, list) or key in _IN_PLACE
                total += self.size(child, f"{at}.{key}", in_place if same else len(self._open))
        self._open.pop()
        self._sizes[id(node)] = total
        return total

    def _target(self, reference: str, at: str) -> Any:
        node: Any = self._schema
        name, *steps = unquote(reference).split("/")
        try:
            if name != "#":
                raise KeyError(name)
            for step in steps:
                node = node[int(step) if isinstance(node, list) else step.replace("~1", "/").replace("~0", "~")]
        except (KeyError, ValueError, IndexError, TypeError):
            why = f"is {reference[:80]!r}, which is not a schema in this request. Use a reference like #/$defs/name"
            raise refused(f"{self._path}{at}", why) from None
        return node


def _dotted(start: str, path: Iterable[Any]) -> str:
    return ".".join((start, *map(str, path)))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
