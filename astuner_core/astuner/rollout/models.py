"""The models that an episode's agents speak with, one for each policy; or where episodes run that have models of
their own; and how an experiment samples them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from astuner.contracts.types import DEFAULT_POLICY, Episode, SamplingParams, Split, WorkflowTask

if TYPE_CHECKING:
    from astuner.chat.codec import ChatCodec
    from astuner.config import Config
    from astuner.contracts.backbone import InferenceEngine
    from astuner.rollout.runner import EpisodeRunner


@dataclass(frozen=True)
class PolicyModel:
    """An engine, and the codec of its tokenizer."""

    engine: InferenceEngine
    codec: ChatCodec


Models: TypeAlias = Mapping[str, PolicyModel]
"""Policy -> its model."""


class EpisodeHost(Protocol):
    """Runs episodes somewhere else, e.g. in the workers of a cluster, where the models are."""

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        """One attempt, as `EpisodeRunner.run`; cancelling it ends the episode there."""

    async def judge_group(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """As `EpisodeRunner.judge_group`."""


@dataclass(frozen=True)
class EpisodesHere:
    """An `EpisodeHost`: this process."""

    runner: EpisodeRunner
    models: Models

    async def run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        return await self.runner.run(workflow_task, self.models, sampling)

    async def judge_group(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        return await self.runner.judge_group(episodes)


def one_model(engine: InferenceEngine, codec: ChatCodec) -> Models:
    """The models of an experiment with one policy."""
    return {DEFAULT_POLICY: PolicyModel(engine, codec)}


def sampling_for(config: Config, split: Split) -> SamplingParams:
    """`rollout.temperature`, `top_p` and `top_k` in training; those of `rollout.val_kwargs` in validation."""
    rollout = config.astuner.rollout
    how = rollout if split is Split.TRAIN else rollout.val_kwargs
    return SamplingParams(
        max_tokens=rollout.max_response_length_in_one_turn,
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
    )
