"""Answer HTTP requests with the model: check the key, read the request, send the answer.

`Handler` serves the models of running episodes; other model servers share its handling of dialects. Invariant: every
request ends in an answer in the format of the requested API.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import UnsupportedRequest, told
from astuner_gateway.endpoint import anthropic_messages, openai_chat, openai_responses
from astuner_gateway.endpoint.access import DEFAULT_MODEL, KeyRing, Pass
from astuner_gateway.endpoint.agreeing import agree
from astuner_gateway.endpoint.errors import ApiError, from_exception, logger
from astuner_gateway.endpoint.replay import Identity, Outcome, Replays, outcome_of
from astuner_gateway.endpoint.request import KEEP_ALIVE, Answer, ChatRequest, Dialect, Holder, answer, count, encode
from astuner_gateway.endpoint.sampling import overrule, runs_own
from astuner_gateway.gate import Gate, id_headers, json_answer, not_found, parse, read_body, refusal, worked_on
from astuner_gateway.half_closed import is_delivered

if TYPE_CHECKING:
    from aiohttp import web


DIALECTS = {d.route: d for d in (openai_chat.DIALECT, openai_responses.DIALECT, anthropic_messages.DIALECT)}
MODELS = "/v1/models"
COUNT = anthropic_messages.COUNT_ROUTE
"""Route that counts the tokens of a prompt, in the format of Anthropic's messages."""

_LONGEST = 1000
"""Maximum characters of an error in the log."""
_QUIET = 2.0
"""Seconds after which a waiting stream starts, and between its keep-alive comments."""


class ModelGate(Gate):
    """An application that serves models in some or all dialects."""

    routes: Sequence[str] = (*(f"POST {route}" for route in (*DIALECTS, COUNT)), f"GET {MODELS}")
    """Existing routes, for the answer to other paths."""

    def refuse(self, error: ApiError, request: web.BaseRequest, request_id: str) -> web.Response:
        """Answer an error in the format of the requested API; on unknown routes, the headers select the API."""
        dialect = dialect_of(request.path)
        if dialect is None:
            anthropic = "anthropic-version" in request.headers
            dialect = anthropic_messages.DIALECT if anthropic else openai_chat.DIALECT
        return refusal(error, dialect.error(error), request_id)

    def look_up(self, request: web.BaseRequest, name: str) -> dict[str, Any]:
        """Return the answer for a route that lists models.

        :param name: Name of the model.
        :raises ApiError: The route does not exist.
        """
        path = request.path
        if request.method in ("GET", "HEAD"):
            if path == MODELS:
                return {"object": "list", "data": [_model(name)], "has_more": False, "first_id": name, "last_id": name}
            if path.startswith(MODELS + "/"):
                return _model(path[len(MODELS) + 1 :])
        raise not_found(request, self.routes)


_LEFT_OUT, _OVERRULED = "endpoint/left_out/", "endpoint/overruled/"
_MOST_NAMES = 50
"""Maximum number of metrics per process; fields beyond it are counted together."""
_METRIC = re.compile(r"endpoint/\w+/[A-Za-z_][\w.-]{0,39}", re.ASCII)
_MOST_KINDS = 100
"""Maximum number of error kinds whose first occurrence is logged as a warning."""


