"""The judge that ranks a group's attempts: rewards from rankings, what is shown to whom, and groups that have none."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import Attempt
from astuner.contracts.types import FinishReason, Generation, JudgeOutput, Split, Turn, WorkflowOutput
from astuner.rollout.parts import build_judge
from astuner.testing import ScriptedModel, check_judge, workflow_task
from astuner_helpers import BudgetSpent, HelperModels
from astuner_helpers.settings import HelperModel
from astuner_rubrics.relative import Preferences, RelativeConfig, RelativeJudge, letters, pairs_of, ranking_form
from astuner_testing.fakes import fake_config
from tests.table import table

from ._reading import read

TASK = workflow_task("Say a large number.", answer="100")
SAID = Generation(prompt_ids=[1], response_ids=[2], logprobs=[0.0], finish_reason=FinishReason.STOP, policy_version=0)
Body = dict[str, Any]

USER_CODE = """
from astuner import Judge, JudgeOutput

class Half(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=0.5, is_success=True)
"""


def judge_of(
    folder: Path, server: ScriptedModel | str, *, helper: Any = None, experiment: str = "", **settings: Any
) -> Any:
    url = server if isinstance(server, str) else server.base_url
    section = HelperModel(base_url=url, model="m", **{"cache": False, "max_retries": 0, **(helper or {})})
    (folder / "mine.py").write_text(USER_CODE)
    return RelativeJudge(
        RelativeConfig(helper_model="small", **settings),
        BuildContext(
            config=fake_config(folder, experiment), helpers=HelperModels({"small": section}, scope=str(folder))
        ),
    )


def outputs(*texts: str) -> list[WorkflowOutput]:
    return [WorkflowOutput(response=text) for text in texts]


def attempts_of(*texts: str, split: Split = Split.TRAIN) -> list[Attempt]:
    task = replace(TASK, split=split)
    return [Attempt(workflow_task=task, output=output) for output in outputs(*texts)]


def rewards(judge: Any, *texts: str, split: Split = Split.TRAIN) -> list[float]:
    found = asyncio.run(judge.judge_group(attempts_of(*texts, split=split)))
    return [verdict.reward for verdict in found]


def shown(body: Body) -> dict[str, str]:
    fenced = read(body["messages"][1]["content"]).fenced
    return {label.removeprefix("ATTEMPT "): text for label, text in fenced.items() if label.startswith("ATTEMPT ")}


def by_size(body: Body) -> Body:
    """A judge model that puts the larger number first, whatever the order of showing."""
    numbers = {name: int(text) for name, text in shown(body).items()}
    ranked = sorted(numbers, key=lambda name: -numbers[name])
    tied = [list(names) for _, names in itertools.groupby(ranked, key=lambda name: numbers[name] // 10)]
    return {"reason": "by size", "ranking": tied}


@table("settings", [{}, {"orders": 1}, {"orders": 5}, {"mode": "pairwise"}])
def test_a_ranking_becomes_rewards_between_0_and_1(tmp_path: Path, settings: dict[str, Any]) -> None:
    with ScriptedModel(by_size) as server:
        judge = judge_of(tmp_path, server, **settings)
        assert rewards(judge, "30", "10", "40", "20", "15") == [0.75, 0.125, 1.0, 0.5, 0.125]


@table("mode", ["listwise", "pairwise"])
def test_it_keeps_to_the_contract_of_group_judges(tmp_path: Path, mode: str) -> None:
    with ScriptedModel(by_size) as server:
        found = check_judge(judge_of(tmp_path, server, mode=mode), TASK, outputs("30", "10", "20"))
    assert [(v.reward, v.is_success) for v in found if isinstance(v, JudgeOutput)] == [
        (1.0, None),  # the first place counts as a success
        (0.0, None),
        (0.5, None),
    ]


def test_metrics_say_what_was_asked_and_how_far_the_orders_agree(tmp_path: Path) -> None:
    with ScriptedModel(by_size) as server:
        found = asyncio.run(judge_of(tmp_path, server).judge_group(attempts_of("30", "15", "10")))
    assert found[0].metrics == {"asked": 2.0, "distinct": 3.0, "ties": pytest.approx(1 / 3), "agreement": 1.0}


def first_place(body: Body) -> Body:
    """A judge model that likes whatever it is shown first."""
    return {"reason": "", "ranking": [[name] for name in shown(body)]}


@table("settings", [{"orders": 2}, {"orders": 4}, {"mode": "pairwise"}])
def test_a_liking_for_the_first_place_cancels_out_and_is_seen(tmp_path: Path, settings: dict[str, Any]) -> None:
    with ScriptedModel(first_place) as server:
        found = asyncio.run(judge_of(tmp_path, server, **settings).judge_group(attempts_of("3", "1", "2")))
    assert [v.reward for v in found] == [0.5, 0.5, 0.5]
    assert found[0].metrics["agreement"] < 0.5


def test_attempts_that_answered_the_same_are_shown_once_and_get_the_same(tmp_path: Path) -> None:
    with ScriptedModel(by_size) as server:
        judge = judge_of(tmp_path, server, orders=1)
        assert rewards(judge, "30", "10", "30", "20") == pytest.approx([5 / 6, 0, 5 / 6, 1 / 3])
        assert [sorted(shown(body).values()) for body in server.requests] == [["10", "20", "30"]]
        assert rewards(judge, "7", "7", " 7 ") == [0.5, 0.5, 0.5]  # nothing to ask
        assert len(server.requests) == 1


def test_what_is_shown_is_fenced_and_the_criteria_are_in_the_system_message(tmp_path: Path) -> None:
    with ScriptedModel(by_size) as server:
        rewards(judge_of(tmp_path, server, criteria="Larger is better.", reference="answer", orders=1), "1", "20")
        system, user = (m["content"] for m in server.requests[0]["messages"])
    assert "Larger is better." in system
    found = read(user)
    assert list(found.fenced) == ["QUESTION", "REFERENCE", "ATTEMPT A", "ATTEMPT B"]
    assert [line for line in found.outside if line] == ["Rank the attempts A, B, the best first."]


def test_the_orders_of_showing_are_others_for_others_and_the_same_for_the_same(tmp_path: Path) -> None:
    with ScriptedModel(by_size) as server:
        judge = judge_of(tmp_path, server)
        rewards(judge, "30", "10", "20")
        rewards(judge, "20", "30", "10")  # another order of attempts is the same question
        first, second, third, fourth = sorted([tuple(shown(b).values()) for b in server.requests])
        assert (first, third) == (second, fourth)
        assert first == third[::-1]
        places = set()
        for n in range(20):
            rewards(judge, str(10 * n), str(10 * n + 10))
            places.add(list(shown(server.requests[-1]).values()).index(str(10 * n)))
    assert places == {0, 1}


@table(
    "said",
    [
        {"reason": "", "ranking": [["A"], ["B"]]},  # of another group
        {"reason": "", "ranking": [["A"], ["B"], ["C"], ["D"]]},
        {"reason": "", "ranking": [["A"], ["A"], ["B"], ["C"]]},
        {"reason": "", "ranking": [["A", "B", "C"], ["A"]]},
        {"reason": "", "ranking": []},
        {"reason": "", "ranking": "ABC"},
        {"ranking": [["A"], ["B"], ["C"]]},
        {"reason": "", "scores": [1, 2, 3]},
        "A is the best.",
        (503, {"error": {"message": "busy"}}),
    ],
)
def test_a_ranking_that_does_not_name_everybody_once_is_none(tmp_path: Path, said: Any) -> None:
    with ScriptedModel(lambda body: said) as server:
        judge = judge_of(tmp_path, server, orders=1, helper={"max_retries": 1})
        with pytest.raises(JudgeFailed, match="no verdict"):
            rewards(judge, "1", "2", "3")
        assert len(server.requests) == 2


def test_without_ties_each_has_a_place_of_its_own(tmp_path: Path) -> None:
    def strict(body: Body) -> Body:
        return {"reason": "", "ranking": [name for (name,) in by_size(body)["ranking"]]}

    with ScriptedModel(strict) as server:
        assert rewards(judge_of(tmp_path, server, ties=False), "30", "10", "20") == [1.0, 0.0, 0.5]
        schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["ranking"]["items"] == {"type": "string"}
    with ScriptedModel(lambda body: {"reason": "", "ranking": [["A", "B"]]}) as server, pytest.raises(JudgeFailed):
        rewards(judge_of(tmp_path, server, ties=False), "1", "2")


def test_a_helper_that_is_down_gives_no_verdicts_and_a_spent_budget_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(JudgeFailed, match="no verdict"):
        rewards(judge_of(tmp_path, "http://127.0.0.1:9/v1"), "1", "2")
    with ScriptedModel(by_size) as server, pytest.raises(BudgetSpent, match="budget_tokens"):
        rewards(judge_of(tmp_path, server, helper={"budget_tokens": 1}), "1", "2")


def test_an_attempt_without_an_answer_drops_alone_and_the_others_are_compared(tmp_path: Path) -> None:
    with ScriptedModel(by_size) as server:
        judge = judge_of(tmp_path, server)
        attempts = [*attempts_of("10", "20"), Attempt(workflow_task=TASK, output=WorkflowOutput())]
        low, high, none = asyncio.run(judge.judge_group(attempts))
        assert (low.reward, high.reward) == (0.0, 1.0)
        assert "has no response" in str(none)
        alone, none = asyncio.run(judge.judge_group(attempts[1:]))
        assert "a single attempt cannot be compared" in str(alone)
        assert "has no response" in str(none)


def test_one_attempt_alone_and_the_validation_go_to_the_judge_that_is_named_for_them(tmp_path: Path) -> None:
    with ScriptedModel(by_size) as server:
        without = judge_of(tmp_path, server)
        (failed,) = asyncio.run(without.judge_group(attempts_of("1")))
        assert isinstance(failed, JudgeFailed)
        assert "astuner.task_judge.relative.alone" in str(failed)
        assert rewards(without, "10", "20", split=Split.VALIDATION) == [0.0, 1.0]
        judge = judge_of(tmp_path, server, alone="mine.py->Half")
        assert rewards(judge, "1") == [0.5]
        assert rewards(judge, "10", "20", split=Split.VALIDATION) == [0.5, 0.5]
        assert rewards(judge, "10", "20") == [0.0, 1.0]
        one = asyncio.run(judge.judge(TASK, WorkflowOutput(response="1")))
        assert (one.reward, one.is_success) == (0.5, True)


@table(
    ("settings", "experiment", "says"),
    [
        ({"helper_model": "large"}, "", "helper model 'large'"),
        ({}, "  rollout: {num_repeat: 1}\n", "rollout.num_repeat is 1; set it to at least 2"),
        ({"alone": "nobody"}, "", "unknown judge 'nobody'"),
        ({"alone": "math_anser"}, "", "did you mean"),
    ],
)
def test_mistakes_show_before_anything_runs(
    tmp_path: Path, settings: dict[str, Any], experiment: str, says: str
) -> None:
    url = "http://127.0.0.1:9/v1"
    section = {"helper_model": "small", **settings}
    text = f"  helper_models: {{small: {{base_url: '{url}', model: m}}}}\n"
    options = ", ".join(f"{key}: {value}" for key, value in section.items())
    config = fake_config(tmp_path, f"{text}  task_judge: {{judge: relative, relative: {{{options}}}}}\n{experiment}")
    with pytest.raises((ConfigError, LookupError), match=says):
        build_judge(config)


def test_a_single_attempt_per_task_is_fine_with_a_judge_for_it(tmp_path: Path) -> None:
    judge_of(tmp_path, "http://127.0.0.1:9/v1", alone="mine.py->Half", experiment="  rollout: {num_repeat: 1}\n")


def turn(index: int, asked: str, said: str) -> Turn:
    return Turn(
        index=index,
        agent="default",
        generation=SAID,
        continues=index - 1 if index else None,
        request=[{"role": "user", "content": asked}],
        message={"role": "assistant", "content": said},
    )


def test_of_conversations_what_all_have_in_common_is_shown_once(tmp_path: Path) -> None:
    said = [("1", "2"), ("1", "3"), ("1", "3")]
    attempts = [
        Attempt(workflow_task=TASK, output=WorkflowOutput(), turns=[turn(0, "hi", first), turn(1, "more", second)])
        for first, second in said
    ]

    def last_message(body: Body) -> Body:
        fenced = read(body["messages"][1]["content"]).fenced
        last = {label.split()[1]: int(text) for label, text in fenced.items() if label.startswith("ATTEMPT ")}
        return {"reason": "", "ranking": [[name] for name in sorted(last, key=lambda n: -last[n])]}

    with ScriptedModel(last_message) as server:
        judge = judge_of(tmp_path, server, show="conversation", orders=1)
        found = asyncio.run(judge.judge_group(attempts))
        fenced = read(server.requests[0]["messages"][1]["content"]).fenced
    assert [v.reward for v in found] == [0.0, 0.75, 0.75]
    assert fenced["ALL ATTEMPTS MESSAGE 1 USER"] == "hi"
    assert fenced["ALL ATTEMPTS MESSAGE 3 USER"] == "more"
    assert sorted(text for label, text in fenced.items() if label.startswith("ATTEMPT ")) == ["2", "3"]


def test_fewer_pairs_can_be_compared_each_attempt_about_as_often(tmp_path: Path) -> None:
    with ScriptedModel(by_size) as server:
        judge = judge_of(tmp_path, server, mode="pairwise", max_pairs=8)
        found = rewards(judge, *(str(10 * n) for n in range(8)))
        assert len(server.requests) == 16
    assert (found[0], found[7]) == (0.0, 1.0)
    for most in (None, 1, 8, 12, 16, 28, 99):
        pairs = pairs_of(8, most)
        times = [sum(n in pair for pair in pairs) for n in range(8)]
        assert max(times) - min(times) <= 1
        assert len(set(pairs)) == len(pairs)
        assert most is None or len(pairs) <= max(most, 8)
    assert len(pairs_of(8, None)) == 28
    assert pairs_of(2, None) == [(0, 1)]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_rewards_follow_the_ranking(scores: list[int], rng: random.Random) -> None:
    distinct = sorted(set(scores))
    if len(distinct) < 2:
        return
    preferences = Preferences(len(distinct))
    for _ in range(rng.randint(1, 3)):
        preferences.add_ranking([[i] for i in reversed(range(len(distinct)))])
    times = [scores.count(score) for score in distinct]
    found = preferences.rewards(times)
    assert found == sorted(found)
    assert all(0 <= reward <= 1 for reward in found)
    mean = sum(n * reward for n, reward in zip(times, found, strict=True)) / len(scores)
    assert mean == pytest.approx(0.5)


def test_preferences_are_averaged_over_comparisons() -> None:
    preferences = Preferences(3)
    preferences.add_ranking([[0], [1], [2]])
    preferences.add_ranking([[1], [0, 2]])
    assert (preferences.of(0, 1), preferences.of(1, 0), preferences.of(0, 2)) == (0.5, 0.5, 0.75)
    assert preferences.agreement == pytest.approx(1 / 3)
    assert preferences.ties == pytest.approx(1 / 6)
    assert preferences.rewards([1, 1, 1]) == [0.625, 0.75, 0.125]
    assert Preferences(2).of(0, 1) is None
    assert Preferences(2).agreement is None
    assert Preferences(1).rewards([4]) == [0.5]


def test_attempts_have_letters_for_names() -> None:
    assert letters(28)[-3:] == ["Z", "AA", "AB"]
    form: Callable[..., Any] = ranking_form(2, ties=True, explain=False).model_validate
    names: Sequence[Sequence[str]] = form({"ranking": [["B"], ["A"]]}).ranking
    assert names == [["B"], ["A"]]
