"""Structured answers: how one is asked for, and how strictly it is read.

What a helper says may have been steered by the text that it judges, so nothing is guessed from it: the whole answer is
one JSON object of the wanted form, or there is none.  Invariant: an answer with a second object, with prose around it
or with a key twice is never read.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from astuner_http.strict_json import parse_json

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)
_REASONING = re.compile(r"\A.*</think>", re.DOTALL)
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
    schema: dict[str, Any] = _closed(answer.model_json_schema())
    return schema, '"additionalProperties": {' not in json.dumps(schema)


@functools.lru_cache(maxsize=256)
def _schema_text(answer: type[BaseModel]) -> str:
    return json.dumps(answer.model_json_schema(), ensure_ascii=False)


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


def read(text: str, answer: type[BaseModel], how: str) -> Any:
    """The validated instance of ``answer``.

    :raises Invalid: the text is not exactly one JSON object of that form; says why.
    """
    try:
        found = _object(text.strip())
    except ValueError as e:
        inner = None if how == "json_schema" else _inner(text)
        if inner is None:
            raise Invalid(f"it is not one JSON object: {e}") from None
        try:
            found = _object(inner)
        except ValueError as e2:
            raise Invalid(f"it is not one JSON object: {e2}") from None
    try:
        return answer.model_validate(found)
    except ValidationError as e:
        wrong = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'it'}: {p['msg']}" for p in e.errors()[:3])
        raise Invalid(f"it does not have the wanted form: {wrong}") from None


def _inner(text: str) -> str | None:
    """What a model without an enforced form means: after its reasoning, and inside of its one fenced block."""
    rest = _REASONING.sub("", text).strip()
    blocks = _FENCE.findall(rest)
    if not blocks:
        return rest if rest != text.strip() else None
    return blocks[0].strip() if len(blocks) == 1 and _FENCE.fullmatch(rest) else None


def _object(text: str) -> dict[str, Any]:
    found = parse_json(text.encode("utf-8", "surrogatepass"))
    json.loads(text, object_pairs_hook=_once)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found
