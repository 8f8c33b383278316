"""Which conversation a request continues: by what was said, since the API has no other word for it.

Every reply gives the conversation a digest of all messages up to it.  Invariant: a request that begins with the same
messages, and no other, has that digest among its own.  What client libraries change in a reply when they send it back
(empty fields, reasoning that is left out, a text as a list of parts) makes no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

C = TypeVar("C")

NOTHING_SAID = b""
"""The digest of no messages."""


def digests(messages: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """One for each message: of it and all before it.

    :param messages: as `astuner_gateway.endpoint.openai_messages.read_messages` returns them.
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
