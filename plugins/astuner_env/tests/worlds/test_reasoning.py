"""reasoning-gym: reference answers score 1, wrong ones never count as a success."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner import Task
from astuner.testing import check_environment

pytest.importorskip("reasoning_gym", reason="these tasks are reasoning-gym's")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from astuner_env.worlds.reasoning import REFUSED, ReasoningGym, ScorerBroken, read_answer, warm
from tests.table import table

SMALL = {"datasets": {"chain_sum": {"max_terms": 2, "max_digits": 1}}}


def start(task_id: str, **params: Any) -> ReasoningGym:
    world = ReasoningGym(params)
    world.reset(Task(task_id=task_id))
    return world


def reference(task_id: str) -> str:
    name, _, seed = task_id.partition(":")
    return str(reasoning_gym.create_dataset(name, seed=int(seed), size=1)[0]["answer"])


def say(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"So it is <answer>{answer}</answer>."}


@table("params", [{}, SMALL, {"partial": False}])
def test_it_keeps_to_the_contract(params: dict[str, Any]) -> None:
    check_environment(ReasoningGym, params=params)
    check_environment(ReasoningGym, params=params, act=lambda observation: say("7"))


@table(
    "name", ["chain_sum", "countdown", "puzzle24", "n_queens", "binary_matrix", "string_insertion", "tower_of_hanoi"]
)
def test_the_reference_answer_is_a_success(name: str) -> None:
    task_id = f"{name}:17"
    world = start(task_id)
    answer = reference(task_id)
    result = world.step(say(answer))
    assert (result.observation, result.reward, result.terminated) == ("Right.", 1.0, True)
    evaluation = world.evaluate()
    assert (evaluation.score, evaluation.success) == (1.0, True)
    assert evaluation.details == {"dataset": name, "answer": answer.strip()}


@table(("partial", "score"), [(True, 0.05), (False, 0.0)])
def test_a_little_for_a_wrong_answer_is_no_success(partial: bool, score: float) -> None:
    world = start("countdown:17", partial=partial)
    result = world.step(say("1 + 1"))
    assert (result.observation, result.reward) == ("Not right.", score)
    assert world.evaluate().score == score
    assert world.evaluate().success is False


def test_a_message_without_an_answer_may_be_followed_by_another() -> None:
    world = start("chain_sum:17", max_steps=2)
    first = world.step({"role": "assistant", "content": "Let me think."})
    assert first.observation.startswith("No answer found.")
    assert (first.is_over, first.reward) == (False, 0.0)
    second = world.step({"role": "assistant", "content": "<answer>5"})
    assert (second.truncated, second.terminated) == (True, False)
    assert world.step(say(reference("chain_sum:17"))).observation == "It is over."
    assert world.evaluate().score == 0


def test_only_the_first_answer_counts() -> None:
    world = start("chain_sum:17")
    world.step(say("-1"))
    again = world.step(say(reference("chain_sum:17")))
    assert (again.observation, again.reward, again.terminated) == ("It is over.", 0.0, True)
    assert not world.evaluate().is_success


def test_the_answer_is_nowhere_to_be_seen_before_it_is_given() -> None:
    world = ReasoningGym(SMALL)
    result = world.reset(Task(task_id="chain_sum:17"))
    assert result.info == {}
    assert world.evaluate().details == {"dataset": "chain_sum", "answer": None}
    assert reference("chain_sum:17") not in repr(world.describe())


@table(
    ("message", "answer"),
    [
        ({"content": "<answer> 5 </answer>"}, "5"),
        ({"content": "<answer>4</answer> no: <answer>5</answer>"}, "5"),
        ({"content": "<answer>4 <answer>5</answer>"}, "5"),
        ({"content": "<answer>5</answer> and <answer>6"}, "5"),
        ({"content": "<answer></answer>"}, ""),
        ({"content": "</answer>5<answer>"}, None),
        ({"content": "5"}, None),
        ({"content": None}, None),
        ({"content": "", "tool_calls": [{"function": {"name": "answer", "arguments": '{"answer": 5}'}}]}, "5"),
        ({"content": "<answer>5</answer>", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}, "5"),
    ],
)
def test_answers_are_read(message: dict[str, Any], answer: str | None) -> None:
    assert read_answer(message) == answer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "countdown", "number_sorting", "graph_color", "sudoku", "rotate_matrix"])
@settings(max_examples=40)
@given(text=st.text(max_size=60) | st.text("[]{}()0123456789,\"' +-*/.", max_size=60))
def test_any_answer_has_a_score(name: str, text: str) -> None:
    world = start(f"{name}:5")
    result = world.step(say(text))
    assert 0 <= result.reward <= 1
    assert math.isfinite(world.evaluate().score)
    assert world.evaluate().is_success == (world.evaluate().score >= 1)


def test_a_scorer_that_stumbles_over_an_answer_gives_nothing_and_a_broken_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = DATASETS["chain_sum"][0]

    def stumble(self: Any, answer: str, entry: dict[str, Any]) -> float:
        if answer == "nothing":
            return float("inf")
        if answer != entry["answer"]:
            raise IndexError("oh")
        return 1.0

    monkeypatch.setattr(kind, "score_answer", stumble)
    world = start("chain_sum:5")
    result = world.step(say("x"))
    assert (result.reward, result.info["scorer"]) == (0.0, "the scorer failed: IndexError: oh")
    assert world.evaluate().details["scorer"] == result.info["scorer"]
    assert "score is inf" in start("chain_sum:5").step(say("nothing")).info["scorer"]
    monkeypatch.setattr(kind, "score_answer", lambda self, answer, entry: float("nan"))
    with pytest.raises(ScorerBroken, match="score is nan"):
        start("chain_sum:5").step(say(reference("chain_sum:5")))
    monkeypatch.setattr(kind, "score_answer", lambda self, answer, entry: 1 / 0)
    with pytest.raises(ScorerBroken, match="ZeroDivisionError"):
        start("chain_sum:5").step(say("x"))


@table(
    ("datasets", "complaint"),
    [
        ({}, "'datasets' is empty"),
        ({"chain_summ": {}}, "unknown .* 'chain_summ'"),
        ({"composite": {}}, "cannot be created from a name and a seed"),
        ({"coin_flip": {}}, "not supported: its scorer accepts 0"),
        ({"simple_integration": {}}, "executes the answer as code"),
        ({"chain_sum": {"terms": 3}}, "'terms' of .*max_terms"),
        ({"chain_sum": {"seed": 3}}, "unknown setting 'seed'"),
        ({"chain_sum": 3}, "must be a mapping"),
    ],
)
def test_wrong_data_sets_are_refused(datasets: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ReasoningGym.tasks("train", {"datasets": datasets})
    with pytest.raises(ValueError, match=complaint):
        ReasoningGym({"datasets": datasets})


def test_settings_that_reasoning_gym_refuses_and_unknown_tasks() -> None:
    world = ReasoningGym({"datasets": {"chain_sum": {"min_terms": 0}}})
    with pytest.raises(ValueError, match="reasoning-gym rejects the settings"):
        world.reset(Task(task_id="chain_sum:1"))
    with pytest.raises(ValueError, match="executes the answer"):
        start("simple_integration:1")
    with pytest.raises(ValueError, match="unknown task"):
        start("chain_sum:x")
    with pytest.raises(ValueError, match="must be greater than or equal to 1"):
        ReasoningGym({"max_steps": 0})
    with pytest.raises(RuntimeError, match="step before reset"):
        ReasoningGym().step(say("1"))


def test_tasks_take_turns_and_settings_are_heard() -> None:
    tasks = [task.task_id for task in ReasoningGym.tasks("validation", {"tasks": 3})]
    assert tasks == ["chain_sum:1000000", "countdown:1000001", "chain_sum:1000002"]
    question = ReasoningGym(SMALL).reset(Task(task_id="chain_sum:17")).observation
    assert re.search(r" \d [-+] \d =\n", question)
    assert "chain_sum" in ReasoningGym().describe()["datasets"]
    assert not REFUSED.keys() & set(ReasoningGym().describe()["datasets"])
    warm()
