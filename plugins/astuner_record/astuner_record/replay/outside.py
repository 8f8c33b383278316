"""Models outside of the run (`model: external`) in a fork: what they said, as long as they hear the same.

They have no tokens, so they are known by their messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.parts import ExternalModelPart, ExternalReply
from astuner.rollout.speaker import ExternalSpeaker
from astuner_record.episode_log.rows import json_text
from astuner_record.replay.recording import Recording

if TYPE_CHECKING:
    from astuner.rollout.model_tuner import ModelTuner


class RecordedModel(ExternalModelPart):
    """One agent's model: the recorded answers first, then the real one's."""

    def __init__(self, real: ExternalModelPart, recording: Recording, agent: str) -> None:
        self.name = real.name
        self._real, self._recording, self._agent = real, recording, agent
        self._heard: list[Any] = []

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ExternalReply:
        plain = json.loads(json_text(list(messages)))  # as the log holds them
        known = len(self._heard) if plain[: len(self._heard)] == self._heard else 0  # as `ExternalSpeaker` wrote them
        turn = self._recording.take_outside(self._agent, plain[known:])
        self._heard = plain
        if turn is None:
            return await self._real.chat(messages, tools, options)
        return ExternalReply(
            message=turn.message,
            finish_reason="tool_calls" if turn.message.get("tool_calls") else "stop",  # the log has it not
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
        )


def replay_outside(tuner: ModelTuner, recording: Recording) -> None:
    """Have the models outside of the run answer from ``recording`` in this episode."""
    find = tuner._speaker

    def found(agent_name: str, role: str | None) -> Any:
        speaker = find(agent_name, role)
        if isinstance(speaker, ExternalSpeaker) and not isinstance(speaker.model, RecordedModel):
            speaker.model = RecordedModel(speaker.model, recording, agent_name)
        return speaker

    setattr(tuner, "_speaker", found)  # noqa: B010  # mypy takes no assignment to a method
