"""The chats of an episode, as data sets for other trainers have them: whole message lists, with their tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.contracts.types import Episode, Turn

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What one trained agent read and said along one branch, from its first message to its last reply."""

    agent: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    """Those offered in its last turn."""
    turns: int


def conversations(episode: Episode) -> list[Conversation]:
    """One per branch of each agent that may train, in the order in which the branches ended."""
    turns = {turn.index: turn for turn in episode.turns if turn.trained}
    inner = {turn.continues for turn in turns.values()}
    return [_up_to(leaf, turns) for leaf in turns.values() if leaf.index not in inner]


def pair(better: Conversation, worse: Conversation) -> dict[str, Any] | None:
    """A chosen and a rejected way to go on from what both have in common; None where they differ before a reply."""
    common = 0
    for a, b in zip(better.messages, worse.messages, strict=False):
        if a != b:
            break
        common += 1
    chosen, rejected = better.messages[common:], worse.messages[common:]
    if not (common and chosen and rejected and chosen[0]["role"] == rejected[0]["role"] == "assistant"):
        return None
    return {
        "prompt": list(better.messages[:common]),
        "chosen": list(chosen),
        "rejected": list(rejected),
        **({"tools": list(better.tools)} if better.tools else {}),
    }


def _up_to(leaf: Turn, turns: Mapping[int, Turn]) -> Conversation:
    path: list[Turn] = [leaf]
    while path[-1].continues in turns:
        path.append(turns[path[-1].continues])  # type: ignore[index]  # None is in no mapping of numbers
    path.reverse()
    messages: list[Message] = []
    tools: Sequence[Mapping[str, Any]] = ()
    for turn in path:
        messages += [dict(m) for m in turn.request]
        messages.append({"role": "assistant", **turn.message})
        tools = turn.tools or tools
    return Conversation(
        agent=leaf.agent, messages=tuple(messages), tools=tuple(dict(t) for t in tools), turns=len(path)
    )
