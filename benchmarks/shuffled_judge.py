"""A judge whose rewards are right on average and say nothing: the control that must not learn.

In training every episode gets the verdict of some other, randomly chosen episode that was judged earlier; in
validation the truth.  So the rewards that are trained on have the distribution of the real ones, and no relation to
what the episode did.
"""

from __future__ import annotations

import random
from typing import Any

from astuner import Judge, JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.contracts.types import Split
from astuner_math.judges import MathAnswerAsJudge

POOL = 256
"""Verdicts that wait to be given away: four steps of 64 episodes, so hardly any stays within its own group."""
FIRST_SHARE = 0.15
"""Successes among the verdicts that are there before the first; about those of the untrained model."""


class ShuffledJudge(Judge):
    """`MathAnswerAsJudge`, with the training verdicts dealt out at random."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._judge = MathAnswerAsJudge()
        self._random = random.Random(config.astuner.seed)
        self._waiting = [JudgeOutput(reward=float(self._random.random() < FIRST_SHARE)) for _ in range(POOL)]

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        verdict = await self._judge.judge(workflow_task, output)
        if workflow_task.split is Split.VALIDATION:
            return verdict
        place = self._random.randrange(POOL)
        given, self._waiting[place] = self._waiting[place], verdict
        return given
