"""How good the result is.

A judge looks at one finished attempt.  It is built once per run and asked many times at once, so it keeps no
state about the attempt at hand.  It is asked only when the workflow left ``reward`` empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, ClassVar

from astuner.types import JudgeOutput, WorkflowOutput, WorkflowTask


class Judge(ABC):
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

        :returns: a finite reward; ``is_success`` None means "a reward of 1 or more is a success".
        """
