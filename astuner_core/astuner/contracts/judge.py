"""Interface of judges, which turn the output of a workflow into a reward.

A judge scores one finished attempt; a group judge scores all attempts at a task together. A judge is created once per
run and called concurrently, so it keeps no state about an attempt. It is called only if the workflow left ``reward``
empty.
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
    """A judge of single attempts."""

    wants_evaluation: ClassVar[bool] = False
    """Whether to evaluate the task's environment after the workflow. The judge receives the result in
    ``output.evaluation``, which is None for a task without an environment."""

    def __init__(self, config: Any = None) -> None:
        """Store the section. Do not open connections yet.

        :param config: Instance of the provider's ``config`` model, or None without a model.
        """
        self.config = config

    @abstractmethod
    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> Awaitable[JudgeOutput] | JudgeOutput:
        """Judge one attempt. Implement it as ``async def`` or ``def`` (which runs in its own thread).

        Raise if you cannot judge, e.g. because a helper model is unavailable or the reference answer is missing. The
        judge is then called again with the same output; if it fails again, the episode is dropped and counted. Do not
        return 0 in this case.

        If the workflow ended without an output (context overflow or call limit), ``output.response`` is the last reply
        and ``output.metadata["stop_reason"]`` the reason.

        :returns: A finite reward. Without ``is_success``, a reward of 1 or more counts as success (with the tolerance
            `astuner.contracts.types.SUCCESS_TOLERANCE`). Set it if your rewards use another scale.
        """


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a task, as passed to a `GroupJudge`."""

    workflow_task: WorkflowTask
    output: WorkflowOutput
    """Output as for `Judge.judge`."""
    turns: Sequence[Turn] = ()
    """Turns of the attempt, in the order of the replies."""


class GroupJudge(Judge):
    """A judge that compares the attempts at a task."""

    @abstractmethod
    def judge_group(
        self, attempts: Sequence[Attempt]
    ) -> Awaitable[Sequence[JudgeOutput | JudgeFailed]] | Sequence[JudgeOutput | JudgeFailed]:
        """Judge the attempts at a task after its complete group has ended.

        ``attempts`` contains only attempts that can be scored and have no reward yet. Attempts that failed, were
        canceled, were stopped by a check or got a reward from the workflow are missing, so there may be fewer than
        ``rollout.num_repeat`` attempts, even one. Incomplete groups are not judged.

        Raise if you cannot judge, as in `Judge.judge`: the judge is called again with the same attempts; if it fails
        again, all of them are dropped and counted.

        :returns: One verdict per attempt, in order. Return `astuner.contracts.errors.JudgeFailed` for a single attempt
            that cannot be judged: the judge is called again, and then only that attempt is dropped.
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
