"""One question to an OpenAI-compatible server.

The key is read from the environment for each request, and `astuner.http_client` keeps it out of every message and
away from other hosts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from astuner.http_client import HttpError, JsonClient


class ChatError(Exception):
    """The server gave no answer; `again` says whether asking once more may help, `after` from when (seconds)."""

    def __init__(self, message: str, *, again: bool, after: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        self.after = after


@dataclass(frozen=True)
class ChatAnswer:
    text: str
    finish_reason: str


def ask(base_url: str, body: dict[str, Any], *, api_key_env: str | None, timeout: float) -> ChatAnswer:
    """POST ``body`` to ``base_url``/chat/completions and return the first choice. Blocks; run it in a thread.

    :param timeout: seconds, as for `astuner.http_client.JsonClient`.
    :raises ChatError: no answer; the message names the URL and what happened.
    """
    key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
    try:
        client = JsonClient(base_url, api_key=key, key_name=f"the key in {api_key_env}", timeout=timeout)
        answer = client.post("/chat/completions", body)
    except HttpError as e:
        raise ChatError(str(e), again=e.again, after=e.after) from None
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""
        if not isinstance(text, str):
            raise TypeError(f"content is a {type(text).__name__}")
        return ChatAnswer(text=text, finish_reason=choice.get("finish_reason") or "")
    except (LookupError, TypeError, AttributeError) as e:
        raise ChatError(
            f"{client.base_url} did not answer with a chat completion ({type(e).__name__}: {e})", again=True
        ) from None
