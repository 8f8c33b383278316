"""An episode as a person reads it: messages, verdict, and how it ended. Plain JSON, one episode per line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner.types import Episode


def transcript(episode: Episode) -> dict[str, Any]:
    """The conversation as it went: for every turn only the messages that were new, then the reply."""
    task = episode.workflow_task
    return {
        "episode_id": task.episode_id,
        "group_id": task.group_id,
        "task_id": task.task.task_id,
        "query": task.task.main_query,
        "stop_reason": episode.stop_reason.value,
        "reward": episode.reward,
        "reward_source": episode.reward_source,
        "is_success": episode.is_success,
        "error": episode.error,
        "seconds": round(episode.seconds, 4),
        "turns": [
            {
                "agent": turn.agent,
                "continues": turn.continues,
                **({"branch_reason": turn.branch_reason} if turn.branch_reason else {}),
                "new_messages": [dict(m) for m in turn.request],
                "reply": dict(turn.message),
                "prompt_tokens": len(turn.generation.prompt_ids),
                "response_tokens": len(turn.generation.response_ids),
                "finish_reason": turn.generation.finish_reason.value,
                "policy_version": turn.generation.policy_version,
            }
            for turn in episode.turns
        ],
    }


def as_text(episode: Episode) -> str:
    """The same for a terminal."""
    lines = [f"── episode {episode.workflow_task.episode_id}: {episode.workflow_task.task.main_query}"]
    for turn in episode.turns:
        lines += [f"   {m.get('role', '?'):<9} {_content(m)}" for m in turn.request]
        lines.append(
            f" ▶ {turn.agent:<9} {_content(turn.message)}   "
            f"[{len(turn.generation.prompt_ids)} + {len(turn.generation.response_ids)} tokens, "
            f"{turn.generation.finish_reason.value}{', branch: ' + turn.branch_reason if turn.branch_reason else ''}]"
        )
    lines.append(
        f"   {episode.stop_reason.value}, reward {episode.reward} "
        f"({episode.reward_source or 'not scored'}) {episode.error}"
    )
    return "\n".join(lines)


def _content(message: Mapping[str, Any]) -> str:
    parts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        parts.append(f"{call['function']['name']}({call['function']['arguments']})")
    return " ".join(p for p in parts if p)
