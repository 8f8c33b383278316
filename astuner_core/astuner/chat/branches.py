"""Why a request continues nothing that was recorded, in a closed vocabulary.

Looked into only when a request has already failed to continue a turn, so it may take its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from astuner.chat.history import History, Node, Place
from astuner.contracts.messages import Key, Message, key_of
from astuner.contracts.types import Turn

BRANCH_REASONS = {
    "repeated_request": "the same first request was sent again, as a retry or to draw another answer",
    "new_conversation": "the request mentions nothing that the model said in this episode",
    "history_retold": "what the model said comes back inside another's message (a multi-agent formatter)",
    "tools_changed": "the messages go on from a turn, but the list of tools, which is part of the prompt, is another",
    "messages_removed": "a message that a turn was answered under is gone, such as a one-shot hint",
    "messages_inserted": "a message was put in before a reply of the model",
    "history_rewritten": "messages before a reply, or the reply itself, were changed",
    "template_not_incremental": "in such a conversation, the chat template writes what follows a reply in another way",
}
"""Every reason, with what it means."""

STARTS = frozenset({"new_conversation", "repeated_request"})
"""Branch reasons of turns that have nothing of the model's to go on from."""

_TELLING = 12
"""Characters from which on a text in another's message is no chance."""


def has_predecessor(turn: Turn) -> bool:
    """Whether ``turn`` goes on from something that the model said in this episode."""
    return turn.continues is not None or bool(turn.branch_reason and turn.branch_reason not in STARTS)


def wasted_prompt(turns: Iterable[Turn]) -> int:
    """Prompt tokens that were encoded and computed again, since their turns could not continue an earlier one."""
    return sum(len(t.generation.prompt_ids) for t in turns if t.continues is None and has_predecessor(t))


def branch_reason(history: History, root: Node, place: Place, messages: Sequence[Message]) -> str:
    """The reason why a request that was found at ``place``, below ``root``, continues no turn."""
    if not history.replies:
        return ""
    if not place.rest and place.node.replies:
        return "repeated_request"
    if any(history.find(other, messages).said for other in history.roots if other is not root):
        return "tools_changed"
    keys = [key_of(m) for m in messages]
    for at in range(len(keys) - 1, -1, -1):
        if reply := history.replies.get(keys[at]):
            asked, given = reply.path()[:-1], keys[:at]
            if len(given) < len(asked) and _is_subsequence(given, asked):
                return "messages_removed"
            if len(given) > len(asked) and _is_subsequence(asked, given):
                return "messages_inserted"
            return "history_rewritten"
    if any(key[0] in ("assistant", "calls") for key in keys):
        return "history_rewritten"
    return "history_retold" if _is_retold(history, keys) else "new_conversation"


def _is_retold(history: History, keys: Iterable[Key]) -> bool:
    heard = [key[1] for key in keys if key[0] == "user"]
    replies = (node.said.message["content"].strip() for node in history.replies.values() if node.said)
    return any(len(reply) >= _TELLING and reply in text for reply in replies for text in heard)


def _is_subsequence(short: Iterable[Key], long: Iterable[Key]) -> bool:
    rest = iter(long)
    return all(key in rest for key in short)
