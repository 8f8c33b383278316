"""Questions, replies and usage of helper models as data, and the errors of asking.

Servers omit fields, and some send invalid values. Invariant: two questions have the same key exactly if a server would
receive the same request for the same sample. Token counts of a reply are non-negative integers or missing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.contracts.errors import AstunerError, ConfigError

FORMAT = 1
"""Part of every key. Increase it if answers are read or stored differently."""
CHAT, EMBEDDINGS = "/chat/completions", "/embeddings"
_PER_MESSAGE = 4
_BYTES_PER_TOKEN = 3.0


class HelperFailed(AstunerError):
    """There is no valid answer after all tries. The message has the last reason and never the API key.

    :param about_question: The server is reachable and did not answer this question: it refused, or the answer is
        invalid. Another question may succeed. False means that the next question is likely to fail as well.
    """

    def __init__(self, message: str, *, about_question: bool = False) -> None:
        super().__init__(message)
        self.about_question = about_question


class BudgetSpent(ConfigError):
    """The budget is spent. Ends the run or command; all results so far are saved."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to a server."""

    purpose: str
    """Purpose in one or two words, for the record."""
    body: Mapping[str, Any]
    """The complete request body."""
    asked_of: Mapping[str, Any]
    """Recipient of the body, as far as the answer depends on it, without secrets."""
    route: str = CHAT
    sample: int = 0
    most_completion: int = 0
    """Maximum number of answer tokens."""
    key: str = field(init=False)
    prompt_estimate: int = field(init=False)
    """Upper estimate of the prompt tokens: one token per three bytes, and a few per message."""

    def __post_init__(self) -> None:
        everything = [FORMAT, self.route, self.asked_of, self.body, self.sample]
        raw = json.dumps(everything, sort_keys=True, default=str).encode()
        object.__setattr__(self, "key", hashlib.sha256(raw).hexdigest())
        object.__setattr__(self, "prompt_estimate", tokens_of(self.body.get("messages") or self.body.get("input")))


def tokens_of(said: Any) -> int:
    """Return an upper estimate of the tokens of messages or texts."""
    parts: Sequence[Any] = said if isinstance(said, (list, tuple)) else [said]
    size = 0
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str)
        size += len(text.encode("utf-8", "replace"))
    return int(size / _BYTES_PER_TOKEN) + _PER_MESSAGE * len(parts)


@dataclass(frozen=True, kw_only=True)
class HelperAnswer:
    """An answer of a helper model."""

    text: str
    data: Any = None
    """The validated instance of the requested model, or None if none was requested."""
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """Cost of the request in the currency of `price`, or 0 for a cached answer."""
    cached: bool = False
    seconds: float = 0.0
    """Duration of the request, or 0 for a cached answer."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Usage of a helper model in a scope (a run folder or a command's output folder)."""

    calls: int = 0
    """Requests sent, including failed ones."""
    cached: int = 0
    """Answers read from the cache instead."""
    failed: int = 0
    """Requests in `calls` without a valid answer."""
    estimated: int = 0
    """Requests in `calls` whose tokens are estimated because the server reported none."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __str__(self) -> str:
        """Format the usage, e.g. ``12 calls (1 failed), 30 from the cache, 4500 tokens, cost 0.021``."""
        failed = f" ({self.failed} failed)" if self.failed else ""
        guessed = f" (estimated for {self.estimated} of the calls)" if self.estimated else ""
        cost = f", cost {self.cost:.6g}" if self.cost else ""
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        return f"{calls}{failed}, {self.cached} from the cache, {self.tokens} tokens{guessed}{cost}"


class NoReply(Exception):
    """There is no usable reply."""

    def __init__(
        self, message: str, *, again: bool = True, after: float = 0.0, billed: bool = True, about_question: bool = False
    ) -> None:
        super().__init__(message)
        self.again = again
        self.after = after
        """Pause in seconds that the server requests."""
        self.billed = billed
        """Whether the request may have been processed."""
        self.about_question = about_question
        """Whether the server rejected the content of the question."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply to a request."""

    text: str = ""
    finish_reason: str = "stop"
    refusal: str = ""
    vectors: tuple[tuple[float, ...], ...] = ()
    prompt_tokens: int | None = None
    """None: the server reported no count, or an invalid one."""
    completion_tokens: int | None = None


def chat_reply(found: Any) -> Reply:
    """Return the reply of a chat completion.

    :raises NoReply: The response is not a chat completion.
    """
    try:
        choice = found["choices"][0]
        message = choice["message"]
        text, refusal = message.get("content"), message.get("refusal")
        reason = choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError) as e:
        raise NoReply(f"the server did not answer with a chat completion ({type(e).__name__}: {e})") from None
    prompt_tokens, completion_tokens = usage_of(found)
    return Reply(
        text=_text(text),
        finish_reason=reason if isinstance(reason, str) and reason else "stop",
        refusal=refusal if isinstance(refusal, str) else "",
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def embedding_reply(found: Any, count: int) -> Reply:
    """Return the reply of an embeddings request.

    :raises NoReply: The response does not have one vector of finite numbers per text, all of the same length.
    """
    try:
        rows = sorted(found["data"], key=lambda row: row["index"])
        if [row["index"] for row in rows] != list(range(count)):
            raise NoReply(f"the server answered with {len(rows)} embeddings for {count} texts")
        vectors = tuple(tuple(float(x) for x in row["embedding"]) for row in rows)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise NoReply(f"the server did not answer with embeddings ({type(e).__name__}: {e})") from None
    if not vectors[0] or any(len(v) != len(vectors[0]) for v in vectors):
        raise NoReply("the server answered with embeddings of different lengths, or empty ones")
    if not all(math.isfinite(x) for v in vectors for x in v):
        raise NoReply("the server answered with an embedding that contains NaN or infinity")
    return Reply(vectors=vectors, prompt_tokens=usage_of(found)[0], completion_tokens=0)


def usage_of(found: Any) -> tuple[int | None, int | None]:
    """Return the prompt and completion tokens that a response reports."""
    usage = found.get("usage") if isinstance(found, Mapping) else None
    usage = usage if isinstance(usage, Mapping) else {}
    return count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens"))


def count_of(value: Any) -> int | None:
    """Return a number of tokens, or None if the value is not a valid count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if math.isfinite(value) and 0 <= value < 1 << 53 and value == int(value) else None


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):  # some servers send a list of parts
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    kind = type(content).__name__
    raise NoReply(f"the server did not answer with a chat completion: its content is not text but {kind}")
