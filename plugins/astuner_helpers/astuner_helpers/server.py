"""How a helper model is reached: an OpenAI-compatible server over HTTP.

Invariant: what goes wrong comes out as `NoReply`, which says whether to ask again, and whether the request may have
been carried out, and so be billed.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import BaseModel

from astuner.support.http_client import HttpError, JsonClient
from astuner_helpers.reply import EMBEDDINGS, BadReply, Question, Reply, chat_reply, embedding_reply
from astuner_helpers.settings import HelperModel

_MAX_REPLY = 1 << 22
_MAX_EMBEDDINGS = 1 << 26
QUESTION_REFUSED = frozenset({400, 413, 422})
"""Statuses that speak of the request's body: too long, or of contents that are not answered."""
_VERSION = re.compile(r"v\d+\w*")


class NoReply(Exception):
    """There is no reply that can be used."""

    def __init__(
        self, message: str, *, again: bool, after: float = 0.0, billed: bool, about_question: bool = False
    ) -> None:
        super().__init__(message)
        self.again = again
        self.after = after
        """Seconds that the server asks to wait."""
        self.billed = billed
        """Whether it may have been carried out."""
        self.about_question = about_question
        """Whether the server refuses what it is asked, as far as it says."""


class Server(Protocol):
    """Where questions go."""

    @property
    def name(self) -> str:
        """For records, and for whom limits are counted together; no secrets."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What its answers depend on beside the question; no secrets."""

    def send(self, question: Question, answer: type[BaseModel] | None) -> Reply:
        """Blocks; may be called from several threads at once.

        :raises NoReply: there is none.
        """


class OpenAIServer:
    """An OpenAI-compatible server."""

    def __init__(self, section: HelperModel, key: str, key_name: str) -> None:
        """:raises astuner.support.http_client.HttpError: the URL or the key cannot be used."""
        assert section.base_url is not None  # the section checks that
        self.name = section.base_url
        self.identity = {"base_url": section.base_url}

        def client(max_reply: int) -> JsonClient:
            return JsonClient(
                self.name, api_key=key, key_name=key_name, timeout=section.timeout, max_reply=max_reply
            )

        self._chat, self._embeddings = client(_MAX_REPLY), client(_MAX_EMBEDDINGS)

    def send(self, question: Question, answer: type[BaseModel] | None) -> Reply:
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
        except BadReply as e:
            raise NoReply(str(e), again=True, billed=True) from None

    def _hint(self) -> str:
        """What a server without such a page suggests, where the URL names no version of the interface."""
        if any(_VERSION.fullmatch(part) for part in urllib.parse.urlsplit(self.name).path.split("/")):
            return ""
        return f"; did you mean the address {self.name.rstrip('/')}/v1"
