"""The server of `astuner serve`, in this process: clients, conversations, what it refuses, what a collector is told."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import openai
import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import SamplingParams
from astuner.rollout.models import PolicyModel, one_model
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from astuner_gateway.listening import bind
from astuner_gateway.served.conversations import Conversations
from astuner_gateway.served.following import Answering
from astuner_gateway.served.handler import Handler
from astuner_gateway.served.model import About, ServedAgent, ServedModel
from astuner_gateway.served.spans import CompletionTracer, collector_at, parent_of
from astuner_trackers.telemetry import messages as said
from tests.receivers import Collector, serving
from tests.table import table

KEY = "sk-test-0123456789abcdef"
ABOUT = About(name="exam/step-000007", policy="default", checkpoint="/models/step-000007", step=7)
SAMPLING = SamplingParams(max_tokens=5000, temperature=0.5)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@dataclass
class Running:
    handler: Handler
    engine: FakeEngine
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    url: str

    async def ask(self, *texts: str, **options: Any) -> Any:
        """A completion for messages of user and assistant, taking turns."""
        roles = ("user", "assistant")
        messages: Any = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return await self.client.chat.completions.create(model="any", messages=messages, **options)

    async def post(self, body: Any, route: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
        sent = {"Authorization": f"Bearer {KEY}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(f"{self.url}{route}", data=data, headers=sent) as response:
            return response.status, await response.json()


Play = Callable[..., Any]


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(make_tokenizer())


@pytest.fixture
def play(codec: ChatCodec, tmp_path: Path) -> Play:
    """Run ``scenario(running)`` with a server, and return what it returns."""
    tokenizer = make_tokenizer()

    def play(
        scenario: Callable[[Running], Awaitable[Any]],
        replies: Any = lambda prompt: "four",
        *,
        engine: Any = None,
        tracer: Any = None,
        settings: str = "",
        kept_tokens: int = 1_000_000,
        max_model_len: int = 100_000,
        speaker: Callable[[Any, FakeEngine], Any] | None = None,
    ) -> Any:
        from astuner_gateway.gate import make_server

        speaking = engine or FakeEngine(replies, tokenizer, max_model_len=max_model_len)
        config = fake_config(tmp_path, settings)
        served = (
            speaker(config, speaking) if speaker else ServedModel(config, PolicyModel(speaking, codec), ABOUT, SAMPLING)
        )

        async def main() -> Any:
            current = Answering(ABOUT, Conversations(served.voice, kept_tokens))
            handler = Handler(current, key=KEY, host="127.0.0.1", tracer=tracer)
            listening = bind("127.0.0.1", 0, listen=True)
            runner = aiohttp.web.ServerRunner(make_server(handler), shutdown_timeout=1.0)
            await runner.setup()
            await aiohttp.web.SockSite(runner, listening).start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            http = openai.DefaultAsyncHttpxClient(trust_env=False)
            try:
                async with (
                    openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=http) as client,
                    aiohttp.ClientSession() as session,
                ):
                    return await scenario(Running(handler, speaking, client, session, url))
            finally:
                await runner.cleanup()
                listening.close()
                await served.close()

        return asyncio.run(main())

    return play


class Told:
    """A tracer that remembers."""

    def __init__(self) -> None:
        self.exchanges: list[Any] = []

    def completed(self, exchange: Any) -> None:
        self.exchanges.append(exchange)

    def metrics(self) -> dict[str, int]:
        return {}


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.slow
def test_the_official_client_gets_answers_plain_and_streamed(play: Play) -> None:
    async def scenario(running: Running) -> None:
        plain = await running.ask("What is 2 + 2?")
        assert plain.choices[0].message.content == "four"
        assert plain.choices[0].finish_reason == "stop"
        assert plain.model == ABOUT.name, "whatever the client calls it"
        assert plain.usage.prompt_tokens > plain.usage.completion_tokens > 0
        stream = await running.ask("What is 2 + 2?", stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "four"
        assert chunks[-1].usage == plain.usage
        (chunk_id,) = {chunk.id for chunk in chunks}
        assert chunk_id != plain.id
        assert [model.id async for model in running.client.models.list()] == [ABOUT.name]

    play(scenario)


def test_many_clients_at_once_each_get_their_own_answer(play: Play) -> None:
    async def scenario(running: Running) -> None:
        asked = [f"number {n}" for n in range(40)]
        answers = await asyncio.gather(*(running.ask(text) for text in asked))
        assert [a.choices[0].message.content for a in answers] == [f"you said {text}" for text in asked]
        assert len({a.id for a in answers}) == 40
        assert running.handler.metrics()["answered"] == 40
        assert running.handler.metrics()["under_way"] == 0

    play(scenario, lambda prompt: f"you said {prompt.rpartition('user')[2].split('<')[0].strip()}")


def test_what_the_model_said_goes_back_to_it_token_by_token(play: Play) -> None:
    """As in training, and not as the client or the template spell it: here with spaces that JSON does not need."""
    spaced = CALL.replace('": ', '":   ')

    async def scenario(running: Running) -> None:
        first = await running.ask("Hello", tools=[ADD])
        call = first.choices[0].message
        messages: Any = [
            {"role": "user", "content": "Hello"},
            call.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "4"},
        ]
        await running.client.chat.completions.create(model="any", messages=messages, tools=[ADD])
        (began, _, session), (went_on, _, same) = running.engine.calls
        assert running.engine.tokenizer.decode(went_on[len(began) :]).startswith(spaced)
        assert went_on[: len(began)] == began
        assert session == same, "so that the engine can keep what it has computed"

    play(scenario, [spaced, "yes"])


def test_what_a_request_says_of_sampling_is_done(play: Play) -> None:
    async def scenario(running: Running) -> Any:
        await running.ask("a")
        await running.ask("b", temperature=0, top_p=0.5, seed=7, max_tokens=9)
        return [sampling for _, sampling, _ in running.engine.calls]

    plain, special = play(scenario)
    assert (plain.temperature, plain.top_p, plain.max_tokens, plain.seed) == (0.5, 1.0, 5000, None)
    assert (special.temperature, special.top_p, special.max_tokens, special.seed) == (0.0, 0.5, 9, 7)


def test_budgets_of_training_do_not_limit_a_conversation(play: Play) -> None:
    settings = "  data: {max_prompt_length: 1, max_response_length: 1}\n  rollout: {multi_turn: {max_steps: 1}}"

    async def scenario(running: Running) -> None:
        texts = ["Hello"]
        for _ in range(3):
            texts.append((await running.ask(*texts)).choices[0].message.content)
            texts.append("And then?")

    play(scenario, settings=settings)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_without_the_key_nothing_is_answered(play: Play) -> None:
    async def scenario(running: Running) -> None:
        for headers in ({"Authorization": "Bearer wrong"}, {}, {"x-api-key": KEY[:-1]}):
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/metrics")):
                async with running.http.request(method, running.url + path, headers=headers) as response:
                    assert response.status == 401, (method, path)
                    assert KEY not in await response.text()
        with pytest.raises(openai.AuthenticationError, match="astuner serve"):
            await running.client.with_options(api_key="other").models.list()
        async with running.http.get(f"{running.url}/health") as response:
            assert response.status == 200
        async with running.http.get(f"{running.url}/metrics", headers={"x-api-key": KEY}) as response:
            assert (await response.json())["refused"] == 10
        assert running.engine.calls == []

    play(scenario)


def test_a_web_page_cannot_reach_it_under_a_name_of_its_own(play: Play) -> None:
    async def scenario(running: Running) -> None:
        status, body = await running.post({"messages": [{"role": "user", "content": "x"}]}, Host="evil.example")
        assert (status, body["error"]["code"]) == (403, "wrong_host")

    play(scenario)


@table(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}], "frequency_penalty": 1}, "frequency_penalty"),
        ({"messages": [{"role": "user", "content": "x"}], "temperatur": 1}, "temperatur"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (b"{", None),
        (b'{"messages": NaN}', None),
    ],
)
def test_what_it_cannot_honour_is_refused_by_the_name_of_the_field(play: Play, body: Any, param: str | None) -> None:
    async def scenario(running: Running) -> None:
        status, answer = await running.post(body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert running.engine.calls == []

    play(scenario)


def test_anthropics_route_refuses_in_anthropics_shape(play: Play) -> None:
    async def scenario(running: Running) -> None:
        status, answer = await running.post({"messages": [{"role": "user", "content": []}]}, "/v1/messages")
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert answer["error"]["message"].startswith("messages[0].content is empty")

    play(scenario)


SHOWS_NO_TOOLS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


@table(
    "asked",
    [{"tools": [ADD]}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}],
)
def test_a_template_without_tools_is_the_requests_fault_and_not_tried_again(play: Play, asked: Any) -> None:
    """A helper model behind `astuner serve` was asked five times for what could never be: the answer was a 500."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SHOWS_NO_TOOLS

    def speaker(config: Any, engine: FakeEngine) -> ServedModel:
        return ServedModel(config, PolicyModel(engine, ChatCodec(tokenizer)), ABOUT, SAMPLING)

    async def scenario(running: Running) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            await running.ask("What is 2 + 2?", **asked)
        return str(caught.value)

    assert "astuner.model.chat_template" in play(scenario, speaker=speaker)


