"""One request to an episode's model, and what its answer means for the conversation.

The request goes on as it came, except that it is not streamed: engines give whole replies, and the stream for the
client is cut from one.  Invariant: no key is in what a client gets to see.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.feedback.conversations import EpisodeModel

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT = 10.0
_LIMITS = frozenset({"context_length_exceeded", "turn_limit_reached"})
"""Refusals that a conversation survives: it can be rated as it is."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """There is no reply."""

    error: ApiError
    """For the client."""
    fatal: str = ""
    """Why the conversation cannot go on; empty where it can."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A chat completion."""

    body: dict[str, Any] = field(repr=False)


async def ask(
    session: aiohttp.ClientSession, model: EpisodeModel, request: Mapping[str, Any], *, is_first: bool
) -> Reply | Refusal:
    """Ask the model.

    :param request: the body of a chat completion.
    :param is_first: whether the conversation has no reply yet.
    """
    import aiohttp

    body = {name: value for name, value in request.items() if name not in ("stream", "stream_options")}
    headers = {"Authorization": f"Bearer {model.api_key}"}
    try:
        async with session.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response:
            status, found = response.status, json.loads(await response.read())
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as e:
        return _gone(f"its model cannot be reached any more ({type(e).__name__})")
    if status == 200:
        return Reply(body=found)
    return _refused(status, found, is_first)


def _refused(status: int, found: Any, is_first: bool) -> Refusal:
    said = found.get("error") if isinstance(found, Mapping) else None
    said = said if isinstance(said, Mapping) else {}
    message, code, param = (said.get(name) for name in ("message", "code", "param"))
    text = message if isinstance(message, str) else f"its model answered {status}"
    error = ApiError(status, text, param=param, code=code)
    if code == "context_length_exceeded" and is_first:
        return Refusal(error=error, fatal=f"the first request of the conversation was refused: {text}")
    if status == 400 or code in _LIMITS:
        return Refusal(error=error)
    if status == 401 or code == "episode_over":
        return _gone("its episode is over")
    # Whatever it was, the next request begins a conversation with another episode, so it is worth a try.
    return Refusal(error=ApiError(502, text, code=code, retry_after=1), fatal=f"the model gave no reply: {text}")


def _gone(why: str) -> Refusal:
    error = ApiError(
        503,
        f"this conversation is over: {why}. The same request begins a new one, with the history as it is",
        code="conversation_over",
        retry_after=1,
    )
    return Refusal(error=error, fatal=why)
