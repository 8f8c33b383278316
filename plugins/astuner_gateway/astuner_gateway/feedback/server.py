"""The service's routes: OpenAI's for applications, ``/feedback`` for their users' opinions, ``/episodes`` for the run.

Invariant: nothing but ``GET /health`` is answered without a key; the application's key opens no episode's route, and
the run's opens no other.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from astuner.support.strict_json import parse as parse_strictly
from astuner_gateway.endpoint.access import DEFAULT_MODEL
from astuner_gateway.endpoint.errors import ApiError, unexpected
from astuner_gateway.endpoint.handler import json_answer, read_body, refusal, send
from astuner_gateway.endpoint.json_body import parse
from astuner_gateway.endpoint.openai_chat import DIALECT
from astuner_gateway.endpoint.openai_messages import read_messages
from astuner_gateway.endpoint.replay import Outcome
from astuner_gateway.endpoint.request import ChatRequest
from astuner_gateway.endpoint.sse import encode
from astuner_gateway.feedback import upstream
from astuner_gateway.feedback.conversations import Conversations, EpisodeModel, Exchange
from astuner_gateway.feedback.history import NOTHING_SAID, after, digests
from astuner_gateway.listening import is_own_name

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

HEARTBEAT = 10.0
"""Seconds between signs of life on the connection of an episode that waits."""
MOST_IDS = 1000
"""Replies that one request may rate."""
_RATING_FIELDS = ("msg_ids", "completion_id", "reward", "task_id", "run_id")
_ROUTES = "POST /v1/chat/completions, GET /v1/models, POST /feedback, GET /metrics and GET /health"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms the service runs; written by the run, read by the process."""

    host: str
    loopback: bool
    """Whether only this machine can reach it."""
    app_key: str = field(repr=False)
    run_key: str = field(repr=False)
    wait_timeout: float


@dataclass(eq=False)
class _Asked:
    """What `astuner_gateway.endpoint.handler.send` waits for."""

    task: asyncio.Task[Outcome]

    @property
    def outcome(self) -> Outcome:
        return self.task.result()


