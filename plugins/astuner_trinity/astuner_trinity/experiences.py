"""Convert samples to Trinity's experiences and pass them through Trinity's pipeline and queue to its trainer.

A sample is split at its first trained token: everything before it is Trinity's prompt, the rest is the response, masked
where the model did not generate.  Invariant: the tokens equal the sample's ``input_ids``, and the ones of the mask are
its trained tokens.

Trinity counts experiences, and waits forever (or trains on a mixture) if an episode yields a different number than
configured.  Here each experience stores the size of its batch, so a train step is an explorer step, in every
synchronization style.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
from trinity.buffer import get_buffer_reader
from trinity.buffer.operators import ExperienceOperatorV1
from trinity.common.config import BufferConfig
from trinity.common.experience import EID, CustomField, Experience

from astuner.contracts.errors import RunError
from astuner.contracts.types import Episode, Sample
from astuner_ray.training.before_update import ROW, row_id
from astuner_trinity import mailbox
from astuner_trinity.session import Credited, Session

BATCH_SIZE = "astuner_batch_size"
TOKEN_WEIGHT = "token_weight"
_SAMPLE = "astuner_sample"
_FIELDS = [
    CustomField(source_field=TOKEN_WEIGHT, destination_field=TOKEN_WEIGHT, data_type=torch.float32),
    CustomField(source_field=ROW, destination_field=ROW, data_type=torch.int64),
]


def of_episode(episode: Episode, samples: Sequence[Sample]) -> list[Experience]:
    """Return the samples of an episode, in the order of `astuner.rollout.turns.build_samples`."""
    task, found = episode.workflow_task, []
    for number, sample in enumerate(samples):
        start = list(sample.loss_mask).index(1)
        experience = Experience(
            eid=EID(task=task.group_id, run=task.attempt, step=number),
            tokens=torch.tensor(sample.input_ids, dtype=torch.int32),
            prompt_length=start,
            logprobs=torch.tensor(sample.logprobs[start:], dtype=torch.float32),
            action_mask=torch.tensor(sample.loss_mask[start:], dtype=torch.bool),
            reward=sample.reward,
            info={_SAMPLE: (sample.episode_id, number)},
        )
        found.append(experience)
    return found


def nothing(group: str = "", *, step: int = 0) -> Experience:
    """Return an experience without trained tokens: Trinity rejects empty groups and batches.

    :param group: Group that has no experience; empty: padding of a batch.
    :param step: Step of the padded batch.
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
    """Return the episode and the number of its sample; None for `nothing`."""
    found: tuple[str, int] | None = experience.info.get(_SAMPLE)
    return found


def give_credit(experience: Experience, credit: Credited, *, step: int) -> None:
    """Set the advantage of every token, and the loss weight and identity of the row in ``step`` for the trainer."""
    experience.advantages = torch.full((len(experience.tokens) - experience.prompt_length,), credit.advantage)
    experience.info[TOKEN_WEIGHT] = credit.token_weight
    experience.info[ROW] = row_id(step, credit.place)
    experience.custom_fields = _FIELDS


class CreditOperator(ExperienceOperatorV1):
    """``algorithm.advantage_fn``: compute the advantages of a batch.

    Trinity runs it as the last operator of its experience pipeline, after the user's operators: it receives all
    experiences of an explorer step.  It requests their credit from the run (over episodes, as on every backbone), drops
    samples without a gradient, and pads the batch to a size that the trainer's workers can share.
    """

    def __init__(self, multiple: int) -> None:
        """:param multiple: Batch sizes are multiples of this: data-parallel workers x mini-batches."""
        self._multiple = multiple

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Return False: Trinity calls this in the pipeline, not in the trainer."""
        return False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return no defaults, so that Trinity requires ``multiple``."""
        return {}

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """Return the experiences to train on, with their advantages.

        :raises RunError: Operators removed all experiences, so the batch cannot be identified; or the run is over.
        """
        if not exps:
            raise RunError(
                "trinity.data_processor.experience_pipeline.operators removed all experiences of a batch; keep at "
                "least one, and use astuner.trainer_common.algorithm to exclude samples from training"
            )
        step, groups = int(exps[0].eid.batch), sorted({str(e.eid.task) for e in exps})
        credit = await mailbox.ask(Session.credit, step, groups)
        kept = []
        for experience in exps:
            sample = sample_of(experience)
            if sample is not None and (credited := credit.get(sample)) is not None:
                give_credit(experience, credited, step=step)
                kept.append(experience)
        whole = max(1, math.ceil(len(kept) / self._multiple)) * self._multiple  # a batch is never empty
        kept += [nothing(step=step) for _ in range(whole - len(kept))]
        for experience in kept:
            experience.info[BATCH_SIZE] = len(kept)
        return kept, {}


class WholeBatches(SampleStrategy):
    """``algorithm.sample_strategy``: use all experiences of one explorer step, regardless of their number."""

    def __init__(self, buffer_config: BufferConfig, **kwargs: Any) -> None:
        super().__init__(buffer_config)
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)

    async def sample(self, step: int, **kwargs: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """Return the experiences of the oldest batch in the queue; wait if there is none."""
        first = await self._reader.read(1)
        rest = first[0].info[BATCH_SIZE] - 1
        return first + (await self._reader.read(rest) if rest else []), {}, []

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a resumed run draws the batches again that were not trained on."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: see `state_dict`."""
