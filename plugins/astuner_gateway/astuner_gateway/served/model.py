"""The served model: each conversation has a voice of its own, which speaks as an agent does in training.

A voice keeps the tokens of its conversation, so what the model said goes back to it as it was generated and not as its
text happens to be tokenised again: the prompt is the one that training would have made.  Nothing else of training is
in here: no budget of an episode, no turn limit, no checks, and nothing is recorded.
Invariant: ids of replies are unguessable, and those of tool calls are given once.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from astuner import AgentRegistry, Config, PolicyModel
from astuner.contracts.errors import ContextOverflow, EpisodeError
from astuner.contracts.messages import ChatReply
from astuner.contracts.types import DEFAULT_AGENT, DEFAULT_ROLE, SamplingParams, Split, Task, Turn, WorkflowTask
from astuner.rollout.recorder import EpisodeRecorder
from astuner.rollout.speaker import EpisodeState, PolicySpeaker, Request


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


class ServedModel:
    """One policy's model. Used on one event loop.

    :param sampling: how to draw where a request does not say; ``max_tokens`` is also the most that it may ask for.
    """

    def __init__(self, config: Config, model: PolicyModel, about: About, sampling: SamplingParams) -> None:
        self.about, self.sampling = about, sampling
        self._config = _without_budgets(config, sampling.max_tokens)
        self._model = model
        self._recorder = _Numbers()

    def voice(self, conversation: str) -> Voice:
        """Somebody to talk to.

        :param conversation: its id.
        """
        task = WorkflowTask(
            task=Task(task_id=conversation), episode_id=conversation, group_id=conversation, split=Split.VALIDATION
        )
        episode = EpisodeState(
            config=self._config,
            workflow_task=task,
            recorder=self._recorder,
            sampling=self.sampling,
            check_open=lambda: None,
            complain=lambda complaint: None,
        )
        policy = self.about.policy
        return Voice(
            _Speaker(episode, agent=DEFAULT_AGENT, role=DEFAULT_ROLE, policy=policy, trained=False, model=self._model)
        )

    async def close(self) -> None:
        """There is nothing to close: the engine is its backbone's."""


class Voice:
    """What one conversation is led with; it answers as `astuner.rollout.model_tuner.ModelTuner` does."""

    def __init__(self, speaker: PolicySpeaker) -> None:
        self._speaker = speaker
        self.tokens = 0
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
        :raises ContextOverflow: the prompt leaves no room for an answer.
        :raises astuner.contracts.errors.ModelFailed: the engine failed.
        :raises astuner.contracts.errors.UnsupportedRequest: the request cannot be turned into tokens.
        """
        reply = await self._speaker.answer(Request(messages=messages, tools=tools or (), **options))
        self.tokens += reply.prompt_tokens + reply.completion_tokens
        return replace(reply, reply_id=secrets.token_hex(12))

    def leave_out(self, turn_indices: Sequence[int]) -> None:
        """Nothing that is said here is trained."""


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


def _without_budgets(config: Config, max_tokens: int) -> Config:
    """The config without what limits an episode as a whole: a conversation may fill the model's context."""
    astuner = config.astuner
    rollout = astuner.rollout.model_copy(
        update={
            "multi_turn": astuner.rollout.multi_turn.model_copy(update={"max_steps": None}),
            "max_response_length_in_one_turn": max_tokens,
        }
    )
    data = astuner.data.model_copy(update={"max_prompt_length": None, "max_response_length": None})
    return replace(config, astuner=astuner.model_copy(update={"rollout": rollout, "data": data}))
