"""Attempts, judges, environments and the log start from the task of the data, whatever user code does to its copy."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Episode, Split, StopReason, Task
from astuner.rollout.models import EpisodesHere, one_model, sampling_for
from astuner.rollout.pool import RolloutPool
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.task_copy import copy_data, copy_task
from astuner_testing.fakes import FakeEngine, fake_config, make_tokenizer
from tests.table import table

TOKENIZER = make_tokenizer()

METADATA = {
    "hints": ["Use the calculator."],
    "limits": {"calls": 3, "tools": [{"name": "add", "tags": ["math"]}]},
    "numbers": [3, 1, 2],
    "answer": "18",
}
MESSAGES = ({"role": "system", "content": "You count."}, {"role": "user", "content": [{"type": "text", "text": "Go."}]})
TASK = Task(task_id="t", main_query="How many?", init_messages=list(MESSAGES), metadata=METADATA)

CODE = """
import json
from astuner import Environment, Judge, JudgeOutput, Workflow, WorkflowOutput
from astuner.contracts.environment import StepResult
from astuner.contracts.errors import EnvironmentFailed, JudgeFailed
from astuner.contracts.judge import GroupJudge

seen = []
def look(where, task):
    shown = {{"query": task.main_query, "messages": list(task.init_messages), "metadata": task.metadata}}
    seen.append((where, json.loads(json.dumps(shown, default=sorted))))

class W(Workflow):
    async def execute(self, workflow_task, model_tuner):
        task = workflow_task.task
        look("workflow", task)
        reply = await model_tuner.chat([*task.init_messages, {{"role": "user", "content": "hi"}}])
        metadata = task.metadata
{workflow}
        return WorkflowOutput()

class J(Judge):
    def judge(self, workflow_task, output):
        task, metadata = workflow_task.task, workflow_task.task.metadata
        look("judge", task)
{judge}
        return JudgeOutput(reward=1.0)

class G(GroupJudge):
    def judge_group(self, attempts):
        for attempt in attempts:
            task, metadata = attempt.workflow_task.task, attempt.workflow_task.task.metadata
            look("judge", task)
{judge_group}
        return [JudgeOutput(reward=float(n)) for n, _ in enumerate(attempts)]

class E(Environment):
    rules = [{{"role": "system", "content": "Rules."}}, {{"role": "user", "content": "Play."}}]
    @classmethod
    def tasks(cls, split, params):
        return iter(())
    def reset(self, task):
        metadata = task.metadata
        look("environment", task)
{environment}
        return StepResult(observation="go", messages=self.rules)
    def step(self, action):
        return StepResult(observation="over", terminated=True)
    def evaluate(self):
        return 1.0
