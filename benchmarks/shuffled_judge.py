"""Judge with shuffled rewards: the control that must not learn.

In training every episode gets the verdict of another, randomly chosen episode that was judged earlier; in validation
its own.  The training rewards have the distribution of the real rewards, but do not depend on the episode.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

from astuner import Judge, JudgeOutput, WorkflowOutput, WorkflowTask, import_user_code
from astuner.contracts.types import Split

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
POOL = 256
"""Number of pending verdicts: four steps of 64 episodes, so few verdicts stay within their own group."""
FIRST_SHARE = 0.15
"""Share of successes among the initial verdicts; about the success rate of the untrained model."""


class ShuffledJudge(Judge):
    """`MathAnswerAsJudge` with randomly permuted training verdicts."""

    true: ClassVar[str] = "astuner_math.judges->MathAnswerAsJudge"
    """Judge that produces the verdicts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._judge = import_user_code(self.true, EXAMPLES)()
        self._random = random.Random(config.astuner.seed)
        self._waiting = [JudgeOutput(reward=float(self._random.random() < FIRST_SHARE)) for _ in range(POOL)]

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        verdict = self._judge.judge(workflow_task, output)
        if not isinstance(verdict, JudgeOutput):
            verdict = await verdict
        if workflow_task.split is Split.VALIDATION:
            return verdict
        place = self._random.randrange(POOL)
        given, self._waiting[place] = self._waiting[place], verdict
        return given


class ShuffledLabel(ShuffledJudge):
    """Shuffled judge of the ticket triage."""

    true = "ticket_triage/triage.py->RightLabel"


class ShuffledLookup(ShuffledJudge):
    """Shuffled judge of the shop lookup."""

    true = "shop_lookup/shop.py->RightNumber"


class ShuffledNumber(ShuffledJudge):
    """Shuffled judge of the word problems."""

    true = "word_problems/solver.py->LastNumber"


class ShuffledTable(ShuffledJudge):
    """Shuffled judge of learning to ask."""

    true = "learning_to_ask/waiter.py->RightTable"


class ShuffledCountdown(ShuffledJudge):
    """Shuffled judge of Countdown."""

    true = "countdown/game.py->Reached"


class ShuffledSearch(ShuffledJudge):
    """Shuffled judge of searching documents."""

    true = "search_documents/librarian.py->RightAndRead"
