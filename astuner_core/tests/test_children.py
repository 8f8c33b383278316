"""What an agent's own code starts ends with its episode; what may serve other episodes goes on."""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Episode, SamplingParams, StopReason
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner_testing.fakes import FakeEngine, fake_config, make_tokenizer, workflow_task
from tests.table import table

TOKENIZER = make_tokenizer()
CODE = """
import asyncio, subprocess, sys, threading, time
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput

STUBBORN = "trap '' TERM; sleep 600 & echo ready; wait; sleep 600"
FOLDER = {folder!r}
LIBRARY = {{}}
exec(compile("import subprocess\\ndef start(*a, **k): return subprocess.Popen(*a, **k)", {library!r}, "exec"), LIBRARY)

def keep(process):
    with open(FOLDER + "/pids", "a") as file:
        print(process.pid, file=file)
    sys.__dict__.setdefault("kept_processes", []).append(process)  # or else Python warns that it runs still
    return process

class Base(Workflow):
    reward = 1.0
    async def execute(self, workflow_task, model_tuner):
        reply = await model_tuner.chat([{{"role": "user", "content": "hi"}}])
        await self.start()
        return WorkflowOutput(reward=self.reward, response=reply.text)

class Asyncio(Base):
    async def start(self):
        keep(await asyncio.create_subprocess_exec("sleep", "600"))

class Shell(Base):
    async def start(self):
        process = keep(await asyncio.create_subprocess_shell(STUBBORN, stdout=subprocess.PIPE))
        await process.stdout.readline()
        for child in __import__("psutil").Process(process.pid).children():
            keep(child)

class Raises(Base):
    async def start(self):
        keep(subprocess.Popen(["sleep", "600"], start_new_session=True, env={{}}))
        raise ValueError("and then")

class InATask(Base):
    async def start(self):
        async def begin():
            keep(subprocess.Popen(["sleep", "600"]))
        await asyncio.create_task(begin())

class Plain(Workflow):
    def execute(self, workflow_task, model_tuner):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        keep(subprocess.Popen(["sleep", "600"]))
        return WorkflowOutput(reward=1.0, response=model_tuner.chat_sync([{{"role": "user", "content": "hi"}}]).text)

class OfALibrary(Base):
    async def start(self):
        keep(LIBRARY["start"](["sleep", "600"]))

class OfAConstructor(Base):
    pool = None
    def __init__(self):
        OfAConstructor.pool = OfAConstructor.pool or keep(subprocess.Popen(["sleep", "600"]))
    async def start(self):
        pass

class Quiet(Base):
    reward = None
    async def start(self):
        subprocess.run(["true"], check=True)

class Mine(Judge):
    def judge(self, workflow_task, output):
        keep(subprocess.Popen(["sleep", "600"]))
        return JudgeOutput(reward=1.0)
"""


def play(folder: Path, workflow: str, judge: str = "") -> Episode:
    library = str(Path(sysconfig.get_path("purelib")) / "library.py")
    (folder / "mine.py").write_text(CODE.format(folder=str(folder), library=library))
    overrides = [f"astuner.rollout.workflow=mine.py->{workflow}"]
    overrides += [f"astuner.task_judge.judge=mine.py->{judge}"] * bool(judge)
    runner = EpisodeRunner(fake_config(folder, "", overrides))
    models = one_model(FakeEngine(["answer"], TOKENIZER), ChatCodec(TOKENIZER))
    return asyncio.run(runner.run(workflow_task(), models, SamplingParams(max_tokens=20)))


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "pids"
    file.touch()
    yield file
    for pid in map(int, file.read_text().split()):
        if runs(pid):
            psutil.Process(pid).kill()


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@table("workflow", ["Asyncio", "Shell", "Raises", "InATask", "Plain"])
def test_it_ends_with_its_episode(tmp_path: Path, workflow: str) -> None:
    (tmp_path / "pids").touch()
    episode = play(tmp_path, workflow)
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(started) == (2 if workflow == "Shell" else 1)
    assert [pid for pid in started if runs(pid)] == []
    raises = workflow == "Raises"
    assert episode.stop_reason is (StopReason.WORKFLOW_FAILED if raises else StopReason.COMPLETED), episode.error


@pytest.mark.parametrize(("workflow", "judge"), [("OfALibrary", ""), ("OfAConstructor", ""), ("Quiet", "Mine")])
def test_what_may_serve_others_goes_on(tmp_path: Path, pids: Path, workflow: str, judge: str) -> None:
    episode = play(tmp_path, workflow, judge)
    assert episode.stop_reason is StopReason.COMPLETED, episode.error
    (pid,) = map(int, pids.read_text().split())
    assert runs(pid)
