"""What a server's reply says: the text, how it ended, and the tokens it took.

Servers differ in what they leave out, and some send nonsense.  Invariant: the numbers of tokens that come out are
whole and not negative, or they are missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class BadReply(Exception):
    """The reply is none that can be used; `final` says whether asking again would bring the same."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


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
    """:raises BadReply: it is no chat completion."""
    try:
        choice = found["choices"][0]
        message = choice["message"]
        text, refusal = message.get("content"), message.get("refusal")
        reason = choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError) as e:
        raise BadReply(f"the server did not answer with a chat completion ({type(e).__name__}: {e})") from None
    text = _text(text)
    prompt_tokens, completion_tokens = usage_of(found)
    return Reply(
        text=text,
        finish_reason=reason if isinstance(reason, str) and reason else "stop",
        refusal=refusal if isinstance(refusal, str) else "",
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def embedding_reply(found: Any, count: int) -> Reply:
    """:raises BadReply: it does not have one vector of finite numbers for each text, all of the same length."""
    try:
        rows = sorted(found["data"], key=lambda row: row["index"])
        if [row["index"] for row in rows] != list(range(count)):
            raise BadReply(f"the server answered with {len(rows)} embeddings for {count} texts")
        vectors = tuple(tuple(float(x) for x in row["embedding"]) for row in rows)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise BadReply(f"the server did not answer with embeddings ({type(e).__name__}: {e})") from None
    if not vectors[0] or any(len(v) != len(vectors[0]) for v in vectors):
        raise BadReply("the server answered with embeddings of different lengths, or empty ones")
    if not all(math.isfinite(x) for v in vectors for x in v):
        raise BadReply("the server answered with an embedding that has NaN or an infinity in it")
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
    raise BadReply(f"the server did not answer with a chat completion: its content is no text but {kind}")
