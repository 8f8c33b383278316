"""A real language model behind `astuner serve`, asked as judge and as writer of tasks by the prompts that are shipped.

SmolLM2-135M is far too small to judge or to write: what it says is rarely the JSON that was asked for. So this shows
that the prompts arrive whole and are answered, and that an answer which cannot be read is no verdict and no task, and
is said.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner_smollm2.cache import model_folder

HELPER: dict[str, Any] = {"model": "any", "max_tokens": 80, "temperature": 0, "api_key_env": "SMOL_KEY", "timeout": 300}
WORKFLOW = """
from astuner import Workflow, WorkflowOutput


class Fixed(Workflow):
    async def execute(self, workflow_task, model_tuner):
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(response="12", metadata={"final_answer": "12"})
"""


def astuner(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ASTUNER_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "astuner", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def write(folder: Path, name: str, settings: dict[str, Any]) -> None:
    (folder / name).write_text(yaml.safe_dump(settings), encoding="utf-8")


def lines(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Where it answers, and its key."""
    folder = tmp_path_factory.mktemp("served")
    rollout = {"max_model_len": 2048, "max_response_length_in_one_turn": 80}
    model = {"path": str(model_folder("smollm2-135m")), "chat_template": "hermes"}
    write(folder, "served.yaml", {"astuner": {"model": model, "rollout": rollout}})
    command = [sys.executable, "-m", "astuner", "serve", "served.yaml", "--backbone", "local", "--checkpoint", "base"]
    command += ["--port", "0", "--json"]
    environment = {**os.environ, "ASTUNER_HOME": str(folder / "home")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(240, process.kill)  # a process that never speaks
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        yield json.loads(Path(json.loads(line)["access_file"]).read_text())
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def asked(folder: Path, purpose: str) -> list[tuple[str, int, int, int, str]]:
    """What the helper was asked for ``purpose``: state, tokens of prompt and answer, whether estimated, error."""
    with sqlite3.connect(folder / "home" / "helper_models" / "calls.sqlite") as db:
        wanted = "SELECT state, prompt_tokens, completion_tokens, estimated, error FROM calls WHERE purpose LIKE ?"
        return list(db.execute(wanted, (f"%{purpose}%",)))


@pytest.mark.slow
@pytest.mark.parametrize("structured", ["json_schema", "none"])
def test_asked_as_a_judge(server: dict[str, Any], structured: str, tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text(WORKFLOW)
    lines(tmp_path, "tasks.jsonl", [{"question": "What is 5 + 7?"}, {"question": "What is 6 + 6?"}])
    helper = {**HELPER, "base_url": server["base_url"], "structured": structured}
    judge = {"judge": "llm_judge", "llm_judge": {"helper_model": "real", "criteria": "The answer is right."}}
    settings = {
        "model": {"path": "tiny-calculator"},
        "helper_models": {"real": helper},
        "task_reader": {"type": "jsonl", "jsonl": {"training": {"file_path": "tasks.jsonl"}}},
        "task_judge": judge,
        "rollout": {"workflow": "workflow.py->Fixed", "num_repeat": 2, "max_response_length_in_one_turn": 4},
        "data": {"train_batch_size": 2},
        "trainer_common": {"total_steps": 1, "val_before_train": False},
    }
    write(tmp_path, "judged.yaml", {"astuner": settings})
    done = astuner(tmp_path, "run", "judged.yaml", "--backbone", "local", SMOL_KEY=server["api_key"])
    calls = asked(tmp_path, "judge")
    assert calls
    assert not any(estimated for *_, estimated, _ in calls), "the server counted: it read and answered"
    assert min(prompt for _, prompt, *_ in calls) > 200, "the fences and the criteria are in it"
    assert min(completion for _, _, completion, *_ in calls) > 0
    unread = [error for state, *_, error in calls if state == "failed"]
    if len(unread) == len(calls):  # no verdict: no reward, and it is said why
        assert done.returncode != 0
        assert "the helper model 'real' gave no valid answer" in done.stdout + done.stderr
    else:
        assert done.returncode == 0, done.stderr
    print(f"{structured}: {len(calls) - len(unread)} of {len(calls)} verdicts could be read")


@pytest.mark.slow
@pytest.mark.parametrize("structured", ["json_schema", "none"])
def test_asked_as_a_writer_of_tasks(server: dict[str, Any], structured: str, tmp_path: Path) -> None:
    samples = [
        {"id": "a", "question": "Tom has 6 boxes with 4 eggs in each. How many eggs?", "answer": "24"},
        {"id": "b", "question": "Mia puts 3 cups on each of 5 tables. How many cups?", "answer": "15"},
    ]
    lines(tmp_path, "samples.jsonl", samples)
    helper = {**HELPER, "base_url": server["base_url"], "structured": structured}
    generation = {"helper_model": "real", "seeds": "samples.jsonl", "tasks": 2, "use_seeds": "validation"}
    settings = {
        "model": {"path": "tiny-calculator"},
        "helper_models": {"real": helper},
        "task_reader": {"type": "data_generation", "data_generation": generation},
    }
    write(tmp_path, "more.yaml", {"astuner": settings})
    done = astuner(tmp_path, "data", "generate", "more.yaml", SMOL_KEY=server["api_key"])
    calls = asked(tmp_path, "")
    assert calls
    assert not any(estimated for *_, estimated, _ in calls), "the server counted: it read and answered"
    assert min(prompt for _, prompt, *_ in calls) > 200, "the rules and the samples are in it"
    report = json.loads((tmp_path / "generated" / "more" / "report.json").read_text())
    assert "Traceback" not in done.stderr
    written = (tmp_path / "generated" / "more" / "train.jsonl").is_file()
    assert (done.returncode == 0) == written, done.stderr
    if not written:
        assert "no task resulted from the" in done.stderr
    print(f"{structured}: {json.dumps(report)[:600]}")
