r"""Judge math answers: reward 1 if the answer is mathematically equal to the reference, else 0.

Numbers, quantities, dates, times and ranges are compared in this process, algebra in a limited process. An answer that
is wrong, unreadable, missing or too expensive to compare gets 0. A missing or unreadable reference is an error of the
data, so the episode gets no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from astuner import Judge, JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import JudgeFailed
from astuner.contracts.section import Section
from astuner_math.answers import last_boxed, last_number, normalise, reference_answer
from astuner_math.limited import LimitedEquality
from astuner_math.values import compare

MAX_ANSWER = 2000
"""Maximum characters of an answer; longer answers are wrong and are not parsed."""


class MathAnswerConfig(Section):
    """Settings of the judge `math_answer`."""

    answer_field: str = "answer"
    """Metadata field of a task with the reference; text before GSM8K's `####` is ignored."""
    require_boxed: bool = True
    """Whether an answer without `\\boxed{}` is wrong. If false, its last number is used."""
    processes: int = Field(default=2, ge=1)
    """Number of limited processes for symbolic comparison; started on first use."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """CPU time limit of one comparison; an answer that needs more is wrong (metric `judge/timeout`)."""
    memory_mb: int = Field(default=1024, ge=256)
    """Memory limit of such a process (Linux)."""


class MathAnswerAsJudge(Judge):
    r"""Judge that compares ``output.metadata["final_answer"]`` (or ``output.response``) with the reference.

    The candidate is the last complete ``\boxed{}``. The reference is ``task.metadata[answer_field]``. Metrics:
    ``boxed`` (the answer has a box), ``timeout`` (the comparison exceeded its CPU time or ended the process).
    """

    def __init__(self, config: MathAnswerConfig | None = None) -> None:
        super().__init__(config or MathAnswerConfig())
        self.equality = LimitedEquality(self.config.processes, self.config.cpu_seconds, self.config.memory_mb << 20)

    def close(self) -> None:
        """End the limited processes; they also end together with the judge or the interpreter."""
        self.equality.close()

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Judge one attempt.

        :raises JudgeFailed: The reference is missing or unreadable, or no process for the comparison can be started.
        """
        reference, candidate, metrics = self._read(workflow_task, output)
        if candidate is None:
            return _verdict(False, metrics)
        return await self._compare(workflow_task, reference, candidate, metrics)

    async def _compare(
        self, workflow_task: WorkflowTask, reference: str, candidate: str, metrics: Mapping[str, float]
    ) -> JudgeOutput:
        """Compare two normalized answers, in this process if possible."""
        question = compare(reference, candidate)
        if isinstance(question, bool):
            return _verdict(question, metrics)
        try:
            found = await asyncio.wrap_future(self.equality.submit(question.reference, question.candidate))
        except JudgeFailed as e:
            raise JudgeFailed(f"{self._place(workflow_task)}: {e}") from e
        return _verdict(found.equal, {**metrics, "timeout": float(found.timeout)})

    def _read(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> tuple[str, str | None, dict[str, float]]:
        """Return reference and candidate, normalized; the candidate is None if the answer is missing or too long."""
        reference = reference_answer(workflow_task.task.metadata, self.config.answer_field)
        if reference is None or len(reference) > MAX_ANSWER:
            known = ", ".join(sorted(map(str, workflow_task.task.metadata))) or "nothing"
            problem = (
                "has no reference answer"
                if reference is None
                else f"has a reference longer than {MAX_ANSWER} characters"
            )
            raise JudgeFailed(
                f"{self._place(workflow_task)} {problem} (metadata fields: {known}). "
                "Set answer_field in the judge's section to the field of the reference."
            )
        said: Any = output.metadata.get("final_answer")
        said = output.response if said is None else said
        text = "" if said is None else str(said)
        boxed = last_boxed(text)
        candidate = boxed if boxed is not None or self.config.require_boxed else last_number(text)
        metrics = {"boxed": float(boxed is not None), "timeout": 0.0}
        if candidate is None or not candidate.strip() or len(candidate) > MAX_ANSWER:
            return normalise(reference), None, metrics
        return normalise(reference), normalise(candidate), metrics

    def _place(self, workflow_task: WorkflowTask) -> str:
        return f"task {workflow_task.task.task_id!r}, metadata[{self.config.answer_field!r}]"


def _verdict(equal: bool, metrics: Mapping[str, float]) -> JudgeOutput:
    return JudgeOutput(reward=float(equal), is_success=equal, metrics=metrics)
