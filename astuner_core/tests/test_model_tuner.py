"""The one path to the model: budget, recording, checks, threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.config.schema import AstunerSection
from astuner.contracts.errors import (
    ContextOverflow,
    EpisodeAborted,
    ModelFailed,
    PromptTooLong,
    TurnLimitReached,
    UnsupportedRequest,
)
from astuner.contracts.types import Generation, SamplingParams, Split
from astuner.rollout.model_tuner import ModelTuner
from astuner.rollout.models import one_model
from astuner.rollout.parts import OutputChecks
from astuner.rollout.turns import EpisodeRecorder
from astuner.testing import FakeEngine, make_tokenizer, workflow_task
from tests.table import table

ASK = {"role": "user", "content": "What is 2 + 2?"}
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def codec(tokenizer: Any) -> ChatCodec:
    return ChatCodec(tokenizer)


@pytest.fixture
def make(codec: ChatCodec, tokenizer: Any) -> Any:
    def make(
        replies: Any = lambda prompt: "four",
        *,
        engine: Any = None,
        max_model_len: int = 100_000,
        checks: Sequence[str] = (),
        data: Any = None,
        rollout: Any = None,
        split: Split = Split.TRAIN,
    ) -> tuple[ModelTuner, FakeEngine, EpisodeRecorder]:
        engine = engine or FakeEngine(replies, tokenizer, max_model_len=max_model_len)
        recorder = EpisodeRecorder()
        config: Any = SimpleNamespace(
            astuner=AstunerSection.model_validate(
                {"model": {"path": "fake"}, "data": data or {}, "rollout": rollout or {}}
            )
        )
        tuner = ModelTuner(
            models=one_model(engine, codec),
            recorder=recorder,
            sampling=SamplingParams(max_tokens=500, temperature=0.7, stop_token_ids=(5,)),
            config=config,
            workflow_task=workflow_task(split=split),
            checks=OutputChecks(checks) if checks else None,
        )
        return tuner, engine, recorder

    return make


class Waiting(FakeEngine):
    """Answers only when told to."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(lambda prompt: "four", tokenizer)
        self.asked, self.cancelled = threading.Event(), threading.Event()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("nobody sets the event")


def test_a_reply_becomes_a_turn_that_holds_only_what_is_new(make: Any, codec: ChatCodec) -> None:
    tuner, engine, recorder = make([CALL, "four"])

    async def work() -> None:
        first = await tuner.chat([ASK], TOOLS)
        assert first.finish_reason == "tool_calls"
        assert first.text == ""
        tool = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "4"}
        second = await tuner.chat([ASK, first.message, tool], TOOLS)
        assert (second.finish_reason, second.text, second.reasoning, second.unparsed_tool_calls) == (
            "stop",
            "four",
            "",
            (),
        )
        assert second.prompt_tokens > first.prompt_tokens + first.completion_tokens

    asyncio.run(work())
    first, second = recorder.turns
    assert (first.index, first.continues, first.request, list(first.tools)) == (0, None, (ASK,), TOOLS)
    assert (second.index, second.continues, second.branch_reason, list(second.tools)) == (1, 0, "", [])
    assert [m["role"] for m in second.request] == ["tool"]
    assert [call[2] for call in engine.calls] == ["episode/default"] * 2
    assert engine.calls[0][1].stop_token_ids == (5, *codec.stop_token_ids)


def test_agents_of_an_episode_have_a_conversation_each_and_share_the_count(make: Any) -> None:
    tuner, engine, recorder = make()

    async def work() -> None:
        replies = await asyncio.gather(*(tuner.chat([ASK], agent_name=name) for name in ("wolf", "villager", "wolf")))
        assert sorted(r.turn_index for r in replies) == [0, 1, 2]
        reply = await tuner.chat([ASK, replies[1].message, ASK], agent_name="villager")
        assert reply.turn.continues == replies[1].turn_index
        assert (await tuner.chat([ASK, replies[1].message, ASK])).turn.continues is None

    asyncio.run(work())
    assert [t.agent for t in recorder.turns][3:] == ["villager", "default"]
    assert {call[2] for call in engine.calls} == {"episode/wolf", "episode/villager", "episode/default"}


PROMPT = len("[user\nWhat is 2 + 2?]\n[assistant\n")
"""Tokens of the first prompt: one per byte, and one for each special token, here written as a bracket."""