class Handler(ModelGate):
    """Serve all requests of one endpoint.

    :param overrules: As in `Endpoint`.
    """

    what = "endpoint"

    def __init__(self, keys: KeyRing, replays: Replays, host: str, *, overrules: bool = True) -> None:
        super().__init__(host)
        self._keys = keys
        self._replays = replays
        self._overrules = overrules
        self._names: set[str] = set()
        self._kinds: set[tuple[int, str | None, str]] = set()

    def refuse(self, error: ApiError, request: web.BaseRequest, request_id: str) -> web.Response:
        self._log(error, request_id, self._keys.find(request.headers))
        return super().refuse(error, request, request_id)

    def _log(self, error: ApiError, request_id: str, holder: Pass | None) -> None:
        """Log an error in one line: the first of its kind as a warning, unless the run counts it as a limit."""
        kind = (error.status, error.code, re.sub(r"\d+", "", error.param or ""))
        is_news = error.status != 403 and error.code != "context_length_exceeded" and kind not in self._kinds
        if is_news and (is_news := len(self._kinds) < _MOST_KINDS):
            self._kinds.add(kind)
        who = "an unknown client"
        if holder is not None:
            who = f"agent {holder.agent_name!r} in episode {holder.tuner.workflow_task.episode_id}"
        why = told(error).removeprefix(f"{type(error).__name__}: ")
        level = logging.WARNING if is_news else logging.INFO
        logger.log(level, "request %s of %s: %d %s", request_id, who, error.status, why[:_LONGEST])

    async def reply(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        dialect = dialect_of(request.path)
        if dialect is not None:
            check_post(request)
        holder = self._keys.find(request.headers)
        if holder is None:
            raise ApiError(
                401,
                "the key does not belong to a running episode. Pass the key from base_url_and_key() of the episode's "
                "model as Authorization: Bearer KEY or x-api-key: KEY",
                code="invalid_api_key",
            )
        if dialect is None:
            return json_answer(self.look_up(request, holder.tuner.model_name), request_id)
        if request.path == COUNT:
            return json_answer(await self._count(request, dialect, holder), request_id)
        return await self._reply(request, dialect, holder, request_id)

    async def _count(self, request: web.BaseRequest, dialect: Dialect, holder: Pass) -> dict[str, int]:
        """Count the tokens of the prompt for a request. Nothing is recorded."""
        raw = await read_body(request)
        model, own = holder.tuner.model_name, runs_own(holder) if self._overrules else None
        template = holder.tuner.prompt_template(holder.agent_name, holder.role)

        def understand(raw: bytes) -> ChatRequest:
            body = parse(raw)
            if own is not None:
                overrule(body, own)
            agree(body, template, holder.tuner.sampling)
            return dialect.read(body, model, holder.told)

        return await counted(await worked_on(raw, understand), dialect, holder)

    async def _reply(
        self, request: web.BaseRequest, dialect: Dialect, holder: Pass, request_id: str
    ) -> web.StreamResponse:
        raw = await read_body(request)
        model = getattr(holder.tuner, "model_name", DEFAULT_MODEL)
        own = runs_own(holder) if self._overrules else None
        template = holder.tuner.prompt_template(holder.agent_name, holder.role)

        def understand(raw: bytes) -> tuple[ChatRequest, Sequence[str], bytes]:
            body = parse(raw)
            overruled = [] if own is None else overrule(body, own)
            agreed = agree(body, template, holder.tuner.sampling)
            chat = echoed(dialect.read(body, model, holder.told), agreed)
            return chat, overruled, hashlib.sha256(raw).digest()

        try:
            chat, overruled, digest = await worked_on(raw, understand)
        except ApiError as e:  # recorded, in case the agent cannot recover and fails because of it
            if holder.tuner.failure is None or isinstance(holder.tuner.failure, UnsupportedRequest):
                holder.tuner.failure = UnsupportedRequest(e.message)
            raise
        identity = Identity(holder.digest, dialect.route, digest)
        retries = request.headers.get("x-stainless-retry-count", "")
        made: list[int] = []

        def answered(answers: Sequence[Answer], whole: Mapping[str, Any]) -> None:
            made.extend(each.reply.turn_index for each in answers)
            if chat.history is not None:
                holder.told.keep(whole, chat.history, len(raw))
            if (turn := answers[0].reply.turn) is not None and (chat.left_out or overruled):
                turn.notes.update(self._notes(chat.left_out, overruled))

        job = self._replays.attach(
            identity,
            lambda: made_for(chat, dialect, holder, answered),
            on_lost=lambda: holder.tuner.leave_out(made),
            retry=int(retries) if retries.isdecimal() and len(retries) < 6 else 0,
            name=request.headers.get("Idempotency-Key", "")[:255],
        )
        delivered = False
        try:
            response = await send(request, dialect, chat, job.task, request_id)
            delivered = True
            if isinstance(outcome := outcome_of(job.task), ApiError):
                self._log(outcome, request_id, holder)
            return response
        finally:
            self._replays.detach(job, delivered=delivered)

    def _notes(self, left_out: Mapping[str, int], overruled: Sequence[str]) -> Mapping[str, int]:
        """Count ignored fields by metric and warn once per metric. The number of metrics is bounded."""
        notes, known = Counter[str](), {f"{_OVERRULED}{name}": 1 for name in overruled}
        for metric, times in (known | {f"{_LEFT_OUT}{name}": times for name, times in left_out.items()}).items():
            is_full = len(self._names) >= _MOST_NAMES or not _METRIC.fullmatch(metric)
            if is_full and metric not in known and metric not in self._names:
                metric = f"{_LEFT_OUT}other"
            if metric not in self._names:
                why = "the model cannot read them" if metric not in known else "astuner.endpoint.sampling is run"
                logger.warning("ignored request fields, counted as %s: %s", metric, why)
                self._names.add(metric)
            notes[metric] += times
        return notes


def dialect_of(path: str) -> Dialect | None:
    """Return the dialect of a path; None if the path does not belong to a model."""
    return anthropic_messages.DIALECT if path == COUNT else DIALECTS.get(path)


def echoed(chat: ChatRequest, agreed: Sequence[str]) -> ChatRequest:
    """Return the request with the fields that its answer repeats because the model does them anyway."""
    if "parallel_tool_calls" not in agreed or not chat.echo:
        return chat
    return replace(chat, echo={**chat.echo, "parallel_tool_calls": False})


async def counted(chat: ChatRequest, dialect: Dialect, holder: Holder) -> dict[str, int]:
    """Return the answer to a request on `COUNT`.

    :raises ApiError: The request would be rejected.
    """
    try:
        return {"input_tokens": await count(chat, holder)}
    except Exception as e:
        raise dialect.translated(from_exception(e), chat) from e


def check_post(request: web.BaseRequest) -> None:
    """Check the HTTP method of a model's route.

    :raises ApiError: 405, the method is not POST.
    """
    if request.method != "POST":
        raise ApiError(405, f"{request.path} accepts only POST requests", code="method_not_allowed")


async def made_for(
    chat: ChatRequest, dialect: Dialect, holder: Holder, told: Callable[[Sequence[Answer], Mapping[str, Any]], None]
) -> Outcome:
    """Return the outcome of a request: bytes or an error. Raises nothing.

    :param told: Called with the answers and their body. If it fails, the client does not receive the answer.
    """
    answers: Sequence[Answer] = ()
    try:
        answers = await answer(chat, holder)
        whole = dialect.body(chat, answers, int(time.time()))
        told(answers, whole)
        return written(chat, dialect, whole)
    except Exception as e:
        holder.tuner.leave_out([each.reply.turn_index for each in answers])
        return dialect.translated(from_exception(e), chat)


def written(chat: ChatRequest, dialect: Dialect, whole: dict[str, Any]) -> bytes:
    """Return the bytes of an answer: one JSON object, or the events of a stream."""
    if chat.stream:
        return encode(dialect.events(chat, whole)) + dialect.end
    return json.dumps(whole, separators=(",", ":")).encode("ascii")


async def send(
    request: web.BaseRequest, dialect: Dialect, chat: ChatRequest, task: asyncio.Future[Outcome], request_id: str
) -> web.StreamResponse:
    """Wait for the task and send its outcome; return when the connection has accepted all bytes."""
    from aiohttp import web

    stream: web.StreamResponse | None = None
    # A stream starts only after a longer wait, so that an early error is sent with its own status.
    while not (await asyncio.wait({task}, timeout=_QUIET if chat.stream else None))[0]:
        stream = stream or await _begin(request, request_id)
        await stream.write(KEEP_ALIVE)
    outcome = outcome_of(task)
    if isinstance(outcome, ApiError):
        if stream is None:
            return refusal(outcome, dialect.error(outcome), request_id)
        outcome = encode(dialect.error_events(outcome)) + dialect.end
    if chat.stream:
        stream = stream or await _begin(request, request_id)
        await stream.write(outcome)
        await stream.write_eof()
        await _check_delivery(request)
        return stream
    response = web.Response(body=outcome, content_type="application/json", headers=id_headers(request_id))
    # Sent here instead of by aiohttp, so that a connection that breaks during sending is detected.
    await response.prepare(request)
    await response.write_eof()
    await _check_delivery(request)
    return response


async def _check_delivery(request: web.BaseRequest) -> None:
    """Check that a client that stopped sending still receives the answer.

    :raises ConnectionResetError: The client is gone.
    """
    protocol: Any = request.protocol
    if not getattr(protocol, "half_closed", False):
        return
    protocol.answered = True
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is None or not await is_delivered(connection):
        raise ConnectionResetError("the client is gone")
    protocol.answered = False


async def _begin(request: web.BaseRequest, request_id: str) -> web.StreamResponse:
    from aiohttp import web

    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
        **id_headers(request_id),
    }
    stream = web.StreamResponse(headers=headers)
    await stream.prepare(request)
    return stream


def _model(name: str) -> dict[str, Any]:
    """Return the description of a model under the name that the client used, since requests may use any name."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "astuner",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
