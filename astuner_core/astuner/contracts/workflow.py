"""Interface of workflows.

A workflow is user code: it creates an agent that uses ``model_tuner``, runs it on the task, and returns the output for
the judge. Each episode uses a new instance, so ``self`` may store any state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from astuner.contracts.building import Built
from astuner.contracts.types import WorkflowOutput, WorkflowTask

if TYPE_CHECKING:
    from astuner.rollout.model_tuner import ModelTuner


class Workflow(Built, ABC):
    """User code that works on a task."""

    name: str = ""

    @abstractmethod
    def execute(
        self, workflow_task: WorkflowTask, model_tuner: ModelTuner
    ) -> Awaitable[WorkflowOutput] | WorkflowOutput:
        """Work on the task. Implement it as ``async def`` or ``def`` (which runs in its own thread).

        For a task with an environment, an ``async def`` runs on a separate event loop, where ``gym_step`` may block. So
        do not share objects bound to a loop (a client, a lock) between episodes.

        An exception ends only this episode. Raise `astuner.contracts.errors.ContextOverflow` or another `EpisodeError`,
        or let it pass, to set the stop reason.

        :returns: The output. Leave ``reward`` None to call the judge.
        """
