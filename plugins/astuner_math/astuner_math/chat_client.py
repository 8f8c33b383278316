"""One question to an OpenAI-compatible server, by the standard library.

`urllib` rather than the openai package: this is one POST of one small JSON document, and the package would add
forty megabytes, a second retry policy and version conflicts with AgentScope's pin to a plugin that needs none of
them.  What `urllib` lacks is added here: a deadline over the whole exchange, a bound on the answer's size, and no
redirects (they would carry the key to another host).  The key is read from the environment for each request and
appears in no message.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import IO, Any

_MAX_REPLY = 1 << 20
_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def ask(base_url: str, body: dict[str, Any], *, api_key_env: str | None, timeout: float) -> ChatAnswer:
    """POST ``body`` to ``base_url``/chat/completions and return the first choice. Blocks; run it in a thread.

    :param timeout: seconds for the whole exchange.
    :raises ChatError: no answer; the message names the URL and what happened.
    """
    url = f"{base_url.rstrip('/')}/chat/completions"
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
    if not (key.isascii() and key.isprintable()):  # http.client would refuse it and print it
        raise ChatError(f"the key in {api_key_env} has characters that no HTTP header may have", again=False)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
    deadline = time.monotonic() + timeout
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return _choice(_read(response, deadline), url)
    except urllib.error.HTTPError as e:
        with e:
            excerpt = e.read(500).decode(errors="replace").replace(key or "\0", "***")
        raise ChatError(
            f"{url} answered {e.code} {e.reason}: {excerpt.strip() or 'no text'}",
            again=e.code in _RETRIED_STATUS,
            after=_seconds(e.headers.get("Retry-After")),
        ) from None
    except TimeoutError:
        raise ChatError(f"{url} gave no answer within {timeout:g} s", again=True) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as e:
        reason = getattr(e, "reason", None) or e
        raise ChatError(f"cannot reach {url}: {type(reason).__name__}: {reason}", again=True) from None


def _read(response: IO[bytes], deadline: float) -> bytes:
    """The whole body, unless it is too long or drips in past the deadline."""
    parts: list[bytes] = []
    size = 0
    read_some = getattr(response, "read1", response.read)
    while chunk := read_some(65536):
        parts.append(chunk)
        size += len(chunk)
        if size > _MAX_REPLY:
            raise ChatError(f"the answer is longer than {_MAX_REPLY} bytes", again=False)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _choice(body: bytes, url: str) -> ChatAnswer:
    try:
        choice = json.loads(body)["choices"][0]
        text = choice["message"]["content"] or ""
        if not isinstance(text, str):
            raise TypeError(f"content is a {type(text).__name__}")
        return ChatAnswer(text=text, finish_reason=choice.get("finish_reason") or "")
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise ChatError(f"{url} did not answer with a chat completion ({type(e).__name__}: {e})", again=True) from None


def _seconds(retry_after: str | None) -> float:
    """The seconds form of a Retry-After header (RFC 9110, 10.2.3); the date form is not waited for."""
    return float(retry_after) if retry_after and retry_after.strip().isdigit() else 0.0
