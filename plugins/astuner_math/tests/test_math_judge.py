"""`MathAnswerAsJudge` as the runner sees it: where it reads, what it scores, and what it refuses to score."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import JudgeOutput, Task, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import JudgeFailed
from astuner_math.answers import last_boxed, last_number, reference_answer
from astuner_math.judges import MAX_ANSWER, MathAnswerAsJudge, MathAnswerConfig
from tests.table import table


@pytest.fixture
def make():
    made = []

    def build(**settings) -> MathAnswerAsJudge:
        made.append(MathAnswerAsJudge(MathAnswerConfig(**settings)))
        return made[-1]

    yield build
    for judge in made:
        judge.close()


def ask(judge: MathAnswerAsJudge, metadata: dict, output: WorkflowOutput) -> JudgeOutput:
    task = Task(task_id="gsm8k:7", metadata=metadata)
    return asyncio.run(judge.judge(WorkflowTask(task=task, episode_id="e", group_id="g"), output))


def said(text: object) -> WorkflowOutput:
    return WorkflowOutput(metadata={"final_answer": text})


@table(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{4}, no: \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, \frac{1}{2}\}}", r"\{1, \frac{1}{2}\}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\boxed{4} } } \boxed{5}", "5"),
        (r"{ { \boxed{5}", "5"),
        ("5", None),
        (r"\boxed 5", None),
        (r"\boxed{5", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", r"\{", r"\}", "\\", "x", " "]), max_size=40))
def test_what_a_box_holds_has_balanced_braces(parts):
    content = last_boxed("".join(parts))
    if content is not None:
        plain = content.replace("\\\\", "").replace(r"\{", "").replace(r"\}", "")
        assert plain.count("{") == plain.count("}")


@table(
    ("text", "number"),
    [("6 times 7 is 42.", "42"), ("$1,250.50 each", "$1,250.50"), ("x2 is no number", None), ("a 3/4 share", "3/4")],
)
def test_last_number(text, number):
    assert last_number(text) == number


@table(
    ("value", "reference"),
    [
        ("5+5=10\n#### 10", "10"),
        ("#### 3\n#### 1,000 ", "1,000"),
        (r"so \boxed{\frac12}", r"\frac12"),
        (42, "42"),
        (2.5, "2.5"),
        ("", None),
        ("####", None),
        (True, None),
        (None, None),
        (["5"], None),
    ],
)
def test_reference_answer(value, reference):
    assert reference_answer({"answer": value}, "answer") == reference


def test_verdict_has_reward_success_and_metrics(make):
    good = ask(make(), {"answer": "#### 5"}, said(r"\boxed{5}"))
    assert (good.reward, good.is_success, dict(good.metrics)) == (1.0, True, {"boxed": 1.0, "timeout": 0.0})
    bad = ask(make(), {"answer": "#### 5"}, said(r"\boxed{6}"))
    assert (bad.reward, bad.is_success) == (0.0, False)


def test_without_a_box_an_answer_is_wrong_unless_the_config_says_otherwise(make):
    assert ask(make(), {"answer": "5"}, said("the answer is 5")).metrics["boxed"] == 0.0
    assert ask(make(), {"answer": "5"}, said("the answer is 5")).reward == 0.0
    assert ask(make(require_boxed=False), {"answer": "5"}, said("4 + 1 = 5.")).reward == 1.0
    assert ask(make(require_boxed=False), {"answer": "5"}, said(r"\boxed{6}, not 5")).reward == 0.0


def test_the_response_is_read_when_there_is_no_final_answer(make):
    assert ask(make(), {"answer": "5"}, WorkflowOutput(response=r"\boxed{5}")).reward == 1.0
    assert ask(make(), {"answer": "5"}, WorkflowOutput()).reward == 0.0
    assert ask(make(), {"answer": "5"}, said(None)).reward == 0.0
    assert ask(make(), {"answer": "5"}, said(5)).reward == 0.0


def test_another_field_can_hold_the_reference(make):
    assert ask(make(answer_field="solution"), {"solution": "5", "answer": "6"}, said(r"\boxed{5}")).reward == 1.0


@table("metadata", [{}, {"question": "?"}, {"answer": " "}, {"answer": "1" * (MAX_ANSWER + 1)}])
def test_a_task_without_reference_is_not_scored(make, metadata):
    with pytest.raises(JudgeFailed, match=r"gsm8k:7.*answer_field"):
        ask(make(), metadata, said(r"\boxed{5}"))


def test_a_judge_can_be_sent_to_another_process(make):
    judge = make(answer_field="solution")
    twin = pickle.loads(pickle.dumps(judge))
    assert ask(twin, {"solution": "x+1"}, said(r"\boxed{1+x}")).reward == 1.0
    twin.close()


def test_many_attempts_are_judged_at_once(make):
    judge = make(processes=2)
    task = WorkflowTask(task=Task(task_id="t", metadata={"answer": "x+1"}), episode_id="e", group_id="g")

    async def all_at_once() -> list[JudgeOutput]:
        texts = [rf"\boxed{{{n % 2 + 1} + x - {n % 3} + {n % 3}}}" for n in range(24)]
        return await asyncio.gather(*(judge.judge(task, said(text)) for text in texts))

    verdicts = asyncio.run(all_at_once())
    assert [v.reward for v in verdicts] == [float(n % 2 == 0) for n in range(24)]
    assert len(judge.equality.children) <= 2