@table(
    ("settings", "max_tokens", "expected"),
    [
        ({}, None, 500),
        ({}, 40, 40),
        ({"rollout": {"max_response_length_in_one_turn": 30}}, 40, 30),
        ({"max_model_len": PROMPT + 20}, None, 20),
        ({"max_model_len": PROMPT + 1}, None, 1),
        ({"data": {"max_response_length": 10}}, None, 10),
        ({"data": {"max_prompt_length": PROMPT}}, None, 500),
    ],
)
def test_an_answer_may_have_as_many_tokens_as_the_tightest_limit_leaves(
    make: Any, settings: Any, max_tokens: int | None, expected: int
) -> None:
    tuner, engine, _ = make(**settings)
    reply = asyncio.run(tuner.chat([ASK], max_tokens=max_tokens))
    assert reply.prompt_tokens == PROMPT
    assert engine.calls[0][1].max_tokens == expected
    assert not tuner.context_overflow


@table(
    ("settings", "named"),
    [
        ({"max_model_len": PROMPT}, "context"),
        ({"data": {"max_prompt_length": PROMPT - 1}}, "data.max_prompt_length"),
    ],
)
def test_a_first_prompt_that_does_not_fit_is_the_tasks_fault_and_names_it(make: Any, settings: Any, named: str) -> None:
    tuner, engine, recorder = make(**settings)
    with pytest.raises(PromptTooLong, match=f"task 'task'.*{named}"):
        asyncio.run(tuner.chat([ASK]))
    assert isinstance(tuner.failure, PromptTooLong)
    assert not tuner.context_overflow
    assert engine.calls == []
    assert recorder.turns == ()


def test_what_an_episode_adds_is_counted_from_its_first_prompt_tool_results_included(make: Any) -> None:
    tuner, engine, _ = make([CALL, "four"], data={"max_response_length": 200, "max_prompt_length": PROMPT})

    async def work() -> None:
        first = await tuner.chat([ASK])
        second = await tuner.chat([ASK, first.message, {"role": "user", "content": "x" * 50}])
        assert engine.calls[1][1].max_tokens == 200 - (second.prompt_tokens - PROMPT)
        with pytest.raises(ContextOverflow, match="max_response_length"):
            await tuner.chat([ASK, first.message, {"role": "user", "content": "x" * 200}])

    asyncio.run(work())
    assert tuner.context_overflow
    assert isinstance(tuner.failure, ContextOverflow)


def test_a_prompt_that_another_agent_gets_after_the_first_reply_is_the_policys_fault(make: Any) -> None:
    tuner, _, _ = make(data={"max_prompt_length": PROMPT})

    async def work() -> None:
        await tuner.chat([ASK])
        with pytest.raises(ContextOverflow, match="max_prompt_length"):
            await tuner.chat([{**ASK, "content": "What is 2 + 2? " * 2}], agent_name="other")

    asyncio.run(work())


@table(("before", "kind"), [(0, PromptTooLong), (1, ContextOverflow)])
def test_an_overflow_in_the_engine_is_noticed(make: Any, tokenizer: Any, before: int, kind: type[Exception]) -> None:
    class Full(FakeEngine):
        async def generate(self, prompt_ids: Any, sampling: Any, *, session: str = "") -> Any:
            if len(self.calls) == before:
                raise ContextOverflow("no room")
            return await super().generate(prompt_ids, sampling, session=session)

    tuner, _, _ = make(engine=Full(lambda prompt: "four", tokenizer))

    async def work() -> None:
        for _ in range(before):
            await tuner.chat([ASK])
        with pytest.raises(kind, match=r"task 'task'.*no room"):
            await tuner.chat([ASK])

    asyncio.run(work())
    assert type(tuner.failure) is kind
    assert tuner.context_overflow is (before == 1)


def test_a_limit_that_an_agent_copes_with_gives_way_to_a_failure_that_comes_later(make: Any) -> None:
    tuner, _, _ = make(["four"], rollout={"multi_turn": {"max_steps": 1}})

    async def work() -> None:
        await tuner.chat([ASK])
        with pytest.raises(TurnLimitReached):
            await tuner.chat([ASK])
        with pytest.raises(ModelFailed):
            await tuner.chat([ASK], agent_name="other")
        with pytest.raises(TurnLimitReached):
            await tuner.chat([ASK])

    asyncio.run(work())
    assert isinstance(tuner.failure, ModelFailed)


