"""Serve environments over HTTP, from startup to shutdown.

The older routes are compatible with clients of the older environment services and add a few parameters. They share one
body: ``env_type``, ``task_id``, ``instance_id``, ``messages`` (on ``/step`` the action) and ``params``. Additions:
``params.request_id`` executes a step at most once; ``params.task`` contains the text of a task; a create with the ID of
an existing instance replaces it; ``params.details`` returns the complete evaluation from ``/evaluate``. The typed
routes below ``/v1`` return the fields of `StepResult` and `Evaluation`.

Access: clients with the token or, on loopback, programs on this machine; never browsers. A web page can make its
visitor's browser send requests to this machine: directly (detected by the ``Origin`` and ``Sec-Fetch-Site`` headers) or
through a domain that resolves to this machine (DNS rebinding, detected by the ``Host`` header).

Invariants:

- ``Starting server on HOST:PORT`` is printed once requests are accepted, not before.
- No process outlives the service, even if the service is killed (the zygotes ensure this).
- The service is not reachable from other machines without a token.
- Clients get no details of internal errors; the log contains them.
- Parsing a body results in data or in a refusal that names the field.
- Every request passes the guard and results in one answer with an ID and one log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiohttp import HttpVersion11, web

from astuner import in_daemon_thread
from astuner.contracts.errors import ConfigError
from astuner_env.env_service.server import FOLDERS, TOKEN_VARIABLE
from astuner_env.manager.capacity import IDLE_TTL, capacity, tree_bytes
from astuner_env.manager.manager import Instance, Manager
from astuner_env.manager.metrics import Metrics
from astuner_env.manager.refusal import Refusal
from astuner_env.manager.served import ServedEnvironment, is_name
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.gate import read_body, when_closed, worked_on
from astuner_gateway.listening import BACKLOG, bind, check_open, has_key, is_loopback, is_own_name, quiet_http_logger
from astuner_http.strict_json import parse_json
from astuner_sandbox.isolation.scratch import Root

log = logging.getLogger("astuner_env")

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Standard attributes of a log record; all other attributes are fields of the log line."""
MEASURE_EVERY = 1.0
"""Seconds between two measurements of the instances."""
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Service:
    """Running service."""

    host: str
    port: int
    manager: Manager

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Address, access and limits of a service.

    :raises ConfigError: A number is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """0 selects a free port."""
    token: str = field(default="", repr=False)
    """Token that every request must contain; required unless `host` is loopback."""
    max_instances: int | None = None
    """None: computed from memory and cores."""
    idle_ttl: float = IDLE_TTL
    """Seconds after which an idle instance is ended."""
    patience: float = 30.0
    """Seconds that a request for a new instance waits for a slot."""
    debug: bool = False
    """Whether to log every request and send tracebacks of environments to clients."""
    parent: Path | None = None
    """Folder in which its private folder is created; None: the folder for temporary files."""

    def __post_init__(self) -> None:
        if self.idle_ttl <= 0 or (self.max_instances is not None and self.max_instances < 1):
            raise ConfigError("--max-instances and --idle-ttl must be more than 0")


