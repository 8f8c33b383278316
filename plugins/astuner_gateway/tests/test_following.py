"""The next model while requests come: none is refused or cut short, and each model is closed when its last one ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import astuner_local
from astuner import load_config
from astuner.chat.codec import ChatCodec
from astuner.contracts.types import SamplingParams
from astuner.rollout.models import PolicyModel
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from astuner_gateway.gate import running
from astuner_gateway.listening import bind
from astuner_gateway.served import following
from astuner_gateway.served.conversations import Conversations
from astuner_gateway.served.following import Answering, follow, promoted_now
from astuner_gateway.served.handler import Handler
from astuner_gateway.served.model import About, ServedModel
from astuner_models.promoted import Promotions, promoted_folder

KEY = "sk-test-0123456789abcdef"
TINY = Path(astuner_local.__file__).parent / "tiny" / "model"
EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent" / "math_agent.yaml"


class Held(FakeEngine):
    """Answers when it is allowed to."""

    def __init__(self, replies: Any, tokenizer: Any) -> None:
        super().__init__(replies, tokenizer)
        self.asked, self.allowed = asyncio.Event(), asyncio.Event()

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.asked.set()
        await self.allowed.wait()
        return await super().generate(*args, **options)


class Stage:
    """A server that follows, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = make_tokenizer()
        self.config = fake_config(folder)
        self.engines: dict[str, Held] = {}
        self.closed: list[str] = []
        self.remarks: list[str] = []
        self.told: list[str] = []
        self.wanted: str | None = None

    def load(self, checkpoint: str) -> Answering:
        if checkpoint == "broken":
            raise ValueError("it is broken")
        engine = self.engines[checkpoint] = Held(lambda prompt: f"I am {checkpoint}", self.tokenizer)
        about = About(name=f"e/{checkpoint}", policy="default", checkpoint=checkpoint, step=None)
        sampling = SamplingParams(max_tokens=50)
        served = ServedModel(self.config, PolicyModel(engine, ChatCodec(self.tokenizer)), about, sampling)

        async def close() -> None:
            self.closed.append(checkpoint)

        return Answering(about, Conversations(served.voice), close)

    def play(self, scenario: Callable[[Any, Handler], Awaitable[None]]) -> None:
        async def main() -> None:
            handler = Handler(self.load("first"), key=KEY, host="127.0.0.1")
            with bind("127.0.0.1", 0, listen=True) as listening:
                url = f"http://127.0.0.1:{listening.getsockname()[1]}"

                async def ask(*texts: str) -> tuple[str, str]:
                    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
                    body, headers = {"model": "any", "messages": messages}, {"Authorization": f"Bearer {KEY}"}
                    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                        got = await response.json()
                        assert response.status == 200, got
                        return got["model"], got["choices"][0]["message"]["content"]

                async with running(handler, listening, grace=1.0), aiohttp.ClientSession() as session:
                    following = asyncio.create_task(
                        follow(
                            handler,
                            None,
                            lambda: self.wanted,
                            self.load,
                            lambda about: self.told.append(about.name),
                            self.remarks.append,
                        )
                    )
                    await scenario(ask, handler)
                following.cancel()
                await asyncio.wait({following})
                await handler.current.retire()

        asyncio.run(main())


async def until(what: Callable[[], Any]) -> None:
    while not what():
        await asyncio.sleep(0.002)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(following, "LOOK", 0.002)
    return Stage(tmp_path)


def test_what_is_under_way_ends_with_the_old_one_and_what_comes_gets_the_new(stage: Stage) -> None:
    async def scenario(ask: Any, handler: Handler) -> None:
        slow = asyncio.ensure_future(ask("hello"))
        await stage.engines["first"].asked.wait()
        stage.wanted = "second"
        await until(lambda: stage.told)
        stage.engines["second"].allowed.set()
        assert await ask("hello") == ("e/second", "I am second")
        assert stage.closed == [], "somebody waits for it"
        stage.engines["first"].allowed.set()
        assert await slow == ("e/first", "I am first")
        await until(lambda: stage.closed)
        assert stage.closed == ["first"]
        # A conversation with the old one goes on from its history, and not from the tokens of another model.
        assert await ask("hello", "I am first", "who?") == ("e/second", "I am second")
        told = handler.metrics()
        assert (told["switches"], told["answered"], told["refused"], told["conversations"]) == (1, 3, 0, 3)

    stage.play(scenario)
    assert stage.told == ["e/second"]
    assert stage.closed == ["first", "second"]
    assert stage.remarks == []