"""


def play(folder: Path, task: Task, *, judge_class: str = "J", **code: str) -> tuple[list[Episode], list[Any]]:
    """Run three attempts of two groups and two validations; return all episodes and what user code saw at its start."""
    bodies = {name: code.get(name, "pass") for name in ("workflow", "judge", "environment")}
    bodies["judge_group"] = bodies["judge"]
    shifts = {"judge_group": 12}
    indented = {
        name: "\n".join(f"{' ' * shifts.get(name, 8)}{line}" for line in body.splitlines())
        for name, body in bodies.items()
    }
    (folder / "mine.py").write_text(CODE.format(**indented))
    names = ["astuner.rollout.workflow=mine.py->W", f"astuner.task_judge.judge=mine.py->{judge_class}"]
    config = fake_config(folder, "  rollout: {max_retries: 2, max_env_worker: 1}\n", names)
    runner = EpisodeRunner(config)
    models = one_model(FakeEngine(["answer"] * 99, TOKENIZER), ChatCodec(TOKENIZER))
    host = EpisodesHere(runner, models)

    async def everything() -> list[Episode]:
        episodes: list[Episode] = []
        for split, ids in ((Split.TRAIN, ("g1", "g2")), (Split.VALIDATION, ("v1", "v2"))):
            sampling = sampling_for(config, split)
            pool = RolloutPool(
                lambda attempt, sampling=sampling: host.run(attempt, sampling=sampling),
                max_parallel=1,
                judge_group=host.judge_group,
            )
            groups = await pool.run_groups([(group_id, task) for group_id in ids], repeat=3, split=split)
            episodes += [episode for group in groups for episode in group.episodes]
        return episodes

    episodes = asyncio.run(everything())
    module = runner._parts().make_workflow().execute.__func__.__globals__  # type: ignore[union-attr]
    return episodes, module["seen"]


def check(episodes: list[Episode], seen: list[Any], task: Task, before: Task) -> None:
    assert task == before
    assert len(episodes) == 12
    assert {e.stop_reason for e in episodes} == {StopReason.COMPLETED}
    assert {e.workflow_task.task.main_query for e in episodes} == {before.main_query}
    assert all(e.workflow_task.task == before for e in episodes)
    for where, shown in seen:
        messages = list(map(dict, before.init_messages))
        expected = {"query": before.main_query, "messages": messages, "metadata": before.metadata}
        assert shown == expected, where


# Each row is one way to change a task in place.
CHANGES = [
    "metadata['hints'].append(reply.text)",
    "metadata['hints'].clear()",
    "metadata['limits']['calls'] -= 1",
    "metadata['limits']['tools'][0]['tags'].append('new')",
    "metadata['limits']['tools'].pop()",
    "metadata['numbers'].sort()",
    "metadata['numbers'].reverse()",
    "metadata['numbers'] += [9]",
    "metadata.update(answer='19', extra=[1])",
    "del metadata['answer']",
    "metadata.setdefault('memory', []).append(reply.text)",
    "task.init_messages.append({'role': 'user', 'content': 'more'})",
    "task.init_messages[0]['content'] += ' Hurry.'",
    "task.init_messages[1]['content'][0]['text'] = 'Stop.'",
    "task.init_messages.pop(0)",
    "task.init_messages.clear()",
    "object.__setattr__(task, 'metadata', {})",
    "object.__setattr__(task, 'main_query', 'Another?')",
    "object.__setattr__(workflow_task, 'task', None)",
    "model_tuner.workflow_task.task.metadata['hints'].append('x')",
    # a list of another attempt, kept in a module, is not this attempt's
    "globals().setdefault('kept', metadata['hints']).append('x')",
    # before a retry
    "metadata['hints'].append('x')\nif workflow_task.attempt == 1 and len(seen) % 2: raise EnvironmentFailed('down')",
]


@pytest.mark.slow
@table("workflow", CHANGES)
def test_a_workflow_that_changes_its_task_changes_no_other(tmp_path: Path, workflow: str) -> None:
    task = replace(TASK, init_messages=copy.deepcopy(TASK.init_messages), metadata=copy.deepcopy(METADATA))
    episodes, seen = play(tmp_path, task, workflow=workflow)
    check(episodes, seen, task, TASK)


@pytest.mark.slow
@table(
    ("judge_class", "judge"),
    [
        ("J", "metadata['hints'].append('judged')"),
        ("J", "metadata['answer'] = '19'"),
        ("J", "metadata.clear()"),
        ("J", "task.init_messages[0]['content'] = ''"),
        ("J", "metadata['numbers'].sort()\nif len(seen) % 3 == 0: raise JudgeFailed('ask again')"),
        ("G", "metadata['hints'].append('judged')"),
        ("G", "del metadata['limits']['calls']"),
        ("G", "task.init_messages.clear()"),
        ("G", "object.__setattr__(task, 'metadata', {})"),
        ("G", "metadata['numbers'].pop()\nif len(seen) % 11 == 0: raise JudgeFailed('ask again')"),
    ],
)
def test_a_judge_that_changes_the_task_changes_no_other(tmp_path: Path, judge_class: str, judge: str) -> None:
    task = replace(TASK, init_messages=copy.deepcopy(TASK.init_messages), metadata=copy.deepcopy(METADATA))
    episodes, seen = play(tmp_path, task, judge_class=judge_class, judge=judge)
    check(episodes, seen, task, TASK)


@table(
    "environment",
    [
        "metadata['hints'].append('in the room')",
        "metadata['limits']['calls'] = 0",
        "metadata.clear()",
        "object.__setattr__(task, 'main_query', 'Another?')",
        "metadata['numbers'].append(4)\nif len(seen) == 3: raise EnvironmentFailed('down')",
    ],
)
def test_an_environment_that_changes_its_task_changes_no_other(tmp_path: Path, environment: str) -> None:
    task = replace(TASK, init_messages=(), env_type="mine.py->E", metadata=copy.deepcopy(METADATA))
    before = replace(task, metadata=METADATA)
    change_messages = "task.init_messages[0]['content'] += ' Hurry.'\nmetadata['hints'].append('x')"
    episodes, seen = play(tmp_path, task, environment=environment, workflow=change_messages, judge=change_messages)
    assert task == before
    assert {e.stop_reason for e in episodes} == {StopReason.COMPLETED}
    rules = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Play."}]
    assert all(e.workflow_task.task == replace(before, init_messages=tuple(rules)) for e in episodes)
    for where, shown in seen:
        messages = [] if where == "environment" else rules
        assert shown == {"query": before.main_query, "messages": messages, "metadata": METADATA}, where


class Point:
    def __init__(self, place: list[int]) -> None:
        self.place = place


class Numbered(Task):
    """A reader's own kind of task."""


@table(
    "value",
    [
        {"a": [1, {"b": [2.5, None, True, "x", b"y"]}]},
        [[], {}, ()],
        ([1], {"a": [2]}),
        OrderedDict(a=[1]),
        defaultdict(list, a=[1]),
        {1, 2},
        {"days": MappingProxyType({"monday": [1]})},
        bytearray(b"data"),
        {("a", 1): [1]},
    ],
)
def test_copies_are_equal_of_the_same_type_and_independent(value: Any) -> None:
    copied = copy_data(value)
    assert copied == value
    assert type(copied) is type(value)
    assert not mutable_parts(copied) & mutable_parts(value)


def mutable_parts(value: Any) -> set[int]:
    """The ids of all lists, dicts and other mutable containers in a value."""
    if isinstance(value, (dict, MappingProxyType)):
        return {id(value)}.union(*map(mutable_parts, value.values()))
    if isinstance(value, list):
        return {id(value)}.union(*map(mutable_parts, value))
    if isinstance(value, tuple):
        return set().union(*map(mutable_parts, value))
    return {id(value)} if isinstance(value, (set, bytearray)) else set()


def test_objects_that_are_no_json_are_copied_where_that_is_possible() -> None:
    lock, point = threading.Lock(), Point([1])
    cycle: list[Any] = [1]
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    copied = copy_data({"lock": lock, "point": point, "same": point, "cycle": cycle})
    assert copied["lock"] is lock
    assert copied["point"] is not point
    assert copied["point"] is copied["same"]
    assert copied["point"].place is not point.place
    assert copied["cycle"] is not cycle
    assert copied["cycle"][1] is copied["cycle"]
    assert copy_data(deep) is deep


def test_a_task_of_a_readers_own_class_stays_one() -> None:
    task = Numbered(task_id="t", metadata={"hints": []})
    copied = copy_task(task)
    assert isinstance(copied, Numbered)
    assert copied.metadata == task.metadata
    assert copied.metadata is not task.metadata
