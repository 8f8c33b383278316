"""Describe errors in the format of each API.

An `ApiError` is the answer that a client receives: a status, a message for its programmer and the invalid field. Client
libraries repeat a request after 408, 409, 429 and 5xx. Repeating cannot fix any error here, so these statuses are not
used, except 502 if the model itself fails; that answer forbids a retry with ``x-should-retry``. Invariant: no message
contains a key or a traceback.
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
    (ConfigError, 400, "unsupported_value"),  # tools or a structure that the chat template does not support
    (AstunerError, 500, "internal_error"),
)
"""Exceptions whose text is the message of the answer. The first match applies."""

NO_THREADS = "thread_unsupported_request"
"""Anthropic's code for a server that stores no conversations; the client then sends the full history."""


class ApiError(Exception):
    """An HTTP answer that reports an error.

    :param status: HTTP status.
    :param param: Path of the invalid field, such as ``messages[2].content``.
    :param code: Machine-readable error code.
    :param retry_after: Seconds after which the same request may succeed; None if it never does.
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
        """Return the same error for a field that has another name."""
        param = instead + self.param[len(name) :] if self.param and self.param.startswith(name) else self.param
        starts = self.message.startswith(name)
        return self.about(param, instead + self.message[len(name) :] if starts else self.message)

    def about(self, param: str | None, message: str) -> ApiError:
        """Return the error with another field and message."""
        return ApiError(self.status, message, param=param, code=self.code, retry_after=self.retry_after)

    def openai(self) -> dict[str, Any]:
        """Return the body in OpenAI's format."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the body in Anthropic's format, which has no key for the field; the message names it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
        return {"type": "error", "error": error}


def refused(param: str, why: str, *, code: str = "unsupported_value") -> ApiError:
    """Return a 400 error for a field; ``why`` continues the sentence that starts with its name."""
    return ApiError(400, f"{param} {why}", param=param, code=code)


def from_exception(error: BaseException) -> ApiError:
    """Return the error that a client receives if a call to the model raises ``error``."""
    text = safe_text(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnsupportedRequest):
        field = re.match(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)(?: is |: )", text)  # the message starts with the field
        return ApiError(400, text, param=field and field[1], code="unsupported_value")
    if isinstance(error, (PromptTooLong, ContextOverflow)):
        # Clients and frameworks recognize this case by OpenAI's code or by the first words of Anthropic's message.
        return ApiError(400, f"prompt is too long: {text}", param="messages", code="context_length_exceeded")
    for kind, status, code in _TOLD:
        if isinstance(error, kind):
            return ApiError(status, text, code=code)
    return unexpected(error)


def unexpected(error: BaseException) -> ApiError:
    """Return a 500 error with an ID under which the log contains the traceback."""
    incident = secrets.token_hex(6)
    logger.error("incident %s: %s", incident, type(error).__name__, exc_info=error)
    return ApiError(
        500,
        f"ASTuner failed to answer ({type(error).__name__}). Its log contains the traceback under incident {incident}",
        code="internal_error",
    )
