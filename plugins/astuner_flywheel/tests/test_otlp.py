"""OTLP spans, from a real SDK and from files: whole, out of order, half missing, twice, and broken."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from astuner.contracts.errors import DataError
from astuner_flywheel.traces.conversation import Tally
from astuner_flywheel.traces.messages import Unreadable, read_messages
from astuner_flywheel.traces.sources import CUT, NO_ANSWER, NO_MESSAGES, NO_QUESTION, ORPHAN, read_source
from tests.table import table

from ._traces import collecting, lines, parts, prepared, reply, request, span


def read(path):
    tally = Tally()
    return list(read_source(path, 1 << 20, tally)), tally


def of_spans(tmp_path, *spans):
    found, tally = read(lines(tmp_path / "spans.jsonl", request(*spans)))
    return found, tally


def test_a_real_sdk_sends_what_becomes_a_task(tmp_path: Path) -> None:
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    with collecting(tmp_path / "traces.sqlite") as collector:
        provider = TracerProvider(shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{collector.url}/v1/traces", compression=Compression.Gzip)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = provider.get_tracer("an.app", "2")
        named = {"gen_ai.conversation.id": "c1"}
        with tracer.start_as_current_span("invoke_agent helper") as agent:
            agent.set_attributes({"gen_ai.operation.name": "invoke_agent", **named})
            call_of_a_tool = {"type": "tool_call", "id": "c", "name": "add", "arguments": {"a": 2}}
            for i, part in enumerate([call_of_a_tool, {"type": "text", "content": "5"}]):
                with tracer.start_as_current_span("chat m") as call:
                    call.set_attributes(
                        {
                            "gen_ai.operation.name": "chat",
                            "gen_ai.request.model": "m",
                            "gen_ai.response.id": f"chatcmpl-{i}",
                            "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Add."}]),
                            "gen_ai.input.messages": json.dumps([parts("user", "What is 2 + 3?")]),
                            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [part]}]),
                            **named,
                        }
                    )
        with tracer.start_as_current_span("GET /"):
            pass
        provider.shutdown()
    (task,) = prepared(tmp_path / "traces.sqlite").train
    assert (task.init_messages, task.main_query) == (({"role": "system", "content": "Add."},), "What is 2 + 3?")
    trace = task.metadata["trace"]
    assert (trace["answer"], trace["model"], trace["conversation_id"]) == ("5", "m", "c1")
    assert trace["trace_id"] == f"{agent.get_span_context().trace_id:032x}"


def test_spans_in_any_order_over_many_lines_and_twice_give_the_same_tasks(tmp_path: Path) -> None:
    spans = [each for trace in range(1, 40) for each in reply(trace, f"question {trace}?", f"answer {trace}")]
    whole = prepared(lines(tmp_path / "whole.jsonl", request(*spans)))
    mixed = [*spans, *spans[::3]]
    random.Random(0).shuffle(mixed)
    batches = [request(*mixed[i : i + 7]) for i in range(0, len(mixed), 7)]
    again = prepared(lines(tmp_path / "mixed.jsonl", *batches))
    assert len(whole.train) == 39
    plain = [[(t.task_id, t.main_query, t.init_messages) for t in each.train] for each in (whole, again)]
    assert plain[0] == plain[1]
    assert again.report["dropped"]["a duplicate span"]["count"] == 26


def test_half_of_a_trace_gives_what_it_can(tmp_path: Path) -> None:
    agent, call = reply(1, "q1", "a1")
    assert [c.answer for c in of_spans(tmp_path, agent)[0]] == ["a1"]
    (no_agent,) = of_spans(tmp_path, call)[0]
    assert (no_agent.query, no_agent.answer, no_agent.messages[0]["content"]) == ("q1", "a1", "Be brief.")
    silent = span(2, 20, "invoke_agent")
    found, tally = of_spans(tmp_path, silent, *reply(3, "q3", "a3"))
    assert [c.query for c in found] == ["q3"]
    assert tally.dropped == {f"gen_ai invoke_agent span {NO_MESSAGES}": 1}
    no_answer = span(4, 40, "chat", gen_ai__input__messages=[parts("user", "q")])
    no_question = span(5, 50, "chat", gen_ai__output__messages=[parts("assistant", "a")])
    assert of_spans(tmp_path, no_answer, no_question)[1].dropped == {NO_ANSWER: 1, NO_QUESTION: 1}
    asked, said = [parts("user", "q… [9 more characters]")], [parts("assistant", "a")]
    cut = span(7, 70, "chat", gen_ai__input__messages=asked, gen_ai__output__messages=said, astuner__cut="true")
    assert of_spans(tmp_path, cut)[1].dropped == {CUT: 1}
    broken = span(6, 60, "chat", gen_ai__input__messages=[{"role": "emperor", "parts": []}])
    assert of_spans(tmp_path, broken)[1].bad == {"a message has the role 'emperor'": 1}


def test_only_the_outermost_agent_of_a_trace_counts(tmp_path: Path) -> None:
    main, call = reply(1, "Plan a trip", "Go to Rome")
    inner = span(
        1,
        7,
        "invoke_agent",
        parent=6,
        gen_ai__input__messages=[parts("user", "find hotels")],
        gen_ai__output__messages=[parts("assistant", "three hotels")],
    )
    tool = span(1, 6, "execute_tool", parent=int(main["spanId"], 16))
    found, tally = of_spans(tmp_path, inner, call, tool, main)
    assert [c.query for c in found] == ["Plan a trip"]
    assert not tally.dropped
    found, tally = of_spans(tmp_path, inner, call, main)  # the tool's span is lost, and with it where the agent belongs
    assert [c.query for c in found] == ["Plan a trip"]
    assert tally.dropped == {ORPHAN: 1}
    found, tally = of_spans(tmp_path, inner)
    assert [c.query for c in found] == ["find hotels"]


def test_spans_that_are_each_others_parents_end(tmp_path: Path) -> None:
    one, other = span(1, 1, "invoke_agent", parent=2), span(1, 2, "chat", parent=1)
    assert of_spans(tmp_path, one, other)[0] == []


def test_hints_behind_the_question_and_a_rewritten_history(tmp_path: Path) -> None:
    agent, call = reply(1, "q", "a")
    system, question = parts("system", "Be brief."), parts("user", "q")
    hint = parts("user", "<system-reminder>it is noon</system-reminder>")

    def seen_by_the_model(*messages):
        attributes = [a for a in call["attributes"] if a["key"] != "gen_ai.input.messages"]
        sent = {"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(messages)}}
        return of_spans(tmp_path, agent, {**call, "attributes": [*attributes, sent]})[0][0].messages

    earlier = [parts("user", "before"), parts("assistant", "then")]
    assert [m["content"] for m in seen_by_the_model(system, *earlier, question, hint)] == [
        "Be brief.", "before", "then", "q",
    ]  # fmt: skip
    folded = parts("user", "# Conversation History\nuser: q")
    assert [m["content"] for m in seen_by_the_model(system, folded)] == ["Be brief.", "q"]


def test_calls_and_results_become_openai_messages() -> None:
    found = read_messages(
        [
            parts("system", "s"),
            {
                "role": "assistant",
                "parts": [
                    {"type": "reasoning", "content": "hm"},
                    {"type": "text", "content": "Let me see."},
                    {"type": "tool_call", "id": "c1", "name": "f", "arguments": {"x": "é"}},
                    {"type": "tool_call", "id": "c2", "name": "g", "arguments": '{"y":1}'},
                    {"type": "tool_call_response", "id": "c1", "response": '[{"type": "text", "text": "72"}]'},
                    {"type": "tool_call_response", "id": "c2", "response": "[1,2]"},
                    {"type": "text", "content": "Done."},
                ],
            },
            {"role": "user", "parts": [{"type": "blob", "modality": "image"}, {"type": "text", "content": "and?"}]},
        ]
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"y":1}'}},
    ]
    assert found == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "72"},
        {"role": "tool", "tool_call_id": "c2", "content": "[1,2]"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "[blob]\nand?"},
    ]
    assert read_messages(found) == found


@table(
    "response, text",
    [
        ("""["TextBlock(type='text', text='it\\\\'s 14', id='b1', finished_at=None)"]""", "it's 14"),
        (
            """["TextBlock(text='14')", "DataBlock(type='data', source=URLSource(url=AnyUrl('http://h/')))"]""",
            "14\n[data]",
        ),
        ('["TextBlock(text=open(1))"]', '["TextBlock(text=open(1))"]'),
        ('["TextBlock(text="]', '["TextBlock(text="]'),
        ('["TextBlock(", 3]', '["TextBlock(", 3]'),
    ],
)
def test_agentscope_2_results_of_tools_become_their_text(response: str, text: str) -> None:
    part = {"type": "tool_call_response", "id": "c1", "response": response}
    (message,) = read_messages([{"role": "assistant", "parts": [part]}])
    assert message == {"role": "tool", "tool_call_id": "c1", "content": text}


@table("value", ["text", 7, [1], [{"role": "user", "tool_calls": 3}], [{"content": "no role"}], None])
def test_what_is_no_message_is_said(value) -> None:
    with pytest.raises(Unreadable):
        read_messages(value)


def test_lines_that_are_no_request_are_named(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    good = [json.dumps(request(*reply(i, f"q{i}", f"a{i}"))).encode() for i in (1, 2)]
    path.write_bytes(b"\n".join([good[0], b"{torn", b'"\xff\xfe"', b'{"resourceMetrics": []}', b"", good[1]]) + b"\n")
    found, tally = read(path)
    assert sorted(c.query for c in found) == ["q1", "q2"]
    assert tally.bad == {"a line that is not an OTLP request": 3}
    assert tally.first["a line that is not an OTLP request"] == f"{path}:2"
    with pytest.raises(DataError, match=r"spans\.jsonl:2: a line of OTLP: the body cannot be read as JSON"):
        list(read_source(path, 1 << 20, Tally("stop")))
    path.write_bytes(b"\n".join([good[0], *itertools.repeat(b'{"resourceSpans": "x"}', 2)]))
    assert read(path)[1].bad == {"a line that is not an OTLP request": 2}
