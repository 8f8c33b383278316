"""From AppWorld's own tests of a task to a reward.

A task's tests are labelled: those that a world nobody touched fails (``no_op_fail``), and those that it passes
(``no_op_pass``: nothing else was changed).  Success is all of them, whatever the reward mode; ending a task is not.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from astuner import Evaluation, Judge, JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import JudgeFailed
from astuner.contracts.section import Section


class AppWorldJudgeConfig(Section):
    reward: Literal["success", "pass_fraction", "no_op_adjusted"] = "success"
    """`success`: 1 when every test passes, else 0; what AppWorld's authors report. `pass_fraction`: the share of tests
    that pass; doing nothing is worth something there. `no_op_adjusted`: each passed test that an untouched world fails
    counts 1, each failed test that it passes counts -1, over the number of the former, not below 0; doing nothing is
    worth 0 and success 1."""


class AppWorldJudge(Judge):
    """Rewards what the task's tests say. Metrics: ``pass_fraction``, ``no_op_adjusted``, ``task_completed``."""

    wants_evaluation: ClassVar[bool] = True

    def __init__(self, config: AppWorldJudgeConfig | None = None) -> None:
        super().__init__(config or AppWorldJudgeConfig())

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Judge one attempt.

        :raises JudgeFailed: there is no evaluation, or it is not one of AppWorld's.
        """
        evaluation = output.evaluation
        if evaluation is None or not {"passes", "failures", "num_tests"} <= set(evaluation.details):
            raise JudgeFailed(
                f"task {workflow_task.task.task_id!r} has no evaluation by AppWorld; the judge appworld is for tasks "
                "with env_type: appworld"
            )
        rewards = rewards_of(evaluation)
        return JudgeOutput(
            reward=rewards[self.config.reward],
            is_success=evaluation.is_success,
            metrics={
                "pass_fraction": rewards["pass_fraction"],
                "no_op_adjusted": rewards["no_op_adjusted"],
                "task_completed": float(bool(evaluation.details.get("task_completed"))),
            },
        )


def rewards_of(evaluation: Evaluation) -> dict[str, float]:
    """The reward in every mode, each from 0 to 1; a test without a label is one that an untouched world fails."""
    passes, failures = evaluation.details["passes"], evaluation.details["failures"]
    success = float(evaluation.is_success)
    achieved = sum(test.get("label") != "no_op_pass" for test in passes)
    broken = sum(test.get("label") == "no_op_pass" for test in failures)
    wanted = achieved + sum(test.get("label") != "no_op_pass" for test in failures)
    adjusted = max(0.0, (achieved - broken) / wanted) if wanted else success
    return {"success": success, "pass_fraction": evaluation.score, "no_op_adjusted": adjusted}
