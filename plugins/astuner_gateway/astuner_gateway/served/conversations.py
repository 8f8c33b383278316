"""Find the conversation that a request continues, and limit how many are remembered.

A request continues a conversation if it starts with the messages of that conversation, including the model's reply; the
API has no other identifier. For each reply, the conversation stores a digest of all messages up to it; only a request
that starts with the same messages has that digest among its own. Changes that client libraries make to a reply when
they send it back (empty fields, omitted reasoning, text as a list of parts) make no difference.

`Conversations` are kept for continuation only: a forgotten one continues as a new one with the history in the request.
Invariant: the number of kept tokens is bounded, except for the newest conversation and running requests.
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
"""Digest of an empty history."""


def digests(messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """Return a digest for each message, which covers it and all messages before it.

    :param messages: Messages from `astuner_gateway.endpoint.openai_chat.read_messages`.
    """
    found = [NOTHING_SAID]
    for message in messages:
        found.append(after(found[-1], message))
    return found[1:]


def after(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a history with digest ``before`` followed by ``message``."""
    return hashlib.sha256(before + json.dumps(_said(message)).encode("ascii")).digest()


def _said(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return message["role"], _text(message["content"]), message.get("name"), message.get("tool_call_id"), calls


def _text(content: Any) -> Any:
    """Return the text of a message in a canonical form; several parts stay separate, since templates may differ."""
    if isinstance(content, list):
        texts = [part["text"] for part in content]
        return texts[0] if len(texts) == 1 else texts
    return content or ""


def label_of(body: Mapping[str, Any]) -> str:
    """Return the user that an application names in OpenAI's new or old field, or in Anthropic's."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    return json.dumps([body.get("safety_identifier"), body.get("user"), user])


class Histories(Generic[C]):
    """Conversations by the digests of their histories up to and including each reply."""

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
        """Return the conversation with the longest common history; None if none that ``fits`` has any.

        Several conversations may have the same history, if two users asked the same and got the same answer. One
        without running requests that was not continued yet is preferred, so each continuation gets a conversation.

        :param standing: Return the number of running requests in a conversation and the digests of its last reply.
        """
        for digest in reversed(history):
            if alike := [each for each in self._by_digest.get(digest, ()) if fits(each)]:
                return min(alike, key=lambda each: (standing(each)[0], digest not in standing(each)[1]))
        return None


KEPT_TOKENS = 8_000_000
"""Maximum tokens of all conversations, about 100 MB; the least recently continued ones are forgotten first."""

LEAST_TOKENS = 64
"""Minimum tokens that a conversation counts, because each one uses some memory."""


@dataclass(eq=False)
class Conversation:
    """A conversation between one user and the model."""

    label: str
    """User that the application names; only requests with the same one continue the conversation."""
    voice: Any
    """Voice that answers, with the `tokens` that it keeps."""
    id: str
    under_way: int = 0
    """Number of running requests."""
    said: set[bytes] = field(default_factory=set)
    """Digests of the histories up to each reply."""
    last: frozenset[bytes] = frozenset()
    """Digests of the last reply, one for each choice."""


class Conversations:
    """All conversations with one model. Used on one event loop.

    :param begin: Return the voice of a new conversation by its ID.
    """

    def __init__(self, begin: Callable[[str], Any], kept_tokens: int = KEPT_TOKENS) -> None:
        self._begin, self._most = begin, kept_tokens
        self._known: OrderedDict[Conversation, int] = OrderedDict()
        self._histories: Histories[Conversation] = Histories()
        self._tokens = 0
        self.begun = 0

    @contextmanager
    def of(self, history: Sequence[bytes], label: str) -> Iterator[Conversation]:
        """Provide the conversation of a request while it is answered.

        :param history: Digests of its messages (`digests`).
        """
        conversation = self._find(history, label)
        conversation.under_way += 1
        try:
            yield conversation
        finally:
            conversation.under_way -= 1
            self._keep(conversation)

    def voice_of(self, history: Sequence[bytes], label: str) -> Any:
        """Return the voice that would answer a request, without starting a conversation."""
        found = self._continued(history, label)
        return self._begin("") if found is None else found.voice

    def replied(self, conversation: Conversation, history: Sequence[bytes], replies: Iterable[Any]) -> None:
        """Register the replies of the model; the client may continue with any of them.

        :param history: Digests of the request.
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
        """Remember a conversation as the newest and forget the oldest ones if needed."""
        self._tokens -= self._known.pop(conversation, 0)
        if not conversation.said:  # it never received an answer
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
