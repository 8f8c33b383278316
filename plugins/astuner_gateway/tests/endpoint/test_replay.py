"""Retries do not generate twice, and what nobody waits for ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any

import openai
import pytest

from astuner.contracts.types import Generation, SamplingParams
from astuner.testing import FakeEngine
from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.handler import DIALECTS
from astuner_gateway.endpoint.replay import Identity, Job, Replays

CHAT = "/v1/chat/completions"
ASK: Any = [{"role": "user", "content": "What?"}]
BODY = {"messages": ASK}
RETRY = {"x_stainless_retry_count": "1"}


class Held(FakeEngine):
    """Answers once `go` is set; counts what is cancelled."""

    def __init__(self, tokenizer: Any) -> None:
        self.said = 0
        super().__init__(self._say, tokenizer)
        self.go, self.cancelled, self.begun = asyncio.Event(), 0, 0

    def _say(self, prompt: str) -> str:
        self.said += 1
        return f"draw {self.said}"

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, sampling, session=session)


@pytest.fixture
def held(tokenizer: Any) -> Held:
    return Held(tokenizer)


async def until(condition: Any) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), 20)


async def text(posting: Any) -> str:
    status, body = await posting
    assert status == 200, body
    said: str = body["choices"][0]["message"]["content"]
    return said


async def hang_up(served: Any, held: Held, body: Any = BODY, **headers: str) -> None:
    """Ask, and leave once the generation has begun."""
    begun = held.begun
    asking = asyncio.ensure_future(served.post(CHAT, body, **headers))
    await until(lambda: held.begun > begun)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def test_a_client_that_times_out_and_retries_gets_the_one_generation(play: Any, held: Held) -> None:
    async def work(served: Any) -> None:
        url, key = served.access.base_url, served.access.api_key
        async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=1.0, max_retries=20) as model:
            asyncio.get_running_loop().call_later(1.5, held.go.set)
            done = await model.chat.completions.create(model="m", messages=ASK)
            assert done.choices[0].message.content == "draw 1"
        assert (held.begun, len(served.recorder.turns)) == (1, 1)

    play(work, engine=held, grace=30)


def test_an_equal_request_is_another_draw(play: Any, held: Held) -> None:
    held.go.set()

    async def work(served: Any) -> None:
        both = await asyncio.gather(*(text(served.post(CHAT, BODY)) for _ in range(2)))
        assert sorted(both) == ["draw 1", "draw 2"]
        assert await text(served.post(CHAT, BODY)) == "draw 3"

    play(work, engine=held)


def test_a_retry_gets_the_reply_that_was_delivered_before_and_no_other_request_does(play: Any, held: Held) -> None:
    held.go.set()

    async def work(served: Any) -> None:
        assert await text(served.post(CHAT, BODY)) == "draw 1"
        assert await text(served.post(CHAT, BODY, **RETRY)) == "draw 1"
        assert await text(served.post(CHAT, {**BODY, "user": "else"}, **RETRY)) == "draw 2"
        assert await text(served.post("/v1/chat/completions", BODY)) == "draw 3"

    play(work, engine=held)


def test_whoever_asks_the_same_next_gets_what_a_lost_client_left(play: Any, held: Held) -> None:
    async def work(served: Any) -> None:
        await hang_up(served, held)
        held.go.set()
        await until(lambda: held.said == 1)
        assert await text(served.post(CHAT, BODY)) == "draw 1"
        assert await text(served.post(CHAT, BODY)) == "draw 2"

    play(work, engine=held, grace=30)


def test_a_reply_that_nobody_came_for_is_not_trained(play: Any, held: Held) -> None:
    async def work(served: Any) -> None:
        await hang_up(served, held)
        held.go.set()
        await until(lambda: len(served.recorder.turns) == 1)
        assert await text(served.post(CHAT, {**BODY, "user": "else"})) == "draw 2"
        await until(lambda: len(served.recorder.turns) == 2)
        served.endpoint.revoke(served.tuner)
        assert [turn.trained for turn in served.recorder.turns] == [False, True]

    play(work, engine=held, grace=30)


def test_when_one_of_n_fails_the_others_are_not_trained(play: Any, held: Held) -> None:
    answered: list[int] = []

    class Half(Held):
        async def generate(self, *args: Any, **options: Any) -> Generation:
            answered.append(1)
            if len(answered) == 2:
                await asyncio.sleep(0.1)
                raise RuntimeError("broken")
            return await FakeEngine.generate(self, *args, **options)

    async def work(served: Any) -> None:
        status, _ = await served.post(CHAT, {**BODY, "n": 2})
        assert status == 502
        assert [turn.trained for turn in served.recorder.turns] == [False]

    play(work, engine=Half(held.tokenizer))


def test_a_turn_whose_answer_cannot_be_written_is_not_trained(
    play: Any, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.go.set()
    broken = dataclasses.replace(DIALECTS[CHAT], body=lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(DIALECTS, CHAT, broken)

    async def work(served: Any) -> None:
        assert (await served.post(CHAT, BODY))[0] == 500
        assert [turn.trained for turn in served.recorder.turns] == [False]

    play(work, engine=held)


def test_a_retry_may_join_while_the_generation_runs(play: Any, held: Held) -> None:
    async def work(served: Any) -> None:
        await hang_up(served, held)
        again = asyncio.ensure_future(text(served.post(CHAT, BODY, **RETRY)))
        other = asyncio.ensure_future(text(served.post(CHAT, BODY)))
        await until(lambda: held.begun == 2)
        held.go.set()
        assert sorted([await again, await other]) == ["draw 1", "draw 2"]

    play(work, engine=held, grace=30)


def test_another_agents_key_never_gets_the_reply(play: Any, held: Held) -> None:
    async def work(served: Any) -> None:
        await hang_up(served, held)
        held.go.set()
        other = served.endpoint.issue(served.tuner, "other").api_key
        assert await text(served.post(CHAT, BODY, Authorization=f"Bearer {other}", **RETRY)) == "draw 2"

    play(work, engine=held, grace=30)


def test_an_idempotency_key_names_one_request(play: Any, held: Held) -> None:
    held.go.set()

    async def work(served: Any) -> None:
        for _ in range(2):
            assert await text(served.post(CHAT, BODY, Idempotency_Key="a")) == "draw 1"
        assert await text(served.post(CHAT, BODY, Idempotency_Key="b")) == "draw 2"
        status, body = await served.post(CHAT, {**BODY, "user": "else"}, Idempotency_Key="a")
        assert (status, body["error"]["code"]) == (400, "idempotency_key_reused")
        assert await text(served.post(CHAT, BODY, **RETRY)) == "draw 3"  # a named reply is for its name only

    play(work, engine=held)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_for_good_ends_the_generation(play: Any, held: Held, stream: bool) -> None:
    async def work(served: Any) -> None:
        await hang_up(served, held, {**BODY, "stream": stream, "n": 3})
        await until(lambda: held.cancelled == 3)
        assert served.recorder.turns == ()
        assert len(served.endpoint._replays) == 0
        held.go.set()
        assert await text(served.post(CHAT, BODY, **RETRY)) == "draw 1"

    play(work, engine=held, grace=0.05)


def test_the_end_of_the_episode_ends_all_its_generations_and_no_others(play: Any, held: Held) -> None:
    async def work(served: Any) -> None:
        asking = asyncio.ensure_future(served.post(CHAT, BODY))
        await until(lambda: held.begun == 1)
        await hang_up(served, held, {**BODY, "user": "gone"})
        served.endpoint.revoke(served.tuner)
        status, body = await asking
        assert (status, body["error"]["code"]) == (403, "episode_over")
        await until(lambda: held.cancelled == 2)
        assert len(served.endpoint._replays) == 0
        assert (await served.post(CHAT, BODY))[0] == 401

    play(work, engine=held, grace=30)


def test_a_stream_is_kept_awake_and_ends_with_an_error_of_its_api(
    play: Any, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astuner_gateway.endpoint.handler._QUIET", 0.02)
    bodies = {"/v1/chat/completions": BODY, "/v1/responses": {"input": "What?"}, "/v1/messages": BODY}

    async def work(served: Any) -> None:
        key = served.access.api_key
        for route in bodies:
            headers, url = {"Authorization": f"Bearer {key}"}, served.access.anthropic_base_url + route
            async with served.session.post(url, json={**bodies[route], "stream": True}, headers=headers) as response:
                said = (await response.content.readany()).decode()
                held.go.set()
                said += await response.text()
            assert said.startswith(": the model is at work\n\n")
            assert "draw" in said
            held.go.clear()
        async with openai.AsyncOpenAI(base_url=served.access.base_url, api_key=key) as model:
            stream = await model.chat.completions.create(model="m", messages=ASK, stream=True)
            responses = await model.responses.create(model="m", input="What?", stream=True)
            import anthropic

            async with anthropic.AsyncAnthropic(base_url=served.access.anthropic_base_url, api_key=key) as claude:
                messages = await claude.messages.create(model="m", max_tokens=5, messages=ASK, stream=True)
                served.endpoint.revoke(served.tuner)
                for broken in (stream, responses):
                    with pytest.raises(openai.APIError, match="episode has ended"):
                        async for _ in broken:  # type: ignore[attr-defined]
                            pass
                with pytest.raises(anthropic.APIStatusError, match="episode has ended"):
                    async for _ in messages:
                        pass

    play(work, engine=held)


# ---- the table of jobs by itself -------------------------------------------------------------------------------------


def replays(scenario: Any, **options: Any) -> Any:
    async def main() -> Any:
        return await scenario(Replays(**{"grace": 30, **options}))

    return asyncio.run(main())


def identity(content: bytes = b"body", key: bytes = b"key") -> Identity:
    return Identity(key, CHAT, content)


async def finished(table: Replays, outcome: Any, content: bytes) -> Job:
    async def produce() -> Any:
        return outcome

    job = table.attach(identity(content), produce)
    await job.task
    await asyncio.sleep(0)
    table.detach(job, delivered=True)
    return job


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    async def work(table: Replays) -> None:
        jobs = [await finished(table, b"x" * 40, bytes([i])) for i in range(4)]
        assert len(table) == 2
        assert table.attach(identity(bytes([3])), never, retry=1) is jobs[3]
        assert table.attach(identity(bytes([1])), never, retry=1) is not jobs[1]

    async def never() -> Any:
        await asyncio.Event().wait()

    replays(work, kept_bytes=100)


def test_an_error_is_not_kept_so_a_retry_tries_again() -> None:
    async def work(table: Replays) -> None:
        failed = await finished(table, ApiError(502, "no"), b"a")
        assert len(table) == 0
        assert await finished(table, b"reply", b"a") is not failed

    replays(work)


def test_of_delivered_replies_to_the_same_request_the_last_few_are_kept() -> None:
    async def work(table: Replays) -> None:
        jobs = [await finished_again(table) for _ in range(40)]
        assert len(table) == 16
        assert table.attach(identity(), never, retry=1) in jobs[-16:]

    async def finished_again(table: Replays) -> Job:
        async def produce() -> Any:
            return b"reply"

        job = table.attach(identity(), produce)
        await job.task
        table.detach(job, delivered=True)
        return job

    async def never() -> Any:
        await asyncio.Event().wait()

    replays(work)


def test_a_retry_that_comes_while_the_generation_is_being_cancelled_begins_anew() -> None:
    async def work(table: Replays) -> None:
        async def slow_to_end() -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)

        async def produce() -> Any:
            return b"reply"

        job = table.attach(identity(), slow_to_end, name="a")
        await asyncio.sleep(0)
        table.detach(job, delivered=False)
        while len(table):
            await asyncio.sleep(0.001)
        assert not job.task.done()
        again = table.attach(identity(), produce, name="a", retry=1)
        assert again is not job
        await asyncio.wait({job.task, again.task})
        assert again.task.result() == b"reply"
        assert table.attach(identity(), produce, name="a") is again

    replays(work, grace=0.01)


def test_a_delivered_reply_is_for_no_retry_after_a_while() -> None:
    async def work(table: Replays) -> None:
        async def produce() -> Any:
            return b"again"

        old = await finished(table, b"reply", b"a")
        again = table.attach(identity(b"a"), produce, retry=1)
        assert again is old
        table.detach(again, delivered=True)
        old.delivered_at -= 61
        assert table.attach(identity(b"a"), produce, retry=2) is not old

    replays(work)


def test_two_lost_clients_that_retry_get_a_generation_each() -> None:
    async def work(table: Replays) -> None:
        async def produce() -> Any:
            await asyncio.Event().wait()

        jobs: list[Job] = [table.attach(identity(), produce) for _ in range(2)]
        for job in jobs:
            table.detach(job, delivered=False)
        again = [table.attach(identity(), produce, retry=1) for _ in range(2)]
        assert again == jobs
        third: Coroutine[Any, Any, Any] | Job = table.attach(identity(), produce, retry=1)
        assert third not in jobs
        table.cancel(lambda key: key == b"other")
        assert len(table) == 3
        table.cancel(lambda key: True)
        assert len(table) == 0

    replays(work)
