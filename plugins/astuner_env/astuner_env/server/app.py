"""The application: every request passes the guard, and ends in one answer, with one log line and an id.

Invariant: what a client sees of an error of ours is that there was one; the log has the rest.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, web

from astuner.support.threads import in_daemon_thread
from astuner_env.manager.manager import Manager
from astuner_env.manager.memory import tree_bytes
from astuner_env.manager.refusal import Refusal
from astuner_env.server.answers import refused
from astuner_env.server.body import MAX_BYTES
from astuner_env.server.compat import Compat
from astuner_env.server.guard import Guard
from astuner_env.server.v1 import V1

log = logging.getLogger("astuner_env.http")

HEALTH = "/healthz"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(manager: Manager, guard: Guard, capacity: str = "", *, debug: bool = False) -> web.Application:
    """All routes.

    :param capacity: how the number of instances came about, for ``/v1/info``.
    :param debug: send an environment's traceback to the client.
    """

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        began, request_id = time.monotonic(), secrets.token_hex(8)
        try:
            guard.check(request.headers, public=request.path == HEALTH)
            response = await handler(request)
        except Refusal as e:
            manager.metrics.refused.labels(e.code).inc()
            response = refused(e, is_local=guard.is_local, debug=debug)
        except web.HTTPException as e:  # aiohttp's own
            code = {404: "not_found", 405: "method_not_allowed"}.get(e.status, "bad_request")
            response = refused(Refusal(code, f"{request.method[:20]} {request.path[:200]}: {e.reason}"))
        except Exception:
            log.exception("the service itself failed", extra={"request": request_id, "path": _path(request)})
            response = refused(Refusal("internal", f"the service failed; its log says more under {request_id}"))
        response.headers["X-Request-Id"] = request_id
        if log.isEnabledFor(logging.DEBUG):
            took = round(1000 * (time.monotonic() - began), 1)
            fields = {"method": request.method, "path": _path(request), "status": response.status, "ms": took}
            log.debug("answered", extra={"request": request_id, **fields})
        return response

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def metrics(request: web.Request) -> web.Response:
        await _measure(manager)
        return web.Response(body=manager.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application(middlewares=[around], client_max_size=MAX_BYTES)
    routes = [web.get(HEALTH, healthz), web.get("/metrics", metrics)]
    routes += [*Compat(manager).routes(), *V1(manager, capacity).routes(), web.route("*", r"/{path:(?s:.*)}", _nothing)]
    for route in routes:
        route.kwargs["expect_handler"] = _expected
    app.add_routes(routes)
    return app


async def _expected(request: web.Request) -> web.Response | None:
    """Answer an ``Expect`` header; aiohttp's own way to do it fails on one that is no text."""
    if request.version == HttpVersion11 and request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
        return None
    return refused(Refusal("unexpected", "the only Expect header that is known is 100-continue"))


async def _nothing(request: web.Request) -> web.Response:
    """There is no such route, or not with this method."""
    for resource in request.app.router.resources():
        info = resource.get_info()
        pattern = info.get("pattern")
        is_other = resource is not request.match_info.route.resource
        if is_other and (info.get("path") == request.path or (pattern and pattern.fullmatch(request.rel_url.raw_path))):
            raise Refusal("method_not_allowed", f"{request.method[:20]} is not for {request.path[:200]}")
    what = f"there is no {request.method[:20]} {request.path[:200]}"
    raise Refusal("not_found", f"{what}; GET /v1/info says who this is")


async def _measure(manager: Manager) -> None:
    """Bring up to date what is looked at only when somebody asks."""
    metrics = manager.metrics
    sizes = await in_daemon_thread(tree_bytes, manager.zygotes())
    for name in manager.environments:
        metrics.active.labels(name).set(manager.count(name))
        metrics.memory.labels(name).set(sizes.get(name, 0))
    room = manager.room()
    metrics.queue.set(room.waiting)
    metrics.capacity.set(room.size)


def _path(request: web.Request) -> str:
    """The route, without the id of an instance."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else request.path[:200]
