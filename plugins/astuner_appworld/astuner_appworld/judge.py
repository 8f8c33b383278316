"""Compute rewards from AppWorld's tests of a task.

Tests have a label: ``no_op_fail`` tests fail in an untouched world, ``no_op_pass`` tests pass there (they check that
nothing else changed). A success is a pass of all tests, in every reward mode; completing the task is not enough.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from astuner import Evaluation, Judge, JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import JudgeFailed
from astuner.contracts.section import Section


class AppWorldJudgeConfig(Section):
    """Settings of the judge `appworld`."""

    reward: Literal["success", "pass_fraction", "no_op_adjusted"] = "success"
    """`success`: 1 if every test passes, else 0, as reported by AppWorld's authors. `pass_fraction`: share of passed
    tests; an agent that does nothing gets more than 0. `no_op_adjusted`: number of passed `no_op_fail` tests minus
    number of failed `no_op_pass` tests, divided by the number of `no_op_fail` tests, at least 0; an agent that does
    nothing gets 0, a success gets 1."""


class AppWorldJudge(Judge):
    """Judge that uses the task's tests. Metrics: ``pass_fraction``, ``no_op_adjusted``, ``task_completed``."""

    wants_evaluation: ClassVar[bool] = True

    def __init__(self, config: AppWorldJudgeConfig | None = None) -> None:
        super().__init__(config or AppWorldJudgeConfig())

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Judge one attempt.

        :raises JudgeFailed: The evaluation is missing or does not come from AppWorld.
        """
        evaluation = output.evaluation
        if evaluation is None or not {"passes", "failures", "num_tests"} <= set(evaluation.details):
            raise JudgeFailed(
                f"The judge appworld needs an evaluation by AppWorld, which task {workflow_task.task.task_id!r} lacks. "
                "Use it for tasks with env_type: appworld."
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
    """Return the reward of every mode, from 0 to 1; a test without a label counts as ``no_op_fail``."""
    passes, failures = evaluation.details["passes"], evaluation.details["failures"]
    success = float(evaluation.is_success)
    achieved = sum(test.get("label") != "no_op_pass" for test in passes)
    broken = sum(test.get("label") == "no_op_pass" for test in failures)
    wanted = achieved + sum(test.get("label") != "no_op_pass" for test in failures)
    adjusted = max(0.0, (achieved - broken) / wanted) if wanted else success
    return {"success": success, "pass_fraction": evaluation.score, "no_op_adjusted": adjusted}
