"""``--workflow``: the experiment's agent answers, with its tools, as it does in training.

Every request is a task of its own, and its one message is what the agent is asked.  Invariant: what the agent would not
get to see or could not heed (a history, tools, how to draw tokens) is refused by the field's name.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from astuner import Config, EpisodeRunner, Models
from astuner.contracts.judge import Judge
from astuner.contracts.messages import ChatReply, text_of
from astuner.contracts.types import (
    Episode,
    JudgeOutput,
    SamplingParams,
    Split,
    StopReason,
    Task,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_gateway.endpoint.errors import ApiError, refused

_CANNOT = {
    "max_tokens": "limits the model calls of the agent by itself; `astuner serve --max-tokens` does",
    "response_schema": "asks for a structure, which the agent knows nothing of",
    "tool_choice": "is about tools of the request, while the agent has its own",
}


class Unjudged(Judge):
    """Nobody judges what a user is told: a verdict would cost time, and perhaps money, and teach nobody."""

    def judge(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> JudgeOutput:
        return JudgeOutput(reward=0.0)


class ServedAgent:
    """The agent of an experiment; as `astuner_gateway.served.model.ServedModel`."""

    def __init__(self, config: Config, models: Models, sampling: SamplingParams) -> None:
        """
        :raises astuner.contracts.errors.ConfigError, astuner.contracts.errors.PluginError: the workflow cannot be
            found, or built.
        """
        self.models, self.sampling = models, sampling
        self.runner = EpisodeRunner(_unjudged(config, sampling.max_tokens))
        self.runner.prepare()

    def voice(self, conversation: str) -> AgentVoice:
        """Somebody to ask.

        :param conversation: its id.
        """
        return AgentVoice(self, conversation)

    async def close(self) -> None:
        await self.runner.close()


class AgentVoice:
    """What one conversation is led with; it remembers nothing."""

    tokens = 0

    def __init__(self, agent: ServedAgent, conversation: str) -> None:
        self._agent, self._conversation = agent, conversation

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent_name: str | None = None,
        role: str | None = None,
        **options: Any,
    ) -> ChatReply:
        """The agent's answer.

        :raises ApiError: 400 for a request that it cannot heed, 502 where it has no answer.
        """
        query = _query(messages, tools, options)
        name = f"{self._conversation}-{secrets.token_hex(4)}"
        attempt = WorkflowTask(
            task=Task(task_id=name, main_query=query), episode_id=name, group_id=name, split=Split.VALIDATION
        )
        episode = await self._agent.runner.run(attempt, self._agent.models, self._agent.sampling)
        if not episode.stop_reason.is_scored:
            why = f"the agent has no answer ({episode.stop_reason.value}): {episode.error}"
            raise ApiError(502, why, code="no_answer")
        generations = [turn.generation for turn in episode.turns]
        return ChatReply(
            message={"role": "assistant", "content": answer_of(episode)},
            finish_reason="stop" if episode.stop_reason is StopReason.COMPLETED else "length",
            prompt_tokens=sum(len(made.prompt_ids) for made in generations),
            completion_tokens=sum(len(made.response_ids) for made in generations),
            turn_index=0,
            reply_id=secrets.token_hex(12),
        )

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """Nothing that is said here is trained."""


def answer_of(episode: Episode) -> str:
    """What the agent says to the user: its output's ``response``, else ``final_answer``, else the last reply's text."""
    output = episode.output
    if output is not None:
        for said in (output.response, output.metadata.get("final_answer")):
            if said is not None:
                return said if isinstance(said, str) else str(said)
    return text_of(episode.turns[-1].message.get("content")) if episode.turns else ""


def _query(messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> str:
    if tools:
        raise refused("tools", "are not offered to the agent, which has its own; leave them out")
    for name in options:
        field = "response_format" if name == "response_schema" else name
        why = _CANNOT.get(name, "is the server's for all model calls of the agent; `astuner serve` has options for it")
        raise refused(field, f"{why}; leave it out")
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise refused(
            "messages",
            "must be one message of the user: with --workflow each request is a task of its own, and the agent brings "
            "its own prompt and gets to see no history",
        )
    return text_of(messages[0]["content"])


def _unjudged(config: Config, max_tokens: int) -> Config:
    astuner = config.astuner
    rollout = astuner.rollout.model_copy(
        update={
            "max_retries": 0,  # somebody is waiting, and may ask again
            "compute_madness_checklist": [],
            "max_response_length_in_one_turn": max_tokens,
        }
    )
    judge = astuner.task_judge.model_copy(update={"judge": f"{__name__}->{Unjudged.__name__}"})
    return replace(config, astuner=astuner.model_copy(update={"rollout": rollout, "task_judge": judge}))
