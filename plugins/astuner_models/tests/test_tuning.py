"""`astuner.tune`: what it trains is what `astuner run` trains with the file that a person would have written."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import astuner
from astuner.cli import main
from astuner.contracts.errors import ConfigError, Interrupted
from astuner.contracts.events import EpisodeEnded, RunResumed, RunStarted, StepEnded
from astuner_local.backbone import LocalBackbone
from tests.table import table

AGENT = """
from astuner import JudgeOutput, WorkflowOutput


async def solve(task, model):
    reply = await model.chat([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=reply.message["content"])


async def letters(task, response):
    return JudgeOutput(reward=sum(map(ord, response)) % 7 / 7 if task["answer"] else -1)
"""
ROWS: list[dict[str, Any]] = [
    {"question": f"Tom has {n} boxes with 3 pens.", "answer": str(3 * n)} for n in range(2, 9)
]
SETTINGS: dict[str, Any] = {
    "astuner.trainer_common": {"total_steps": 2, "save_freq": 1},
    "astuner.trainer_common.optim.lr": 1e-3,
    "astuner.data.train_batch_size": 2,
    "astuner.rollout": {"num_repeat": 3, "max_model_len": 256, "max_response_length_in_one_turn": 20},
}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "its_agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield importlib.import_module("its_agent")
    for name in set(sys.modules) - known:
        if name == "its_agent" or name.startswith("astuner_user_"):
            del sys.modules[name]


def tune(workflow: Any, **options: Any) -> Any:
    given = {"tasks": ROWS, "model": "tiny-calculator", "settings": SETTINGS, **options}
    return astuner.tune(workflow, **given)


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run without what takes time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time", "throughput/", "rollout/seconds"))} for row in rows
    ]


def test_it_trains_what_the_command_trains_with_a_file_of_the_persons_own(agent: Any, tmp_path: Path) -> None:
    result = tune(agent.solve, judge=agent.letters, validation=ROWS[:2])
    assert result.run_dir == tmp_path / "launcher_record" / "solve"
    experiment: dict[str, Any] = {
        "model": {"path": "tiny-calculator"},
        "task_judge": {"judge": "its_agent.py->letters"},
    }
    experiment |= {"trainer_common": {"total_steps": 2, "save_freq": 1, "optim": {"lr": 1e-3}}}
    experiment |= {"data": {"train_batch_size": 2}}
    experiment |= {"rollout": {"workflow": "its_agent->solve", **SETTINGS["astuner.rollout"]}}
    experiment["task_reader"] = {"type": "jsonl", "jsonl": {}}
    for split, rows in (("training", ROWS), ("validation", ROWS[:2])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        experiment["task_reader"]["jsonl"][split] = {"file_path": f"{split}.jsonl"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"astuner": experiment}))
    command("run", "own.yaml", "--backbone", "local")
    typed = numbers(tmp_path / "launcher_record" / "own")
    assert [row["step"] for row in typed] == [0, 1, 2, 2]
    assert numbers(result.run_dir) == typed
    assert len({row["reward/mean"] for row in typed if "reward/mean" in row}) == 2


def test_a_run_is_watched_and_stopped_and_the_command_goes_on_with_it(agent: Any, tmp_path: Path) -> None:
    tuning = tune(agent.solve, judge=agent.letters, name="watched", wait=False)
    seen = []
    for event in tuning.events():
        seen.append(event)
        if isinstance(event, StepEnded) and event.step == 1:
            tuning.stop()
    with pytest.raises(Interrupted):
        tuning.result(timeout=60)
    assert any(isinstance(event, EpisodeEnded) for event in seen)
    assert tuning.progress is not None
    assert tuning.progress.total_steps == 2
    assert list(tuning.events()) == []
    assert repr(tuning).startswith("watched: Interrupted: ")
    assert [row["step"] for row in tuning.view.rows] == [1]
    file = tmp_path / "launcher_record" / "watched.experiment" / "watched.yaml"
    command("run", str(file))
    folder = tmp_path / "launcher_record" / "watched"
    assert "continuing the run in" in (folder / "run.log").read_text()
    assert [row["step"] for row in numbers(folder)] == [1, 2]
    resumed = astuner.Tuning("watched")
    for event in (RunStarted(run_dir=folder, name="watched", settings={}), RunResumed(step=2, state={})):
        resumed.handle(event)
    assert [row["step"] for row in resumed.view.rows] == [1, 2]


def test_a_function_of_a_notebook_trains_beside_its_event_loop_and_says_that_only_it_can_go_on(
    agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def typed(task: dict[str, Any], model: Any) -> Any:
        return await agent.solve(task, model)

    async def cell() -> Any:
        return tune(typed, judge=agent.letters)

    with pytest.warns(UserWarning, match=r"^typed cannot be imported .*: only this process can resume"):
        result = asyncio.run(cell())
    assert (result.run_dir / "summary.json").exists()
    workers = replace(LocalBackbone.capabilities, in_process=False)
    monkeypatch.setattr(LocalBackbone, "capabilities", workers)
    with pytest.raises(ConfigError, match="workers of the backbone 'local' must import it"):
        asyncio.run(cell())


@table("file", [None, "<stdin>"])
def test_a_class_of_a_notebook_or_of_what_is_piped_to_python_is_planned(
    agent: Any, monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    cell = ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", cell)
    cell.__dict__.update({"__file__": file} if file else {})
    execute = "    async def execute(self, workflow_task, model_tuner): ...\n"
    exec(f"import astuner\nclass Typed(astuner.Workflow):\n{execute}", vars(cell))
    with pytest.warns(UserWarning, match=r"^Typed cannot be imported"):
        plan = tune(cell.Typed, judge=agent.letters, dry_run=True).plan
    assert plan.lines["workflow"] == "Typed from this process"


def test_other_tasks_under_the_same_name_are_another_run(agent: Any, tmp_path: Path) -> None:
    plan = tune(agent.solve, judge=agent.letters, dry_run=True).plan
    assert plan.lines["tasks"].startswith("7 to train on, none")
    tasks = [astuner.Task(task_id=str(n), main_query=row["question"], metadata=row) for n, row in enumerate(ROWS[:3])]
    other = tune(agent.solve, judge=agent.letters, tasks=tasks, dry_run=True).plan
    assert other.lines["tasks"].startswith("3 to train on")
    assert len(list((tmp_path / "launcher_record" / "solve.experiment").glob("training-*.jsonl"))) == 2


def test_ipython_prints_the_message_of_an_error_without_a_traceback(agent: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        tune(agent.solve, backbone="locl")
    (text,) = raised.value._render_traceback_()
    assert text.startswith("ConfigError: ")
    assert "did you mean local?" in text


def test_what_is_wrong_is_said_with_what_to_write(agent: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="a class, a function or a name, not partial"):
            tune(partial(agent.solve))
        with pytest.raises(ConfigError, match=r"task 0 of training is not JSON: .*set"):
            tune(agent.solve, tasks=[{"question": "?", "tags": {1}}])
        with pytest.raises(ConfigError, match=r"^settings cannot be written as YAML: .*Path"):
            tune(agent.solve, settings={"astuner.model.chat_template": Path("a.jinja")})
        for written, what in (
            ("sk-1234567890", "a secret would be written to a file"),
            ("${oc.env:NOT_SET}", "NOT_SET"),
        ):
            with pytest.raises(ConfigError, match=what):
                tune(agent.solve, settings={"astuner.helper_models.big": {"api_key": written}})
        assert not any(b"sk-123" in file.read_bytes() for file in Path().rglob("*.yaml"))
        with pytest.raises(ConfigError, match="the task reader 'huggingface' also provides validation tasks"):
            tune(agent.solve, tasks="huggingface", validation=ROWS)


def test_two_functions_of_one_name_stay_two(agent: Any) -> None:
    with pytest.warns(UserWarning, match=r"^<lambda>, <lambda>_1 cannot be imported"):
        result = tune(lambda task, model: agent.solve(task, model), judge=lambda task, response: len(response) > 3)
    assert result.run_dir.name == "lambda"
