"""Define the common form of requests and answers in all dialects.

Invariant: a `ChatRequest` contains everything that its body requested, as arguments of `ModelTuner.chat`.
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
"""Name (may be empty) and data of a server-sent event."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One request."""

    model: str
    """Name of the model in the request; answers repeat it."""
    messages: Sequence[Mapping[str, Any]]
    """Messages in OpenAI's format."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools in OpenAI's format."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `ModelTuner.chat`."""
    structure: Structure | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    """Whether the stream of a chat completion ends with the usage."""
    logprobs: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the answer repeats."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Unknown fields in messages, and how often each occurred."""
    places: Sequence[str] = ()
    """Path in the body from which each message was read; empty if that is ``messages`` with its index."""
    history: Sequence[Any] | None = None
    """The complete input as items of its API, if later requests may refer to it."""


@dataclass(frozen=True)
class Answer:
    """One reply and the parts of it that the client receives."""

    reply: ChatReply
    content: str | None
    """Text of the reply; None if a structure was requested and the text does not match it."""
    refusal: str | None = None
    """Reason why the content is missing, if a structure was requested."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One API: converts between its bodies and `ChatRequest`."""

    route: str
    read: Callable[..., ChatRequest]
    """Return the request for a body, the model's own name and, if references are possible, the agent's `Told`; raise
    `ApiError`."""
    body: Callable[[ChatRequest, Sequence[Answer], int], dict[str, Any]]
    """Return the body for the answers and the time in seconds since 1970."""
    events: Callable[[ChatRequest, dict[str, Any]], Iterable[Event]]
    """Return the events of a stream for the body of an answer."""
    error: Callable[[ApiError], dict[str, Any]]
    error_events: Callable[[ApiError], Iterable[Event]]
    """Events that end a stream if the error occurs after its start."""
    end: bytes = b""
    """Bytes after the last event."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Keywords of `ModelTuner.chat` and fields of chat completions that have another name in this API."""

    def translated(self, error: ApiError, chat: ChatRequest) -> ApiError:
        """Return an error about a field with the names of this API and the path in its body."""
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
    """A model that answers: `astuner.rollout.model_tuner.ModelTuner` or a served model."""

    @property
    def count_prompt_tokens(self) -> Callable[..., Awaitable[int]]:
        """Count tokens as `ModelTuner.count_prompt_tokens` does."""
        ...

    @property
    def chat(self) -> Callable[..., Awaitable[ChatReply]]:
        """Answer as `ModelTuner.chat` does."""
        ...

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """Exclude these replies from training, because no client received them."""


@dataclass(frozen=True, eq=False)
class Holder:
    """The agent that calls the model."""

    tuner: Speaks
    agent_name: str = ""
    role: str | None = None


async def count(request: ChatRequest, holder: Holder) -> int:
    """Return the number of tokens in the prompt of a request."""
    schema = {} if request.structure is None else {"response_schema": request.structure.schema}
    choice = {name: request.sampling[name] for name in ("tool_choice",) if name in request.sampling}
    return await holder.tuner.count_prompt_tokens(
        request.messages, request.tools, agent_name=holder.agent_name, role=holder.role, **choice, **schema
    )


async def answer(request: ChatRequest, holder: Holder) -> list[Answer]:
    """Call the model ``n`` times in parallel and return all answers, or raise the first error.

    If the request has a seed, it increases by one for each call.

    :raises ApiError: The answer cannot provide a requested part.
    """
    options = dict(request.sampling)
    if request.structure is not None:
        options["response_schema"] = request.structure.schema

    async def ask(draw: int) -> Answer:
        own = options
        if (first := options.get("seed")) is not None:  # wraps from the largest 64-bit number to the smallest
            own = {**options, "seed": (first + draw + 2**63) % 2**64 - 2**63}
        reply = await holder.tuner.chat(
            request.messages, request.tools, agent_name=holder.agent_name, role=holder.role, **own
        )
        if request.logprobs and reply.completion_tokens and not reply.token_logprobs():
            raise ApiError(
                400,
                f"logprobs: agent {holder.agent_name!r} uses an external model, which returns none. Leave it out",
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
        holder.tuner.leave_out([a.reply.turn_index for a in made if isinstance(a, Answer)])  # no client receives them
        raise


def _settle(reply: ChatReply, structure: Structure | None) -> Answer:
    """Return an answer whose content, if any, matches the requested structure.

    Client libraries parse any content and fail if that is not possible. Text next to tool calls is not a final answer,
    so it is dropped without a refusal.
    """
    complaint = None if structure is None else structure.complaint(reply.text)
    if complaint is None:
        return Answer(reply, reply.text)
    if reply.tool_calls:
        return Answer(reply, None)
    return Answer(reply, None, refusal_of(complaint, reply.text))


_MARK = "\nThe reply was: "


def refusal_of(complaint: str, said: str) -> str:
    """Return OpenAI's ``refusal`` for a reply that does not match the requested structure."""
    return f"The reply does not match the requested structure: {complaint}.{_MARK}{said}"


def said_in(refusal: str) -> str:
    """Return the reply in a refusal that a client sends back, so that the model's own tokens are recognized."""
    return refusal.partition(_MARK)[2] if _MARK in refusal else refusal


def reasoning_tokens(reply: ChatReply) -> int:
    """Return the number of tokens up to the end of the reasoning; 0 if there is none or it is unknown."""
    low, high = 1, reply.completion_tokens
    if not reply.reasoning or reply.reasoning not in reply.beginning(high):
        return 0
    while low < high:  # binary search: a longer prefix contains at least as much text
        middle = (low + high) // 2
        if reply.reasoning in reply.beginning(middle):
            high = middle
        else:
            low = middle + 1
    return high


def logprobs_of(reply: ChatReply) -> list[dict[str, Any]]:
    """Return all generated tokens in OpenAI's format, including reasoning, tool calls and the end token."""
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

# The engine returns complete replies, so the deltas of a stream are cut from a finished reply and sent together; until
# then, comments keep the connection alive.

KEEP_ALIVE = b": the model is at work\n\n"
"""A comment, which all clients skip."""

_PIECE = 200
"""Characters per delta: several deltas per answer, but few enough that parsing them is fast."""


def pieces(text: str) -> Iterator[str]:
    """Yield ``text`` in deltas; none for an empty text."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def encode(events: Iterable[Event]) -> bytes:
    """Return events of (name, data) as bytes of a stream; a name may be empty."""
    lines = []
    for name, data in events:
        if name:
            lines.append(f"event: {name}\n")
        lines.append(f"data: {json.dumps(data, separators=(',', ':'))}\n\n")
    return "".join(lines).encode("ascii")
