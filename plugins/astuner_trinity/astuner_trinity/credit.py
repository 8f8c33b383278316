"""The advantages of a batch, on its way from Trinity's explorer to its trainer.

Trinity's advantage function, which it runs as the last operator of its experience pipeline, after a person's: it sees
all experiences of an explorer step at once.  Which groups these are it tells the run, whose own credit
(`astuner.rollout.credit`, over episodes, the same on every backbone) comes back; what has no gradient is left out, and
the batch is filled up to what the trainer's workers can share.
"""

from __future__ import annotations

import math
from typing import Any

from trinity.buffer.operators import ExperienceOperatorV1
from trinity.common.experience import Experience

from astuner.contracts.errors import RunError
from astuner_trinity import mailbox
from astuner_trinity.experiences import BATCH_SIZE, give_credit, nothing, sample_of
from astuner_trinity.requests import GetCredit


class CreditOperator(ExperienceOperatorV1):
    """Set as ``algorithm.advantage_fn``."""

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
        credit = await mailbox.ask(GetCredit(step, groups))
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
