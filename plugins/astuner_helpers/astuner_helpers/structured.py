"""Request structured answers, and read them strictly.

The text that a helper model judges may try to control its answer, so nothing is guessed: the complete answer is one
JSON object of the requested form, or it is invalid. Only unambiguous wrappings are removed: reasoning at the start, one
fence or one pair of tags around the answer, a list or an object whose only member is the answer, JSON inside a JSON
string, and keys in another spelling. Invariant: an answer with a second object, with text around it or with a duplicate
key is always rejected.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from astuner_http.strict_json import parse_json

_REASONING = re.compile(r"\A.*</(?:think|thinking|thought|reasoning)>|\A.*\[/THINK\]", re.DOTALL | re.IGNORECASE)
_OPEN_REASONING = re.compile(r"\A(?:<(?:think|thinking|thought|reasoning)>|\[THINK\])", re.IGNORECASE)
_END = re.compile(r"(?:<\|\w{1,40}\|>|</s>|<eos>|<end_of_turn>)\Z")
"""End token that a server leaves in the text."""
_FENCE = re.compile(r"(?P<marks>`{3,}|~{3,})[ \t]*(?:jsonc?|json5)?(?=\s)", re.IGNORECASE)
_QUOTED = re.compile(r"(?P<marks>`+)(?P<body>[^`]+)(?P=marks)")
_TAGGED = re.compile(r"<(?P<tag>[A-Za-z_]\w*)>(?P<body>.*)</(?P=tag)>", re.DOTALL)
_INVISIBLE = "\ufeff\u200b\u2060"
"""Byte order mark and zero-width spaces."""
_LEFT_OUT = frozenset({"title", "default"})


class Invalid(Exception):
    """An answer does not have the requested form. The message has the reason."""


def request_of(answer: type[BaseModel], how: str) -> dict[str, Any]:
    """Return the request body fields that ask for such an answer."""
    if how == "json_schema":
        schema, strict = strict_schema(answer)
        wanted = {"name": re.sub(r"\W", "_", answer.__name__)[:64], "schema": schema, "strict": strict}
        return {"response_format": {"type": "json_schema", "json_schema": wanted}}
    return {"response_format": {"type": "json_object"}} if how == "json_object" else {}


def explained(messages: Sequence[Mapping[str, Any]], answer: type[BaseModel], how: str) -> list[dict[str, Any]]:
    """Return the messages, with the form in the system message if the server does not receive the schema."""
    found = [dict(message) for message in messages]
    if how == "json_schema":
        return found
    text = f"Answer with one JSON object and nothing else. It follows this JSON schema:\n{_schema_text(answer)}"
    if found and found[0].get("role") == "system" and isinstance(found[0].get("content"), str):
        found[0]["content"] = f"{found[0]['content']}\n\n{text}"
        return found
    return [{"role": "system", "content": text}, *found]


@functools.lru_cache(maxsize=256)  # creating a schema takes pydantic milliseconds
def strict_schema(answer: type[BaseModel]) -> tuple[dict[str, Any], bool]:
    """Return the schema in the form that strict servers require, and whether it can be strict. Do not modify it.

    Strict servers accept only closed objects with all properties required (OpenAI's guide to structured outputs).
    """
    schema: dict[str, Any] = _closed(_schema(answer))
    return schema, '"additionalProperties": {' not in json.dumps(schema)


@functools.lru_cache(maxsize=256)
def _schema(answer: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a form. Do not modify it."""
    return answer.model_json_schema()


def _schema_text(answer: type[BaseModel]) -> str:
    return json.dumps(_schema(answer), ensure_ascii=False)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):  # user-chosen names, not keywords
            found[key] = {name: _closed(below) for name, below in value.items()}
        elif key not in _LEFT_OUT:
            found[key] = _closed(value)
    if "properties" in found:
        found["required"] = list(found["properties"])
        found.setdefault("additionalProperties", False)
    return found


def read(text: str, answer: type[BaseModel]) -> Any:
    """Return the validated instance of ``answer``.

    :raises Invalid: The text without wrappings is not exactly one JSON object of that form.
    """
    try:
        found = _unwrapped(_json(_bare(text)), answer)
    except ValueError as e:
        raise Invalid(f"the answer is not one JSON object: {e}") from None
    try:
        return answer.model_validate(found)
    except ValidationError as e:
        wrong = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'object'}: {p['msg']}" for p in e.errors()[:3])
        raise Invalid(f"the answer does not have the required form: {wrong}") from None


def _bare(text: str) -> str:
    """Return the text without leading reasoning and without one enclosing fence or pair of tags.

    :raises ValueError: The reasoning has no end.
    """
    found = _stripped(text)
    if found.startswith("{"):  # a string inside may contain a tag
        return found
    found = _stripped(_REASONING.sub("", found))
    if _OPEN_REASONING.match(found):
        raise ValueError("the reasoning does not end")
    if tagged := _TAGGED.fullmatch(found):
        found = tagged["body"].strip()
    if fence := _FENCE.match(found):
        return found[fence.end() :].removesuffix(fence["marks"]).strip()
    quoted = _QUOTED.fullmatch(found)
    return quoted["body"].strip() if quoted else found


def _stripped(text: str) -> str:
    """Return the text without surrounding white space, invisible characters and end tokens."""
    found = text.strip().strip(_INVISIBLE).strip()
    while end := _END.search(found):
        found = found[: end.start()].rstrip()
    return found


def _unwrapped(found: Any, answer: type[BaseModel]) -> Any:
    """Return the object of the form: the only item of a list, or the only member of an enclosing object.

    :raises ValueError: The value is not an object.
    """
    if isinstance(found, str):
        found = _json(found.strip())
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise ValueError(f"it has the type {type(found).__name__}")
    schema = _schema(answer)
    names = {_folded(name) for name in schema.get("properties", {})}
    if len(found) == 1 and names:
        (key, inner), *_ = found.items()
        if isinstance(inner, list) and len(inner) == 1:
            inner = inner[0]
        if isinstance(inner, dict) and _folded(key) not in names:
            found = inner
    return _respelled(found, schema, schema)


def _respelled(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return ``value`` with its keys in the schema's spelling.

    :raises ValueError: Two keys differ only in their spelling.
    """
    while isinstance(schema, Mapping) and "$ref" in schema:
        schema = root.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2])
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_respelled(item, schema.get("items"), root) for item in value]
    known: Mapping[str, Any] = schema.get("properties", {})
    if not isinstance(value, dict) or not known:
        return value
    spelled = {_folded(name): name for name in known}
    found: dict[str, Any] = {}
    for key, member in value.items():
        is_known = key in known or len(spelled) < len(known)
        name = str(key if is_known else spelled.get(_folded(key), key))
        if name in found:
            raise ValueError(f"the key {name!r} occurs twice, in different spellings")
        found[name] = _respelled(member, known.get(name), root)
    return found


def _folded(key: str) -> str:
    return re.sub(r"[\s_-]", "", key).casefold()


def _json(text: str) -> Any:
    """Return the value of a JSON text without duplicate keys.

    :raises ValueError: The text is not valid JSON.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once)
        return parse_json(json.dumps({"value": found}).encode())["value"]
    except RecursionError:
        raise ValueError("the nesting is too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
