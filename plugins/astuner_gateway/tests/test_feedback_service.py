"""The feedback service as it runs: its own process, real HTTP, the official client, episodes of a real runner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from astuner import run_service
from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.types import Episode, SamplingParams, StopReason
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.turns import build_samples
from astuner.support import processes
from astuner.testing import FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner_gateway.feedback.service import FeedbackService
from astuner_gateway.feedback.settings import ServiceConfig
from tests.table import table

TOKENIZER = make_tokenizer()
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLING = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


def said(prompt: str) -> str:
    """What the fake model says: 5, where there are tools after a call."""
    if "<tool_response>" in prompt or "<tools>" not in prompt:
        return "5"
    return CALLING


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ASTUNER_FEEDBACK_URL", "ASTUNER_FEEDBACK_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    return tmp_path


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[FeedbackService]:
    """The service, answering; at the end it and what it wrote down are gone."""
    service = FeedbackService(ServiceConfig(**settings))
    with run_service(service, "feedback", "", folder / "feedback.log"):
        yield service
    assert processes.recorded_processes() == []
    assert list((folder / "home" / "feedback").glob("*")) == []


@dataclass
class Place:
    """A service, episodes that ask it for conversations, and an application with users."""

    access: dict[str, Any]
    client: openai.AsyncOpenAI
    session: aiohttp.ClientSession
    offer: Callable[..., asyncio.Task[Episode]]
    engine: FakeEngine

    async def ask(self, *messages: Any, **options: Any) -> Any:
        history = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return await self.client.chat.completions.create(model="any", messages=history, **options)

    async def post(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key or self.access['api_key']}"}
        url = self.access["feedback_url"].removesuffix("/feedback") + path
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(url, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def rate(self, *ids: str, reward: Any = 1.0) -> tuple[int, Any]:
        return await self.post("/feedback", {"msg_ids": list(ids), "reward": reward})

    async def metrics(self) -> dict[str, int]:
        headers = {"Authorization": f"Bearer {self.access['api_key']}"}
        url = self.access["feedback_url"].removesuffix("/feedback") + "/metrics"
        async with self.session.get(url, headers=headers) as response:
            found: dict[str, int] = await response.json()
            return found

    async def until(self, **wanted: int) -> None:
        """Wait until the metrics say so."""
        while not wanted.items() <= (await self.metrics()).items():
            await asyncio.sleep(0.02)


def play(
    folder: Path,
    scenario: Callable[[Place], Awaitable[Any]],
    *,
    replies: Any = said,
    engine: Any = None,
    retries: int = 0,
    workflow: str = "{}",
    more: str = "",
    **settings: Any,
) -> Any:
    """Run ``scenario`` beside a runner whose episodes use the workflow."""
    text = f"  rollout:\n    workflow: feedback\n    max_retries: {retries}\n    feedback: {workflow}\n{more}"

    async def main(service: FeedbackService) -> Any:
        runner = EpisodeRunner(fake_config(folder, text))
        speaking = engine or FakeEngine(replies, TOKENIZER)
        models = one_model(speaking, ChatCodec(TOKENIZER))
        tasks: list[asyncio.Task[Episode]] = []

        def offer() -> asyncio.Task[Episode]:
            run = runner.run(workflow_task(), models, SamplingParams(max_tokens=200))
            tasks.append(asyncio.ensure_future(run))
            return tasks[-1]

        (file,) = (folder / "home" / "feedback").glob("*.json")
        access = json.loads(file.read_text())
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with (
            aiohttp.ClientSession() as session,
            openai.AsyncOpenAI(
                base_url=access["base_url"], api_key=access["api_key"], max_retries=0, http_client=http
            ) as client,
        ):
            try:
                return await asyncio.wait_for(scenario(Place(access, client, session, offer, speaking)), 120)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await runner.close()

    with serving(folder, **settings) as service:
        before = dict(os.environ)
        os.environ.update(service.environ())
        try:
            return asyncio.run(main(service))
        finally:
            os.environ.clear()
            os.environ.update(before)


def test_a_conversation_with_tools_is_an_episode_with_the_users_reward(home: Path) -> None:
    async def scenario(place: Place) -> tuple[Episode, Any, str]:
        episode = place.offer()
        question = {"role": "user", "content": "Will it rain?"}
        first = await place.ask(question, tools=[WEATHER])
        message = first.choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "no"}
        second = await place.ask(question, message.model_dump(exclude_none=True), result, tools=[WEATHER])
        assert second.choices[0].message.content == "5"
        answer = await place.rate(second.id, reward=0.25)
        return await episode, answer, second.id

    episode, (status, answer), completion_id = play(home, scenario)
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.COMPLETED, 0.25, "")
    (rated,) = answer["rated"]
    assert (status, rated["reward"], rated["msg_ids"]) == (200, 0.25, [completion_id])
    assert episode.output is not None
    assert episode.output.metadata == {"conversation": rated["conversation"], "rated": [completion_id]}
    assert [turn.continues for turn in episode.turns] == [None, 0]
    (sample,) = build_samples(episode).samples
    trained = [token for token, mask in zip(sample.input_ids, sample.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(trained) == f"{CALLING}<|im_end|>5<|im_end|>"


@pytest.mark.slow
def test_a_stream_is_as_the_whole_and_can_be_rated(home: Path) -> None:
    async def scenario(place: Place) -> tuple[Episode, Any]:
        episode = place.offer()
        with_usage = {"include_usage": True}
        parts = [part async for part in await place.ask("2 + 3?", stream=True, stream_options=with_usage)]
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        (reply_id,) = {part.id for part in parts}
        again = await place.ask("2 + 3?", {"role": "assistant", "content": text}, "Sure?")
        assert parts[-1].usage.completion_tokens == 2
        await place.rate(reply_id, again.id)
        return await episode, text

    episode, text = play(home, scenario)
    assert (text, episode.reward, len(episode.turns)) == ("5", 1.0, 2)


@pytest.mark.slow
def test_users_at_once_have_an_episode_each(home: Path) -> None:
    async def user(place: Place, number: int) -> float:
        first = await place.ask("2 + 3?")  # all the same words
        reply = first.choices[0].message.model_dump(exclude_none=True)
        second = await place.ask("2 + 3?", reply, f"I am user {number}.")
        status, _ = await place.rate(second.id, reward=float(number))
        assert status == 200
        return float(number)

    async def scenario(place: Place) -> list[Episode]:
        episodes = [place.offer() for _ in range(6)]
        await asyncio.gather(*(user(place, number) for number in range(6)))
        return list(await asyncio.gather(*episodes))

    episodes = play(home, scenario)
    for episode in episodes:
        assert len(episode.turns) == 2
        assert episode.turns[1].request[-1]["content"] == f"I am user {episode.reward:g}."


@pytest.mark.slow
def test_ratings_that_make_no_sense_are_refused_and_change_nothing(home: Path) -> None:
    async def scenario(place: Place) -> Episode:
        episode = place.offer()
        completion = await place.ask("2 + 3?")
        for reward in ("1.0", None, True, [1], 10**400):
            status, answer = await place.rate(completion.id, reward=reward)
            assert (status, answer["error"]["param"]) == (422, "reward"), reward
        for raw in (b'{"msg_ids": ["x"], "reward": NaN}', b'{"msg_ids": ["x"], "reward": 1e999}', b"[]", b"{"):
            assert (await place.post("/feedback", raw))[0] == 422, raw
        for wrong in (
            {"reward": 1.0},
            {"msg_ids": [], "reward": 1.0},
            {"msg_ids": [1], "reward": 1.0},
            {"msg_ids": [completion.id], "completion_id": completion.id, "reward": 1.0},
            {"msg_ids": [completion.id], "reward": 1.0, "stars": 5},
        ):
            assert (await place.post("/feedback", wrong))[0] == 422, wrong
        status, answer = await place.rate("chatcmpl-unheard-of")
        assert (status, answer["error"]["code"]) == (404, "unknown_id")
        assert "chatcmpl-unheard-of" in answer["error"]["message"]
        assert not episode.done()
        good = {"completion_id": completion.id, "reward": 0, "task_id": "t", "run_id": 3}
        assert (await place.post("/feedback", good))[0] == 200
        assert (await place.rate(completion.id))[1]["error"]["code"] == "already_rated"
        assert (await place.metrics())["rated"] == 1
        return await episode

    assert play(home, scenario).reward == 0.0


def test_each_key_opens_its_own_routes_only(home: Path) -> None:
    async def scenario(place: Place) -> None:
        run_key = os.environ["ASTUNER_FEEDBACK_TOKEN"]
        url = place.access["feedback_url"].removesuffix("/feedback")
        everything = ["/v1/chat/completions", "/feedback", "/episodes", "/metrics", "/v1/models", "/nothing"]
        for path in everything:
            assert (await place.post(path, {}, key="no-such-key-at-all"))[0] == 401, path
        assert (await place.post("/episodes", {}))[0] == 401
        assert (await place.post("/feedback", {}, key=run_key))[0] == 401
        status, answer = await place.post("/nothing", {})
        assert status == 404
        assert "POST /feedback" in answer["error"]["message"]
        async with place.session.get(f"{url}/health") as response:
            assert response.status == 200
        headers = {"Host": "elsewhere.example", "Authorization": f"Bearer {place.access['api_key']}"}
        async with place.session.get(f"{url}/metrics", headers=headers) as response:
            assert response.status == 403
        for path in ("/metrics", "/v1/models", "/nothing"):
            async with place.session.get(f"{url}{path}") as response:
                assert response.status == 401, path
        (model,) = (await place.client.models.list()).data
        assert model.id == "astuner"

    play(home, scenario)
    log = (home / "feedback.log").read_text()
    assert "sk-" not in log


def test_without_a_free_episode_a_client_is_told_when_to_come_again(home: Path) -> None:
    async def scenario(place: Place) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await place.ask("2 + 3?")
        assert caught.value.status_code == 503
        assert caught.value.response.headers["Retry-After"] == "5"
        assert caught.value.response.headers["x-should-retry"] == "true"
        assert "no episode became free" in caught.value.message

    play(home, scenario, wait_timeout=0.05)


def test_what_nobody_rates_starts_over_and_is_then_a_failed_episode(home: Path) -> None:
    async def scenario(place: Place) -> Episode:
        episode = place.offer()
        for _ in range(2):
            completion = await place.ask("2 + 3?")
        ended = await episode
        assert (await place.rate(completion.id))[1]["error"]["code"] == "conversation_over"
        return ended

    episode = play(home, scenario, workflow="{rating_timeout: 0.2}", retries=1)
    assert (episode.stop_reason, episode.reward, episode.retries) == (StopReason.ENVIRONMENT_FAILED, None, 1)
    assert "neither rated nor continued" in episode.error


class Slow(FakeEngine):
    """Waits before its reply to what holds "slowly", until it is told."""

    def __init__(self) -> None:
        super().__init__(said, TOKENIZER)
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def generate(self, prompt_ids: Any, *args: Any, **options: Any) -> Any:
        if "slowly" in TOKENIZER.decode(prompt_ids):
            self.asked.set()
            await self.go_on.wait()
        return await super().generate(prompt_ids, *args, **options)


def test_a_client_that_goes_away_leaves_its_episode_to_the_next_and_its_reply_untrained(home: Path) -> None:
    async def scenario(place: Place) -> Episode:
        episode = place.offer()
        gone = asyncio.ensure_future(place.ask("slowly", stream=True))
        await place.engine.asked.wait()  # type: ignore[attr-defined]
        gone.cancel()
        await asyncio.wait({gone})
        await place.until(open_conversations=1)
        place.engine.go_on.set()  # type: ignore[attr-defined]
        await place.until(open_conversations=0, waiting_episodes=1)
        completion = await place.ask("2 + 3?")
        await place.rate(completion.id)
        return await episode

    episode = play(home, scenario, engine=Slow())
    assert [(turn.lost, turn.request[-1]["content"]) for turn in episode.turns] == [
        (True, "slowly"),
        (False, "2 + 3?"),
    ]
    (sample,) = build_samples(episode).samples
    assert "slowly" not in TOKENIZER.decode(sample.input_ids)
    assert episode.reward == 1.0


def test_a_request_that_the_model_refuses_says_so_and_leaves_the_episode_free(home: Path) -> None:
    async def scenario(place: Place) -> Episode:
        episode = place.offer()
        for wrong in ({"top_logprobs": 3}, {"logit_bias": {"1": 5}}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await place.ask("2 + 3?", **wrong)
        await place.rate((await place.ask("2 + 3?")).id)
        return await episode

    episode = play(home, scenario)
    assert (episode.stop_reason, episode.reward, len(episode.turns)) == (StopReason.COMPLETED, 1.0, 1)


def test_an_episode_that_a_check_ends_is_judged_by_the_check(home: Path) -> None:
    async def scenario(place: Place) -> tuple[Episode, Any]:
        episode = place.offer()
        with pytest.raises(openai.InternalServerError) as caught:
            await place.ask("2 + 3?")
        return await episode, caught.value

    more = "    agent_madness_reward: -1.0\n    compute_madness_checklist: [repetition]\n"
    episode, error = play(home, scenario, replies=lambda prompt: "ha " * 60, more=more)
    assert (episode.stop_reason, episode.reward) == (StopReason.CHECK_ABORTED, -1.0)
    assert error.response.headers["x-should-retry"] == "true"  # with another episode


def test_the_end_of_the_run_ends_its_conversations_with_a_clear_answer(home: Path) -> None:
    async def scenario(place: Place) -> None:
        episode = place.offer()
        completion = await place.ask("2 + 3?")
        waiting = asyncio.ensure_future(place.ask("2 + 3?", {"role": "assistant", "content": "5"}, "slowly"))
        await place.engine.asked.wait()  # type: ignore[attr-defined]
        episode.cancel()
        with pytest.raises(openai.InternalServerError, match="this conversation has ended") as caught:
            await waiting
        assert caught.value.status_code == 503
        await place.until(open_conversations=0, withdrawn=1)
        assert (await place.rate(completion.id))[1]["error"]["code"] == "conversation_over"

    play(home, scenario, engine=Slow())


@pytest.mark.slow
def test_an_episode_whose_service_is_gone_says_so_and_may_start_over(home: Path) -> None:
    async def scenario(place: Place) -> Episode:
        episode = place.offer()
        await place.until(waiting_episodes=1)
        for process in processes.recorded_processes():
            os.kill(process.pid, signal.SIGTERM)
        return await episode

    episode = play(home, scenario)
    assert episode.stop_reason is StopReason.ENVIRONMENT_FAILED
    assert "the feedback service" in episode.error


def test_a_workflow_without_its_service_says_what_to_type(home: Path) -> None:
    async def main() -> Episode:
        runner = EpisodeRunner(fake_config(home, "  rollout: {workflow: feedback}"))
        try:
            models = one_model(FakeEngine(said, TOKENIZER), ChatCodec(TOKENIZER))
            return await runner.run(workflow_task(), models, SamplingParams(max_tokens=10))
        finally:
            await runner.close()

    with pytest.raises(ConfigError, match="astuner run FILE --with feedback"):
        asyncio.run(main())


@pytest.mark.slow
def test_time_limits_that_leave_no_room_are_refused(home: Path) -> None:
    async def scenario(place: Place) -> None:
        with pytest.raises(ConfigError, match=r"rating_timeout is 900 s, .*episode_timeout = 600"):
            await place.offer()

    play(home, scenario, workflow="{rating_timeout: 900}")


@pytest.mark.slow
def test_the_application_finds_the_key_in_a_file_for_this_user_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(home) as service:
        (file,) = (home / "home" / "feedback").glob("*.json")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        access = json.loads(file.read_text())
        assert str(file) in service.address()
        assert access["api_key"] not in service.address()
        (process,) = processes.recorded_processes()
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        for key in (access["api_key"], service.environ()["ASTUNER_FEEDBACK_TOKEN"]):
            assert key.encode() not in shown
    monkeypatch.setenv("MY_KEY", "a-key-of-my-own-1234")
    with serving(home, key_env="MY_KEY"):
        (file,) = (home / "home" / "feedback").glob("*.json")
        assert json.loads(file.read_text())["api_key"] == "a-key-of-my-own-1234"


@table(
    ("settings", "says"),
    [
        ({"host": "0.0.0.0"}, "astuner.services.feedback.key_env"),
        ({"host": "0.0.0.0", "key_env": "NO_SUCH"}, "export NO_SUCH="),
        ({"key_env": "SHORT"}, "the key in SHORT must have at least 16"),
        ({"host": "192.0.2.1"}, "key_env"),
    ],
)
def test_an_address_that_others_can_reach_needs_a_key(
    home: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("SHORT", "short")
    with pytest.raises(ConfigError) as caught, serving(home, **settings):
        pass
    assert says in str(caught.value)


def test_a_port_that_is_taken_is_said_at_once(home: Path) -> None:
    with serving(home) as service:
        port = int(service.environ()["ASTUNER_FEEDBACK_URL"].rpartition(":")[2])
        with (
            pytest.raises(ConfigError, match=rf"services\.feedback\.host and \.port: .*port {port}"),
            run_service(FeedbackService(ServiceConfig(port=port)), "feedback", "", home / "other.log"),
        ):
            pass
        assert service.is_ready()


def ask_for_ever(service: FeedbackService) -> None:
    """A process that ends may have a last thread that ends a moment later."""
    while True:
        service.is_ready()
        time.sleep(0.05)


def test_a_service_that_has_ended_is_noticed(home: Path) -> None:
    service = FeedbackService()
    with run_service(service, "feedback", "", home / "feedback.log"):
        (process,) = processes.recorded_processes()
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(RunError, match=r"feedback\.log"):
            ask_for_ever(service)


@pytest.mark.slow
def test_it_ends_with_the_run_that_started_it_even_by_sigkill(home: Path) -> None:
    program = (
        "import os, signal, time\nfrom pathlib import Path\n"
        "from astuner_gateway.feedback.service import FeedbackService\n"
        "service = FeedbackService()\nservice.start(log=Path('feedback.log'))\n"
        "while not service.is_ready(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=home, check=False, timeout=100)

    async def gone() -> None:
        while processes.recorded_processes():
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(gone(), 60))
