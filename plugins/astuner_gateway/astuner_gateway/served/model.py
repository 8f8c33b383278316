"""Answer requests with the model, or with the experiment's agent (``--workflow``).

Each conversation with the model has its own voice, which works like an agent in training. A voice keeps the tokens of
its conversation, so the model's replies return to it exactly as generated instead of tokenized again: the prompt equals
the one of training. Other parts of training do not apply: there is no episode budget, no turn limit, no check, and
nothing is recorded.

An agent answers with its own tools. Every request is a separate task whose single message is the agent's query.
Invariants: IDs of replies are unguessable, and IDs of tool calls are unique; a field that an agent would not see or
could not obey (a history, tools, sampling parameters) is rejected by name.
"""

from __future__ import annotations

import itertools
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import (
    AgentRegistry,
    ChatRequest,
    Config,
    EpisodeRecorder,
    EpisodeRunner,
    EpisodeState,
    Models,
    PolicyModel,
    PolicySpeaker,
)
from astuner.contracts.errors import ContextOverflow, EpisodeError, UnsupportedRequest
from astuner.contracts.judge import Judge
from astuner.contracts.messages import ChatReply, text_of
from astuner.contracts.types import (
    DEFAULT_AGENT,
    DEFAULT_ROLE,
    Episode,
    JudgeOutput,
    SamplingParams,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_gateway.endpoint.errors import ApiError, refused

if TYPE_CHECKING:
    from astuner_gateway.endpoint.agreeing import Template


@dataclass(frozen=True, kw_only=True)
class About:
    """Description of the served model, for the console and for spans."""

    name: str
    """Name in the API."""
    policy: str
    checkpoint: str
    """Source of the weights."""
    step: int | None
    """Training step of the weights; None if unknown."""

    @classmethod
    def of(cls, config: Config, policy: str, path: str, checkpoint: str) -> About:
        """Return the description of a model.

        :param path: Directory of the model, or its name on the hub.
        :param checkpoint: Requested checkpoint: ``latest``, ``base`` or a directory.
        """
        folder = Path(path)
        state = folder.parent if folder.name == policy else folder
        step = None if checkpoint == "base" else re.fullmatch(r"step-(\d+)", state.name)
        which = "base" if checkpoint == "base" else state.name
        several = len(AgentRegistry.of(config.astuner).policies) > 1
        return cls(
            name="/".join([config.experiment_name, which, *([policy] if several else [])]),
            policy=policy,
            checkpoint=path,
            step=int(step[1]) if step else None,
        )


class Voice(ABC):
    """Answer the requests of one conversation, like `astuner.rollout.model_tuner.ModelTuner`."""

    tokens = 0
    """Number of token IDs that the voice keeps."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent_name: str | None = None,
        role: str | None = None,
        **options: Any,
    ) -> ChatReply:
        """Return one reply.

        :param options: Options of `astuner.rollout.model_tuner.ModelTuner.chat`, as read by a dialect.
        """
        return await self._reply(messages, tools or (), options)

    async def count_prompt_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent_name: str | None = None,
        role: str | None = None,
        **options: Any,
    ) -> int:
        """Return the number of prompt tokens of the same call to `chat`.

        :raises UnsupportedRequest: The request cannot be converted to tokens.
        """
        return await self._count(ChatRequest(messages=messages, tools=tools or (), **options))

    async def _count(self, request: ChatRequest) -> int:
        raise UnsupportedRequest(
            "the agent writes its own prompts, so their tokens are unknown before it answers. Call its model instead"
        )

    @property
    def template(self) -> Template | None:
        """Chat template that writes the prompts; None if an agent writes them."""
        return None

    @property
    def sampling(self) -> SamplingParams | None:
        """Sampling parameters for requests without their own; None if an agent decides."""
        return None

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """Do nothing, because served replies are not trained."""
        return None

    @abstractmethod
    async def _reply(self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> ChatReply:
        """Return the reply for `chat`."""


def _attempt(name: str, query: str = "") -> WorkflowTask:
    task = Task(task_id=name, main_query=query)
    return WorkflowTask(task=task, episode_id=name, group_id=name, split=Split.VALIDATION)


class ServedModel:
    """The model of one policy. Used on one event loop.

    :param sampling: Sampling parameters for requests without their own; ``max_tokens`` is also the upper limit.
    """

    def __init__(self, config: Config, model: PolicyModel, about: About, sampling: SamplingParams) -> None:
        self.about, self.sampling = about, sampling
        rollout, data = config.astuner.rollout, config.astuner.data
        self._config = _changed(  # without the limits of an episode: a conversation may fill the model's context
            config,
            {
                "multi_turn": rollout.multi_turn.model_copy(update={"max_steps": None}),
                "max_response_length_in_one_turn": sampling.max_tokens,
            },
            data=data.model_copy(update={"max_prompt_length": None, "max_response_length": None}),
        )
        self._model = model
        self._recorder = _Numbers()

    def voice(self, conversation: str) -> ModelVoice:
        """Return the voice of a conversation.

        :param conversation: ID of the conversation.
        """
        episode = EpisodeState(
            config=self._config,
            workflow_task=_attempt(conversation),
            recorder=self._recorder,
            sampling=self.sampling,
            check_open=lambda: None,
            complain=lambda complaint: None,
        )
        policy = self.about.policy
        return ModelVoice(
            _Speaker(episode, agent=DEFAULT_AGENT, role=DEFAULT_ROLE, policy=policy, trained=False, model=self._model),
            self._model.codec.template,
            self.sampling,
        )

    async def close(self) -> None:
        """Do nothing, because the engine belongs to its backbone."""


class ModelVoice(Voice):
    """Voice of a model."""

    def __init__(self, speaker: PolicySpeaker, template: Template, sampling: SamplingParams) -> None:
        self._speaker, self._template, self._sampling = speaker, template, sampling

    @property
    def sampling(self) -> SamplingParams | None:
        return self._sampling

    @property
    def template(self) -> Template | None:
        return self._template

    async def _count(self, request: ChatRequest) -> int:
        return await self._speaker.count_prompt_tokens(request)

    async def _reply(self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> ChatReply:
        """Return the model's reply.

        :raises ContextOverflow: The prompt leaves no space for an answer.
        :raises astuner.contracts.errors.ModelFailed: The engine failed.
        :raises astuner.contracts.errors.UnsupportedRequest: The request cannot be converted to tokens.
        """
        reply = await self._speaker.answer(ChatRequest(messages=messages, tools=tools, **options))
        self.tokens += reply.prompt_tokens + reply.completion_tokens
        return replace(reply, reply_id=secrets.token_hex(12))


class _Speaker(PolicySpeaker):
    """Speaker without an episode or task."""

    def _too_long(self, why: str, key: str = "") -> EpisodeError:
        return ContextOverflow(f"{why}. Shorten the conversation or start a new one")


class _Numbers(EpisodeRecorder):
    """Number replies, so that tool calls have unique IDs, without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(secrets.randbelow(1 << 40))  # a client may send calls from before a restart

    def reserve(self) -> int:
        return next(self._numbers)

    def add(self, turn: Turn) -> None:
        return None


# ---- the agent -------------------------------------------------------------------------------------------------------

_CANNOT = {
    "max_tokens": "is not supported: the agent sets the length of its model calls; use `astuner serve --max-tokens`",
    "response_schema": "is not supported: the agent does not receive the structure",
    "tool_choice": "is not supported: the agent uses its own tools",
}


class Unjudged(Judge):
    """Skip judging, because a verdict on a served answer would cost time and money without any use."""

    def judge(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> JudgeOutput:
        return JudgeOutput(reward=0.0)


class ServedAgent:
    """The agent of an experiment, with the interface of `ServedModel`."""

    def __init__(self, config: Config, models: Models, sampling: SamplingParams) -> None:
        """Build the agent.

        :raises astuner.contracts.errors.ConfigError, astuner.contracts.errors.PluginError: The workflow cannot be found
            or built.
        """
        self.models, self.sampling = models, sampling
        self.runner = EpisodeRunner(
            _changed(
                config,
                {
                    "max_retries": 0,  # a user is waiting and can repeat the request
                    "compute_madness_checklist": [],
                    "max_response_length_in_one_turn": sampling.max_tokens,
                },
                task_judge=config.astuner.task_judge.model_copy(update={"judge": f"{__name__}->{Unjudged.__name__}"}),
            )
        )
        self.runner.prepare()

    def voice(self, conversation: str) -> AgentVoice:
        """Return the voice of a conversation.

        :param conversation: ID of the conversation.
        """
        return AgentVoice(self, conversation)

    async def close(self) -> None:
        await self.runner.close()


class AgentVoice(Voice):
    """Voice of an agent; it keeps no history."""

    def __init__(self, agent: ServedAgent, conversation: str) -> None:
        self._agent, self._conversation = agent, conversation

    async def _reply(self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> ChatReply:
        """Return the agent's answer.

        :raises ApiError: 400 for a request that the agent cannot obey, 502 if it has no answer.
        """
        query = _query(messages, tools, options)
        name = f"{self._conversation}-{secrets.token_hex(4)}"
        episode = await self._agent.runner.run(_attempt(name, query), self._agent.models, self._agent.sampling)
        if not episode.stop_reason.is_scored:
            why = f"the agent returned no answer ({episode.stop_reason.value}): {episode.error}"
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


def answer_of(episode: Episode) -> str:
    """Return the agent's answer: ``response`` of its output, else ``final_answer``, else the last reply's text."""
    output = episode.output
    if output is not None:
        for said in (output.response, output.metadata.get("final_answer")):
            if said is not None:
                return said if isinstance(said, str) else str(said)
    return text_of(episode.turns[-1].message.get("content")) if episode.turns else ""


def _query(messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> str:
    if tools:
        raise refused("tools", "are not supported: the agent uses its own tools. Leave them out")
    for name in options:
        field = "response_format" if name == "response_schema" else name
        why = _CANNOT.get(name, "is not supported: the options of `astuner serve` set it for all model calls")
        raise refused(field, f"{why}. Leave it out")
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise refused(
            "messages",
            "must contain exactly one message, from the user: with --workflow each request is a separate task without "
            "history, and the agent adds its own prompt",
        )
    return text_of(messages[0]["content"])


def _changed(config: Config, rollout: Mapping[str, Any], **sections: Any) -> Config:
    """Return the config with changed keys of the section ``rollout`` and changed sections."""
    changed = {"rollout": config.astuner.rollout.model_copy(update=rollout), **sections}
    return replace(config, astuner=config.astuner.model_copy(update=changed))
