"""An episode in AgentScope's words: messages with blocks, grouped into replies.

A reply is what AgentScope's agents make of one message to them: thoughts, tool calls, results and the answer.  A
message that is no agent's is a reply of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.contracts.messages import call_id, call_parts, full_key, mapping_of, reasoning_of
from astuner.contracts.types import Episode, ExternalTurn, Turn
from astuner_trackers.telemetry.messages import arguments_of, short, shown

Block = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StudioMessage:
    """One message; `time` (seconds since 1970) is None where nobody wrote it down."""

    id: str
    reply_id: str
    reply_name: str
    reply_role: str
    name: str
    role: str
    blocks: Sequence[Block]
    time: float | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def studio_messages(run: str, episode: Episode) -> list[StudioMessage]:
    """The conversations of all agents, in the order of their replies, and at the end the verdict.

    :param run: begins all ids, which Studio wants to be unique.
    """
    return list(_Conversation(run, episode).messages())


class _Conversation:
    def __init__(self, run: str, episode: Episode) -> None:
        self._run, self._episode = run, episode
        self._count = 0
        self._tools: dict[str, str] = {}
        """Call -> tool."""
        self._replies: dict[str, str] = {}
        """Agent -> the reply that it is at."""
        self._seen: dict[str, set[Any]] = {}
        """Agent -> its messages that were shown: a branch repeats its history."""

    def messages(self) -> Iterator[StudioMessage]:
        everybody: list[Turn | ExternalTurn] = [*self._episode.turns, *self._episode.external]
        for turn in sorted(everybody, key=lambda turn: turn.index):
            if isinstance(turn, Turn) and turn.branch_reason:
                yield self._alone("astuner", "system", f"{turn.agent} starts anew: {turn.branch_reason}", turn.started)
            seen = self._seen.setdefault(turn.agent, set())
            for message in map(mapping_of, turn.request):
                if (key := full_key(message)) not in seen:
                    seen.add(key)
                    yield self._asked(turn, message)
            seen.add(full_key({"role": "assistant", **turn.message}))
            yield self._said(turn)
        episode = self._episode
        ended = None if episode.started is None else episode.started + episode.seconds
        yield self._alone("astuner", "system", _verdict(episode), ended, _facts(episode))

    def _asked(self, turn: Turn | ExternalTurn, message: Mapping[str, Any]) -> StudioMessage:
        """A message that an agent was sent."""
        role, text = str(message.get("role") or "user"), shown(message.get("content"))
        if role == "tool":
            call = str(message.get("tool_call_id"))
            name = self._tools.get(call) or str(message.get("name") or "tool")
            result = {"type": "tool_result", "id": call, "name": name, "output": short(text)}
            return self._in_reply(turn, "system", "system", [result], turn.started)
        if role == "assistant":
            return self._in_reply(turn, turn.agent, "assistant", self._blocks(message), turn.started)
        self._replies.pop(turn.agent, None)  # what it says next is another reply
        role = "user" if role == "user" else "system"
        return self._alone(str(message.get("name") or role), role, text, turn.started)

    def _said(self, turn: Turn | ExternalTurn) -> StudioMessage:
        """What an agent answered."""
        facts: dict[str, Any] = {"turn": turn.index}
        if isinstance(turn, Turn):
            facts |= {
                "tokens": len(turn.generation.response_ids),
                "finish_reason": turn.generation.finish_reason.value,
                "policy_version": turn.generation.policy_version,
                "trained": turn.trained,
            }
        else:
            facts["model"] = turn.model
        when = None if turn.started is None else turn.started + (turn.seconds or 0.0)
        return self._in_reply(turn, turn.agent, "assistant", self._blocks(turn.message), when, facts)

    def _blocks(self, message: Mapping[str, Any]) -> list[Block]:
        blocks: list[Block] = []
        if thought := reasoning_of(message):
            blocks.append({"type": "thinking", "thinking": short(thought)})
        if text := shown(message.get("content")):
            blocks.append({"type": "text", "text": short(text)})
        for call in message.get("tool_calls") or ():
            name, arguments = call_parts(call)
            self._tools[str(call_id(call))] = name
            given = arguments_of(arguments)
            given = given if isinstance(given, dict) else {"arguments": given}  # Studio wants an object
            blocks.append({"type": "tool_use", "id": str(call_id(call)), "name": name, "input": given})
        return blocks

    def _in_reply(
        self,
        turn: Turn | ExternalTurn,
        name: str,
        role: str,
        blocks: Sequence[Block],
        when: float | None,
        metadata: Mapping[str, Any] | None = None,
    ) -> StudioMessage:
        number = self._next()
        reply = self._replies.setdefault(turn.agent, f"{number}-reply")
        return StudioMessage(
            id=number,
            reply_id=reply,
            reply_name=turn.agent,
            reply_role="assistant",
            name=name,
            role=role,
            blocks=blocks,
            time=when,
            metadata=metadata or {},
        )

    def _alone(
        self, name: str, role: str, text: str, when: float | None, metadata: Mapping[str, Any] | None = None
    ) -> StudioMessage:
        number = self._next()
        return StudioMessage(
            id=number,
            reply_id=f"{number}-reply",
            reply_name=name,
            reply_role=role,
            name=name,
            role=role,
            blocks=[{"type": "text", "text": short(text)}],
            time=when,
            metadata=metadata or {},
        )

    def _next(self) -> str:
        self._count += 1
        return f"{self._run}-{self._count:04d}"


def _verdict(episode: Episode) -> str:
    text = episode.stop_reason.value
    if episode.reward is not None:
        text += f", reward {episode.reward:g} ({episode.reward_source})"
    return f"{text}: {episode.error}" if episode.error else text


def _facts(episode: Episode) -> dict[str, Any]:
    of = episode.workflow_task
    return {
        "stop_reason": episode.stop_reason.value,
        "reward": episode.reward,
        "is_success": episode.is_success,
        "task_id": of.task.task_id,
        "group_id": of.group_id,
        "episode_id": of.episode_id,
    }
