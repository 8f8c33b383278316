"""Answer HTTP requests in any dialect of the endpoint with the served model.

Invariant: only ``GET /health`` is answered without the key; the tracer receives every completed answer once, after its
delivery succeeded or failed. A request is answered by the model that was current when it had been read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from astuner_gateway.endpoint.agreeing import agree
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.handler import (
    COUNT,
    MODELS,
    ModelGate,
    check_post,
    counted,
    dialect_of,
    echoed,
    made_for,
    send,
)
from astuner_gateway.endpoint.request import Answer, ChatRequest, Dialect, Holder
from astuner_gateway.gate import HEALTH, check_key, json_answer, parse, read_body, worked_on
from astuner_gateway.served.conversations import digests, label_of
from astuner_gateway.served.following import Answering
from astuner_gateway.served.model import About

if TYPE_CHECKING:
    from aiohttp import web

    from astuner_gateway.served.spans import CompletionTracer

MOST_AT_ONCE = 1024
"""Maximum number of requests that are read or answered concurrently; further clients must retry."""
METRICS = "/metrics"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One completion, for the tracer."""

    about: About
    """The served model."""
    request: ChatRequest
    answers: Sequence[Answer]
    completion_id: str
    """ID for the client."""
    conversation_id: str
    started: float
    """Start time in seconds since 1970."""
    ended: float
    lost: bool
    """Whether its client disconnected before it received the answer."""
    traceparent: str
    """Header ``traceparent``; empty if absent."""


class Handler(ModelGate):
    """Serve all requests of one server.

    :param current: Current model; see `switch`.
    :param host: Address of the server.
    """

    routes = (*ModelGate.routes, f"GET {METRICS}", f"GET {HEALTH}")

    def __init__(self, current: Answering, *, key: str, host: str, tracer: CompletionTracer | None = None) -> None:
        super().__init__(host)
        self.current, self._tracer, self._key = current, tracer, key
        self._counts: Counter[str] = Counter()
        self._under_way = 0

    def switch(self, to: Answering) -> Answering:
        """Answer with ``to`` from now on and return the previous model, which finishes its running requests."""
        before, self.current = self.current, to
        self._counts["switches"] += 1
        self._counts["conversations"] += before.conversations.begun
        return before

    async def reply(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        check_key(
            request,
            self._key,
            "the server's key. Find it in the file that `astuner serve` printed when it started, or in the variable of "
            "--key-env, and send it as Authorization: Bearer KEY",
        )
        if (dialect := dialect_of(request.path)) is not None:
            check_post(request)
            if request.path == COUNT:
                return json_answer(await self._count(request, dialect), request_id)
            return await self._reply(request, dialect, request_id)
        if request.path == METRICS and request.method in ("GET", "HEAD"):
            return json_answer(self.metrics(), request_id)
        return json_answer(self.look_up(request, self.current.about.name), request_id)

    def look_up(self, request: web.BaseRequest, name: str) -> dict[str, Any]:
        if request.path.startswith(f"{MODELS}/") and request.path != f"{MODELS}/{name}":
            raise ApiError(404, f"the model does not exist. Available: {name}", code="not_found")
        return super().look_up(request, name)

    def refuse(self, error: ApiError, request: web.BaseRequest, request_id: str) -> web.Response:
        self._counts["refused"] += 1
        return super().refuse(error, request, request_id)

    def metrics(self) -> dict[str, int]:
        """Return counts since the start; running requests and remembered conversations are current values."""
        traced = self._tracer.metrics() if self._tracer else {}
        return {
            **{word: self._counts[word] for word in ("answered", "lost", "refused", "switches")},
            "under_way": self._under_way,
            "conversations": self._counts["conversations"] + self.current.conversations.begun,
            "remembered_conversations": len(self.current.conversations),
            **traced,
        }

    # ----------------------------------------------------------------- private

    async def _count(self, request: web.BaseRequest, dialect: Dialect) -> dict[str, int]:
        raw = await read_body(request)
        with self.current.asked() as answering:
            chat, label, history = await worked_on(raw, lambda raw: self._understood(answering, dialect, raw))
            return await counted(chat, dialect, Holder(answering.conversations.voice_of(history, label)))

    def _understood(
        self, answering: Answering, dialect: Dialect, raw: bytes
    ) -> tuple[ChatRequest, str, Sequence[bytes]]:
        """Return the request, the user that its application names, and the digests of its messages."""
        body, name = parse(raw), answering.about.name
        voice = answering.conversations.voice_of((), "")
        agreed = agree(body, voice.template, voice.sampling)
        chat = replace(echoed(dialect.read(body, name), agreed), model=name)
        return chat, label_of(body), digests(chat.messages)

    async def _reply(self, request: web.BaseRequest, dialect: Dialect, request_id: str) -> web.StreamResponse:
        if self._under_way >= MOST_AT_ONCE:
            raise ApiError(503, f"{MOST_AT_ONCE} requests are running. Retry later", code="overloaded", retry_after=1)
        self._under_way += 1
        try:
            return await self._answer(request, dialect, request_id)
        finally:
            self._under_way -= 1

    async def _answer(self, request: web.BaseRequest, dialect: Dialect, request_id: str) -> web.StreamResponse:
        raw = await read_body(request)
        with self.current.asked() as answering:
            return await self._answer_by(answering, request, dialect, request_id, raw)

    async def _answer_by(
        self, answering: Answering, request: web.BaseRequest, dialect: Dialect, request_id: str, raw: bytes
    ) -> web.StreamResponse:
        conversations = answering.conversations
        chat, label, history = await worked_on(raw, lambda raw: self._understood(answering, dialect, raw))
        started, made = time.time(), list[Exchange]()
        with conversations.of(history, label) as conversation:

            def told(answers: Sequence[Answer], whole: Mapping[str, Any]) -> None:
                conversations.replied(conversation, history, [each.reply.message for each in answers])
                exchange = Exchange(
                    about=answering.about,
                    request=chat,
                    answers=answers,
                    completion_id=whole["id"],
                    conversation_id=conversation.id,
                    started=started,
                    ended=time.time(),
                    lost=False,
                    traceparent=request.headers.get("traceparent", ""),
                )
                made.append(exchange)

            task = asyncio.ensure_future(made_for(chat, dialect, Holder(conversation.voice), told))
            delivered = False
            try:
                response = await send(request, dialect, chat, task, request_id)
                delivered = True
            finally:
                task.cancel()  # if its client disconnected, no request waits for it
                self._tell(made, delivered)
        return response

    def _tell(self, made: Sequence[Exchange], delivered: bool) -> None:
        self._counts["lost" if not delivered else "answered" if made else "refused"] += 1
        if self._tracer is not None:
            for exchange in made:
                self._tracer.completed(replace(exchange, lost=not delivered))
