"""Structured answers: how one is asked for, and how strictly it is read.

What a helper says may have been steered by the text that it judges, so nothing is guessed from it: the complete answer
is one JSON object of the wanted form, or there is none.  Wrappings that can mean nothing else are removed: reasoning
in front, one fence or one pair of tags around everything, a list or an object whose only member is the answer, JSON
inside of a JSON string, and keys in another spelling.  Invariant: an answer with a second
object, with prose around it or with a key twice is never read.
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
"""An end token that a server leaves in the text."""
_FENCE = re.compile(r"(?P<marks>`{3,}|~{3,})[ \t]*(?:jsonc?|json5)?(?=\s)", re.IGNORECASE)
_QUOTED = re.compile(r"(?P<marks>`+)(?P<body>[^`]+)(?P=marks)")
_TAGGED = re.compile(r"<(?P<tag>[A-Za-z_]\w*)>(?P<body>.*)</(?P=tag)>", re.DOTALL)
_INVISIBLE = "\ufeff\u200b\u2060"
"""A byte order mark, and spaces without width."""
_LEFT_OUT = frozenset({"title", "default"})


class Invalid(Exception):
    """An answer is not what was asked for; says why."""


def request_of(answer: type[BaseModel], how: str) -> dict[str, Any]:
    """The fields of a request's body that ask for such an answer."""
    if how == "json_schema":
        schema, strict = strict_schema(answer)
        wanted = {"name": re.sub(r"\W", "_", answer.__name__)[:64], "schema": schema, "strict": strict}
        return {"response_format": {"type": "json_schema", "json_schema": wanted}}
    return {"response_format": {"type": "json_object"}} if how == "json_object" else {}


def explained(messages: Sequence[Mapping[str, Any]], answer: type[BaseModel], how: str) -> list[dict[str, Any]]:
    """The messages, with the wanted form in the system message where the server is not told the schema."""
    found = [dict(message) for message in messages]
    if how == "json_schema":
        return found
    text = f"Answer with one JSON object and nothing else. It follows this JSON schema:\n{_schema_text(answer)}"
    if found and found[0].get("role") == "system" and isinstance(found[0].get("content"), str):
        found[0]["content"] = f"{found[0]['content']}\n\n{text}"
        return found
    return [{"role": "system", "content": text}, *found]


@functools.lru_cache(maxsize=256)  # pydantic makes a schema anew each time, which takes milliseconds
def strict_schema(answer: type[BaseModel]) -> tuple[dict[str, Any], bool]:
    """The schema as servers with strict schemas want it, and whether it can be strict; not to be changed.

    Strict ones take closed objects only, with every property required (OpenAI's guide to structured outputs).
    """
    schema: dict[str, Any] = _closed(_schema(answer))
    return schema, '"additionalProperties": {' not in json.dumps(schema)


@functools.lru_cache(maxsize=256)
def _schema(answer: type[BaseModel]) -> dict[str, Any]:
    """The schema of a form; not to be changed."""
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
        if key in ("properties", "$defs"):  # names that somebody chose, not keywords
            found[key] = {name: _closed(below) for name, below in value.items()}
        elif key not in _LEFT_OUT:
            found[key] = _closed(value)
    if "properties" in found:
        found["required"] = list(found["properties"])
        found.setdefault("additionalProperties", False)
    return found


def read(text: str, answer: type[BaseModel]) -> Any:
    """Return the validated instance of ``answer``.

    :raises Invalid: the text, without wrappings, is not exactly one JSON object of that form; says why.
    """
    try:
        found = _unwrapped(_json(_bare(text)), answer)
    except ValueError as e:
        raise Invalid(f"it is not one JSON object: {e}") from None
    try:
        return answer.model_validate(found)
    except ValidationError as e:
        wrong = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'it'}: {p['msg']}" for p in e.errors()[:3])
        raise Invalid(f"it does not have the wanted form: {wrong}") from None


def _bare(text: str) -> str:
    """The text without reasoning in front, and without one fence or one pair of tags around everything.

    :raises ValueError: it is nothing but reasoning.
    """
    found = _stripped(text)
    if found.startswith("{"):  # a reason in it may mention a tag
        return found
    found = _stripped(_REASONING.sub("", found))
    if _OPEN_REASONING.match(found):
        raise ValueError("its reasoning does not end")
    if tagged := _TAGGED.fullmatch(found):
        found = tagged["body"].strip()
    if fence := _FENCE.match(found):
        return found[fence.end() :].removesuffix(fence["marks"]).strip()
    quoted = _QUOTED.fullmatch(found)
    return quoted["body"].strip() if quoted else found


def _stripped(text: str) -> str:
    """The text without white space, invisible characters and end tokens around it."""
    found = text.strip().strip(_INVISIBLE).strip()
    while end := _END.search(found):
        found = found[: end.start()].rstrip()
    return found


def _unwrapped(found: Any, answer: type[BaseModel]) -> Any:
    """The object of the form: the only item of a list, or the only member of an object that is not of the form.

    :raises ValueError: it is not an object.
    """
    if isinstance(found, str):
        found = _json(found.strip())
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise ValueError(f"it is of type {type(found).__name__}")
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
    """``value`` with the keys of its objects in the schema's spelling.

    :raises ValueError: two keys differ in their spelling alone.
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
            raise ValueError(f"it has the key {name!r} twice, in different spellings")
        found[name] = _respelled(member, known.get(name), root)
    return found


def _folded(key: str) -> str:
    return re.sub(r"[\s_-]", "", key).casefold()


def _json(text: str) -> Any:
    """The value of a JSON text in which no key occurs twice.

    :raises ValueError: it is not JSON.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once)
        return parse_json(json.dumps({"value": found}).encode())["value"]
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found
