"""What users asked, as samples of new tasks: with the system prompt that they were asked under, and no half talks."""

from __future__ import annotations

import json

import pytest

from astuner import load_config
from astuner.contracts.errors import DataError
from astuner.runs.tasks import read_tasks
from astuner.testing import ScriptedModel
from astuner_flywheel.generation.entry import Generation
from tests.table import table

from ._writer import expander, experiment, kind, rows, shown

SYSTEM = {"role": "system", "content": "Answer with a number."}
SAID = [SYSTEM, {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "What can I do for you?"}]


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))


def generation(folder, url, *histories, **section):
    """Of samples that have these messages before them, as `astuner data import` writes them."""
    lines = [{"task_id": f"trace-{i}", "main_query": f"Tom has {i + 2} red boxes with {i + 3} nails. How many nails?",
              "init_messages": history, "metadata": {"answer": str((i + 2) * (i + 3))}}
             for i, history in enumerate(histories)]  # fmt: skip
    (folder / "users.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    section = {"seeds": "users.jsonl", "tasks": 6, "validation_share": 0, **section}
    config = load_config(experiment(folder, url, section))
    return Generation(config), config


def test_new_tasks_have_the_system_prompt_of_the_users(tmp_path):
    with ScriptedModel(expander()) as server:
        made, config = generation(tmp_path, server.base_url, [SYSTEM], [SYSTEM], SAID, use_seeds="train")
        made.run()
        tasks = {task.task_id: task for task in read_tasks(config).train}
        bodies = server.requests
    assert len(tasks) == 9
    assert [list(tasks[f"trace-{i}"].init_messages) for i in range(3)] == [[SYSTEM], [SYSTEM], SAID]
    new = [task for name, task in tasks.items() if name.startswith("gen-")]
    assert [list(task.init_messages) for task in new] == [[SYSTEM]] * 6
    for task in new:  # the third sample means nothing without what was said before
        assert set(task.metadata["provenance"]["seed_tasks"]) == {"trace-0", "trace-1"}
    asked = [shown(body, "SAMPLES") for body in bodies if kind(body) == "write from samples"]
    assert asked
    assert not any("4 red boxes" in text for text in asked)


def test_users_under_different_prompts_make_tasks_without_one(tmp_path):
    with ScriptedModel(expander()) as server:
        made, _ = generation(tmp_path, server.base_url, [SYSTEM], [])
        made.run()
    lines = rows(made.folder.train)
    assert len(lines) == 6
    assert not any("init_messages" in line for line in lines)


@table(
    ("history", "says"),
    [
        (SAID, "every sample in .*users.jsonl continues a conversation .*add samples that can be understood alone"),
        ("hello", "users.jsonl:1: init_messages must be a list of messages"),
        ([{"content": "no role"}], "users.jsonl:1: init_messages must be a list of messages"),
    ],
)
def test_samples_that_cannot_be_shown_are_refused_before_anybody_is_asked(tmp_path, history, says):
    with ScriptedModel(expander()) as server:
        made, _ = generation(tmp_path, server.base_url, history)
        with pytest.raises(DataError, match=says):
            made.plan()
        with pytest.raises(DataError, match=says):
            made.run()
        assert not server.requests