async def serve(
    environments: Sequence[ServedEnvironment],
    settings: ServiceSettings,
    *,
    log_json: bool = False,
    stop_with_stdin: bool = False,
) -> None:
    """Serve until a signal arrives.

    :param stop_with_stdin: Whether to stop when standard input closes, because the parent process has ended.
    :raises ConfigError: The address cannot be bound or requires a token, or there is no environment to serve.
    :raises RunError: An environment cannot be imported.
    """
    log_to_stderr(as_json=log_json, debug=settings.debug, secrets=_secrets(environments, settings.token))
    task = asyncio.current_task()
    assert task is not None
    stopping = False

    def stop(why: str) -> None:
        nonlocal stopping
        if not stopping:  # a second signal must not interrupt the cleanup
            stopping = True
            log.info("stopping", extra={"because": why})
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in _STOP:
        loop.add_signal_handler(number, stop, number.name)
    if stop_with_stdin:
        when_closed(sys.stdin.fileno(), lambda: stop("standard input closed"))
    try:
        async with running(environments, settings) as service:
            print(f"Starting server on {service.host}:{service.port}", flush=True)
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        for number in _STOP:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def running(environments: Sequence[ServedEnvironment], settings: ServiceSettings) -> AsyncIterator[Service]:
    """Run a service inside the block; raise like `serve`."""
    if not environments:
        raise ConfigError("No environment to serve. List environments: astuner env list")
    host, idle_ttl = settings.host, settings.idle_ttl
    guard = Guard(host, settings.token)
    room, why = capacity(e.provider.memory_mb for e in environments)
    if settings.max_instances is not None:
        room, why = settings.max_instances, "set by --max-instances"
    bound = bind(host, settings.port)
    with contextlib.closing(bound), contextlib.closing(Root(FOLDERS, settings.parent)) as root:
        manager = Manager(
            environments,
            root,
            Metrics(e.name for e in environments),
            max_instances=room,
            idle_ttl=idle_ttl,
            patience=settings.patience,
        )
        repeated = [
            asyncio.ensure_future(_repeat(manager.sweep, min(10.0, idle_ttl / 4))),
            asyncio.ensure_future(_repeat(manager.hold_limits, MEASURE_EVERY)),
        ]
        app = make_app(manager, guard, why, debug=settings.debug)
        quiet: Any = {
            "access_log": None,
            "logger": quiet_http_logger("astuner_env.malformed"),
            "auto_decompress": False,
            "lingering_time": 1.0,
        }
        runner = web.AppRunner(app, shutdown_timeout=1.0, **quiet)
        try:
            await manager.start()
            await runner.setup()
            await web.SockSite(runner, bound, backlog=BACKLOG).start()
            service = Service(host, bound.getsockname()[1], manager)
            names = ", ".join(manager.environments)
            extra = {"url": service.url, "environments": names, "max_instances": room, "because": why}
            log.info("listening", extra=extra)
            yield service
        finally:
            for task in repeated:
                task.cancel()
            for site in list(runner.sites):
                await site.stop()
            await manager.stop()
            await runner.cleanup()
            log.info("stopped")


