"""Instances, the zygote and the server are killed at random while 200 episodes are played.

Every episode ends completed, with the reward that its actions earned, or as a failure of its environment, without any.
No process is left, and memory returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections import Counter as Tally
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Episode, SamplingParams, StopReason, Task, WorkflowTask
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import FakeEngine, fake_config, make_tokenizer

from ._service import TOYS, Client, Program, eventually, processes_with
from .toys import GOAL, score_of

pytestmark = pytest.mark.slow

EPISODES = 200
AT_ONCE = 16
TOKEN = "a-token-of-sixteen-or-more"

WORKFLOW = """
import time, uuid
from astuner import Workflow, WorkflowOutput
class Mine(Workflow):
    async def execute(self, workflow_task, model_tuner):
        await model_tuner.chat(workflow_task.task.init_messages)
        over, done = False, []
        while not over:
            done.append(uuid.uuid4().hex)
            observation, reward, over, info = model_tuner.gym_step({"role": "assistant", "content": done[-1]})
            assert observation == str(len(done)), (observation, len(done))
            time.sleep(0.02)
        return WorkflowOutput(metadata={"done": done})
"""


class Chaos(threading.Thread):
    """Kills at random, and starts the server anew when that was hit."""

    def __init__(self, arguments: list[str], folder: Path, marker: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._arguments, self._folder, self._marker = arguments, folder, marker
        self._random = random.Random(seed)
        self.over = threading.Event()
        self.killed: Tally[str] = Tally()
        self.failure: BaseException | None = None
        self.program = self._program()

    def _program(self) -> Program:
        return Program(*self._arguments, folder=self._folder, token=TOKEN).__enter__()

    def run(self) -> None:
        try:
            while not self.over.wait(self._random.uniform(0.05, 0.25)):
                self.strike(self._random.choices(["instance", "zygote", "server"], [80, 8, 4])[0])
            for what in ("zygote", "server"):  # however quick it went: each at least once
                if not self.killed[what]:
                    self.strike(what)
        except BaseException as e:
            self.failure = e

    def strike(self, what: str) -> None:
        server = self.program.process.pid
        zygotes = [pid for pid in processes_with(self._marker) if parent(pid) == server]
        found = {
            "server": [server],
            "zygote": zygotes,
            "instance": [pid for pid in processes_with(self._marker) if parent(pid) in zygotes],
        }[what]
        if not found:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._random.choice(found), signal.SIGKILL)
            self.killed[what] += 1
        if what == "server":
            self.program.__exit__()
            self.program = self._program()


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


async def play(config: Any) -> list[Episode]:
    tokenizer = make_tokenizer()
    models = one_model(FakeEngine(lambda prompt: "on", tokenizer), ChatCodec(tokenizer))
    runner, room = EpisodeRunner(config), asyncio.Semaphore(AT_ONCE)

    async def one(n: int) -> Episode:
        task = Task(task_id=f"train-{n}", env_type="ledger")
        async with room:
            attempt = WorkflowTask(task=task, episode_id=f"e{n}", group_id="g")
            return await runner.run(attempt, models, SamplingParams(max_tokens=8))

    return list(await asyncio.gather(*(one(n) for n in range(EPISODES))))


@pytest.fixture
def chaos(tmp_path):
    toys = tmp_path / "toys.py"
    toys.write_text(TOYS.read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [f"{toys}->Ledger", "--port", str(port), "--max-instances", str(AT_ONCE)]
    chaos = Chaos(arguments, tmp_path, str(toys), seed=7)
    yield chaos
    chaos.over.set()
    if chaos.ident is not None:
        chaos.join(60)
    chaos.program.__exit__()


def test_chaos(chaos, tmp_path, monkeypatch):
    port, marker = chaos.program.port, str(tmp_path / "toys.py")
    (tmp_path / "mine.py").write_text(WORKFLOW)
    client = Client(port, token=TOKEN)
    size = lambda: client.metric("astuner_env_resident_bytes", environment="ledger")  # noqa: E731
    before = size()

    monkeypatch.setenv("ASTUNER_ENV_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("ASTUNER_ENV_TOKEN", TOKEN)
    monkeypatch.setattr("astuner_env.env_service.client.FIRST_PAUSE", 0.2)
    settings = "    max_retries: 1\n  task_judge:\n    judge: env_service\n"
    config = fake_config(tmp_path, f"  rollout:\n    workflow: mine.py->Mine\n{settings}")
    chaos.start()
    began = time.monotonic()
    try:
        episodes = asyncio.run(play(config))
    finally:
        chaos.over.set()
        chaos.join(60)
    assert chaos.failure is None, chaos.failure
    assert not chaos.is_alive()

    ends = Tally(e.stop_reason for e in episodes)
    told = {"ends": ends, "killed": chaos.killed, "seconds": round(time.monotonic() - began, 1)}
    assert len(episodes) == EPISODES
    assert set(ends) <= {StopReason.COMPLETED, StopReason.ENVIRONMENT_FAILED}, [e.error for e in episodes]
    for episode in episodes:
        if episode.stop_reason is StopReason.COMPLETED:
            done = episode.output.metadata["done"]
            assert len(done) == GOAL
            assert episode.verdict.reward == score_of(done)
        else:
            assert episode.verdict is None
            assert episode.error
    print(told)
    assert ends[StopReason.COMPLETED] > 0, told
    assert all(chaos.killed[what] for what in ("instance", "zygote", "server")), told
    assert any(e.stop_reason is StopReason.ENVIRONMENT_FAILED or e.retries for e in episodes), told

    eventually(lambda: client.get("/v1/info").json["active"] == 0)
    client.create("one-more", env_type="ledger")  # starts the zygote, if that was hit last
    assert client.release("one-more").data is None
    assert size() < before + (8 << 20), told
    assert chaos.program.signal(signal.SIGTERM) == 0
    eventually(lambda: not processes_with(marker))
    eventually(lambda: not list(tmp_path.glob("astuner-env-*")))
