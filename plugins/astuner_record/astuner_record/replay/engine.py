"""The models of a fork: recorded replies first, then a real model, or none where the record is all that is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from astuner import find_backbone, load_tokenizer, make_codec, serve_policies
from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.errors import ModelFailed
from astuner.contracts.types import Generation, SamplingParams
from astuner.rollout.agents import AgentRegistry
from astuner.rollout.models import Models, PolicyModel
from astuner_record.replay.recording import Recording

if TYPE_CHECKING:
    from pathlib import Path

    from astuner.config import Config

_UNLIMITED = 1 << 30


class ReplayEngine(InferenceEngine):
    """One policy's model in one fork."""

    def __init__(self, inner: InferenceEngine, recording: Recording, policy: str, fork: int) -> None:
        self.max_model_len = inner.max_model_len
        self._inner, self._recording, self._policy, self._fork = inner, recording, policy, fork

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        episode_id = self._recording.episode.workflow_task.episode_id
        agent = session.removeprefix(f"{episode_id}/")  # `PolicySpeaker` names sessions so
        turn = self._recording.take(agent, self._policy, prompt_ids)
        if turn is not None:
            return turn.generation
        return await self._inner.generate(prompt_ids, sampling, session=f"{session}/fork{self._fork}")


class NoEngine(InferenceEngine):
    """Stands where no model is wanted: everything is recorded."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        raise ModelFailed(
            "the workflow asks for more than was recorded, and no model is loaded; for one write --from-turn K"
        )


def replaying(models: Models, recording: Recording, fork: int) -> Models:
    """``models``, answering from ``recording`` as far as that goes."""
    return {
        policy: PolicyModel(ReplayEngine(model.engine, recording, policy, fork), model.codec)
        for policy, model in models.items()
    }


@contextlib.contextmanager
def real_models(config: Config, checkpoint: Path | None) -> Iterator[Models]:
    """The models of the run, loaded and answering.

    :raises astuner.contracts.errors.CheckpointError: the checkpoint lacks a policy's model.
    """
    backbone, _ = find_backbone(config)
    with serve_policies(backbone, config, checkpoint) as (_, models):
        yield models


def tokenizers_only(config: Config) -> Models:
    """Codecs without models, for a replay that is recorded from end to end.

    :raises astuner.contracts.errors.MissingDependency: transformers is not installed.
    """
    engine = NoEngine(config.astuner.rollout.max_model_len or _UNLIMITED)
    models: Mapping[str, PolicyModel] = {
        policy: PolicyModel(engine, make_codec(config, load_tokenizer(config.locate_model(policy=policy))))
        for policy in AgentRegistry.of(config.astuner).policies
    }
    return models
