"""How good the result is.

A judge looks at one finished attempt, a group judge at all attempts at one task together.  It is built once per run
and asked many times at once, so it keeps no state about the attempt at hand.  It is asked only when the workflow left
``reward`` empty.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from astuner.contracts.building import Built
from astuner.contracts.errors import JudgeFailed
from astuner.contracts.types import JudgeOutput, Turn, WorkflowOutput, WorkflowTask


class Judge(Built, ABC):
    """Turns a workflow's output into a reward."""

    wants_evaluation: ClassVar[bool] = False
    """Whether the task's environment is asked, when the workflow has ended, how good the episode is: the judge finds
    that in ``output.evaluation``, which is None for a task without an environment."""

    def __init__(self, config: Any = None) -> None:
        """Keep the section; connect to nothing yet.

        :param config: an instance of the provider's ``config`` model, or None when it declares none.
        """
        self.config = config

    @abstractmethod
    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> Awaitable[JudgeOutput] | JudgeOutput:
        """Judge one attempt; ``async def`` or plain ``def`` (which then runs in a thread of its own).

        Raise when there is no verdict (a helper model that is down, a missing reference answer): the judge is asked
        again about the same output, then the episode is dropped and counted, and never scored.  Do not return 0 for
        "could not judge".

        When the workflow ended without an output (the context overflowed, or the agent used up its model calls),
        ``output`` holds the last reply as ``response`` and how it ended as ``metadata["stop_reason"]``.

        :returns: a finite reward; ``is_success`` None means "a reward of 1 or more is a success", with the tolerance
            `astuner.contracts.types.SUCCESS_TOLERANCE`. State it where rewards are on another scale.
        """


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a task, as a `GroupJudge` sees it."""

    workflow_task: WorkflowTask
    output: WorkflowOutput
    """As for `Judge.judge`, that of a workflow which ended without one included."""
    turns: Sequence[Turn] = ()
    """What was said, in the order in which it was answered."""


class GroupJudge(Judge):
    """Judges the attempts at one task together, so that it can compare them."""

    @abstractmethod
    def judge_group(
        self, attempts: Sequence[Attempt]
    ) -> Awaitable[Sequence[JudgeOutput | JudgeFailed]] | Sequence[JudgeOutput | JudgeFailed]:
        """Judge attempts at one task, when all of its group have ended.

        Those are shown that ended in a way that can be scored and have no reward yet: not one that failed, was
        cancelled or stopped by a check, and not one that the workflow gave a reward.  So there may be fewer than
        ``rollout.num_repeat``, and only one.  A group that was cut short is not judged.

        Raise when there are no verdicts, as in `Judge.judge`: the judge is asked again about the same attempts, then
        all of them are dropped and counted.

        :returns: a verdict for each, in their order; `astuner.contracts.errors.JudgeFailed` in place of one that cannot
            be judged: the judge is asked again too, and then only that attempt is dropped.
        """

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Judge one attempt as a group of one."""
        attempts = (Attempt(workflow_task=workflow_task, output=output),)
        returned: Any = await asyncio.to_thread(self.judge_group, attempts)
        (verdict,) = await returned if inspect.isawaitable(returned) else returned
        if isinstance(verdict, JudgeFailed):
            raise verdict
        assert isinstance(verdict, JudgeOutput)
        return verdict
