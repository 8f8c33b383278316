r"""The math judge: 1 for an answer that equals the reference as mathematics, else 0.

Numbers, quantities, dates, times and ranges are compared on the spot; algebra goes to a limited process.  A wrong,
unreadable, missing or exhausting answer is the policy's doing and scores 0.  A missing or unreadable reference is not,
and never scores.
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
"""Characters of an answer; a longer one is no answer to anything and is wrong without being read."""


class MathAnswerConfig(Section):
    answer_field: str = "answer"
    """Where the reference is in a task's metadata; GSM8K's text before `####` is left out."""
    require_boxed: bool = True
    """Whether an answer without `\\boxed{}` is wrong; if not, its last number is taken."""
    processes: int = Field(default=2, ge=1)
    """Limited processes that compare what is not a plain number; started when first needed."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """CPU time one comparison may use; an answer that needs more is wrong (metric `judge/timeout`)."""
    memory_mb: int = Field(default=1024, ge=256)
    """Memory of such a process (Linux)."""


class MathAnswerAsJudge(Judge):
    r"""Compares ``output.metadata["final_answer"]`` (or ``output.response``) with ``task.metadata[answer_field]``.

    The candidate is the last complete ``\boxed{}``.  Metrics: ``boxed`` (it had one), ``timeout`` (comparing it used
    up the CPU time, or took the process down).
    """

    def __init__(self, config: MathAnswerConfig | None = None) -> None:
        super().__init__(config or MathAnswerConfig())
        self.equality = LimitedEquality(self.config.processes, self.config.cpu_seconds, self.config.memory_mb << 20)

    def close(self) -> None:
        """End the limited processes; they also end with the judge or the interpreter."""
        self.equality.close()

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Judge one attempt.

        :raises JudgeFailed: the task has no readable reference, or no process to compare in can be started.
        """
        reference, candidate, metrics = self._read(workflow_task, output)
        if candidate is None:
            return _verdict(False, metrics)
        return await self._compare(workflow_task, reference, candidate, metrics)

    async def _compare(
        self, workflow_task: WorkflowTask, reference: str, candidate: str, metrics: Mapping[str, float]
    ) -> JudgeOutput:
        """Compare two normalised answers, without leaving this process where that is possible."""
        question = compare(reference, candidate)
        if isinstance(question, bool):
            return _verdict(question, metrics)
        try:
            found = await asyncio.wrap_future(self.equality.submit(question.reference, question.candidate))
        except JudgeFailed as e:
            raise JudgeFailed(f"{self._place(workflow_task)}: {e}") from e
        return _verdict(found.equal, {**metrics, "timeout": float(found.timeout)})

    def _read(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> tuple[str, str | None, dict[str, float]]:
        """Reference and candidate, normalised; the candidate is None when there is no answer to compare."""
        reference = reference_answer(workflow_task.task.metadata, self.config.answer_field)
        if reference is None or len(reference) > MAX_ANSWER:
            known = ", ".join(sorted(map(str, workflow_task.task.metadata))) or "nothing"
            problem = (
                "has no reference answer" if reference is None else f"has a reference over {MAX_ANSWER} characters"
            )
            raise JudgeFailed(
                f"{self._place(workflow_task)} {problem} (its metadata has {known}); "
                "name its field with answer_field in the judge's section"
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