def test_what_was_refused_is_not_to_blame_for_a_limit_that_comes_later(make: Any) -> None:
    tuner, _, _ = make(["four"], rollout={"multi_turn": {"max_steps": 1}})

    async def work() -> None:
        for refused in ({"seed": 1}, {"temperature": 0.2}):
            with pytest.raises(UnsupportedRequest):
                await tuner.chat([ASK], **refused)
        assert "temperature" in str(tuner.failure)
        await tuner.chat([ASK])
        with pytest.raises(TurnLimitReached):
            await tuner.chat([ASK])
        with pytest.raises(UnsupportedRequest):
            await tuner.chat([ASK], agent_name="other", seed=1)

    asyncio.run(work())
    assert isinstance(tuner.failure, TurnLimitReached)


@table("asked", [0.0, 0.2, 1])
def test_another_temperature_is_refused_while_training_and_honoured_in_validation(make: Any, asked: float) -> None:
    tuner, engine, _ = make()
    with pytest.raises(UnsupportedRequest, match=r"rollout\.temperature = 0\.7"):
        asyncio.run(tuner.chat([ASK], temperature=asked))
    assert engine.calls == []
    assert isinstance(tuner.failure, UnsupportedRequest)
    asyncio.run(tuner.chat([ASK], temperature=0.7))
    validating, engine, _ = make(split=Split.VALIDATION)
    asyncio.run(validating.chat([ASK], temperature=asked))
    assert engine.calls[0][1].temperature == asked
    assert validating.failure is None


def test_the_step_limit_counts_an_agents_own_calls(make: Any) -> None:
    tuner, engine, _ = make(rollout={"multi_turn": {"max_steps": 2}})

    async def work() -> None:
        for _ in range(2):
            await tuner.chat([ASK])
        await tuner.chat([ASK], agent_name="other")
        with pytest.raises(TurnLimitReached, match="max_steps"):
            await tuner.chat([ASK])

    asyncio.run(work())
    assert len(engine.calls) == 3
    assert isinstance(tuner.failure, TurnLimitReached)


@table("stop_at_once", [True, False])
def test_a_check_that_fires_ends_the_episode_after_recording_the_turn(make: Any, stop_at_once: bool) -> None:
    tuner, engine, recorder = make(
        ["<tool_call>{oops</tool_call>", "four"],
        checks=["wrong_toolcall"],
        rollout={"agent_madness_termination": stop_at_once},
    )

    async def work() -> None:
        if stop_at_once:
            with pytest.raises(EpisodeAborted, match="wrong_toolcall"):
                await tuner.chat([ASK], TOOLS)
        else:
            assert (await tuner.chat([ASK], TOOLS)).unparsed_tool_calls == ["<tool_call>{oops</tool_call>"]

    asyncio.run(work())
    assert len(recorder.turns) == 1
    assert isinstance(tuner.failure, EpisodeAborted)
    if stop_at_once:
        with pytest.raises(EpisodeAborted, match="wrong_toolcall"):
            asyncio.run(tuner.chat([ASK], TOOLS))
        assert len(engine.calls) == 1
    else:
        assert asyncio.run(tuner.chat([ASK])).text == "four"


def test_an_engine_that_raises_anything_is_a_model_failure_and_remembered(make: Any, tokenizer: Any) -> None:
    class Broken(FakeEngine):
        async def generate(self, prompt_ids: Any, sampling: Any, *, session: str = "") -> Any:
            raise OSError("connection reset")

    tuner, _, recorder = make(engine=Broken((), tokenizer))
    with pytest.raises(ModelFailed, match="OSError: connection reset") as error:
        asyncio.run(tuner.chat([ASK]))
    assert isinstance(error.value.__cause__, OSError)
    assert tuner.failure is error.value
    assert recorder.turns == ()


