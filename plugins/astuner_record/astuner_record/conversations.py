"""Write the episodes of a run as readable JSON lines: messages, verdict, and stop reason.

The lines contain every message that the policy received, so `astuner check tokens` can replay an episode. The complete
request of a turn is the request of the turn it continues, the reply of that turn, and the new messages of the turn.
"""

from __future__ import annotations

from typing import Any

from astuner import write_jsonl
from astuner.contracts.events import Event, GroupsEnded, RunContext, Subscriber, Summary
from astuner.contracts.messages import mapping_of
from astuner.contracts.types import DEFAULT_POLICY, DEFAULT_ROLE, Episode, ExternalTurn, Split, Turn


class Conversations(Subscriber):
    """Write ``step_000012.jsonl`` and ``validation_000012.jsonl``, or ``debug.jsonl`` if nothing is trained.

    A training step writes up to `trainer_common.save_episodes` episodes; a validation and a try-out write all.
    """

    essential = True

    def __init__(self, context: RunContext) -> None:
        self._folder, self._trains = context.run_dir / "episodes", context.trains
        limit = context.config.astuner.trainer_common.save_episodes
        self._most: int | None = None if limit == -1 else limit

    def handle(self, event: Event) -> None:
        """Write the episodes that ended.

        :raises OSError: The file cannot be written.
        """
        if not isinstance(event, GroupsEnded):
            return
        if not self._trains:
            name, episodes = "debug.jsonl", event.episodes
        elif event.split is Split.VALIDATION:
            name, episodes = f"validation_{event.step:06d}.jsonl", event.episodes
        else:
            name, episodes = f"step_{event.step:06d}.jsonl", event.episodes[: self._most]
        if episodes:
            write_jsonl(self._folder / name, map(transcript, episodes))

    def summary(self) -> Summary:
        return Summary(lines={"Conversations": str(self._folder)})


def transcript(episode: Episode) -> dict[str, Any]:
    """Return an episode with, for every turn, only its new messages and the reply.

    ``tools`` lists each set of tools that was offered. A turn names a set by index if it differs from the set of the
    turn it continues. Turns of external models appear in order, with ``model`` and all ``messages`` of the request.
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
