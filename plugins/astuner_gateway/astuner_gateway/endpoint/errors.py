"""What goes wrong, in the words of each API.

An `ApiError` is what a client gets to see: a status, a message for its programmer, and the field that is to blame.
Client libraries send a request again after 408, 409, 429 and 5xx.  No refusal here gets better by that, so none of the
statuses is one of these, except where the model itself failed; that answer forbids it by ``x-should-retry``.
Invariant: no message holds a key or a traceback.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from astuner.contracts.errors import (
    AstunerError,
    ConfigError,
    ContextOverflow,
    EpisodeAborted,
    ModelFailed,
    PromptTooLong,
    TurnLimitReached,
    UnsupportedRequest,
    safe_text,
)

logger = logging.getLogger("astuner.endpoint")

_OPENAI_TYPES = {403: "permission_error", 500: "server_error", 502: "server_error", 503: "server_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    502: "api_error",
}
_TOLD = (
    (TurnLimitReached, 403, "turn_limit_reached"),
    (EpisodeAborted, 403, "episode_aborted"),
    (ModelFailed, 502, "model_failed"),
    (ConfigError, 400, "unsupported_value"),  # tools, or a structure, for a chat template that has no place for them
    (AstunerError, 500, "internal_error"),
)
"""What is told of exceptions as they say it; the first that fits."""

NO_THREADS = "thread_unsupported_request"
"""Anthropic's word for a server that keeps no conversations; its client then sends the whole history."""


class ApiError(Exception):
    """An answer that is not a reply.

    :param status: the HTTP status.
    :param param: the path of the field that is to blame, such as ``messages[2].content``.
    :param code: a word for programs.
    :param retry_after: seconds after which the same request may fare better; None: it never does.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def renamed(self, name: str, instead: str) -> ApiError:
        """Return the error about a field that has another name."""
        param = instead + self.param[len(name) :] if self.param and self.param.startswith(name) else self.param
        starts = self.message.startswith(name)
        return self.about(param, instead + self.message[len(name) :] if starts else self.message)

    def about(self, param: str | None, message: str) -> ApiError:
        """Return the error with another field and message."""
        return ApiError(self.status, message, param=param, code=self.code, retry_after=self.retry_after)

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's shape."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's shape, which has no place for the field; our messages name it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
        return {"type": "error", "error": error}


def refused(param: str, why: str, *, code: str = "unsupported_value") -> ApiError:
    """400: the request asks for something that it does not get; ``why`` continues the field's name."""
    return ApiError(400, f"{param} {why}", param=param, code=code)


def from_exception(error: BaseException) -> ApiError:
    """What the client is told of an exception that a call to the model raised."""
    text = safe_text(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnsupportedRequest):
        field = re.match(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)(?: is |: )", text)  # its message begins with it
        return ApiError(400, text, param=field and field[1], code="unsupported_value")
    if isinstance(error, (PromptTooLong, ContextOverflow)):
        # Clients and frameworks know this case by OpenAI's code, or by the first words of Anthropic's message.
        return ApiError(400, f"prompt is too long: {text}", param="messages", code="context_length_exceeded")
    for kind, status, code in _TOLD:
        if isinstance(error, kind):
            return ApiError(status, text, code=code)
    return unexpected(error)


def unexpected(error: BaseException) -> ApiError:
    """500 with an id under which the traceback is in the log."""
    incident = secrets.token_hex(6)
    logger.error("incident %s: %s", incident, type(error).__name__, exc_info=error)
    return ApiError(
        500,
        f"ASTuner failed while it answered ({type(error).__name__}); its log has the traceback under {incident}",
        code="internal_error",
    )
