"""From our samples to Trinity's experiences, and their way through Trinity's pipeline and queue to its trainer.

A sample is cut in two at its first trained token: what stands before it is Trinity's prompt, the rest its response,
masked where the model did not generate.  Invariant: the tokens are the sample's ``input_ids``, and the mask's ones are
its trained tokens.

Trinity counts experiences, and waits for ever (or trains on a mixture) where an episode gives another number of them
than was written down.  Here each experience says how many its batch has, so a train step is an explorer step, in every
synchronisation style.
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
    """The samples of an episode, in the order of `astuner.rollout.turns.build_samples`."""
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


class CreditOperator(ExperienceOperatorV1):
    """``algorithm.advantage_fn``: the advantages of a batch.

    Trinity runs it as the last operator of its experience pipeline, after a person's: it sees all experiences of an
    explorer step at once.  Which groups these are it tells the run, whose own credit (over episodes, the same on every
    backbone) comes back; what has no gradient is left out, and the batch is filled up to what the trainer's workers can
    share.
    """

    def __init__(self, multiple: int) -> None:
        """:param multiple: a batch has a multiple of so many experiences: one for each data-parallel worker and
        mini-batch.
        """
        self._multiple = multiple

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Where Trinity calls it: in the pipeline, not in the trainer."""
        return False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """What Trinity passes when ``advantage_fn_args`` is missing: nothing, and ``multiple`` is then demanded."""
        return {}

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences that are trained on, with their advantages.

        :raises RunError: operators have removed them all, so that nobody can say whose batch it is; or the run is over.
        """
        if not exps:
            raise RunError(
                "trinity.data_processor.experience_pipeline.operators left no experience of a batch; let them keep at "
                "least one, and leave what is not to be trained on to astuner.trainer_common.algorithm"
            )
        step, groups = int(exps[0].eid.batch), sorted({str(e.eid.task) for e in exps})
        credit = await mailbox.ask(Session.credit, step, groups)
        kept = []
        for experience in exps:
            sample = sample_of(experience)
            if sample is not None and (credited := credit.get(sample)) is not None:
                give_credit(experience, credited, step=step)
                kept.append(experience)
        whole = max(1, math.ceil(len(kept) / self._multiple)) * self._multiple  # at least one: a batch is never empty
        kept += [nothing(step=step) for _ in range(whole - len(kept))]
        for experience in kept:
            experience.info[BATCH_SIZE] = len(kept)
        return kept, {}


class WholeBatches(SampleStrategy):
    """``algorithm.sample_strategy``: the trainer takes the experiences of one explorer step, however many they are."""

    def __init__(self, buffer_config: BufferConfig, **kwargs: Any) -> None:
        super().__init__(buffer_config)
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)

    async def sample(self, step: int, **kwargs: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """The experiences of the oldest batch that waits; waits for one where there is none."""
        first = await self._reader.read(1)
        rest = first[0].info[BATCH_SIZE] - 1
        return first + (await self._reader.read(rest) if rest else []), {}, []

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run draws again what was not trained on."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see `state_dict`."""
