"""Serve OpenAI's routes for applications, ``/feedback`` for ratings and ``/episodes`` for the run.

Invariant: only ``GET /health`` is answered without a key; the key of the application and the key of the run are valid
on their own routes only; clients never see a key.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from astuner import in_daemon_thread
from astuner.contracts.types import A_REWARD, is_reward
from astuner_gateway.endpoint.access import DEFAULT_MODEL
from astuner_gateway.endpoint.errors import ApiError, unexpected
from astuner_gateway.endpoint.handler import MODELS, ModelGate, send, written
from astuner_gateway.endpoint.openai_chat import DIALECT, read_messages
from astuner_gateway.endpoint.replay import Outcome
from astuner_gateway.endpoint.request import ChatRequest
from astuner_gateway.feedback.conversations import Conversations, EpisodeModel, Exchange
from astuner_gateway.gate import HEALTH, Gate, check_key, json_answer, parse, read_body, serve_until_told
from astuner_gateway.served.conversations import NOTHING_SAID, after, digests, label_of
from astuner_http.strict_json import parse_json as parse_strictly

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

HEARTBEAT = 10.0
"""Seconds between keep-alive lines to a waiting episode."""
MOST_IDS = 1000
"""Maximum number of replies that one request can rate."""
_RATING_FIELDS = ("msg_ids", "completion_id", "reward", "task_id", "run_id")
CONNECT_TIMEOUT = 10.0
"""Seconds for connecting to an episode's model."""
_LIMITS = frozenset({"context_length_exceeded", "turn_limit_reached"})
"""Errors after which a conversation can still be rated."""
FEEDBACK, METRICS, EPISODES = "/feedback", "/metrics", "/episodes"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings of the service, which the run writes and the process reads."""

    host: str
    app_key: str = field(repr=False)
    run_key: str = field(repr=False)
    wait_timeout: float


class Handler(ModelGate):
    """Serve all requests of one server."""

    what = "service"
    routes = (f"POST {DIALECT.route}", f"GET {MODELS}", f"POST {FEEDBACK}", f"GET {METRICS}", f"GET {HEALTH}")

    def __init__(self, terms: Terms, session: aiohttp.ClientSession, conversations: Conversations) -> None:
        super().__init__(terms.host)
        self._terms = terms
        self._session = session
        self._conversations = conversations
        self._asking: set[asyncio.Task[Outcome]] = set()  # the loop itself keeps no reference to a task

    async def reply(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        asked = (request.method, request.path)
        is_runs = asked == ("POST", EPISODES)
        check_key(
            request,
            self._terms.run_key if is_runs else self._terms.app_key,
            "the key of this route. The run printed the path of the file with the application's key when it started; "
            "send it as Authorization: Bearer KEY",
        )
        if is_runs:
            return await self._episode(request)
        if asked == ("POST", DIALECT.route):
            return await self._chat(request, request_id)
        if asked == ("POST", FEEDBACK):
            ids, reward = _rating(await read_body(request))
            return json_answer({"rated": self._conversations.rate(ids, reward)}, request_id)
        if asked == ("GET", METRICS):
            return json_answer(self._conversations.metrics(), request_id)
        return json_answer(self.look_up(request, self._model_name), request_id)

    refuse = Gate.refuse  # there is only one dialect

    # ------------------------------------------------------- for applications

    async def _chat(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        body = parse(await read_body(request))
        chat = DIALECT.read(body, self._model_name)
        history = digests(chat.messages)
        conversation = await self._conversations.find(history, label_of(body), self._terms.wait_timeout)
        exchange = self._conversations.begin(conversation, chat.n)
        # Not canceled when the client disconnects: only for a finished reply is it certain that no client received it.
        task = asyncio.ensure_future(self._ask(exchange, chat, body, history[-1] if history else NOTHING_SAID))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        try:
            response = await send(request, DIALECT, chat, task, request_id)
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
            found = await _answer(self._session, conversation.offer.model, body, is_first=not conversation.replies)
            said = [read_messages([choice["message"]])[0] for choice in found["choices"]]
            found["id"] = self._conversations.replied(exchange, found["id"], [after(before, each) for each in said])
            found["created"] = int(time.time())
            return written(chat, DIALECT, found)
        except Refused as e:
            exchange.fatal = e.fatal
            return e
        except Exception as e:  # the conversation must not wait forever
            exchange.fatal = f"the service failed ({type(e).__name__}); see its log"
            return unexpected(e)

    # ------------------------------------------------------------- for the run

    async def _episode(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send JSON lines: empty ones while the episode waits, then the outcome."""
        from aiohttp import web

        body = parse(await read_body(request))
        try:
            model = EpisodeModel(base_url=body["base_url"], api_key=body["api_key"], name=body["model"])
            begin_timeout, rating_timeout = float(body["begin_timeout"]), float(body["rating_timeout"])
        except (KeyError, TypeError, ValueError) as e:
            raise ApiError(422, f"the body is not an offer of an episode: {type(e).__name__}: {e}") from None
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