@table(
    ("options", "named"),
    [
        ({"tool_choice": "other"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_by_name(make: Any, options: Any, named: str) -> None:
    tuner, engine, _ = make()
    with pytest.raises(UnsupportedRequest, match=named):
        asyncio.run(tuner.chat([ASK], TOOLS, **options))
    assert engine.calls == []


@table(
    ("choice", "reads"),
    [
        (None, True),
        ("auto", True),
        ("required", True),
        ("any", True),
        ("calc", True),
        ({"type": "function", "function": {"name": "calc"}}, True),
        ("none", False),
    ],
)
def test_tool_choice_decides_whether_calls_are_read_and_never_the_prompt(make: Any, choice: Any, reads: bool) -> None:
    tuner, engine, _ = make([CALL, CALL], split=Split.VALIDATION)

    async def work() -> None:
        reply = await tuner.chat([ASK], TOOLS, tool_choice=choice, temperature=0)
        assert bool(reply.tool_calls) is reads
        assert (reply.text == CALL) is not reads
        assert engine.calls[0][1].temperature == 0.0
        plain = await tuner.chat([ASK], TOOLS)
        assert plain.turn.generation.prompt_ids == reply.turn.generation.prompt_ids

    asyncio.run(work())


def test_a_plain_function_in_a_thread_asks_through_chat_sync(make: Any) -> None:
    def work(tuner: ModelTuner) -> str:
        first = tuner.chat_sync([ASK], max_tokens=2, agent_name="plain")
        assert first.finish_reason == "length"
        return tuner.chat_sync([ASK, first.message, ASK], agent_name="plain").text

    async def main() -> EpisodeRecorder:
        tuner, _, recorder = make()
        assert await asyncio.to_thread(work, tuner) == "four"
        return recorder

    recorder = asyncio.run(main())
    assert [(t.agent, t.continues) for t in recorder.turns] == [("plain", None), ("plain", 0)]


def test_chat_sync_on_the_event_loop_says_what_to_write_instead(make: Any) -> None:
    tuner, _, _ = make()

    async def work() -> None:
        with pytest.raises(RuntimeError, match="await chat"):
            tuner.chat_sync([ASK])

    asyncio.run(work())


def test_another_loop_in_a_thread_is_served_by_the_engines_loop(make: Any, tokenizer: Any) -> None:
    loops = []

    class Noting(FakeEngine):
        async def generate(self, prompt_ids: Any, sampling: Any, *, session: str = "") -> Any:
            loops.append(asyncio.get_running_loop())
            return await super().generate(prompt_ids, sampling, session=session)

    async def main() -> None:
        tuner, _, _ = make(engine=Noting(lambda prompt: "four", tokenizer))
        reply = await asyncio.to_thread(lambda: asyncio.run(tuner.chat([ASK])))
        assert reply.text == "four"
        assert loops == [asyncio.get_running_loop()]

    asyncio.run(main())


def test_closing_cancels_calls_from_threads_and_refuses_later_ones(make: Any, tokenizer: Any) -> None:
    engine = Waiting(tokenizer)

    async def main() -> tuple[ModelTuner, EpisodeRecorder]:
        tuner, _, recorder = make(engine=engine)
        call = asyncio.ensure_future(asyncio.to_thread(tuner.chat_sync, [ASK]))
        await asyncio.to_thread(engine.asked.wait, 10)
        tuner.close()
        with pytest.raises(EpisodeAborted, match="is over"):
            await call
        with pytest.raises(EpisodeAborted, match="is over"):
            await tuner.chat([ASK])
        return tuner, recorder

    tuner, recorder = asyncio.run(main())
    assert engine.cancelled.wait(10)
    assert recorder.turns == ()
    with pytest.raises(EpisodeAborted, match="is over"):
        tuner.chat_sync([ASK])


def test_a_thread_that_outlives_the_loop_is_told_that_the_episode_is_over(make: Any) -> None:
    tuner, _, _ = make()
    asyncio.run(tuner.chat([ASK]))
    with pytest.raises(EpisodeAborted, match="is over"):
        tuner.chat_sync([ASK])


def test_an_answer_that_comes_after_the_end_is_not_recorded(make: Any, tokenizer: Any) -> None:
    class Late(FakeEngine):
        async def generate(self, prompt_ids: Any, sampling: Any, *, session: str = "") -> Any:
            tuner.close()
            return await super().generate(prompt_ids, sampling, session=session)

    tuner, _, recorder = make(engine=Late(lambda prompt: "four", tokenizer))
    with pytest.raises(EpisodeAborted, match="is over"):
        asyncio.run(tuner.chat([ASK]))
    assert recorder.turns == ()
