"""What every dialect's request comes to, and what every dialect's answer is made from.

Invariant: a `ChatRequest` holds all that its body asked for, in the words of `ModelTuner.chat`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.structure import Structure

if TYPE_CHECKING:
    from astuner.contracts.messages import ChatReply

Event = tuple[str, Mapping[str, Any]]
"""The name of a server-sent event (may be empty) and its data."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request."""

    model: str
    """As the client calls it; answers repeat it."""
    messages: Sequence[Mapping[str, Any]]
    """In OpenAI's form."""
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's form."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `ModelTuner.chat`."""
    structure: Structure | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    """Whether a chat completion's stream ends with the usage."""
    logprobs: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)
    """What the answer repeats of the request."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Fields of what was said that nobody here knows, and how often each was there."""
    places: Sequence[str] = ()
    """Of each message, the path in the body that it was read from; empty where that is ``messages`` with its index."""
    history: Sequence[Any] | None = None
    """The whole input in its own API's items, where later requests may refer to it."""


@dataclass(frozen=True)
class Answer:
    """One reply, with what may be shown of it."""

    reply: ChatReply
    content: str | None
    """Its text; None when a structure was asked for and this is not it."""
    refusal: str | None = None
    """Why there is no content, where the structure that was asked for is missing."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One API: between its bodies and `ChatRequest`."""

    route: str
    read: Callable[..., ChatRequest]
    """A body, the model's own name and, where earlier answers may be referred to, the agent's `Told` -> the request;
    raises `ApiError`."""
    body: Callable[[ChatRequest, Sequence[Answer], int], dict[str, Any]]
    """The answers and the time (seconds since 1970) -> the body."""
    events: Callable[[ChatRequest, dict[str, Any]], Iterable[Event]]
    """The body of an answer -> the events of its stream."""
    error: Callable[[ApiError], dict[str, Any]]
    error_events: Callable[[ApiError], Iterable[Event]]
    """What ends a stream that had begun when the error came."""
    end: bytes = b""
    """What follows the last event."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Keywords of `ModelTuner.chat`, and fields of chat completions, that have another name in this API."""

    def translated(self, error: ApiError, chat: ChatRequest) -> ApiError:
        """Return an error about a field in the words of this API, with the path in its own body."""
        if error.status != 400 or not (self.names or chat.places):
            return error
        match = re.match(r"([a-z_]+)(?:\[(\d+)\])?", error.message)
        field, index = match.groups() if match else ("", None)
        if field == "messages" and index is not None and int(index) < len(chat.places):
            instead = chat.places[int(index)]
            if instead in ("system", "instructions"):
                error = error.about(error.param, error.message.replace("].content", "]", 1))
            return error.renamed(f"messages[{index}]", instead)
        for name, instead in self.names.items():
            if name in (field, error.param):
                return error.renamed(name, instead)
        return error


class Speaks(Protocol):
    """What answers: `astuner.rollout.model_tuner.ModelTuner`, or a model that is served."""

    @property
    def count_prompt_tokens(self) -> Callable[..., Awaitable[int]]:
        """As `ModelTuner.count_prompt_tokens`."""
        ...

    @property
    def chat(self) -> Callable[..., Awaitable[ChatReply]]:
        """As `ModelTuner.chat`."""
        ...

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """Nobody got to see these replies."""


@dataclass(frozen=True, eq=False)
class Holder:
    """Who asks whom."""

    tuner: Speaks
    agent_name: str = ""
    role: str | None = None


async def count(request: ChatRequest, holder: Holder) -> int:
    """Return how many tokens the prompt of a request has."""
    schema = {} if request.structure is None else {"response_schema": request.structure.schema}
    choice = {name: request.sampling[name] for name in ("tool_choice",) if name in request.sampling}
    return await holder.tuner.count_prompt_tokens(
        request.messages, request.tools, agent_name=holder.agent_name, role=holder.role, **choice, **schema
    )