class Handler:
    """Answers all requests of one server."""

    def __init__(self, terms: Terms, session: aiohttp.ClientSession, conversations: Conversations) -> None:
        self._terms = terms
        self._session = session
        self._conversations = conversations
        self._asking: set[asyncio.Task[Outcome]] = set()  # the loop itself keeps no task alive
        self._routes = {
            ("POST", DIALECT.route): self._chat,
            ("POST", "/feedback"): self._feedback,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
        }

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = f"req_{secrets.token_hex(12)}"
        try:
            if self._terms.loopback and not is_own_name(request.headers.get("Host", ""), self._terms.host):
                raise ApiError(403, "this service is for this machine, under the name localhost", code="wrong_host")
            if (request.method, request.path) == ("GET", "/health"):
                return json_answer({"status": "ok"}, request_id)
            if (request.method, request.path) == ("POST", "/episodes"):
                self._check_key(request, self._terms.run_key)
                return await self._episode(request)
            self._check_key(request, self._terms.app_key)
            route = self._routes.get((request.method, request.path))
            if route is None:
                what = f"{request.method} {request.path[:200]}"
                raise ApiError(404, f"there is no {what}; there are {_ROUTES}", code="not_found")
            return await route(request, request_id)
        except ApiError as e:
            error = e
        except ConnectionResetError:
            error = ApiError(400, "the connection is lost")  # nobody reads it
        except Exception as e:
            error = unexpected(e)
        return refusal(error, DIALECT, request_id)

    # ------------------------------------------------------- for applications

    async def _chat(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        body = parse(await read_body(request))
        chat = DIALECT.read(body, self._model_name)
        history = digests(chat.messages)
        conversation = await self._conversations.find(history, _label(body), self._terms.wait_timeout)
        exchange = self._conversations.begin(conversation, chat.n)
        # Not cancelled when the client goes away: only of a reply that is here is it certain that nobody got it.
        task = asyncio.ensure_future(self._ask(exchange, chat, body, history[-1] if history else NOTHING_SAID))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        try:
            response = await send(request, DIALECT, chat, _Asked(task), request_id)
            exchange.delivered = True
            return response
        finally:
            exchange.abandoned = not exchange.delivered
            if task.done():
                self._conversations.settle(exchange)
            else:
                task.add_done_callback(lambda done: self._conversations.settle(exchange))

    async def _ask(self, exchange: Exchange, chat: ChatRequest, body: Mapping[str, Any], before: bytes) -> Outcome:
        conversation = exchange.conversation
        try:
            answer = await upstream.ask(
                self._session, conversation.offer.model, body, is_first=not conversation.replies
            )
            if isinstance(answer, upstream.Refusal):
                exchange.fatal = answer.fatal
                return answer.error
            found = answer.body
            said = [read_messages([choice["message"]])[0] for choice in found["choices"]]
            found["id"] = self._conversations.replied(exchange, found["id"], [after(before, each) for each in said])
            found["created"] = int(time.time())
            if chat.stream:
                return encode(DIALECT.events(chat, found)) + DIALECT.end
            return json.dumps(found, separators=(",", ":")).encode("ascii")
        except Exception as e:  # the conversation must not wait for ever for what will not come
            exchange.fatal = f"the service failed ({type(e).__name__}); its log says more"
            return unexpected(e)

    async def _feedback(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        ids, reward = _rating(await read_body(request))
        return json_answer({"rated": self._conversations.rate(ids, reward)}, request_id)

    async def _models(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "astuner"}
        return json_answer({"object": "list", "data": [model]}, request_id)

    async def _metrics(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        return json_answer(self._conversations.metrics(), request_id)

    # ------------------------------------------------------------- for the run

    async def _episode(self, request: web.BaseRequest) -> web.StreamResponse:
        """Lines of JSON: empty ones while the episode waits, then what became of it."""
        from aiohttp import web

        body = parse(await read_body(request))
        try:
            model = EpisodeModel(base_url=body["base_url"], api_key=body["api_key"], name=body["model"])
            begin_timeout, rating_timeout = float(body["begin_timeout"]), float(body["rating_timeout"])
        except (KeyError, TypeError, ValueError) as e:
            raise ApiError(422, f"this is no offer of an episode: {type(e).__name__}: {e}") from None
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        offer = self._conversations.offer(model, begin_timeout=begin_timeout, rating_timeout=rating_timeout)
        try:
            while not (await asyncio.wait({offer.outcome}, timeout=HEARTBEAT))[0]:
                await response.write(b"\n")
            await response.write(json.dumps(offer.outcome.result()).encode("ascii") + b"\n")
            await response.write_eof()
        finally:
            self._conversations.withdraw(offer)
        return response

    # ----------------------------------------------------------------- private

    @property
    def _model_name(self) -> str:
        return self._conversations.model_name or DEFAULT_MODEL

    def _check_key(self, request: web.BaseRequest, key: str) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "this is not the key of this route; the application's is in the file that the run named when it "
                "started, and goes into the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )


def _label(body: Mapping[str, Any]) -> str:
    """What the application calls the user, in OpenAI's newer and its older field."""
    return json.dumps([body.get("safety_identifier"), body.get("user")])


def _rating(raw: bytes) -> tuple[list[str], float]:
    """What is rated, and how.

    :raises ApiError: 422, it cannot be read.
    """
    try:
        body = parse_strictly(raw)
    except ValueError as e:
        raise ApiError(422, f"the feedback cannot be read as JSON: {e}", code="invalid_json") from None
    if unknown := [name for name in body if name not in _RATING_FIELDS]:
        raise _wrong(unknown[0], f"is not known here; there are {', '.join(_RATING_FIELDS)}")
    if ("msg_ids" in body) == ("completion_id" in body):
        raise _wrong("msg_ids", "or completion_id says what is rated; send one of the two")
    ids = body["msg_ids"] if "msg_ids" in body else [body["completion_id"]]
    if not isinstance(ids, list) or not 0 < len(ids) <= MOST_IDS or not all(isinstance(each, str) for each in ids):
        raise _wrong("msg_ids", f"must be a list of 1 to {MOST_IDS} ids of chat completions")
    reward = body.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not _is_finite(reward):
        raise _wrong("reward", "must be a finite number, for example 1.0 for good and 0.0 for bad")
    return ids, float(reward)


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that no float can hold
        return False


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(422, f"{param} {why}", param=param, code="invalid_feedback")
