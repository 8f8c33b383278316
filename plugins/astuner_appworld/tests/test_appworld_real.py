"""The real AppWorld package behind the real service: what scores, what does not, and how an episode ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from astuner import WorkflowOutput
from astuner.contracts.errors import EnvironmentFailed
from astuner.contracts.types import Task
from astuner.testing import workflow_task
from astuner_appworld.judge import AppWorldJudge, AppWorldJudgeConfig
from astuner_appworld.synthetic.__main__ import FAMILIES, PEOPLE, SPLITS, task_id
from astuner_env.env_service.client import RemoteEnvironment
from tests.table import table


def _beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOLUTIONS, LOG_IN = _beside("solutions").SOLUTIONS, _beside("solutions").LOG_IN
MODES = ("success", "pass_fraction", "no_op_adjusted")


def rewards(evaluation):
    task = workflow_task()
    output = WorkflowOutput(evaluation=evaluation)
    return [AppWorldJudge(AppWorldJudgeConfig(reward=mode)).judge(task, output).reward for mode in MODES]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.code)
@pytest.mark.parametrize("person", [PEOPLE[0], PEOPLE[5]], ids=lambda person: person.first_name)
def test_a_right_solution_scores_one(play, family, person):
    played = play(task_id(family, person), SOLUTIONS[family.code])
    assert played.evaluation.score == 1.0
    assert played.evaluation.success is True
    assert played.steps[-1].terminated
    assert not played.steps[-1].truncated
    assert rewards(played.evaluation) == [1.0, 1.0, 1.0]
    assert played.evaluation.details["task_completed"] is True


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.code)
@pytest.mark.parametrize(
    ("code", "completed"),
    [("x = 1", False), ("apis.supervisor.complete_task(answer='something else')", True)],
    ids=["doing nothing", "a wrong answer at once"],
)
def test_doing_nothing_scores_as_such(play, family, code, completed):
    played = play(task_id(family, PEOPLE[1]), code)
    share = family.labels.count("no_op_pass") / len(family.labels)
    assert rewards(played.evaluation) == [0.0, pytest.approx(share), 0.0]
    assert played.evaluation.is_success is False
    assert played.steps[-1].terminated is completed
    labels = {test["label"] for test in played.evaluation.details["failures"]}
    assert labels == {"no_op_fail"}


def test_damage_costs_what_the_good_deed_earned(play):
    spoilt = LOG_IN + (
        "apis.simple_note.create_note(access_token=token, title=instruction.split(\"'\")[1], content='')\n"
        "apis.simple_note.delete_note(access_token=token, note_id=notes[0]['note_id'])\n"
        "apis.supervisor.complete_task()"
    )
    played = play("c0write_1", spoilt)
    assert rewards(played.evaluation) == [0.0, pytest.approx(2 / 3), pytest.approx(1 / 2)]


def test_an_evaluation_does_not_change_the_world_and_can_be_repeated(client):
    environment = RemoteEnvironment({}, client=client, env_type="appworld")
    try:
        environment.reset(Task(task_id="a0count_1", env_type="appworld"))
        action = {"role": "assistant", "content": "```python\nx = 1\n```"}
        assert not environment.step(action).is_over
        before = environment.evaluate()
        assert environment.evaluate() == before
        solved = {"role": "assistant", "content": f"```python\n{SOLUTIONS['a0count']}\n```"}
        assert environment.step(solved).terminated
        assert environment.evaluate().success
    finally:
        environment.close()


def test_no_trace_of_the_answers_leaves_the_evaluation(play):
    played = play("b0phone_1", "x = 1")
    assert all(set(test) == {"requirement", "label"} for test in played.evaluation.details["failures"])
    assert PEOPLE[1].phone_number not in repr(played.evaluation)


def test_the_opening_names_the_person_and_the_task(play):
    played = play("a0count_2", "x = 1")
    system, user = played.opening.messages
    assert system["role"] == "system"
    assert "Ben Marsh" in system["content"]
    assert "ben.marsh@example.com" in system["content"]
    assert user["role"] == "user"
    assert "How many notes" in user["content"]


def test_the_splits_are_listed(client):
    for split, people in SPLITS.items():
        assert client.task_ids("appworld", split, {}) == [task_id(f, person) for person in people for f in FAMILIES]
    with pytest.raises(EnvironmentFailed, match="unknown split 'nowhere'"):
        client.task_ids("appworld", "nowhere", {})


@table("name", ["nobody_1", "../../etc", "a0count_1/..", ""])
def test_a_task_that_is_not_there_is_named(client, name):
    environment = RemoteEnvironment({}, client=client, env_type="appworld")
    with pytest.raises(EnvironmentFailed):
        environment.reset(Task(task_id=name, env_type="appworld"))
    environment.close()


def test_a_parameter_that_is_not_there_is_named(client):
    environment = RemoteEnvironment({"max_step": 3}, client=client, env_type="appworld")
    with pytest.raises(EnvironmentFailed, match="'max_step'"):
        environment.reset(Task(task_id="a0count_1", env_type="appworld"))
    environment.close()


def test_what_the_shell_says(play):
    codes = {
        "1 / 0": "ZeroDivisionError",
        "x =": "Syntax error",
        "apis.nothing.at_all()": "No app named 'nothing' found.",
        "apis.phone.nothing()": "No API named 'nothing' found in the phone app.",
        "apis.phone.login(username='a', password='b')": "401",
        "apis.supervisor.show_profile('a')": "TypeError",
        "input()": "input() is not available",
        "print(datetime.datetime.now())": "2023-05-18 12:00:00",
        "import os": "the module 'os' is not available here",
        "y = 7": "Execution successful.",
        "print({'y': y, 'when': DateTime.now()})": '"y": 7',
        "for _ in range(1001): apis.supervisor.show_profile()": "exceeded the limit of 1000",
        "print('x' * 50_000)": "30000 characters left out",
        "apis.simple_note.search_notes(access_token='x' * 5_000_000)": "too large",
    }
    played = play("a0count_1", *codes)
    for step, (code, expected) in zip(played.steps, codes.items(), strict=True):
        assert expected in step.observation, code
        assert step.observation.startswith("Output:\n```\n")
        assert len(step.observation) < 20_200
    assert not played.steps[-1].is_over


def test_the_random_numbers_are_the_same_every_time(play):
    code = "print([random.random() for _ in range(3)])\nprint(apis.simple_note.search_notes.__doc__)"
    first, again, other = (play("a0count_1", code, seed=seed).seen for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_a_message_without_code_is_told_so_and_counts(client):
    environment = RemoteEnvironment({"max_interactions": 2}, client=client, env_type="appworld")
    try:
        environment.reset(Task(task_id="a0count_1", env_type="appworld"))
        first = environment.step({"role": "assistant", "content": "I think I will wait."})
        assert first.observation.startswith("No code was found in your message")
        assert not first.is_over
        last = environment.step({"role": "assistant", "content": "```json\n{}\n```"})
        assert (last.terminated, last.truncated) == (False, True)
        with pytest.raises(EnvironmentFailed, match="over"):
            environment.step({"role": "assistant", "content": "```python\nx = 1\n```"})
    finally:
        environment.close()


def test_a_tool_call_is_an_action_too(client):
    environment = RemoteEnvironment({}, client=client, env_type="appworld")
    call = {"type": "function", "function": {"name": "execute", "arguments": '{"code": "print(6 * 7)"}'}}
    try:
        environment.reset(Task(task_id="a0count_1", env_type="appworld"))
        answer = environment.step({"role": "assistant", "content": "", "tool_calls": [call]})
        assert answer.observation == "Output:\n```\n42\n```"
    finally:
        environment.close()