def test_a_body_has_a_limit(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_gateway.gate.Gate.most_bytes", 1000)

    async def scenario(running: Running) -> None:
        status, answer = await running.post({"messages": [{"role": "user", "content": "x" * 2000}]})
        assert (status, answer["error"]["code"]) == (413, "request_too_large")

    play(scenario)


def test_a_conversation_that_is_too_long_says_so_in_words_that_clients_know(play: Play) -> None:
    async def scenario(running: Running) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await running.ask("word " * 500)
        assert refused.value.code == "context_length_exceeded"
        assert "start a new one" in str(refused.value)
        assert "episode" not in str(refused.value)

    play(scenario, max_model_len=100)


def test_too_many_at_once_are_told_to_come_again(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_gateway.served.handler.MOST_AT_ONCE", 0)

    async def scenario(running: Running) -> None:
        with pytest.raises(openai.InternalServerError) as refused:
            await running.ask("x")
        assert refused.value.code == "overloaded"
        assert refused.value.response.headers["Retry-After"] == "1"

    play(scenario)


def test_an_engine_that_fails_is_no_answer(play: Play) -> None:
    class Broken(FakeEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("out of memory")

    async def scenario(running: Running) -> None:
        with pytest.raises(openai.APIStatusError) as failed:
            await running.ask("x")
        assert failed.value.status_code == 502
        assert told.exchanges == []
        assert len(running.handler.current.conversations) == 0

    told = Told()
    play(scenario, engine=Broken([]), tracer=told)


# ------------------------------------------------------------------------------------------------------- conversations


def test_a_conversation_keeps_its_id_and_others_have_their_own(play: Play) -> None:
    async def scenario(running: Running) -> None:
        await running.ask("Hello")
        await running.ask("Hello", "four", "And 3 + 3?")
        await running.ask("Hello", "four", "And 3 + 3?", "four", "Sure?")
        await running.ask("Hi")
        await running.ask("Hello", "five", "And 3 + 3?")

    told = Told()
    play(scenario, tracer=told)
    ids = [exchange.conversation_id for exchange in told.exchanges]
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids)) == 3
    assert len({exchange.completion_id for exchange in told.exchanges}) == 5


def test_two_users_with_the_same_words_have_two_conversations(play: Play) -> None:
    async def scenario(running: Running) -> None:
        for user in ("anna", "bert"):
            await running.ask("Hello", user=user)
        for user in ("bert", "anna"):
            await running.ask("Hello", "four", "More", user=user)
        await asyncio.gather(*(running.ask("Good day") for _ in range(2)))
        await asyncio.gather(*(running.ask("Good day", "four", "More") for _ in range(2)))

    told = Told()
    play(scenario, tracer=told)
    ids = [exchange.conversation_id for exchange in told.exchanges]
    assert ids[:4] == [ids[0], ids[1], ids[1], ids[0]]
    assert len(set(ids[4:6])) == 2
    assert sorted(ids[4:6]) == sorted(ids[6:8])


def test_any_choice_can_be_gone_on_with(play: Play) -> None:
    async def scenario(running: Running) -> None:
        both = await running.ask("Hello", n=2)
        for choice in both.choices:
            await running.ask("Hello", choice.message.content, "More")

    told = Told()
    play(scenario, ["one", "two", "three", "four"], tracer=told)
    assert len({exchange.conversation_id for exchange in told.exchanges}) == 1


def test_old_conversations_are_forgotten_and_go_on_as_new_ones(play: Play) -> None:
    async def scenario(running: Running) -> None:
        for name in ("a", "b", "c"):
            await running.ask(name)
        assert len(running.handler.current.conversations) == 1
        await running.ask("c", "four", "more")
        await running.ask("a", "four", "more")
        counts = running.handler.metrics()
        assert (counts["conversations"], counts["remembered_conversations"]) == (4, 1)

    told = Told()
    play(scenario, tracer=told, kept_tokens=10)
    ids = [exchange.conversation_id for exchange in told.exchanges]
    assert ids[3] == ids[2]
    assert len(set(ids)) == 4


def test_conversations_of_which_no_token_is_kept_are_forgotten_too() -> None:
    class Voice:
        tokens = 0

    known = Conversations(lambda name: Voice(), kept_tokens=640)
    for n in range(50):
        with known.of([str(n).encode()], "") as conversation:
            known.replied(conversation, [str(n).encode()], [{"role": "assistant", "content": "yes"}])
    assert known.begun == 50
    assert len(known) == 10


def test_a_client_that_goes_away_ends_its_generation_and_is_counted(play: Play) -> None:
    class Slow(FakeEngine):
        cancelled = False

        async def generate(self, *args: Any, **options: Any) -> Any:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async def scenario(running: Running) -> None:
        asking = asyncio.ensure_future(running.ask("x"))
        await begun.wait()
        asking.cancel()
        while not running.handler.metrics()["lost"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # until the news of it has reached the engine
        assert running.engine.cancelled
        assert running.handler.metrics()["under_way"] == 0

    begun = asyncio.Event()
    play(scenario, engine=Slow([]))


# --------------------------------------------------------------------------------------------------------------- spans


def traced(to: Collector, remarks: list[str]) -> CompletionTracer:
    return CompletionTracer(collector_at(to.url, None), SAMPLING, remarks.append)


def test_a_collector_is_told_what_was_said_and_under_which_ids(play: Play) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def scenario(running: Running) -> list[str]:
        first = await running.ask("What is 2 + 2?", tools=[ADD])
        call = first.choices[0].message
        messages: Any = [
            {"role": "user", "content": "What is 2 + 2?"},
            call.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "4"},
        ]
        second = await running.client.chat.completions.create(
            model="any", messages=messages, tools=[ADD], temperature=0, n=2, extra_headers={"traceparent": parent}
        )
        return [first.id, second.id]

    remarks: list[str] = []
    with serving(Collector()) as collector:
        assert isinstance(collector, Collector)
        tracer = traced(collector, remarks)
        ids = play(scenario, [CALL, "four", "4"], tracer=tracer)
        tracer.close()
        first, second = collector.spans
    assert remarks == []
    assert [span["gen_ai.response.id"] for span in (first, second)] == ids
    assert first["gen_ai.conversation.id"] == second["gen_ai.conversation.id"]
    assert first["name"] == f"chat {ABOUT.name}"
    assert first["gen_ai.operation.name"] == "chat"
    assert first["gen_ai.response.model"] == ABOUT.name
    assert (first["astuner.checkpoint"], first["astuner.step"]) == (ABOUT.checkpoint, 7)
    assert first["gen_ai.request.temperature"] == 0.5
    assert second["gen_ai.request.temperature"] == 0
    assert first["start"] <= first["end"] <= second["end"]
    asked = {"role": "user", "parts": [{"type": "text", "content": "What is 2 + 2?"}]}
    assert json.loads(first["gen_ai.input.messages"]) == [asked]
    (calls,) = json.loads(first["gen_ai.output.messages"])
    assert calls["parts"][0]["name"] == "add"
    heard = json.loads(second["gen_ai.input.messages"])
    assert [message["role"] for message in heard] == ["user", "assistant", "tool"]
    said_back = [message["parts"][0]["content"] for message in json.loads(second["gen_ai.output.messages"])]
    assert sorted(said_back) == ["4", "four"]
    assert second["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert (second["trace"].hex(), second["parent"].hex()) == (parent[3:35], parent[36:52])
    assert first["parent"] == b""


@table("header", ["", "nonsense", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"])
def test_a_header_that_names_no_trace_begins_one(header: str) -> None:
    (one, no_parent), (another, _) = parent_of(header), parent_of(header)
    assert no_parent is None
    assert one != another


@pytest.mark.slow
def test_a_collector_that_is_down_delays_nothing_and_is_spoken_of_once(play: Play) -> None:
    with socket.socket() as nobody:  # takes the port, and no connection
        nobody.bind(("127.0.0.1", 0))
        remarks: list[str] = []
        to = collector_at(f"http://127.0.0.1:{nobody.getsockname()[1]}", None)
        tracer = CompletionTracer(to, SAMPLING, remarks.append)

        async def scenario(running: Running) -> None:
            for n in range(5):
                assert (await running.ask(f"number {n}")).choices
            assert running.handler.metrics()["spans"] == 5
            assert running.handler.metrics()["spans_sent"] == 0

        play(scenario, tracer=tracer)
        tracer.close()
    assert 1 <= len(remarks) <= 2, remarks  # it may have been said before the end, too
    assert remarks[-1] == (
        f"5 of 5 spans did not reach the collector at {to.url}: connection refused; check that it is running, "
        "and --trace"
    )


def test_a_text_that_had_to_be_cut_is_marked(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said, "LONGEST", 10)

    async def scenario(running: Running) -> None:
        await running.ask("short")
        await running.ask("much longer than that")

    with serving(Collector()) as collector:
        assert isinstance(collector, Collector)
        tracer = traced(collector, [])
        play(scenario, tracer=tracer)
        tracer.close()
        assert [span.get("astuner.cut") for span in collector.spans] == [None, True]


# --------------------------------------------------------------------------------------------------------------- agent

WORKFLOW = """
from astuner import Workflow, WorkflowOutput

class Twice(Workflow):
    name = "twice"

    async def execute(self, workflow_task, model_tuner):
        if workflow_task.task.main_query == "fail":
            raise RuntimeError("no tool")
        first = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        second = await model_tuner.chat([{"role": "user", "content": "Is it " + first.text + "?"}])
        return WorkflowOutput(metadata={"final_answer": second.text})
"""


def test_the_agent_answers_and_refuses_what_it_would_not_see(play: Play, codec: ChatCodec, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(WORKFLOW)

    async def scenario(running: Running) -> None:
        answer = await running.ask("What is 2 + 2?")
        assert answer.choices[0].message.content == "it is"
        assert answer.usage.completion_tokens == len("four") + len("it is") + 2
        with pytest.raises(openai.APIStatusError, match="no tool"):
            await running.ask("fail")
        for param, options in (("tools", {"tools": [ADD]}), ("temperature", {"temperature": 0.1})):
            with pytest.raises(openai.BadRequestError) as refused:
                await running.ask("x", **options)
            assert refused.value.param == param
        with pytest.raises(openai.BadRequestError) as refused:
            await running.ask("x", "y", "z")
        assert refused.value.param == "messages"

    def agent(config: Any, engine: FakeEngine) -> ServedAgent:
        return ServedAgent(config, one_model(engine, codec), SAMPLING)

    settings = "  rollout: {workflow: twice.py->Twice}\n  task_judge: {judge: nobody.py->Asked}"
    play(scenario, ["four", "it is", "x"], settings=settings, speaker=agent)
