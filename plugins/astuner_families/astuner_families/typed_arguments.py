"""Read tool arguments that a format writes without quotes, by the tool's JSON schema.

GLM and Qwen3-Coder write the number ``5`` and the text ``5`` in the same way. `TypedArguments.read` tries these values
in order and returns the first that the argument's schema allows:

1. The JSON value of the text, unless it is a string in quotes. A whole number such as ``105.0`` or ``2e1`` also counts
   as an integer.
2. ``True``, ``False`` or ``None``, in formats whose template writes Python values.
3. The text itself.
4. ``True``, ``False`` or ``None``, in the other formats.

If ``const`` and ``enum`` allow none of them, the types of the listed values decide. If nothing is allowed, the text
stays text.

A schema allows a value by its type: ``type``, ``nullable``, ``const``, ``enum``, ``$ref``, ``allOf``, ``anyOf``,
``oneOf`` and ``not``. If a tool has alternative sets of arguments, only those that fit all arguments count. Ranges,
formats and members of arrays and objects are not checked: such a value has the right type, and the tool can report the
problem.

Invariant: reading never raises, for any schema, and follows each reference once per value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from astuner.contracts.messages import parse_number, parse_value

_PYTHON_LITERALS = {"True": True, "False": False, "None": None}
_TEXT_KEYWORDS = frozenset(("minLength", "maxLength", "pattern", "contentEncoding", "contentMediaType"))
"""Keywords that apply only to texts: a schema without a type that has one of them describes a text."""
_TYPE_KEYWORDS = frozenset(("type", "const", "enum"))
"""Keywords that `TypedArguments` checks completely, so that their negation can be checked, too."""
_SLOW_PATTERN = re.compile(r"\)[*+{]|\\[1-9]|\(\?|(?:[*+{].*){3}", re.DOTALL)
"""Patterns of ``patternProperties`` that may take more than quadratic time; they are ignored."""
_MAX_BRANCHES = 32
"""Maximum number of branches of ``anyOf`` and ``oneOf`` that are compared with the other arguments."""
_LONGEST_KEY = 256
"""Maximum length of an argument's name that is matched against patterns."""


_Chosen: TypeAlias = "dict[int, list[list[Any]]]"
"""Alternatives of schemas, by `id`."""


class _Given(NamedTuple):
    """The arguments of a call."""

    texts: Mapping[str, str]
    chosen: _Chosen
    """Alternatives that fit the arguments, as far as computed."""


class TypedArguments:
    """The arguments of one tool."""

    def __init__(self, parameters: Any, *, python_literals: bool) -> None:
        """Prepare reading.

        :param parameters: JSON schema of the tool; anything else allows every value.
        :param python_literals: Whether the format writes ``True``, ``False`` and ``None``.
        """
        self._root = parameters
        self._python_literals = python_literals

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments in the schema."""
        properties = self._root.get("properties") if isinstance(self._root, Mapping) else None
        return tuple(filter(_is_text, properties)) if isinstance(properties, Mapping) else ()

    def read(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of the arguments ``texts``."""
        chosen: _Chosen = {}
        return {key: self._value(key, text, _Given(texts, chosen)) for key, text in texts.items()}

    def _value(self, key: str, text: str, given: _Given) -> Any:
        candidates = list(self._candidates(text))
        try:
            schema = self._schema_of(key, self._root, set(), given)
            for exact in (True, False):
                for candidate in candidates:
                    if self._allows(schema, candidate, exact, {}):
                        return candidate
        except RecursionError:  # nested too deeply for Python
            pass
        return text

    def _candidates(self, text: str) -> Iterator[Any]:
        spelled = text.strip()
        value = parse_value(spelled)
        if not isinstance(value, str) and (value is not None or spelled == "null"):
            yield value
            if isinstance(value, float) and isinstance(whole := parse_number(spelled), int):
                yield whole
        literal = [_PYTHON_LITERALS[spelled]] if spelled in _PYTHON_LITERALS else []
        yield from (*literal, text) if self._python_literals else (text, *literal)

    def _schema_of(self, key: str, schema: Any, followed: set[str], given: _Given | None) -> Any:
        """Return the schema of the argument ``key`` of an object with ``schema``; True if it has none.

        :param followed: References that were already followed.
        :param given: Arguments that select alternatives; None to use all alternatives.
        """
        if not isinstance(schema, Mapping):
            return True
        parts = _own_schemas(key, schema)
        if isinstance(reference := schema.get("$ref"), str) and reference not in followed:
            followed.add(reference)
            parts.append(self._schema_of(key, self._resolve(reference, schema), followed, given))
        parts += [self._schema_of(key, part, followed, given) for part in _list(schema.get("allOf"))]
        for branches in self._alternatives(schema, given):
            parts.append(_any_of([self._schema_of(key, branch, followed, given) for branch in branches]))
        known = [part for part in parts if part is not True]
        return {"allOf": known} if known else True

    def _alternatives(self, schema: Mapping[str, Any], given: _Given | None) -> list[list[Any]]:
        """Return the branches of ``anyOf``, ``oneOf`` and ``if`` that the arguments do not exclude."""
        both = [schema[word] for word in ("then", "else") if word in schema]
        lists = [_list(schema.get("anyOf")), _list(schema.get("oneOf")), both]
        if given is None or not any(lists):
            return lists
        if id(schema) not in given.chosen:
            holds = self._fits(schema["if"], given.texts) if "if" in schema else None
            by_condition = both if holds is None else [schema.get("then" if holds else "else", True)]
            fitting = [self._fitting(branches, given.texts) for branches in lists[:2]]
            given.chosen[id(schema)] = [*fitting, by_condition]
        return given.chosen[id(schema)]

    def _fitting(self, branches: list[Any], texts: Mapping[str, str]) -> list[Any]:
        if len(branches) > _MAX_BRANCHES:
            return branches
        return [branch for branch in branches if self._fits(branch, texts)] or branches

    def _fits(self, schema: Any, texts: Mapping[str, str]) -> bool:
        """Return whether the arguments may belong to an object with ``schema``."""
        if not isinstance(schema, Mapping):
            return schema is not False
        target = self._resolve(reference, schema) if isinstance(reference := schema.get("$ref"), str) else None
        for part in (schema, target):
            required = part.get("required") if isinstance(part, Mapping) else None
            if any(isinstance(key, str) and key not in texts for key in _list(required)):
                return False
        members = ((self._schema_of(key, schema, set(), None), text) for key, text in texts.items())
        return all(
            any(self._allows(member, candidate, True, {}) for candidate in self._candidates(text))
            for member, text in members
            if member is not True
        )

    def _allows(self, schema: Any, value: Any, exact: bool, followed: dict[str, bool]) -> bool:
        """Return whether ``schema`` allows ``value``.

        :param exact: Compare with the values of ``const`` and ``enum``, not only with their types.
        :param followed: Results of references that were already followed.
        """
        if not isinstance(schema, Mapping):
            return schema is not False
        if value is None and schema.get("nullable") is True:  # OpenAPI's
            return True
        return (
            _has_type(schema, value)
            and _is_listed(schema, value, exact)
            and self._reference_allows(schema, value, exact, followed)
            and all(self._allows(part, value, exact, followed) for part in _list(schema.get("allOf")))
            and all(
                any(self._allows(branch, value, exact, followed) for branch in branches)
                for word in ("anyOf", "oneOf")
                if (branches := _list(schema.get(word)))
            )
            and not self._is_excluded(schema.get("not"), value)
        )

    def _reference_allows(self, schema: Mapping[str, Any], value: Any, exact: bool, followed: dict[str, bool]) -> bool:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return True
        if reference not in followed:
            followed[reference] = True  # a reference to itself excludes nothing
            followed[reference] = self._allows(self._resolve(reference, schema), value, exact, followed)
        return followed[reference]

    def _is_excluded(self, schema: Any, value: Any) -> bool:
        if not isinstance(schema, Mapping) or not schema or not schema.keys() <= _TYPE_KEYWORDS:
            return False
        return self._allows(schema, value, True, {})

    def _resolve(self, reference: str, schema: Mapping[str, Any]) -> Any:
        """Return the schema that ``reference`` names, or True (anything is allowed) if there is none.

        It is searched in the tool's schema, then in ``schema``, which contains the reference: copied schemas often
        include their definitions.
        """
        base, _, fragment = reference.partition("#")
        for root in (self._root, schema):
            if isinstance(root, Mapping) and base in ("", root.get("$id")):
                found = _at_pointer(root, unquote(fragment)) if fragment[:1] in ("", "/") else _anchored(root, fragment)
                if found is not None:
                    return found
        return True


