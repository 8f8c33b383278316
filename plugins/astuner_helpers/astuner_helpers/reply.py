"""What a helper model is asked and what it gave, as data; and what asking it raises.

Servers differ in what they leave out, and some send nonsense.  Invariant: two questions have the same key exactly if a
server would be sent the same, for the same sample; and the numbers of tokens that come out of a reply are whole and not
negative, or they are missing.
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
"""Part of every key; another number where answers are read or kept differently."""
CHAT, EMBEDDINGS = "/chat/completions", "/embeddings"
_PER_MESSAGE = 4
_BYTES_PER_TOKEN = 3.0


class HelperFailed(AstunerError):
    """There is no (valid) answer after all tries; says the last reason. It never has the key in it.

    :param about_question: the server is there and did not answer *this*: it refused, or said what cannot be read.
        Another question may fare better; where it is False, the next one is likely to fail as well.
    """

    def __init__(self, message: str, *, about_question: bool = False) -> None:
        super().__init__(message)
        self.about_question = about_question


class BudgetSpent(ConfigError):
    """The budget is reached; ends the run or command, in which everything done so far is saved."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a server is asked."""

    purpose: str
    """What for, in a word or two; on the call's record."""
    body: Mapping[str, Any]
    """The request's whole body."""
    asked_of: Mapping[str, Any]
    """Where the body goes, as far as the answer depends on it; no secrets."""
    route: str = CHAT
    sample: int = 0
    most_completion: int = 0
    """Most tokens that the answer may have."""
    key: str = field(init=False)
    prompt_estimate: int = field(init=False)
    """Tokens of the prompt, rather too many: a token for every three bytes, and a few for each message."""

    def __post_init__(self) -> None:
        everything = [FORMAT, self.route, self.asked_of, self.body, self.sample]
        raw = json.dumps(everything, sort_keys=True, default=str).encode()
        object.__setattr__(self, "key", hashlib.sha256(raw).hexdigest())
        object.__setattr__(self, "prompt_estimate", tokens_of(self.body.get("messages") or self.body.get("input")))


def tokens_of(said: Any) -> int:
    """About how many tokens messages or texts have, rather too many than too few."""
    parts: Sequence[Any] = said if isinstance(said, (list, tuple)) else [said]
    size = 0
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str)
        size += len(text.encode("utf-8", "replace"))
    return int(size / _BYTES_PER_TOKEN) + _PER_MESSAGE * len(parts)


@dataclass(frozen=True, kw_only=True)
class HelperAnswer:
    """One answer of a helper model."""

    text: str
    data: Any = None
    """The validated instance of the model that was asked for; None where none was."""
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """Of the request that gave the answer, in the money of `price`; 0 for one that was taken from the cache."""
    cached: bool = False
    seconds: float = 0.0
    """What the request took; 0 for an answer that was taken from the cache."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a scope (a run folder, a command's output folder) used of one helper model."""

    calls: int = 0
    """Requests that were sent, those that failed included."""
    cached: int = 0
    """Answers that were taken from the cache instead."""
    failed: int = 0
    """Requests among `calls` that brought no answer."""
    estimated: int = 0
    """Requests among `calls` whose tokens are estimated, since nobody told them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __str__(self) -> str:
        """``12 calls (1 failed), 30 from the cache, 4500 tokens, cost 0.021``."""
        failed = f" ({self.failed} failed)" if self.failed else ""
        guessed = f" ({self.estimated} of the calls estimated)" if self.estimated else ""
        cost = f", cost {self.cost:.6g}" if self.cost else ""
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        return f"{calls}{failed}, {self.cached} from the cache, {self.tokens} tokens{guessed}{cost}"


class NoReply(Exception):
    """There is no reply that can be used."""

    def __init__(
        self, message: str, *, again: bool = True, after: float = 0.0, billed: bool = True, about_question: bool = False
    ) -> None:
        super().__init__(message)
        self.again = again
        self.after = after
        """Seconds that the server asks to wait."""
        self.billed = billed
        """Whether it may have been carried out."""
        self.about_question = about_question
        """Whether the server refuses what it is asked, as far as it says."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply to one request."""

    text: str = ""
    finish_reason: str = "stop"
    refusal: str = ""
    vectors: tuple[tuple[float, ...], ...] = ()
    prompt_tokens: int | None = None
    """None: the server did not say, or said something that is no number of tokens."""
    completion_tokens: int | None = None


def chat_reply(found: Any) -> Reply:
    """:raises NoReply: it is no chat completion."""
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
    """:raises NoReply: it does not have one vector of finite numbers for each text, all of the same length."""
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
        raise NoReply("the server answered with an embedding that has NaN or an infinity in it")
    return Reply(vectors=vectors, prompt_tokens=usage_of(found)[0], completion_tokens=0)


def usage_of(found: Any) -> tuple[int | None, int | None]:
    """The tokens of prompt and completion that a reply says it took."""
    usage = found.get("usage") if isinstance(found, Mapping) else None
    usage = usage if isinstance(usage, Mapping) else {}
    return count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens"))


def count_of(value: Any) -> int | None:
    """A number of tokens, or None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if math.isfinite(value) and 0 <= value < 1 << 53 and value == int(value) else None


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):  # parts, as some servers have it
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    kind = type(content).__name__
    raise NoReply(f"the server did not answer with a chat completion: its content is no text but {kind}")
