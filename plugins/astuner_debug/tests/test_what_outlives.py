"""What agents start is gone when their run is, however it ends; and a run that ends without a word is told of."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from astuner import process_start_time
from astuner.cli import main
from astuner_debug.left_behind import RUN_VARIABLE, command_line

RUN = """
import sys
from contextlib import contextmanager
from astuner.runs import preflight
from astuner.contracts.backbone import Served
from astuner_debug.backbone import DebugBackbone
from astuner.cli import main
from astuner.testing import FakeEngine, make_tokenizer

class Backbone(DebugBackbone):
    def check(self):
        pass

    @contextmanager
    def serve(self, model_path=None):
        tokenizer = make_tokenizer()
        yield Served(engine=FakeEngine(lambda prompt: "4", tokenizer), tokenizer=tokenizer, name="fake")

preflight.make_backbone = lambda config: Backbone(config)
main(["run", "exp.yaml", *sys.argv[1:]])
"""
EXPERIMENT = """
astuner:
  backbone: debug
  model: {path: .}
  debug: {debug_first_n_tasks: 2, debug_max_parallel: 2}
  rollout: {workflow: "agent.py->Agent", episode_timeout: 300}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
"""
AGENT = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from astuner import Workflow, WorkflowOutput

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)", "--api-key", "planted-secret"]

def fork():
    if (pid := os.fork()) == 0:
        while True:
            time.sleep(1)
    return pid

def orphan():
    return int(subprocess.check_output(["sh", "-c", "sleep 600 >/dev/null & echo $!"]))

def start():
    return [
        subprocess.Popen(SLEEP).pid, subprocess.Popen(SLEEP, start_new_session=True).pid, orphan(), fork(),
        *([subprocess.Popen(SLEEP, env={}).pid] if ENDS == "return" else []),
    ]

def end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        os.abort()
    if how == "os._exit":
        thread = threading.Thread(target=lambda: os._exit(1))
        thread.start()
        thread.join()
        if (pid := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        os._exit(0)  # the run's

ENDS = Path(__file__).with_name("ends").read_text()

class Agent(Workflow):
    def __init__(self):  # what `execute` starts ends with the episode
        with open(Path(__file__).with_name("pids"), "a") as file:
            print(*start(), file=file)

    async def execute(self, workflow_task, model_tuner):
        await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        if not workflow_task.episode_id.startswith("d0000000"):
            end(ENDS)
        return WorkflowOutput(reward=1.0, is_success=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "tasks.jsonl").write_text('{"main_query": "2 + 2?"}\n{"main_query": "1 + 3?"}\n')
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    return tmp_path


def run(folder: Path, ends: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A run of two episodes that end so."""
    (folder / "ends").write_text(ends)
    command = [sys.executable, "run.py", "--run-dir", "run"]
    environ = {**os.environ, "PLANTED_API_KEY": "planted-too", **more}
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=300, env=environ, check=False)


def still_there(folder: Path) -> list[str]:
    """What agents have started, and still runs."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert pids
    return [command_line(psutil.Process(pid)) for pid in pids if process_start_time(pid) is not None]


@pytest.mark.slow
def test_what_agents_start_ends_with_the_run_and_is_named(folder: Path) -> None:
    ended = run(folder, "return")
    assert ended.returncode == 0, ended.stderr
    assert still_there(folder) == []
    log = (folder / "run.debug" / "run.log").read_text()
    (line,) = (line for line in log.splitlines() if "still running when the run finished: " in line)
    for pid in (folder / "pids").read_text().split():
        assert re.search(rf"\b{pid}\b", line)
    assert line.split(" ", 2)[2] in ended.stderr
    assert "planted" not in log


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "abort"])
def test_a_run_that_ends_without_a_word_is_told_of_and_leaves_nothing(folder: Path, how: str) -> None:
    ended = run(folder, how)
    assert ended.returncode == -(signal.SIGKILL if how == "kill" else signal.SIGABRT)
    assert still_there(folder) == []  # what was left held standard error
    log = (folder / "run.debug" / "run.log").read_text()
    assert "ended unexpectedly: it was killed" in log
    assert "or called C's exit; ended its remaining processes: " in log
    assert log.splitlines()[-1].split(" ", 2)[2] in ended.stderr
    if how == "abort":  # what Python can tell of a crash
        assert f'File "{folder / "agent.py"}", line ' in ended.stderr


@pytest.mark.slow
def test_os_exit_ends_its_episode_only_or_a_thread(folder: Path) -> None:
    ended = run(folder, "os._exit")
    assert ended.returncode == 0, ended.stderr
    line = AGENT.splitlines().index("        os._exit(0)  # the run's") + 1
    place = f"{folder / 'agent.py'}:{line}"
    assert f"the workflow raised Exited: os._exit(0) would end the run ({place} in end)" in ended.stderr
    assert "rewards [1.0]" in ended.stderr
    assert "Exited: os._exit(1) would end the run" in ended.stderr  # in a thread of the agent's own, as Python tells it


@pytest.mark.slow
def test_what_a_killed_run_left_is_found_by_astuner_kill(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where what waited beside it was killed, too."""
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, RUN_VARIABLE: f"{os.getpid()} 1.0 {folder / 'run'}"},
    )
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_VARIABLE: "1"})  # of somebody who calls it so
    try:
        for more, says in ((["--dry-run"], "would end"), (["--run-dir", str(folder / "run")], "ended")):
            with pytest.raises(SystemExit):
                main(["kill", *more])
            out = capsys.readouterr().out
            assert f"{says:13}  {left.pid:8}  left by a run: {sys.executable} -c" in out
            assert out.rstrip().endswith(str(folder / "run"))
        assert left.wait(timeout=60) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()
