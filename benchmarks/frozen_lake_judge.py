"""The environment's verdicts dealt out at random: the control that must not learn.

As `shuffled_judge`, for an experiment whose judge is ``env_service``: in training every episode gets the verdict of
some other one that ended earlier; in validation its own.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from astuner import Judge, JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.types import Split

POOL = 256
"""Verdicts that wait to be given away: four steps of 64 episodes, so hardly any stays within its own group."""
FIRST_SHARE = 0.1
"""Successes among the verdicts that are there before the first: more than the untrained model has, or there would be
next to nothing to learn from at all."""


class ShuffledLakeJudge(Judge):
    """The environment's score, with the training verdicts dealt out at random."""

    wants_evaluation: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._random = random.Random(config.astuner.seed)
        self._waiting = [JudgeOutput(reward=float(self._random.random() < FIRST_SHARE)) for _ in range(POOL)]

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        evaluation = output.evaluation
        if evaluation is None:
            raise ValueError("the task has no environment, so there is no verdict to deal out")
        verdict = JudgeOutput(reward=evaluation.score, is_success=evaluation.is_success)
        if workflow_task.split is Split.VALIDATION:
            return verdict
        place = self._random.randrange(POOL)
        given, self._waiting[place] = self._waiting[place], verdict
        return given
