"""Compares short answers word by word."""

from __future__ import annotations

import re
from collections import Counter

from pydantic import BaseModel, ConfigDict

from astuner import Judge, JudgeOutput, WorkflowOutput, WorkflowTask


class WordOverlapConfig(BaseModel):
    """The section `astuner.task_judge.word_overlap`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    partial: bool = True
    """Whether an answer that shares some words with the reference is worth something."""


class WordOverlapJudge(Judge):
    """F1 of `final_answer` against the task's reference `answer`, between 0 and 1."""

    def __init__(self, config: WordOverlapConfig | None = None) -> None:
        super().__init__(config or WordOverlapConfig())

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        # A task without an answer raises KeyError: no verdict, so the episode is counted and not scored.
        given = output.metadata.get("final_answer", output.response)  # a limit may end a workflow before it returns
        score = f1(str(given), str(workflow_task.task.metadata["answer"]))
        return JudgeOutput(reward=score if self.config.partial else float(score == 1), metrics={"word_f1": score})


def f1(given: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words, as SQuAD scores answers (Rajpurkar et al. 2016)."""
    a, b = (Counter(re.findall(r"\w+", text.casefold())) for text in (given, expected))
    shared = (a & b).total()
    if not a or not b:
        return float(a == b)
    return 2 * shared / (a.total() + b.total())