async def answer(request: ChatRequest, holder: Holder) -> list[Answer]:
    """Ask the model ``n`` times at once; all answers, or the first error. With a seed, each draw has the next one.

    :raises ApiError: what was asked for of the answer is not to be had.
    """
    options = dict(request.sampling)
    if request.structure is not None:
        options["response_schema"] = request.structure.schema

    async def ask(draw: int) -> Answer:
        own = options
        if (first := options.get("seed")) is not None:  # after the largest 64-bit number comes the smallest
            own = {**options, "seed": (first + draw + 2**63) % 2**64 - 2**63}
        reply = await holder.tuner.chat(
            request.messages, request.tools, agent_name=holder.agent_name, role=holder.role, **own
        )
        if request.logprobs and reply.completion_tokens and not reply.token_logprobs():
            raise ApiError(
                400,
                f"logprobs: agent {holder.agent_name!r} has an external model, which gives none; leave it out",
                param="logprobs",
            )
        return _settle(reply, request.structure)

    if request.n == 1:
        return [await ask(0)]
    asked = [asyncio.ensure_future(ask(draw)) for draw in range(request.n)]
    try:
        return list(await asyncio.gather(*asked))
    except BaseException:
        for task in asked:
            task.cancel()
        made = await asyncio.gather(*asked, return_exceptions=True)
        holder.tuner.leave_out([a.reply.turn_index for a in made if isinstance(a, Answer)])  # nobody gets to see them
        raise


def _settle(reply: ChatReply, structure: Structure | None) -> Answer:
    """Content that is there has the structure; what the model says beside tool calls is no final answer, so no refusal.

    A client library parses the content wherever there is some, and fails where it cannot.
    """
    complaint = None if structure is None else structure.complaint(reply.text)
    if complaint is None:
        return Answer(reply, reply.text)
    if reply.tool_calls:
        return Answer(reply, None)
    return Answer(reply, None, refusal_of(complaint, reply.text))


_MARK = "\nThe reply was: "


def refusal_of(complaint: str, said: str) -> str:
    """OpenAI's ``refusal`` for a reply without the structure that was asked for."""
    return f"This reply is not in the structure that was asked for: {complaint}.{_MARK}{said}"


def said_in(refusal: str) -> str:
    """The reply behind a refusal that comes back as history; so the model's own words are found again."""
    return refusal.partition(_MARK)[2] if _MARK in refusal else refusal


def reasoning_tokens(reply: ChatReply) -> int:
    """Tokens up to the end of the model's reasoning; 0 when there is none, or where nobody says."""
    low, high = 1, reply.completion_tokens
    if not reply.reasoning or reply.reasoning not in reply.beginning(high):
        return 0
    while low < high:  # the fewest tokens whose text holds the reasoning: the more tokens, the more they hold
        middle = (low + high) // 2
        if reply.reasoning in reply.beginning(middle):
            high = middle
        else:
            low = middle + 1
    return high


def logprobs_of(reply: ChatReply) -> list[dict[str, Any]]:
    """Every token that was generated, reasoning, tool calls and the end token included, in OpenAI's shape."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": None if token.raw is None else list(token.raw),
            "top_logprobs": [],
        }
        for token in reply.token_logprobs()
    ]


# ---- server-sent events (WHATWG HTML, section 9.2) -------------------------------------------------------------------

# The engine returns whole replies, so the deltas of a stream are cut from a finished one and sent at once; until then
# comments keep the connection busy.

KEEP_ALIVE = b": the model is at work\n\n"
"""A comment, which every client skips."""

_PIECE = 200
"""Characters per delta: several per answer, and not so many that parsing them takes the client's time."""


def pieces(text: str) -> Iterator[str]:
    """``text`` in deltas, which joined are the text; none for an empty one."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def encode(events: Iterable[Event]) -> bytes:
    """Events of (name, data), a name may be empty, as they go over the wire."""
    lines = []
    for name, data in events:
        if name:
            lines.append(f"event: {name}\n")
        lines.append(f"data: {json.dumps(data, separators=(',', ':'))}\n\n")
    return "".join(lines).encode("ascii")
