"""What the routes give back: JSON that any browser reads, errors in one sentence, compressed where it is large."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

COMPRESSED_FROM = 16 * 1024
"""Bytes; less is not worth it."""
_LEVEL = 1
"""Of gzip: a loopback is faster than a better compression."""


class NotFound(Exception):
    """There is no such thing; the message is for the person."""


class BadRequest(Exception):
    """It was asked wrongly; the message is for the person."""


async def json_answer(request: Request, data: Any) -> Response:
    """``data`` as JSON; large ones are made, and compressed, beside the event loop."""
    packs = "gzip" in request.headers.get("accept-encoding", "")
    body, packed = await asyncio.to_thread(_encoded, data, packs)
    headers = {"Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if packed else {})}
    return Response(body, media_type="application/json", headers=headers)


def error_answer(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes({"error": message}), status, media_type="application/json", headers=headers)


def json_bytes(data: Any) -> bytes:
    """UTF-8 without numbers that JSON does not have, and without half surrogates that are not escaped."""
    return json_text(data).encode()


def json_text(data: Any) -> str:
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number that is not finite
        text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text), separators=(",", ":"))
    return text


def _encoded(data: Any, packs: bool) -> tuple[bytes, bool]:
    body = json_bytes(data)
    if packs and len(body) >= COMPRESSED_FROM:
        return gzip.compress(body, _LEVEL), True
    return body, False


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
