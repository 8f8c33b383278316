"""An episode as a person reads it: messages, verdict, and how it ended. Plain JSON, one episode per line.

Nothing that the policy was asked is left out, so `astuner check tokens` can play an episode again: a turn's whole
request is that of the turn it continues, that turn's reply, and the turn's own new messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astuner.contracts.messages import mapping_of
from astuner.contracts.types import DEFAULT_POLICY, DEFAULT_ROLE, Episode, ExternalTurn, Turn


def transcript(episode: Episode) -> dict[str, Any]:
    """The conversation as it went: for every turn only the messages that were new, then the reply.

    ``tools`` are the lists of tools that were offered; a turn whose tools are not those of the turn it continues names
    one by its number.  What a model outside of the run said stands between the turns, with ``model`` and all of the
    ``messages`` it was sent.
    """
    task = episode.workflow_task
    offered: list[list[dict[str, Any]]] = []
    turns = {turn.index: _turn(turn, offered) for turn in episode.turns}
    turns.update((turn.index, _external(turn)) for turn in episode.external)
    return {
        "episode_id": task.episode_id,
        "group_id": task.group_id,
        "task_id": task.task.task_id,
        "query": task.task.main_query,
        "stop_reason": episode.stop_reason.value,
        "reward": episode.reward,
        **({"rewards": dict(episode.verdict.rewards)} if episode.verdict and episode.verdict.rewards else {}),
        "reward_source": episode.reward_source,
        "is_success": episode.is_success,
        "error": episode.error,
        "seconds": round(episode.seconds, 4),
        **({"tools": offered} if offered else {}),
        "turns": [turns[index] for index in sorted(turns)],
    }


def _turn(turn: Turn, offered: list[list[dict[str, Any]]]) -> dict[str, Any]:
    said: dict[str, Any] = {"turn": turn.index, "agent": turn.agent}
    if turn.role != DEFAULT_ROLE:
        said["role"] = turn.role
    if turn.policy != DEFAULT_POLICY:
        said["policy"] = turn.policy
    if not turn.trained:
        said["trained"] = False
    said["continues"] = turn.continues
    if turn.branch_reason:
        said["branch_reason"] = turn.branch_reason
    if turn.approximation:
        said["approximation"] = turn.approximation
    if turn.tools:
        tools = [dict(tool) for tool in turn.tools]
        if tools not in offered:
            offered.append(tools)
        said["tools"] = offered.index(tools)
    return said | {
        "new_messages": [dict(m) for m in turn.request],
        "reply": dict(turn.message),
        "prompt_tokens": len(turn.generation.prompt_ids),
        "response_tokens": len(turn.generation.response_ids),
        "finish_reason": turn.generation.finish_reason.value,
        "policy_version": turn.generation.policy_version,
    }


def _external(turn: ExternalTurn) -> dict[str, Any]:
    return {
        "turn": turn.index,
        "agent": turn.agent,
        "role": turn.role,
        "model": turn.model,
        "messages": [dict(mapping_of(m)) for m in turn.request],
        "reply": dict(turn.message),
        "prompt_tokens": turn.prompt_tokens,
        "response_tokens": turn.completion_tokens,
    }


def as_text(episode: Episode) -> str:
    """The same for a terminal."""
    lines = [f"── episode {episode.workflow_task.episode_id}: {episode.workflow_task.task.main_query}"]
    everybody: Sequence[Turn | ExternalTurn] = [*episode.turns, *episode.external]
    for turn in sorted(everybody, key=lambda turn: turn.index):
        lines += [f"   {m.get('role', '?'):<9} {_content(m)}" for m in map(mapping_of, turn.request)]
        lines.append(f" ▶ {turn.agent:<9} {_content(turn.message)}   [{_facts(turn)}]")
    lines.append(
        f"   {episode.stop_reason.value}, reward {episode.reward} "
        f"({episode.reward_source or 'not scored'}) {episode.error}"
    )
    return "\n".join(lines)


def _facts(turn: Turn | ExternalTurn) -> str:
    if isinstance(turn, ExternalTurn):
        return f"{turn.model}, not of this run"
    facts = [
        f"{len(turn.generation.prompt_ids)} + {len(turn.generation.response_ids)} tokens",
        turn.generation.finish_reason.value,
    ]
    if turn.branch_reason:
        facts.append(f"branch: {turn.branch_reason}")
    if turn.approximation:
        facts.append(f"approximated: {turn.approximation}")
    if not turn.trained:
        facts.append("not trained")
    return ", ".join(facts)


def _content(message: Mapping[str, Any]) -> str:
    parts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        parts.append(f"{call['function']['name']}({call['function']['arguments']})")
    return " ".join(p for p in parts if p)