def _rating(raw: bytes) -> tuple[list[str], float]:
    """Return the rated reply IDs and the reward.

    :raises ApiError: 422, the body is invalid.
    """
    try:
        body = parse_strictly(raw)
    except ValueError as e:
        raise ApiError(422, f"the body is not valid JSON: {e}", code="invalid_json") from None
    if unknown := [name for name in body if name not in _RATING_FIELDS]:
        raise _wrong(unknown[0], f"is not a known field. Known fields: {', '.join(_RATING_FIELDS)}")
    if ("msg_ids" in body) == ("completion_id" in body):
        raise _wrong("msg_ids", "or completion_id is required. Send exactly one of them")
    ids = body["msg_ids"] if "msg_ids" in body else [body["completion_id"]]
    if not isinstance(ids, list) or not 0 < len(ids) <= MOST_IDS or not all(isinstance(each, str) for each in ids):
        raise _wrong("msg_ids", f"must be a list of 1 to {MOST_IDS} chat completion IDs")
    reward: Any = body.get("reward")
    if not is_reward(reward):
        raise _wrong("reward", f"must be {A_REWARD}, for example 1.0 for good and 0.0 for bad")
    return ids, float(reward)


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(422, f"{param} {why}", param=param, code="invalid_feedback")


# ---- an episode's model ----------------------------------------------------------------------------------------------


class Refused(ApiError):
    """An episode's model returned an error instead of a reply."""

    fatal = ""
    """Reason why the conversation cannot continue; empty if it can."""


async def _answer(
    session: aiohttp.ClientSession, model: EpisodeModel, request: Mapping[str, Any], *, is_first: bool
) -> dict[str, Any]:
    """Return the model's chat completion.

    The request is passed on unchanged, except that it is not streamed: engines return complete replies, and the stream
    for the client is cut from one.

    :param request: Body of a chat completion.
    :param is_first: Whether the conversation has no reply yet.
    :raises Refused: The model did not reply.
    """
    import aiohttp

    body = {name: value for name, value in request.items() if name not in ("stream", "stream_options")}
    headers = {"Authorization": f"Bearer {model.api_key}"}
    try:
        async with session.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response:
            status, found = response.status, json.loads(await response.read())
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as e:
        raise _gone(f"its model cannot be reached ({type(e).__name__})") from e
    if status != 200:
        raise _refused(status, found, is_first)
    whole: dict[str, Any] = found
    return whole


def _refused(status: int, found: Any, is_first: bool) -> Refused:
    said = found.get("error") if isinstance(found, Mapping) else None
    said = said if isinstance(said, Mapping) else {}
    message, code, param = (said.get(name) for name in ("message", "code", "param"))
    text = message if isinstance(message, str) else f"the model answered {status}"
    refused = Refused(status, text, param=param, code=code)
    if code == "context_length_exceeded" and is_first:
        refused.fatal = f"the first request of the conversation was rejected: {text}"
    elif status == 401 or code == "episode_over":
        return _gone("its episode has ended")
    elif status != 400 and code not in _LIMITS:
        # The next request starts a conversation with another episode, so a retry is useful in any case.
        refused = Refused(502, text, code=code, retry_after=1)
        refused.fatal = f"the model did not reply: {text}"
    return refused


def _gone(why: str) -> Refused:
    text = f"this conversation has ended: {why}. Retry the request to start a new conversation with the same history"
    refused = Refused(503, text, code="conversation_over", retry_after=1)
    refused.fatal = why
    return refused


# ---- the process -----------------------------------------------------------------------------------------------------


async def serve(terms: Terms, listening: socket.socket) -> None:
    """Serve until the process receives a signal to stop."""
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    over = asyncio.Event()
    orphaned = asyncio.ensure_future(in_daemon_thread(sys.stdin.read))
    orphaned.add_done_callback(lambda done: over.set())
    # No limits: a conversation may wait long for its model, and there are as many conversations as episodes.
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    async with ClientSession(timeout=timeout, connector=TCPConnector(limit=0), trust_env=False) as session:

        def ready() -> None:
            print(f"the feedback service listens on {listening.getsockname()[:2]}", flush=True)

        await serve_until_told(Handler(terms, session, Conversations()), listening, ready, grace=1.0, over=over)


def main() -> None:
    """Run ``python -m astuner_gateway.feedback.server``, as started by `astuner_gateway.feedback.service`.

    The first line of standard input is a JSON object with the settings and the file descriptor of a listening socket,
    so keys do not occur in arguments or variables. The process ends on SIGTERM, or when its standard input closes
    because the process that started it has ended.
    """
    given = json.loads(sys.stdin.readline())
    asyncio.run(serve(Terms(**given["terms"]), socket.socket(fileno=given["socket"])))


if __name__ == "__main__":
    main()
