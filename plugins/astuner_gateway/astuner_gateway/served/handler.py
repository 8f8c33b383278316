"""From an HTTP request to its answer, in any dialect of the endpoint.

Invariant: nothing but ``GET /health`` is answered without the key; every answer that was made is told to the tracer,
once, after it reached its client or could not any more.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from astuner.contracts.errors import AstunerError
from astuner.support.threads import in_daemon_thread
from astuner_gateway.endpoint.errors import ApiError, from_exception, unexpected
from astuner_gateway.endpoint.handler import DIALECTS, HEALTH, MODELS, json_answer, read_body, refusal, send
from astuner_gateway.endpoint.json_body import parse
from astuner_gateway.endpoint.openai_chat import DIALECT
from astuner_gateway.endpoint.replay import Outcome
from astuner_gateway.endpoint.request import Answer, ChatRequest, Dialect, answer
from astuner_gateway.endpoint.sse import encode
from astuner_gateway.feedback.history import digests
from astuner_gateway.listening import is_own_name
from astuner_gateway.served.conversations import Conversation, Conversations

if TYPE_CHECKING:
    from aiohttp import web

MOST_AT_ONCE = 1024
"""Requests that are answered, or read, at a time; who comes then is told to come again."""
METRICS = "/metrics"
_LONG = 32 << 10
"""Bytes of a body that is read in a thread of its own, so that the others' requests go on meanwhile."""
_ROUTES = ", ".join([*(f"POST {route}" for route in DIALECTS), f"GET {MODELS}", f"GET {METRICS}", f"GET {HEALTH}"])


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One completion, for who is told of it."""

    request: ChatRequest
    answers: Sequence[Answer]
    completion_id: str
    """As the client knows it."""
    conversation_id: str
    started: float
    """Seconds since 1970."""
    ended: float
    lost: bool
    """Its client went away before it got it."""
    traceparent: str
    """The header of that name; empty if there was none."""


class Tracer(Protocol):
    """Is told of every completion."""

    def completed(self, exchange: Exchange) -> None:
        """Returns at once."""

    def metrics(self) -> Mapping[str, int]: ...


@dataclass(eq=False)
class _Holder:
    """Whom a request asks; see `astuner_gateway.endpoint.request.Holder`."""

    tuner: Any
    agent_name: str = ""
    role: str | None = None


@dataclass(eq=False)
class _Asked:
    """An answer in the making; what `astuner_gateway.endpoint.handler.send` waits for."""

    traceparent: str
    started: float = field(default_factory=time.time)
    task: asyncio.Task[Outcome] = field(init=False)
    made: Exchange | None = None

    @property
    def outcome(self) -> Outcome:
        return self.task.result()


class Handler:
    """Answers all requests of one server.

    :param name: what the API calls the model.
    :param host: where the server listens.
    :param loopback: whether only this machine can reach it; then the Host header must say so too, or else a web page
        could reach it under a name of its own (DNS rebinding).
    """

    def __init__(
        self,
        conversations: Conversations,
        *,
        name: str,
        key: str,
        host: str,
        loopback: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._conversations, self._tracer = conversations, tracer
        self._name, self._key = name, key.encode()
        self._host, self._loopback = host, loopback
        self._counts: Counter[str] = Counter()
        self._under_way = 0

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = f"req_{secrets.token_hex(12)}"
        dialect = DIALECTS.get(request.path, DIALECT)
        try:
            if self._loopback and not is_own_name(request.headers.get("Host", ""), self._host):
                raise ApiError(403, "this server is for this machine, under the name localhost", code="wrong_host")
            if request.path == HEALTH and request.method in ("GET", "HEAD"):
                return json_answer({"status": "ok"}, request_id)
            self._check_key(request)
            if request.path in DIALECTS and request.method == "POST":
                return await self._reply(request, dialect, request_id)
            return json_answer(self._other(request), request_id)
        except ApiError as e:
            error = e
        except AstunerError as e:
            error = from_exception(e)
        except ConnectionResetError:
            error = ApiError(400, "the connection is lost")  # nobody reads it
        except Exception as e:
            error = unexpected(e)
        self._counts["refused"] += 1
        return refusal(error, dialect, request_id)

    def metrics(self) -> dict[str, int]:
        """Since the start, but for those under way and remembered now."""
        traced = self._tracer.metrics() if self._tracer else {}
        return {
            **{word: self._counts[word] for word in ("answered", "lost", "refused")},
            "under_way": self._under_way,
            "conversations": self._conversations.begun,
            "remembered_conversations": len(self._conversations),
            **traced,
        }

    # ----------------------------------------------------------------- private

    def _check_key(self, request: web.BaseRequest) -> None:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        for given in (request.headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""):
            if hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key):
                return
        raise ApiError(
            401,
            "this is not the server's key; it is in the file that `astuner serve` named when it started, or in the "
            "variable of --key-env, and goes into the header Authorization: Bearer KEY",
            code="invalid_api_key",
        )

    def _other(self, request: web.BaseRequest) -> dict[str, Any]:
        """The routes that are not a model's."""
        path = request.path
        if path in DIALECTS:
            raise ApiError(405, f"{path} takes POST requests only", code="method_not_allowed")
        if request.method in ("GET", "HEAD"):
            model = {"id": self._name, "object": "model", "created": 0, "owned_by": "astuner"}
            if path == MODELS:
                return {"object": "list", "data": [model]}
            if path == f"{MODELS}/{self._name}":
                return model
            if path == METRICS:
                return self.metrics()
        raise ApiError(404, f"there is no {request.method} {path[:200]}; there are {_ROUTES}", code="not_found")

    async def _reply(self, request: web.BaseRequest, dialect: Dialect, request_id: str) -> web.StreamResponse:
        if self._under_way >= MOST_AT_ONCE:
            raise ApiError(
                503, f"{MOST_AT_ONCE} requests are being answered; come again", code="overloaded", retry_after=1
            )
        self._under_way += 1
        try:
            return await self._answer(request, dialect, request_id)
        finally:
            self._under_way -= 1

    async def _answer(self, request: web.BaseRequest, dialect: Dialect, request_id: str) -> web.StreamResponse:
        raw = await read_body(request)

        def understand() -> tuple[ChatRequest, str, Sequence[bytes]]:
            body = parse(raw)
            chat = replace(dialect.read(body, self._name), model=self._name)
            return chat, label_of(body), digests(chat.messages)

        chat, label, history = await in_daemon_thread(understand) if len(raw) > _LONG else understand()
        asked = _Asked(request.headers.get("traceparent", ""))
        with self._conversations.of(history, label) as conversation:
            asked.task = asyncio.ensure_future(self._produce(asked, chat, dialect, conversation, history))
            delivered = False
            try:
                response = await send(request, dialect, chat, asked, request_id)
                delivered = True
            finally:
                asked.task.cancel()  # where its client went away: nobody waits for it any more
                self._tell(asked, delivered)
        return response

    async def _produce(
        self, asked: _Asked, chat: ChatRequest, dialect: Dialect, conversation: Conversation, history: Sequence[bytes]
    ) -> Outcome:
        try:
            answers = await answer(chat, _Holder(conversation.voice))
            whole = dialect.body(chat, answers, int(time.time()))
            self._conversations.replied(conversation, history, [each.reply.message for each in answers])
            asked.made = Exchange(
                request=chat,
                answers=answers,
                completion_id=whole["id"],
                conversation_id=conversation.id,
                started=asked.started,
                ended=time.time(),
                lost=False,
                traceparent=asked.traceparent,
            )
            if chat.stream:
                return encode(dialect.events(chat, whole)) + dialect.end
            return json.dumps(whole, separators=(",", ":")).encode("ascii")
        except (ApiError, AstunerError) as e:
            return from_exception(e)
        except Exception as e:
            return unexpected(e)

    def _tell(self, asked: _Asked, delivered: bool) -> None:
        if asked.made is None:
            self._counts["refused" if delivered else "lost"] += 1
            return
        self._counts["answered" if delivered else "lost"] += 1
        if self._tracer is not None:
            self._tracer.completed(replace(asked.made, lost=not delivered))


def label_of(body: Mapping[str, Any]) -> str:
    """What the application calls the user, in OpenAI's newer and its older field, and in Anthropic's."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    return json.dumps([body.get("safety_identifier"), body.get("user"), user])
