"""From our samples to Trinity's experiences, and what must be said about each on the way to the trainer.

A sample is cut in two at its first trained token: what stands before it is Trinity's prompt, the rest its response,
masked where the model did not generate.  Invariant: the tokens are the sample's ``input_ids``, and the mask's ones are
its trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from trinity.common.experience import EID, CustomField, Experience

from astuner.contracts.types import Episode, Sample
from astuner_ray.training.before_update import ROW, row_id

BATCH_SIZE = "astuner_batch_size"
TOKEN_WEIGHT = "token_weight"
_SAMPLE = "astuner_sample"
_FIELDS = [
    CustomField(source_field=TOKEN_WEIGHT, destination_field=TOKEN_WEIGHT, data_type=torch.float32),
    CustomField(source_field=ROW, destination_field=ROW, data_type=torch.int64),
]


@dataclass(frozen=True)
class Credited:
    """What the run says about one sample."""

    advantage: float
    token_weight: float
    place: int = 0
    """Of the sample, among those of its step."""


def of_episode(episode: Episode, samples: Sequence[Sample]) -> list[Experience]:
    """The samples of an episode, in the order of `astuner.rollout.samples.build_samples`."""
    task = episode.workflow_task
    return [_experience(sample, group=task.group_id, run=task.attempt, number=i) for i, sample in enumerate(samples)]


def nothing(group: str = "", *, step: int = 0) -> Experience:
    """An experience that trains nothing: Trinity takes neither a group nor a batch without any.

    :param group: the group that has none of its own; empty: it fills up a batch.
    :param step: of the batch that it fills up.
    """
    experience = Experience(
        eid=EID(task=group),
        tokens=torch.zeros(2, dtype=torch.int32),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        reward=0.0,
        info={"model_version": 0, "model_version_drift": 0, "use_count": 0, "task_index": {}},
    )
    give_credit(experience, Credited(0.0, 0.0), step=step)
    return experience


def sample_of(experience: Experience) -> tuple[str, int] | None:
    """(episode, number of its sample); None for `nothing`."""
    found: tuple[str, int] | None = experience.info.get(_SAMPLE)
    return found


def give_credit(experience: Experience, credit: Credited, *, step: int) -> None:
    """Set the advantage of every token, and what `astuner_trinity.algorithm` is to know of the row: the weight that it
    multiplies its loss with, and which one of ``step`` it is.
    """
    experience.advantages = torch.full((len(experience.tokens) - experience.prompt_length,), credit.advantage)
    experience.info[TOKEN_WEIGHT] = credit.token_weight
    experience.info[ROW] = row_id(step, credit.place)
    experience.custom_fields = _FIELDS


def _experience(sample: Sample, *, group: str, run: int, number: int) -> Experience:
    start = list(sample.loss_mask).index(1)
    return Experience(
        eid=EID(task=group, run=run, step=number),
        tokens=torch.tensor(sample.input_ids, dtype=torch.int32),
        prompt_length=start,
        logprobs=torch.tensor(sample.logprobs[start:], dtype=torch.float32),
        action_mask=torch.tensor(sample.loss_mask[start:], dtype=torch.bool),
        reward=sample.reward,
        info={_SAMPLE: (sample.episode_id, number)},
    )
