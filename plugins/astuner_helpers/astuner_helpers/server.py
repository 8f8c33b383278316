"""Send requests to models outside of the run: OpenAI-compatible servers over HTTP.

A helper model is one of them. An external model plays an agent (an opponent, a moderator, a simulated user); it answers
in text without token IDs, so it is never trained. Invariant: every error of a helper model is raised as `NoReply`,
which states whether to retry and whether the request may have been processed and billed.
"""

from __future__ import annotations

import asyncio
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from astuner import AgentSection, in_daemon_thread
from astuner.contracts.errors import ConfigError, ModelFailed
from astuner.contracts.messages import normalise
from astuner.contracts.parts import ExternalModelPart, ExternalReply
from astuner_helpers.reply import EMBEDDINGS, NoReply, Question, Reply, chat_reply, embedding_reply
from astuner_helpers.settings import HelperModel
from astuner_http.client import HttpError, JsonClient

_MAX_REPLY = 1 << 22
_MAX_EMBEDDINGS = 1 << 26
QUESTION_REFUSED = frozenset({400, 413, 422})
"""Statuses that refer to the request body: too long, or rejected content."""
_VERSION = re.compile(r"v\d+\w*")


def key_of(variable: str | None, where: str) -> str:
    """Return the API key of a server from the environment.

    :param where: The config key that names the variable, as users write it.
    :raises ConfigError: The variable is not set.
    """
    if variable is None:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(
            f"{where} names {variable}, which is not set in the environment; set it, or remove {where} if the server "
            "requires no key"
        )
    return key


class OpenAIServer:
    """An OpenAI-compatible server."""

    def __init__(self, section: HelperModel, key: str, key_name: str) -> None:
        """Create a client.

        :raises astuner_http.client.HttpError: The URL or the key cannot be used.
        """
        assert section.base_url is not None  # the section checks that
        self.name = section.base_url
        """Name in records and for limits, without secrets."""
        self.identity = {"base_url": section.base_url}
        """What its answers depend on besides the question, without secrets."""

        def client(max_reply: int) -> JsonClient:
            return JsonClient(self.name, api_key=key, key_name=key_name, timeout=section.timeout, max_reply=max_reply)

        self._chat, self._embeddings = client(_MAX_REPLY), client(_MAX_EMBEDDINGS)

    def send(self, question: Question, answer: type[BaseModel] | None) -> Reply:
        """Send a question and return the reply. Blocking and thread-safe.

        :raises NoReply: There is no usable reply.
        """
        client = self._embeddings if question.route == EMBEDDINGS else self._chat
        try:
            found = client.post(question.route, question.body)
            if question.route == EMBEDDINGS:
                return embedding_reply(found, len(question.body["input"]))
            return chat_reply(found)
        except HttpError as e:
            refused = e.status is not None or e.unsent
            hint = self._hint() if e.status == 404 else ""
            of_it = e.status in QUESTION_REFUSED
            raise NoReply(
                f"{e}{hint}", again=e.again, after=e.after, billed=not refused, about_question=of_it
            ) from None

    def _hint(self) -> str:
        """Return a suggestion for a 404 response if the URL has no API version."""
        if any(_VERSION.fullmatch(part) for part in urllib.parse.urlsplit(self.name).path.split("/")):
            return ""
        return f"; did you mean the address {self.name.rstrip('/')}/v1"


_TRIES = 3
_MAX_EXTERNAL = 1 << 24


class ExternalModel(ExternalModelPart):
    """A model on an external server."""

    def __init__(self, role: str, settings: AgentSection) -> None:
        """Check the settings without connecting.

        :raises ConfigError: The server, the model's name or the key is missing.
        """
        where = f"astuner.agents.{role}"
        if not settings.base_url or not settings.name:
            missing = "base_url" if not settings.base_url else "name"
            raise ConfigError(f"{where}.{missing} is required because {where}.model is external")
        key, self.name = key_of(settings.api_key_env or None, f"{where}.api_key_env"), settings.name
        self._temperature, self._timeout = settings.temperature, settings.timeout
        called = settings.api_key_env or "the API key"
        try:
            self._client = JsonClient(
                settings.base_url, api_key=key, key_name=called, timeout=self._timeout, max_reply=_MAX_EXTERNAL
            )
        except HttpError as e:
            raise ConfigError(f"{where}: {e}") from e

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ExternalReply:
        """See `ExternalModelPart.chat`. Requests are retried when the error is temporary."""
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
        raise ModelFailed(f"the external model's answer is not a chat completion ({type(e).__name__}: {e})") from e
