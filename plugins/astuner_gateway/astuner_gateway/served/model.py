"""Who answers: the model, or with ``--workflow`` the experiment's agent.

Each conversation with the model has a voice of its own, which speaks as an agent does in training.  A voice keeps the
tokens of its conversation, so what the model said goes back to it as it was generated and not as its text happens to be
tokenised again: the prompt is the one that training would have made.  Nothing else of training is in here: no budget of
an episode, no turn limit, no checks, and nothing is recorded.

An agent answers with its tools.  Every request is a task of its own, and its one message is what the agent is asked.
Invariants: ids of replies are unguessable, and those of tool calls are given once; what an agent would not get to see
or could not heed (a history, tools, how to draw tokens) is refused by the field's name.
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
    """What is served, for people and for spans."""

    name: str
    """What the API calls it."""
    policy: str
    checkpoint: str
    """Where the weights were read from."""
    step: int | None
    """Of the training that made them; None where nobody says."""

    @classmethod
    def of(cls, config: Config, policy: str, path: str, checkpoint: str) -> About:
        """
        :param path: the model's folder, or its name on the hub.
        :param checkpoint: what was asked for: ``latest``, ``base`` or a folder.
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
    """What one conversation is led with; it answers as `astuner.rollout.model_tuner.ModelTuner` does."""

    tokens = 0
    """Token ids that it keeps."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent_name: str | None = None,
        role: str | None = None,
        **options: Any,
    ) -> ChatReply:
        """One reply.

        :param options: those of `astuner.rollout.model_tuner.ModelTuner.chat`, as a dialect has read them.
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
        """Return how many tokens the prompt of the same `chat` would have.

        :raises UnsupportedRequest: The request cannot be turned into tokens.
        """
        return await self._count(ChatRequest(messages=messages, tools=tools or (), **options))

    async def _count(self, request: ChatRequest) -> int:
        raise UnsupportedRequest(
            "the agent writes its own prompts, so their tokens are not known before it answers. Ask its model instead"
        )

    @property
    def template(self) -> Template | None:
        """What writes the prompts; None where that is an agent."""
        return None

    @property
    def sampling(self) -> SamplingParams | None:
        """How tokens are drawn where a request does not state it; None where an agent decides."""
        return None

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """Nothing that is said here is trained."""
        return None

    @abstractmethod
    async def _reply(self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> ChatReply:
        """What `chat` answers."""


def _attempt(name: str, query: str = "") -> WorkflowTask:
    task = Task(task_id=name, main_query=query)
    return WorkflowTask(task=task, episode_id=name, group_id=name, split=Split.VALIDATION)


class ServedModel:
    """One policy's model. Used on one event loop.

    :param sampling: how to draw where a request does not say; ``max_tokens`` is also the most that it may ask for.
    """

    def __init__(self, config: Config, model: PolicyModel, about: About, sampling: SamplingParams) -> None:
        self.about, self.sampling = about, sampling
        rollout, data = config.astuner.rollout, config.astuner.data
        self._config = _changed(  # without what limits an episode as a whole: it may fill the model's context
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
        """Somebody to talk to.

        :param conversation: its id.
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
        """There is nothing to close: the engine is its backbone's."""


class ModelVoice(Voice):
    """The model's."""

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
        """
        :raises ContextOverflow: the prompt leaves no room for an answer.
        :raises astuner.contracts.errors.ModelFailed: the engine failed.
        :raises astuner.contracts.errors.UnsupportedRequest: the request cannot be turned into tokens.
        """
        reply = await self._speaker.answer(ChatRequest(messages=messages, tools=tools, **options))
        self.tokens += reply.prompt_tokens + reply.completion_tokens
        return replace(reply, reply_id=secrets.token_hex(12))


class _Speaker(PolicySpeaker):
    """Nobody here knows of episodes and tasks."""

    def _too_long(self, why: str, key: str = "") -> EpisodeError:
        return ContextOverflow(f"{why}; shorten the conversation, or begin a new one")


class _Numbers(EpisodeRecorder):
    """Gives replies their numbers, by which tool calls are named, and keeps none of them."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(secrets.randbelow(1 << 40))  # a client may bring calls from before a restart

    def reserve(self) -> int:
        return next(self._numbers)

    def add(self, turn: Turn) -> None:
        return None


# ---- the agent -------------------------------------------------------------------------------------------------------

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
    """The agent of an experiment; as `ServedModel`."""

    def __init__(self, config: Config, models: Models, sampling: SamplingParams) -> None:
        """
        :raises astuner.contracts.errors.ConfigError, astuner.contracts.errors.PluginError: the workflow cannot be
            found, or built.
        """
        self.models, self.sampling = models, sampling
        self.runner = EpisodeRunner(
            _changed(
                config,
                {
                    "max_retries": 0,  # somebody is waiting, and may ask again
                    "compute_madness_checklist": [],
                    "max_response_length_in_one_turn": sampling.max_tokens,
                },
                task_judge=config.astuner.task_judge.model_copy(update={"judge": f"{__name__}->{Unjudged.__name__}"}),
            )
        )
        self.runner.prepare()

    def voice(self, conversation: str) -> AgentVoice:
        """Somebody to ask.

        :param conversation: its id.
        """
        return AgentVoice(self, conversation)

    async def close(self) -> None:
        await self.runner.close()


class AgentVoice(Voice):
    """The agent's; it remembers nothing."""

    def __init__(self, agent: ServedAgent, conversation: str) -> None:
        self._agent, self._conversation = agent, conversation

    async def _reply(self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> ChatReply:
        """
        :raises ApiError: 400 for a request that it cannot heed, 502 where it has no answer.
        """
        query = _query(messages, tools, options)
        name = f"{self._conversation}-{secrets.token_hex(4)}"
        episode = await self._agent.runner.run(_attempt(name, query), self._agent.models, self._agent.sampling)
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


def _changed(config: Config, rollout: Mapping[str, Any], **sections: Any) -> Config:
    """With these keys of the section ``rollout``, and these sections."""
    changed = {"rollout": config.astuner.rollout.model_copy(update=rollout), **sections}
    return replace(config, astuner=config.astuner.model_copy(update=changed))