def test_one_that_cannot_be_loaded_is_said_once_and_the_old_one_goes_on(stage: Stage) -> None:
    async def scenario(ask: Any, handler: Handler) -> None:
        stage.engines["first"].allowed.set()
        stage.wanted = "broken"
        await until(lambda: stage.remarks)
        await asyncio.sleep(0.05)
        assert await ask("hello") == ("e/first", "I am first")
        stage.wanted = "second"
        await until(lambda: stage.told)
        stage.engines["second"].allowed.set()
        assert await ask("hello") == ("e/second", "I am second")

    stage.play(scenario)
    (remark,) = stage.remarks
    assert "it is broken" in remark
    assert "e/first" in remark


def test_an_end_in_between_waits_for_nobody(stage: Stage) -> None:
    async def scenario(ask: Any, handler: Handler) -> None:
        asyncio.ensure_future(ask("hello"))  # noqa: RUF006 - its connection is closed at the end
        await stage.engines["first"].asked.wait()
        stage.wanted = "second"
        await until(lambda: stage.told)

    stage.play(scenario)
    assert sorted(stage.closed) == ["first", "second"]


def test_what_should_answer_is_what_the_file_says(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    assert promoted_now(config) is None
    folder = promoted_folder(config.run_dir)
    folder.mkdir(parents=True)
    Promotions(folder=folder, serving="0001", entries={"0001": {"name": "step-000010", "before": None}}).write()
    assert promoted_now(config) == str(folder / "0001" / "step-000010")
    Promotions(folder=folder, entries={"0001": {"name": "step-000010", "before": None}}).write()
    assert promoted_now(config) == "base"


# ------------------------------------------------------------------------------------------------- as a person types it


@pytest.mark.slow
def test_under_load_over_several_switches_no_request_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own with the tiny model; what serves is changed under it four times."""
    monkeypatch.chdir(tmp_path)
    config = load_config(EXAMPLE, backbone="local")
    folder = promoted_folder(config.run_dir)
    entries = {f"000{n}": {"name": f"step-0000{n}0", "before": None} for n in (1, 2)}
    for number, entry in entries.items():
        shutil.copytree(TINY, folder / number / str(entry["name"]))
    Promotions(folder=folder, serving="0001", entries=entries).write()
    environment = {**os.environ, "ASTUNER_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "astuner", "serve", str(EXAMPLE), "--backbone", "local", "--port", "0", "--json"]
    with Path("log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, Path("log").read_text()
        file = Path(json.loads(line)["access_file"])
        access = json.loads(file.read_text())
        assert access["model"] == "math_agent/step-000010"
        order = ["0002", None, "0001", "0002"]
        answers, failures = asyncio.run(_load(access, [lambda to=to: _serve(folder, entries, to) for to in order]))
        assert failures == []
        assert set(answers) == {"math_agent/step-000010", "math_agent/step-000020", "math_agent/base"}
        assert json.loads(file.read_text()) == {**access, "model": "math_agent/step-000020"}
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0, Path("log").read_text()
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
    said = Path("log").read_text()
    assert said.count("now serving ") == len(order)
    assert f"answered {sum(answers.values()):,} requests" in said
    assert "Traceback" not in said


def _serve(folder: Path, entries: Any, to: str | None) -> str:
    """Change what serves; what the API will call it."""
    Promotions(folder=folder, serving=to, entries=entries).write()
    return f"math_agent/{entries[to]['name'] if to else 'base'}"


async def _load(access: Any, switches: list[Callable[[], str]], clients: int = 8) -> tuple[Counter[str], list[str]]:
    """Clients that ask without a pause, while what serves changes as soon as it is seen to have changed."""
    answers: Counter[str] = Counter()
    failures: list[str] = []
    newest, over = "", False
    body = {"model": "any", "max_tokens": 24, "messages": [{"role": "user", "content": "How many eggs are 6 times 4?"}]}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {access['api_key']}"}) as session:

        async def client() -> None:
            nonlocal newest
            while not over:
                try:
                    async with session.post(f"{access['base_url']}/chat/completions", json=body) as response:
                        got = await response.json()
                        if response.status == 200:
                            newest = got["model"]
                            answers[newest] += 1
                        else:
                            failures.append(f"{response.status}: {got}")
                except (aiohttp.ClientError, ValueError) as e:
                    failures.append(repr(e))

        asking = [asyncio.create_task(client()) for _ in range(clients)]
        for switch in switches:
            await asyncio.sleep(0.5)
            wanted = switch()
            while newest != wanted:
                await asyncio.sleep(0.05)
            async with session.get(f"{access['base_url']}/models") as response:
                assert [one["id"] for one in (await response.json())["data"]] == [wanted]
        over = True
        await asyncio.gather(*asking)
    return answers, failures
