"""How answers and refusals are written."""

from __future__ import annotations

from json import dumps
from typing import Any

from aiohttp import web

from astuner_env.manager.refusal import Refusal


def json(data: Any, status: int = 200) -> web.Response:
    """JSON in ASCII, so that half a surrogate pair, which a model can write, is an escape and no failure."""
    return web.Response(
        body=dumps(data, separators=(",", ":")).encode("ascii"), status=status, content_type="application/json"
    )


def success(data: Any, *, ok: bool = True) -> web.Response:
    """The envelope of the older routes."""
    return json({"success": ok, "data": data})


def refused(refusal: Refusal, *, is_local: bool = False, debug: bool = False) -> web.Response:
    """A refusal with its status and what else a client should know."""
    response = json({"detail": refusal.detail(is_local=is_local, debug=debug)}, refusal.status)
    if refusal.retry_after is not None:
        response.headers["Retry-After"] = str(refusal.retry_after)
    if refusal.code == "unauthorized":
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def is_waiting(request: web.Request) -> bool:
    """Whether the client is still there for the answer."""
    return request.transport is not None and not request.transport.is_closing()
