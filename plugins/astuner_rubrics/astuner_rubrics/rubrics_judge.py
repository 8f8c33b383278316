"""The judge `rubrics`: grade answers by a rubric file with the same questions as when its agreement was measured.

Pointwise rubrics grade single attempts; pairwise and listwise rubrics grade the attempts of a group in comparison. The
reward is the weighted mean of the grades, scaled to 0 (worst) to 1 (best). Compared answers that tie by the file's
`tie` get the same reward. Invariant: without grades there is no reward (`JudgeFailed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from astuner import Judge, JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.section import Section
from astuner.contracts.types import counts_as_success
from astuner_helpers import Helper, HelperFailed
from astuner_helpers.members import together
from astuner_rubrics.asking import answer_of, question_of
from astuner_rubrics.grading import Grader, Matrix, Messages, median_of, overall, with_ties
from astuner_rubrics.labels import Mode, digest
from astuner_rubrics.rubric_file import RubricFile, load_rubrics

AT_ONCE = 8
"""Number of answers graded in comparison. Larger groups are graded in parts, which differ between votes."""


class RubricsConfig(Section):
    """Options of the judge `rubrics`."""

    file: str = Field(min_length=1)
    """Rubric file, as written by `astuner judge learn`. Relative paths start at the experiment file."""
    helper_model: str = Field(min_length=1)
    """Name of the grading model in `astuner.helper_models`."""
    answer_field: str | None = None
    """Text to judge: `response` or a key of the output's metadata. Default: `final_answer` if present."""
    samples: int | None = Field(None, ge=1, le=25)
    """Number of requests per verdict. Default: `votes` of the file."""
    success_at: float | None = Field(None, ge=0, le=1)
    """Minimum reward of a successful attempt. Default: 1."""


class _Grading(Judge):
    """Request grades, and turn them into verdicts."""

    config: RubricsConfig

    def __init__(self, rubrics: RubricFile, config: RubricsConfig, helper: Helper) -> None:
        super().__init__(config)
        self.rubrics = rubrics
        self._helper, self._grader = helper, Grader(self._ask, *rubrics.scale)
        self._votes = config.samples or rubrics.votes

    async def _ask(self, messages: Messages, **how: Any) -> Any:
        return (await self._helper.ask(messages, **how)).data

    async def _verdicts(self, question: str, answers: Sequence[str]) -> list[JudgeOutput]:
        """Return one verdict per answer.

        :raises JudgeFailed: There are no grades.
        """
        parts = [self._one_vote(question, answers, vote) for vote in range(self._votes)]
        try:
            votes = await together(parts)
        except HelperFailed as e:
            raise JudgeFailed(f"no verdict: {e}") from e
        weights = [r.weight for r in self.rubrics.rubrics]
        grades = median_of(votes)
        totals = overall(grades, weights)
        if self.rubrics.mode is not Mode.POINTWISE:
            totals = with_ties(totals, self.rubrics.tie)
        each_vote = [overall(vote, weights) for vote in votes]
        return [
            self._output(total, [row[i] for row in grades], [vote[i] for vote in each_vote])
            for i, total in enumerate(totals)
        ]

    async def _one_vote(self, question: str, answers: Sequence[str], vote: int) -> Matrix:
        """Return the grades of all answers, in parts that are shown together."""
        criteria = [r.text for r in self.rubrics.rubrics]
        order = sorted(range(len(answers)), key=lambda i: digest([vote // 2, answers[i]]))
        count = math.ceil(len(order) / AT_ONCE)
        places = [order[start::count] for start in range(count)]
        matrices = await together(
            [
                self._grader.grade(question, [answers[i] for i in part], criteria, purpose="rubrics", vote=vote)
                for part in places
            ]
        )
        found = np.empty((len(criteria), len(answers)))
        for part, matrix in zip(places, matrices, strict=True):
            found[:, part] = matrix
        return tuple(map(tuple, found.tolist()))

    def _output(self, total: float, by_rubric: Sequence[float], votes: Sequence[float]) -> JudgeOutput:
        scaled = self.rubrics.scaled
        reward = scaled(total)
        at = 1.0 if self.config.success_at is None else self.config.success_at
        success = counts_as_success(reward, at=at)
        metrics = {f"rubric_{n}": scaled(grade) for n, grade in enumerate(by_rubric, start=1)}
        metrics["rubrics"] = float(int(self.rubrics.digest[:6], 16))  # makes an edited file visible in the curves
        metrics["edited"] = float(self.rubrics.is_edited)
        if len(votes) > 1:
            metrics["vote_spread"] = scaled(max(votes)) - scaled(min(votes))
        return JudgeOutput(reward=reward, is_success=success, metrics=metrics)


class PointwiseRubrics(_Grading):
    """Grade single attempts.

    Metrics: ``rubric_1``, … (grade of each criterion, 0 to 1), ``rubrics`` (a number that identifies the rules),
    ``edited`` (whether they changed since their agreement was measured), ``vote_spread``.
    """

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Judge:
        """Return the judge for the file: of attempts or of groups.

        :raises ConfigError: The file is invalid, the helper model does not exist, or the rubrics compare answers and
            ``rollout.num_repeat`` is 1.
        """
        rubrics = load_rubrics(context.config.base_dir / section.file)
        helper = context.helper_models.get(section.helper_model, where="astuner.task_judge.rubrics.helper_model")
        if rubrics.mode is Mode.POINTWISE:
            return cls(rubrics, section, helper)
        if context.config.astuner.rollout.num_repeat == 1:
            raise ConfigError(
                f"task_judge.judge: {section.file} compares answers ({rubrics.mode.value}), but rollout.num_repeat is "
                "1; set it to at least 2, or learn pointwise rubrics"
            )
        return GroupRubrics(rubrics, section, helper)

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Return the verdict on an attempt.

        :raises JudgeFailed: There are no grades, or nothing to judge.
        """
        answer = answer_of(output, self.config.answer_field)
        (verdict,) = await self._verdicts(question_of(workflow_task), [answer])
        return verdict


class GroupRubrics(_Grading, GroupJudge):
    """Grade the attempts of a group in comparison. Metrics are the same as of `PointwiseRubrics`.

    Identical answers are graded once.
    """

    async def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        """Return the verdicts on the attempts.

        :raises JudgeFailed: There are no grades.
        """
        said: list[str | JudgeFailed] = []
        for attempt in attempts:
            try:
                said.append(answer_of(attempt.output, self.config.answer_field))
            except JudgeFailed as e:
                said.append(e)
        answers = sorted({text for text in said if isinstance(text, str)})
        if not answers:
            return [text for text in said if isinstance(text, JudgeFailed)]
        verdicts = await self._verdicts(question_of(attempts[0].workflow_task), answers)
        by_answer = dict(zip(answers, verdicts, strict=True))
        return [by_answer[text] if isinstance(text, str) else text for text in said]