def _own_schemas(key: str, schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas for the member ``key`` in ``schema`` itself."""
    schemas = []
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and key in properties:
        schemas.append(properties[key])
    if isinstance(patterns, Mapping):
        schemas += [member for pattern, member in patterns.items() if _matches(pattern, key)]
    if not schemas:
        others = (schema.get(word) for word in ("additionalProperties", "unevaluatedProperties"))
        schemas += [other for other in others if isinstance(other, Mapping)][:1]
    return schemas


def _matches(pattern: Any, key: str) -> bool:
    if not isinstance(pattern, str) or len(key) > _LONGEST_KEY or _SLOW_PATTERN.search(pattern):
        return False
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return False


def _any_of(schemas: list[Any]) -> Any:
    """Return the schema that allows whatever one of ``schemas`` allows, ignoring schemas that name nothing."""
    known = [schema for schema in schemas if schema is not True]
    return {"anyOf": known} if known else True


def _has_type(schema: Mapping[str, Any], value: Any) -> bool:
    if "type" not in schema:
        return isinstance(value, str) or schema.keys().isdisjoint(_TEXT_KEYWORDS | {"type"})
    declared = schema["type"]
    names = [name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)]
    return not names or not _types(value).isdisjoint(names)


def _is_listed(schema: Mapping[str, Any], value: Any, exact: bool) -> bool:
    """Return whether ``const`` or ``enum`` lists ``value``, or a value of its type."""
    lists = [[schema["const"]]] if "const" in schema else []
    lists += [schema["enum"]] if isinstance(schema.get("enum"), list) else []
    if exact:
        return all(any(_is_same(value, listed) for listed in values) for values in lists)
    return all(any(_types(listed) & _types(value) for listed in values) for values in lists)


def _types(value: Any) -> set[str]:
    """Return JSON Schema's names for the type of ``value``."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, where 1 equals 1.0 and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _at_pointer(root: Mapping[str, Any], pointer: str) -> Any:
    """Return the value at the JSON pointer (RFC 6901) in ``root``, or None."""
    found: Any = root
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        else:
            found = found[int(key)] if isinstance(found, list) and key.isdecimal() and int(key) < len(found) else None
    return found


def _anchored(root: Mapping[str, Any], name: str) -> Any:
    """Return the schema inside ``root`` whose ``$anchor`` is ``name``, or None."""
    waiting: list[Any] = [root]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, Mapping):
            if schema.get("$anchor") == name or f"#{name}" in (schema.get("$id"), schema.get("id")):
                return schema
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
