"""What happens to one task.

A workflow is the user's own code: it builds an agent around ``model_tuner``, lets it work on the task and
returns what the judge needs.  A fresh instance is made for every episode, so ``self`` may hold anything.
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
    """One way to work on a task."""

    name: str = ""

    @abstractmethod
    def execute(
        self, workflow_task: WorkflowTask, model_tuner: ModelTuner
    ) -> Awaitable[WorkflowOutput] | WorkflowOutput:
        """Work on the task; ``async def`` or plain ``def`` (which then runs in a thread of its own).

        For a task with an environment, an ``async def`` runs on an event loop of its own, where ``gym_step`` may block;
        so it shares nothing that belongs to a loop (a client, a lock) with other episodes.

        Whatever it raises ends this episode only.  `astuner.contracts.errors.ContextOverflow` and the other
        `EpisodeError` kinds may be raised (or let through) to say how it ended.

        :returns: the output; leave ``reward`` None to ask the judge.
        """
