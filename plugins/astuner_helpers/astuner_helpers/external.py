"""A model outside of the run that speaks for an agent: an opponent, a moderator, a simulated user.

It is asked in OpenAI's chat completions over HTTP and answers in text, so what it says has no token ids and is never
trained.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.config.schema import Agent
from astuner.contracts.errors import ConfigError, ModelFailed
from astuner.contracts.messages import normalise
from astuner.contracts.parts import ExternalModelPart, ExternalReply
from astuner.support.http_client import HttpError, JsonClient
from astuner.support.threads import in_daemon_thread

_TRIES = 3
_MAX_REPLY = 1 << 24


class ExternalModel(ExternalModelPart):
    """One model of one server."""

    def __init__(self, role: str, settings: Agent) -> None:
        """Look at the settings; connect to nothing yet.

        :raises ConfigError: the server, the model's name or the key is missing.
        """
        where = f"astuner.agents.{role}"
        if not settings.base_url or not settings.name:
            missing = "base_url" if not settings.base_url else "name"
            raise ConfigError(f"{where}.{missing} is required, since {where}.model is external")
        key = ""
        if settings.api_key_env:
            key = os.environ.get(settings.api_key_env, "")
            if not key:
                raise ConfigError(f"{where}.api_key_env: the environment variable {settings.api_key_env} is not set")
        self.name = settings.name
        self._temperature = settings.temperature
        self._timeout = settings.timeout
        try:
            self._client = JsonClient(
                settings.base_url,
                api_key=key,
                key_name=settings.api_key_env or "the API key",
                timeout=settings.timeout,
                max_reply=_MAX_REPLY,
            )
        except HttpError as e:
            raise ConfigError(f"{where}: {e}") from e

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ExternalReply:
        """As `ExternalModelPart.chat`; asked again when the server says that may help."""
        body: dict[str, Any] = {"model": self.name, "messages": list(messages)}
        if self._temperature is not None:
            body["temperature"] = self._temperature
        if tools:
            body["tools"] = list(tools)
        body |= {name: value for name, value in options.items() if value is not None}
        for left in range(_TRIES - 1, -1, -1):
            try:
                return _reply(await in_daemon_thread(self._client.post, "/chat/completions", body))
            except HttpError as e:
                if not left or not e.again:
                    raise ModelFailed(f"the external model {self.name}: {e}") from e
                await asyncio.sleep(min(max(e.after, 0.5), self._timeout))
        raise AssertionError("the last try returns or raises")


def _reply(answer: Any) -> ExternalReply:
    try:
        choice = answer["choices"][0]
        message = normalise({**choice["message"], "role": "assistant"})
        usage = answer.get("usage") or {}
        return ExternalReply(
            message=message,
            finish_reason=str(choice.get("finish_reason") or "stop"),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise ModelFailed(f"the external model's answer is no chat completion ({type(e).__name__}: {e})") from e
