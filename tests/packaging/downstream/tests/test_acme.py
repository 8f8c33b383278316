import pytest
from astuner_acme.judge import WordOverlapConfig, WordOverlapJudge

from astuner import WorkflowOutput
from astuner.testing import check_judge, check_plugin, workflow_task


def test_plugin():
    assert list(check_plugin("acme").provides["judge"]) == ["word_overlap"]


@pytest.mark.parametrize(
    ("answer", "partial", "reward"),
    [("The red  house", True, 1.0), ("a red barn", True, 1 / 3), ("a red barn", False, 0.0), ("", True, 0.0)],
)
def test_judge(answer, partial, reward):
    judge = WordOverlapJudge(WordOverlapConfig(partial=partial))
    verdict = check_judge(
        judge, workflow_task(answer="the red house"), WorkflowOutput(metadata={"final_answer": answer})
    )
    assert verdict.reward == pytest.approx(reward)