async def _repeat(work: Callable[[], Awaitable[None]], every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            await work()
        except Exception:
            log.exception("background task %s failed and continues", work.__name__)


def _secrets(environments: Sequence[ServedEnvironment], token: str) -> list[str]:
    """Return texts that must not be logged: the token, and variables of environments whose name suggests a secret."""
    words = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    given = [
        value
        for environment in environments
        for name, value in environment.settings.environ.items()
        if len(value) >= 6 and any(word in name.upper() for word in words)
    ]
    return [token, *given, os.environ.get(TOKEN_VARIABLE, "")]


def log_to_stderr(*, as_json: bool, debug: bool, secrets: Iterable[str]) -> None:
    """Write the log of the service to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json=as_json, secrets=secrets))
    for name in ("astuner_env", "astuner_sandbox"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.DEBUG if debug else logging.INFO)
        logger.propagate = False


class Lines(logging.Formatter):
    """Formatter that writes one line per record.

    :param secrets: Texts that are replaced by ``***``.
    """

    def __init__(self, *, as_json: bool, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._as_json = as_json
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        fields = {k: v for k, v in vars(record).items() if k not in _OWN}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        line = self._json(record, fields) if self._as_json else self._text(record, fields)
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line

    def _json(self, record: logging.LogRecord, fields: dict[str, Any]) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        own = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        return json.dumps({**own, **fields}, default=str)

    def _text(self, record: logging.LogRecord, fields: dict[str, Any]) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        long = [str(v) for v in fields.values() if "\n" in str(v)]
        short = [f"{k}={v}" for k, v in fields.items() if v not in (None, "") and "\n" not in str(v)]
        head = " ".join([stamp, record.levelname.lower(), record.getMessage(), *short])
        return "\n".join([head, *long])


# ---- one request -----------------------------------------------------------------------------------------------------

_http_log = logging.getLogger("astuner_env.http")

HEALTH = "/healthz"
MAX_BYTES = 16 << 20
_parse = partial(parse_json, halves=True)  # answers are ASCII, where half a surrogate pair is an escape
_LONGEST_TASK_ID = 1024
_LARGEST_PAGE = 1000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """Access control by request headers.

    :param host: Address that the service listens on.
    :raises ConfigError: The address requires a token, or the token is invalid.
    """

    def __init__(self, host: str, token: str = "") -> None:
        self._host = host
        self._token = token
        self.is_local = is_loopback(host)
        """Whether the service is reachable only from this machine."""
        if not self.is_local and not token:
            raise ConfigError(
                f"{host} is reachable from other machines, so the service requires a token. For example: "
                f"export {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
            )
        check_open(host, token, host_at="--host", key_at=TOKEN_VARIABLE)

    def check(self, headers: Mapping[str, str], *, public: bool = False) -> None:
        """Check whether a request is allowed.

        :param public: Whether the route requires no token.
        :raises Refusal: forbidden or unauthorized.
        """
        if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refusal("forbidden", "Requests from web pages are not accepted.")
        # DNS rebinding matters only without a token; with a token, the service may have any name.
        if self.is_local and not is_own_name(headers.get("Host", ""), self._host):
            raise Refusal(
                "forbidden",
                "The Host header must be localhost or a loopback address such as 127.0.0.1.",
            )
        if self._token and not public and not has_key(headers, self._token):
            raise Refusal(
                "unauthorized",
                f"The token is missing or wrong. Send the header 'Authorization: Bearer …' (clients read the "
                f"token from {TOKEN_VARIABLE}).",
            )


def make_app(manager: Manager, guard: Guard, capacity: str = "", *, debug: bool = False) -> web.Application:
    """Return the application with all routes.

    :param capacity: Explanation of the number of instances, for ``/v1/info``.
    :param debug: Whether to send tracebacks of environments to clients.
    """

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        began, request_id = time.monotonic(), secrets.token_hex(8)
        try:
            guard.check(request.headers, public=request.path == HEALTH)
            response = await handler(request)
        except Refusal as e:
            if e.code == "unknown_instance" and not request.path.startswith("/v1/"):
                e.status = 400  # clients of the older routes expect 400
            manager.metrics.refused.labels(e.code).inc()
            response = refused(e, is_local=guard.is_local, debug=debug)
        except web.HTTPException as e:  # aiohttp's own
            code = {404: "not_found", 405: "method_not_allowed"}.get(e.status, "bad_request")
            response = refused(Refusal(code, f"{request.method[:20]} {request.path[:200]}: {e.reason}"))
        except Exception:
            _http_log.exception("internal error", extra={"request": request_id, "path": _path(request)})
            response = refused(Refusal("internal", f"Internal error. See the service's log for request {request_id}."))
        response.headers["X-Request-Id"] = request_id
        if _http_log.isEnabledFor(logging.DEBUG):
            took = round(1000 * (time.monotonic() - began), 1)
            fields = {"method": request.method, "path": _path(request), "status": response.status, "ms": took}
            _http_log.debug("answered", extra={"request": request_id, **fields})
        return response

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def metrics(request: web.Request) -> web.Response:
        # measured only on request
        told, sizes = manager.metrics, await in_daemon_thread(tree_bytes, manager.zygotes())
        active = Counter(instance.environment.name for instance in manager.instances.values())
        for name in manager.environments:
            told.active.labels(name).set(active[name])
            told.memory.labels(name).set(sizes.get(name, 0))
        told.queue.set(manager.slots.waiting)
        told.capacity.set(manager.slots.size)
        return web.Response(body=told.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    app = web.Application(middlewares=[around], client_max_size=MAX_BYTES)
    routes = [web.get(HEALTH, healthz), web.get("/metrics", metrics)]
    routes += [*Routes(manager, capacity).all(), web.route("*", r"/{path:(?s:.*)}", _nothing)]
    for route in routes:
        route.kwargs["expect_handler"] = _expected
    app.add_routes(routes)
    return app


def refused(refusal: Refusal, *, is_local: bool = False, debug: bool = False) -> web.Response:
    """Return a refusal as a response with its status and headers."""
    response = json_answer({"detail": refusal.detail(is_local=is_local, debug=debug)}, refusal.status)
    if refusal.retry_after is not None:
        response.headers["Retry-After"] = str(refusal.retry_after)
    if refusal.code == "unauthorized":
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _expected(request: web.Request) -> web.Response | None:
    """Answer an ``Expect`` header; aiohttp's default fails if the value is not text."""
    if request.version == HttpVersion11 and request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response itself has not started
        return None
    return refused(Refusal("unexpected", "The only supported Expect header is 100-continue."))


async def _nothing(request: web.Request) -> web.Response:
    """Refuse an unknown route or method."""
    for resource in request.app.router.resources():
        info = resource.get_info()
        pattern = info.get("pattern")
        is_other = resource is not request.match_info.route.resource
        if is_other and (info.get("path") == request.path or (pattern and pattern.fullmatch(request.rel_url.raw_path))):
            raise Refusal("method_not_allowed", f"{request.path[:200]} does not support {request.method[:20]}.")
    what = f"Unknown route: {request.method[:20]} {request.path[:200]}."
    raise Refusal("not_found", f"{what} GET /v1/info describes this service.")


def _path(request: web.Request) -> str:
    """Return the route without an instance ID."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else request.path[:200]


# ---- the routes ------------------------------------------------------------------------------------------------------


class Routes:
    """The older routes and the typed ones below ``/v1``.

    For an unknown instance, the older routes return 400 and the typed routes 404.

    :param capacity: Explanation of the number of instances.
    """

    def __init__(self, manager: Manager, capacity: str) -> None:
        self._manager = manager
        self._capacity = capacity

    def all(self) -> list[web.RouteDef]:
        older = (self.get_env_profile, self.create, self.step, self.evaluate, self.get_info, self.release)
        return [
            *(web.post(f"/{handler.__name__}", handler) for handler in older),
            web.get("/v1/info", self.v1_info),
            web.get("/v1/environments", self.v1_environments),
            web.get("/v1/environments/{environment}", self.v1_environment),
            web.get("/v1/environments/{environment}/tasks", self.v1_tasks),
            web.post("/v1/instances", self.v1_create),
            web.get("/v1/instances/{instance}", self.v1_instance),
            web.post("/v1/instances/{instance}/step", self.v1_step),
            web.post("/v1/instances/{instance}/evaluate", self.v1_evaluate),
            web.get("/v1/instances/{instance}/info", self.v1_describe),
            web.delete("/v1/instances/{instance}", self.v1_release),
        ]

    async def _create(
        self, request: web.Request, body: Mapping[str, Any], env_type: str, task: Any, params: Mapping[str, Any]
    ) -> tuple[Instance, dict[str, Any]]:
        environment = self._manager.environment(env_type)
        task_id = read_task_id(body)
        known = {"task_id": task_id, "main_query": text(task, "main_query"), "metadata": mapping(task, "metadata")}
        wanted_id = body.get("instance_id")
        wanted_id = None if wanted_id in (None, "") else read_instance_id(wanted_id)
        return await self._manager.create(environment, known, params, wanted_id, is_wanted=lambda: is_waiting(request))

    # ---- the older ones

    async def get_env_profile(self, request: web.Request) -> web.Response:
        body = await read_fields(request)
        environment = self._manager.environment(text(body, "env_type"))
        params = mapping(body, "params")
        split = text(params, "split", "train")
        others = {key: value for key, value in params.items() if key != "split"}
        return success((await self._manager.tasks(environment, split, others))["tasks"])

    async def create(self, request: web.Request) -> web.Response:
        body = await read_fields(request)
        params = mapping(body, "params")
        task, others = mapping(params, "task"), {key: value for key, value in params.items() if key != "task"}
        instance, first = await self._create(request, body, text(body, "env_type"), task, others)
        own = {"instance_id": instance.id, "task_id": instance.task_id, "at_most_once": True}
        return success(
            {
                "state": first["messages"],
                "observation": first["observation"],
                "info": {**first["info"], **own},
                "reward": first["reward"],
                "is_terminated": first["terminated"] or first["truncated"],
            }
        )

    async def step(self, request: web.Request) -> web.Response:
        body, instance_id = await self._asked(request)
        action = {"role": "assistant", "content": "", **mapping(body, "messages")}
        request_id = read_request_id(mapping(body, "params"))
        result = await self._manager.step(instance_id, action, request_id)
        flags = {key: result[key] for key in ("terminated", "truncated")}
        return success(
            {
                "state": [{"tool_calls": [], **message} for message in result["messages"]],
                "observation": result["observation"],
                "reward": result["reward"],
                "is_terminated": any(flags.values()),
                "info": {**result["info"], **flags},
            }
        )

    async def evaluate(self, request: web.Request) -> web.Response:
        body, instance_id = await self._asked(request)
        params = mapping(body, "params")
        result = await self._manager.evaluate(instance_id)
        if params.get("details"):
            return success(result)
        return success(float(result["success"]) if params.get("sparse") else result["score"])

    async def get_info(self, request: web.Request) -> web.Response:
        _, instance_id = await self._asked(request)
        return success(await self._manager.describe(instance_id))

    async def release(self, request: web.Request) -> web.Response:
        _, instance_id = await self._asked(request)
        return success(None, ok=await self._manager.release(instance_id))

    async def _asked(self, request: web.Request) -> tuple[dict[str, Any], str]:
        body = await read_fields(request)
        return body, read_instance_id(body.get("instance_id"))

    # ---- the typed ones

    async def v1_info(self, request: web.Request) -> web.Response:
        return json_answer(
            {
                "service": "astuner-env",
                "version": version("astuner-env"),
                "environments": sorted(self._manager.environments),
                "active": len(self._manager.instances),
                "max_instances": self._manager.slots.size,
                "capacity": self._capacity,
                "waiting": self._manager.slots.waiting,
                "idle_ttl": self._manager.idle_ttl,
            }
        )

    async def v1_environments(self, request: web.Request) -> web.Response:
        return json_answer({"environments": [_shown(e) for e in self._manager.environments.values()]})

    async def v1_environment(self, request: web.Request) -> web.Response:
        return json_answer(_shown(self._manager.environment(request.match_info["environment"])))

    async def v1_tasks(self, request: web.Request) -> web.Response:
        environment = self._manager.environment(request.match_info["environment"])
        offset = number(request.query, "offset", 0, 10**8)
        limit = number(request.query, "limit", 100, _LARGEST_PAGE)
        split = request.query.get("split", "train")
        page = await self._manager.tasks(environment, split, {}, offset=offset, limit=limit)
        return json_answer({**page, "split": split, "offset": offset, "limit": limit})

    async def v1_create(self, request: web.Request) -> web.Response:
        body = await read_fields(request)
        task, params = mapping(body, "task"), mapping(body, "params")
        instance, first = await self._create(request, body, text(body, "environment"), task, params)
        own = {"instance_id": instance.id, "environment": instance.environment.name, "task_id": instance.task_id}
        return json_answer({**own, **first}, status=201)

    async def v1_instance(self, request: web.Request) -> web.Response:
        return json_answer(self._manager.status(_id(request)))

    async def v1_step(self, request: web.Request) -> web.Response:
        body = await read_fields(request)
        action = {"role": "assistant", "content": "", **mapping(body, "action")}
        return json_answer(await self._manager.step(_id(request), action, read_request_id(body)))

    async def v1_evaluate(self, request: web.Request) -> web.Response:
        await read_fields(request, may_be_empty=True)
        return json_answer(await self._manager.evaluate(_id(request)))

    async def v1_describe(self, request: web.Request) -> web.Response:
        return json_answer(await self._manager.describe(_id(request)))

    async def v1_release(self, request: web.Request) -> web.Response:
        if not await self._manager.release(_id(request)):
            self._manager.instance(_id(request))  # raises with the reason
        return json_answer({"released": True})


def _id(request: web.Request) -> str:
    return read_instance_id(request.match_info["instance"])


def _shown(environment: ServedEnvironment) -> dict[str, Any]:
    own = ("summary", "splits", "create_timeout", "step_timeout", "evaluate_timeout", "memory_mb")
    return {"name": environment.name, **{key: getattr(environment.provider, key) for key in own}}


async def read_fields(request: web.Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the JSON object in the body.

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
        raise Refusal("not_json", f"The body is not valid JSON: {str(e)[:200]}") from None


def mapping(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object; a missing or null value is an empty object."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal("bad_request", f"{key} is {_kind(value)}; it must be an object")
    return value


def text(body: Mapping[str, Any], key: str, default: str = "") -> str:
    """Return a string; a missing or null value is the default."""
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise Refusal("bad_request", f"{key} is {_kind(value)}; it must be a string")
    return value


def read_task_id(body: Mapping[str, Any]) -> str:
    """Return the required task ID; an integer is converted to a string."""
    value = body.get("task_id")
    value = str(value) if isinstance(value, int) and not isinstance(value, bool) else text(body, "task_id")
    if not value or len(value) > _LONGEST_TASK_ID:
        raise Refusal("bad_request", f"task_id is required and has at most {_LONGEST_TASK_ID} characters")
    return value


def read_instance_id(value: Any) -> str:
    """Return a valid instance ID."""
    if value in (None, ""):
        raise Refusal("bad_request", "instance_id is required")
    if not is_name(value):
        raise Refusal(
            "bad_request", "instance_id must have 1 to 128 letters, digits, '.', '_' or '-' and must not be . or .."
        )
    return str(value)


def read_request_id(body: Mapping[str, Any]) -> str | None:
    """Return the request ID of a step, which guarantees at most one execution."""
    value = text(body, "request_id")
    if len(value) > 128:
        raise Refusal("bad_request", "request_id must have at most 128 characters")
    return value or None


def number(query: Mapping[str, str], key: str, default: int, most: int) -> int:
    """Return an integer from the query string, from 0 to ``most``."""
    value = query.get(key, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value) <= most):
        raise Refusal("bad_request", f"{key} is {value[:20]!r}; it must be an integer from 0 to {most}")
    return int(value)


def _kind(value: Any) -> str:
    return {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}.get(
        type(value), "an object"
    )


def json_answer(data: Any, status: int = 200) -> web.Response:
    """Return a response with ASCII JSON; half a surrogate pair, which models can write, becomes an escape."""
    return web.Response(
        body=json.dumps(data, separators=(",", ":")).encode("ascii"), status=status, content_type="application/json"
    )


def success(data: Any, *, ok: bool = True) -> web.Response:
    """Return data in the format of the older routes."""
    return json_answer({"success": ok, "data": data})


def is_waiting(request: web.Request) -> bool:
    """Return whether the client is still connected."""
    return request.transport is not None and not request.transport.is_closing()
