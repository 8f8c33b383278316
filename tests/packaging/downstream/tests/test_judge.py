import pytest

from astuner_older.judge import OlderJudgeConfig, OlderJudge
from astuner import WorkflowOutput
from astuner.testing import check_judge, workflow_task


@pytest.mark.parametrize(("answer", "reward"), [("Paris", 1.0), (" paris ", 1.0), ("Lyon", 0.0)])
def test_judge(answer, reward):
    output = WorkflowOutput(metadata={"final_answer": answer})
    assert check_judge(OlderJudge(), workflow_task(answer="Paris"), output).reward == reward


def test_case_matters_when_asked_for():
    judge = OlderJudge(OlderJudgeConfig(ignore_case=False))
    output = WorkflowOutput(metadata={"final_answer": "paris"})
    assert check_judge(judge, workflow_task(answer="Paris"), output).reward == 0.0
