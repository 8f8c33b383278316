"""Which conversation a request continues, and how many are remembered.

A request goes on with a conversation when it begins with messages that were said in it, the model's reply included; the
API has no other word for it (see `astuner_gateway.feedback.history`).  Any other request begins one.  What is kept of
a conversation is for its continuation only: a forgotten one goes on as a new one, with the history that the request
brings.  Invariant: the tokens that are kept are bounded, but for the newest conversation and those under way.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from astuner_gateway.feedback.history import Histories, after

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

        :param history: the digests of its messages (`astuner_gateway.feedback.history.digests`).
        """
        conversation = self._find(history, label)
        conversation.under_way += 1
        try:
            yield conversation
        finally:
            conversation.under_way -= 1
            self._keep(conversation)

    def replied(self, conversation: Conversation, history: Sequence[bytes], replies: Iterable[Any]) -> None:
        """The model has answered; the client may go on with any of the choices.

        :param history: that of the request.
        """
        conversation.last = frozenset(after(history[-1], reply) for reply in replies)
        conversation.said |= conversation.last
        self._histories.add(conversation, conversation.last)

    def __len__(self) -> int:
        return len(self._known)

    def _find(self, history: Sequence[bytes], label: str) -> Conversation:
        found = self._histories.continued(history, lambda c: c.label == label, lambda c: (c.under_way, c.last))
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
