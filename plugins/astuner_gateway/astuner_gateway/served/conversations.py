"""Which conversation a request continues, and how many are remembered.

A request goes on with a conversation when it begins with messages that were said in it, the model's reply included; the
API has no other word for it.  Every reply gives the conversation a digest of all messages up to it; a request that
begins with the same messages, and no other, has that digest among its own.  What client libraries change in a reply
when they send it back (empty fields, reasoning that is left out, a text as a list of parts) makes no difference.

What `Conversations` keep is for a continuation only: a forgotten one goes on as a new one, with the history that the
request brings.  Invariant: the tokens that are kept are bounded, but for the newest conversation and those under way.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

C = TypeVar("C")

NOTHING_SAID = b""
"""The digest of no messages."""


def digests(messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """One for each message: of it and all before it.

    :param messages: as `astuner_gateway.endpoint.openai_chat.read_messages` returns them.
    """
    found = [NOTHING_SAID]
    for message in messages:
        found.append(after(found[-1], message))
    return found[1:]


def after(before: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest when ``message`` follows what has the digest ``before``."""
    return hashlib.sha256(before + json.dumps(_said(message)).encode("ascii")).digest()


def _said(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return message["role"], _text(message["content"]), message.get("name"), message.get("tool_call_id"), calls


def _text(content: Any) -> Any:
    """Text, however it was sent; several parts stay several, since templates may tell them apart."""
    if isinstance(content, list):
        texts = [part["text"] for part in content]
        return texts[0] if len(texts) == 1 else texts
    return content or ""


def label_of(body: Mapping[str, Any]) -> str:
    """What an application calls the user, in OpenAI's newer and its older field, and in Anthropic's."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    return json.dumps([body.get("safety_identifier"), body.get("user"), user])


class Histories(Generic[C]):
    """Conversations by what was said in them: by the digests up to each reply, the reply included."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, dict[C, None]] = {}

    def add(self, conversation: C, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._by_digest.setdefault(digest, {})[conversation] = None

    def forget(self, conversation: C, digests: Iterable[bytes]) -> None:
        for digest in digests:
            alike = self._by_digest.get(digest, {})
            alike.pop(conversation, None)
            if not alike:
                self._by_digest.pop(digest, None)

    def continued(
        self,
        history: Sequence[bytes],
        fits: Callable[[C], bool],
        standing: Callable[[C], tuple[int, Collection[bytes]]],
    ) -> C | None:
        """The conversation that goes on with the longest part of ``history``; None where none that ``fits`` does.

        Where several have the same history (two users asked the same and got the same answer), one that nobody is
        talking in and nobody has gone on with yet; so each continuation finds a conversation.

        :param standing: requests under way in a conversation, and the digests of its last reply.
        """
        for digest in reversed(history):
            if alike := [each for each in self._by_digest.get(digest, ()) if fits(each)]:
                return min(alike, key=lambda each: (standing(each)[0], digest not in standing(each)[1]))
        return None


KEPT_TOKENS = 8_000_000
"""Of all conversations, some 100 MB; those that were continued longest ago are forgotten first."""

LEAST_TOKENS = 64
"""What a conversation counts as at least: it takes some memory whatever its voice keeps."""


@dataclass(eq=False)
class Conversation:
    """What one user and the model say to each other."""

    label: str
    """What the application calls the user; only requests with the same one continue it."""
    voice: Any
    """Who answers in it, with the `tokens` that it keeps."""
    id: str
    under_way: int = 0
    """Requests that are being answered."""
    said: set[bytes] = field(default_factory=set)
    """Digests of the histories up to each reply."""
    last: frozenset[bytes] = frozenset()
    """Those of the last reply: one for each choice."""


class Conversations:
    """Everybody who talks with one model. Used on one event loop.

    :param begin: the voice of a new conversation, by its id.
    """

    def __init__(self, begin: Callable[[str], Any], kept_tokens: int = KEPT_TOKENS) -> None:
        self._begin, self._most = begin, kept_tokens
        self._known: OrderedDict[Conversation, int] = OrderedDict()
        self._histories: Histories[Conversation] = Histories()
        self._tokens = 0
        self.begun = 0

    @contextmanager
    def of(self, history: Sequence[bytes], label: str) -> Iterator[Conversation]:
        """The conversation of a request, while it is answered.

        :param history: the digests of its messages (`digests`).
        """
        conversation = self._find(history, label)
        conversation.under_way += 1
        try:
            yield conversation
        finally:
            conversation.under_way -= 1
            self._keep(conversation)

    def voice_of(self, history: Sequence[bytes], label: str) -> Any:
        """Return the voice that would answer a request; a new conversation is not begun."""
        found = self._continued(history, label)
        return self._begin("") if found is None else found.voice

    def replied(self, conversation: Conversation, history: Sequence[bytes], replies: Iterable[Any]) -> None:
        """The model has answered; the client may go on with any of the choices.

        :param history: that of the request.
        """
        conversation.last = frozenset(after(history[-1], reply) for reply in replies)
        conversation.said |= conversation.last
        self._histories.add(conversation, conversation.last)

    def __len__(self) -> int:
        return len(self._known)

    def _continued(self, history: Sequence[bytes], label: str) -> Conversation | None:
        return self._histories.continued(history, lambda c: c.label == label, lambda c: (c.under_way, c.last))

    def _find(self, history: Sequence[bytes], label: str) -> Conversation:
        found = self._continued(history, label)
        if found is not None:
            return found
        self.begun += 1
        name = f"conv_{secrets.token_hex(12)}"
        return Conversation(label, self._begin(name), name)

    def _keep(self, conversation: Conversation) -> None:
        """Remember it as the newest, and forget the oldest for it."""
        self._tokens -= self._known.pop(conversation, 0)
        if not conversation.said:  # it never got an answer
            return
        self._known[conversation] = max(LEAST_TOKENS, conversation.voice.tokens)
        self._tokens += self._known[conversation]
        if self._tokens <= self._most:
            return
        for oldest in [c for c in self._known if not c.under_way and c is not conversation]:
            self._forget(oldest)
            if self._tokens <= self._most:
                return

    def _forget(self, conversation: Conversation) -> None:
        self._tokens -= self._known.pop(conversation)
        self._histories.forget(conversation, conversation.said)
