"""Conventions of tracing SDKs: what real ones of several versions sent, what they send now, and what is none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from astuner.testing import ScriptedModel
from astuner_flywheel.traces.conversation import Tally
from astuner_flywheel.traces.sources import NO_MESSAGES, NOT_UNDERSTOOD, read_source
from tests.table import table

from ._traces import collecting, lines, prepared, reply, request, span

RECORDED = Path(__file__).parent / "recorded"
PROGRAM = Path(__file__).parent / "programs" / "traced_client.py"
SYSTEM = {"role": "system", "content": "You add numbers."}


def read(path: Path) -> tuple[list[Any], Tally]:
    tally = Tally()
    return list(read_source(path, 1 << 20, tally)), tally


def of_spans(tmp_path: Path, *spans: dict[str, Any]) -> tuple[list[Any], Tally]:
    return read(lines(tmp_path / "spans.jsonl", request(*spans)))


def bare(number: int, *, trace: int = 1, parent: int = 0, **attributes: Any) -> dict[str, Any]:
    """A span without an operation of the GenAI convention."""
    made = span(trace, number, "s", parent=parent, **attributes)
    return {**made, "attributes": [a for a in made["attributes"] if a["key"] != "gen_ai.operation.name"]}


def check_two_sums(tasks: Any) -> None:
    """What `traced_client.py` talks about: two sums, the second asked after the first, each by way of a tool."""
    first, second = tasks
    assert [t.main_query for t in tasks] == ["2 + 3?", "10 + 4?"]
    assert [t.metadata["trace"]["answer"] for t in tasks] == ["The sum is 5.", "The sum is 14."]
    assert [dict(m) for m in first.init_messages] == [SYSTEM]
    assert [m["role"] for m in second.init_messages] == ["system", "user", "assistant", "tool", "assistant"]
    call, result = second.init_messages[2]["tool_calls"][0], second.init_messages[3]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
    assert (result["tool_call_id"], result["content"]) == (call["id"], "5")
    assert first.metadata["trace"]["model"].startswith("scripted")


@table("name", sorted(path.name for path in RECORDED.glob("*.jsonl")))
def test_what_real_sdks_sent_becomes_tasks(name: str) -> None:
    done = prepared(RECORDED / name, turns="every")
    check_two_sums(done.train)
    assert (done.report["unreadable"], done.report["dropped"]) == ({}, {})
    session = "session-1" if name.startswith(("openinference", "langfuse")) else None
    assert session in (None, done.train[0].metadata["trace"]["conversation_id"])


def adds(body: dict[str, Any]) -> Any:
    """A model that calls the tool for a sum, and repeats what it says."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return f"The sum is {last['content']}."
    a, b = re.findall(r"\d+", last["content"])
    call = {"name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'}
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{a}", "type": "function", "function": call}]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = {"id": f"r{a}", "object": "chat.completion", "created": 1, "model": "scripted", "usage": usage}
    return 200, {**whole, "choices": [{"index": 0, "finish_reason": "tool_calls", "message": said}]}


@pytest.mark.slow
@pytest.mark.parametrize("sdk", ["openinference", "openllmetry"])
def test_a_client_that_an_sdk_traces_becomes_tasks(tmp_path: Path, sdk: str) -> None:
    path = tmp_path / "traces.sqlite"
    with collecting(path) as collector, ScriptedModel(adds) as model:
        told = [sys.executable, str(PROGRAM), sdk, model.base_url, collector.url, "2 + 3?", "10 + 4?"]
        done = subprocess.run(told, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
    check_two_sums(prepared(path, turns="every").train)


def test_messages_of_openinference_in_all_their_parts(tmp_path: Path) -> None:
    asked = {
        "llm.input_messages.10.message.role": "user",  # sorted as a number
        "llm.input_messages.10.message.contents.0.message_content.type": "text",
        "llm.input_messages.10.message.contents.0.message_content.text": "and this?",
        "llm.input_messages.10.message.contents.1.message_content.type": "image",
        "llm.input_messages.2.message.role": "assistant",
        "llm.input_messages.2.message.content": "a",
        "llm.input_messages.1.message.role": "user",
        "llm.input_messages.1.message.content": '[{"type": "mine"}]',
    }
    said = {"llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": "b"}
    llm = bare(1, **asked, **said, **{"openinference.span.kind": "LLM", "output.value": '{"id": "r-1"}'})
    (found,), _ = of_spans(tmp_path, llm)
    assert [m["content"] for m in found.messages] == ['[{"type": "mine"}]', "a", "and this?\n[image]"]
    assert (found.answer, found.response_ids[0]) == ("b", "r-1")


@table(
    ("kind", "asked", "said", "query"),
    [
        ("AGENT", "what?", "that", "what?"),
        ("CHAIN", '{"args": ["what?", 3], "kwargs": {"deep": true}}', '{"answer": "that"}', "what?"),
        ("CHAIN", '{"messages": [{"role": "user", "content": "what?"}], "x": 1}', '"that"', "what?"),
        ("LLM", '{"model": "m", "prompt": "what?"}', '{"choices": [{"text": "that"}]}', "what?"),
        ("LLM", '{"input": [{"role": "user", "content": [{"type": "input_text", "text": "what?"}]}]}',
         '{"output": [{"type": "reasoning"}, {"content": [{"type": "output_text", "text": "that"}]}]}',
         "what?"),
    ],
)  # fmt: skip
def test_inputs_and_outputs_of_other_forms(tmp_path: Path, kind: str, asked: str, said: str, query: str) -> None:
    one = bare(1, **{"openinference.span.kind": kind, "input.value": asked, "output.value": said})
    (found,), tally = of_spans(tmp_path, one)
    assert (found.query, found.answer) == (query, "that")
    assert not tally.dropped


def test_what_is_not_understood_is_counted_by_kind_with_an_example(tmp_path: Path) -> None:
    chain = {"openinference.span.kind": "CHAIN"}
    spans = [
        *(bare(n, trace=n, **chain) for n in range(1, 13)),
        bare(20, trace=20, **chain, **{"input.value": '{"a": "x", "b": "y"}', "output.value": "7"}),
        bare(30, trace=30, **{"openinference.span.kind": "LLM", "input.value": '{"model": "m"}'}),
        bare(40, trace=40, **{"langfuse.observation.type": "generation"}),
        bare(50, trace=50, **{"http.route": "/"}),
        span(60, 60, "execute_tool"),
        *reply(70, "q", "a"),
    ]
    found, tally = of_spans(tmp_path, *spans)
    assert [c.query for c in found] == ["q"]
    assert tally.dropped == {
        f"openinference CHAIN span {NO_MESSAGES}": 12,
        f"openinference CHAIN span {NOT_UNDERSTOOD} (input.value)": 1,
        f"openinference LLM span {NOT_UNDERSTOOD} (input.value)": 1,
        f"langfuse generation span {NO_MESSAGES}": 1,
        f"span of no known convention (scope 'test') {NO_MESSAGES}": 1,
        f"gen_ai execute_tool span {NO_MESSAGES}": 1,
    }
    first = tally.first[f"openinference CHAIN span {NO_MESSAGES}"]
    assert first == f"{tmp_path / 'spans.jsonl'}, trace {1:032x}, span {1:016x}"


def test_only_the_longest_call_of_a_loop_and_an_agent_before_its_model(tmp_path: Path) -> None:
    llm, agent = {"openinference.span.kind": "LLM"}, {"openinference.span.kind": "AGENT"}
    asked = {"llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "inner"}
    said = {"llm.output_messages.0.message.content": "no"}
    outer = bare(1, **agent, **{"input.value": "outer?", "output.value": "yes"})
    (found,), tally = of_spans(tmp_path, outer, bare(2, parent=1, **llm, **asked, **said))
    assert (found.query, found.answer, not tally.dropped) == ("outer?", "yes", True)
    silent = bare(1, **agent, **{"input.value": '{"a": "b", "c": "d"}'})  # the model's call has to do
    (found,), tally = of_spans(tmp_path, silent, bare(2, parent=1, **llm, **asked, **said))
    assert (found.query, found.answer, not tally.dropped) == ("inner", "no", True)


def test_hostile_spans_cost_little_and_are_counted(tmp_path: Path) -> None:
    kind = {"openinference.span.kind": "LLM"}
    deep = "[" * 5000 + "]" * 5000
    spans = [
        bare(1, trace=1, **kind, **{"llm.input_messages.999999999.message.role": "user",
                                    "llm.input_messages.999999999.message.content": "far?",
                                    "llm.output_messages.7.message.content": "here"}),
        bare(2, trace=2, **kind, **{f"llm.input_messages.{'9' * 6000}.message.role": "user"}),
        bare(3, trace=3, **kind, **{"llm.input_messages": deep}),
        bare(4, trace=4, **kind, **{"llm.input_messages": "7"}),
        bare(5, trace=5, **kind, **{f"llm.input_messages.0.message{'.message' * 40}": "x"}),
        bare(6, trace=6, **{"openinference.span.kind": "\x1b[31m\u202eLLM" * 1000, "input.value": "x"}),
        bare(7, trace=7, **kind, **{"llm.input_messages.0.message.role": {"a": [1]}}),
        bare(8, trace=8, **kind, **{"input.value": json.dumps({"messages": [[[[{"role": "user", "content": "q"}]]]]})}),
        bare(9, trace=9, **{"gen_ai.prompt": json.dumps({"0": {"role": "user", "content": {"x": deep}}})}),
    ]  # fmt: skip
    path = lines(tmp_path / "spans.jsonl", request(*spans))
    tracemalloc.start()
    try:
        found, tally = read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(c.query, c.answer) for c in found] == [("far?", "here")]
    assert sum(tally.dropped.values()) + sum(tally.bad.values()) == len(spans) - 1
    assert peak < 20 << 20
    told = json.dumps(tally.report(), ensure_ascii=False)
    assert "\\u001b" not in told
    assert "\u202e" not in told


def test_reasons_are_few_however_many_a_sender_thinks_of(tmp_path: Path) -> None:
    spans = [bare(n, trace=n, **{"openinference.span.kind": f"KIND-{n}"}) for n in range(1, 2001)]
    _, tally = of_spans(tmp_path, *spans)
    assert sum(tally.dropped.values()) == 2000
    assert len(tally.dropped) <= 201
