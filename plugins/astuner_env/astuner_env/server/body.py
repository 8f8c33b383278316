"""From a request's body to its fields, each of the type it must have.

Invariant: whatever is in a body, reading it ends in data or in a refusal that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from astuner.support import strict_json
from astuner_env.manager.refusal import Refusal
from astuner_env.manager.served import is_name
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.gate import read_body, worked_on

MAX_BYTES = 16 << 20
_parse = partial(strict_json.parse, halves=True)  # what is answered is ASCII, where a half is an escape
_LONGEST_TASK_ID = 1024


async def read(request: web.Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The JSON object in the body.

    :raises Refusal: not_json, too_large, unsupported_encoding or bad_request.
    """
    try:
        raw = await read_body(request)
    except ApiError as e:
        code = {413: "too_large", 415: "unsupported_encoding"}.get(e.status, "bad_request")
        raise Refusal(code, e.message) from None
    if may_be_empty and not raw.strip():
        return {}
    try:
        return await worked_on(raw, _parse)
    except ValueError as e:
        raise Refusal("not_json", f"the body cannot be read as JSON: {str(e)[:200]}") from None


def mapping(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object; missing or null is an empty one."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal("bad_request", f"{key} is {_kind(value)}; it must be an object")
    return value


def text(body: Mapping[str, Any], key: str, default: str = "") -> str:
    """A string; missing or null is the default."""
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise Refusal("bad_request", f"{key} is {_kind(value)}; it must be a string")
    return value


def task_id(body: Mapping[str, Any]) -> str:
    """Required; a whole number stands for its digits, as clients send them."""
    value = body.get("task_id")
    value = str(value) if isinstance(value, int) and not isinstance(value, bool) else text(body, "task_id")
    if not value or len(value) > _LONGEST_TASK_ID:
        raise Refusal("bad_request", f"task_id is required, with at most {_LONGEST_TASK_ID} characters")
    return value


def task_of(given: Mapping[str, Any], known_as: str) -> dict[str, Any]:
    """A task's fields as they cross to the instance."""
    return {"task_id": known_as, "main_query": text(given, "main_query"), "metadata": mapping(given, "metadata")}


def instance_id(value: Any, *, required: bool = True) -> str | None:
    """An instance's id, which is never anything but a name."""
    if value in (None, "") and not required:
        return None
    if value in (None, ""):
        raise Refusal("bad_request", "instance_id is required")
    if not is_name(value):
        raise Refusal("bad_request", "an instance_id has 1 to 128 letters, digits, '.', '_' or '-', and is not . or ..")
    return str(value)


def known_instance(value: Any) -> str:
    """`instance_id`, required."""
    return instance_id(value) or ""


def request_id(body: Mapping[str, Any]) -> str | None:
    """What makes a step happen at most once."""
    value = text(body, "request_id")
    if len(value) > 128:
        raise Refusal("bad_request", "a request_id has at most 128 characters")
    return value or None


def number(query: Mapping[str, str], key: str, default: int, most: int) -> int:
    """A whole number from the query string, from 0 to ``most``."""
    value = query.get(key, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value) <= most):
        raise Refusal("bad_request", f"{key} is {value[:20]!r}; it must be a whole number from 0 to {most}")
    return int(value)


def _kind(value: Any) -> str:
    return {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}.get(
        type(value), "an object"
    )
