"""Conventions of tracing SDKs: what real ones of several versions sent, what they send now, and what is none."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.errors import DataError
from astuner.testing import ScriptedModel
from astuner_flywheel.traces.conventions import understood
from astuner_flywheel.traces.conversation import TABLES, Given, Tally
from astuner_flywheel.traces.exports import NoRow, kept, unfolded
from astuner_flywheel.traces.messages import Span, nested
from astuner_flywheel.traces.sources import ALONE, NO_MESSAGES, NOT_UNDERSTOOD, conversations, read_source
from tests.table import table

from ._traces import collecting, lines, prepared, reply, request, span

RECORDED = Path(__file__).parent / "recorded"
PROGRAM = Path(__file__).parent / "programs" / "traced_client.py"
FRAMEWORKS = Path(__file__).parents[3] / ".venv-frameworks" / "bin" / "python"
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


@table("name", sorted(path.name for path in RECORDED.glob("*.jsonl") if "phoenix" not in path.name))
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
@pytest.mark.parametrize("sdk", ["openinference", "openllmetry", "langfuse"])
def test_a_client_that_an_sdk_traces_becomes_tasks(tmp_path: Path, sdk: str) -> None:
    check_traced(tmp_path, sdk, sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize("sdk", ["logfire", "pydantic_ai"])
def test_so_does_one_that_an_sdk_traces_in_an_environment_of_its_own(tmp_path: Path, sdk: str) -> None:
    """logfire would be imported with every pydantic model here, by a plugin of pydantic's that it brings."""
    if not FRAMEWORKS.exists():
        pytest.skip(f"{FRAMEWORKS} is not there; `make .venv-frameworks/.done` builds it")
    check_traced(tmp_path, sdk, str(FRAMEWORKS))


def check_traced(tmp_path: Path, sdk: str, python: str) -> None:
    path = tmp_path / "traces.sqlite"
    with collecting(path) as collector, ScriptedModel(adds) as model:
        told = [python, str(PROGRAM), sdk, model.base_url, collector.url, "2 + 3?", "10 + 4?"]
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


def test_messages_of_langchain(tmp_path: Path) -> None:
    """As Langfuse's handler writes them, and LangChain itself."""
    call = {"name": "add", "args": {"a": 2}, "id": "c", "type": "tool_call"}
    asked = [
        {"content": "Add.", "type": "system"},
        {"content": "2 + 3?", "type": "human"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"content": "5", "type": "tool", "tool_call_id": "c"},
        {"content": "It is 5.", "type": "ai"},
        {"content": "sure?", "type": "human"},
    ]
    said = {"content": "yes", "type": "ai"}
    attributes = {"langfuse.observation.input": asked, "langfuse.observation.output": said}
    (found,), _ = of_spans(tmp_path, bare(1, **attributes, **{"langfuse.observation.type": "generation"}))
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    (called,) = found.messages[2]["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"a": 2}
    assert found.answer == "yes"


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
        f"span of an unknown convention (scope 'test') {ALONE}": 1,
        f"gen_ai execute_tool span {ALONE}": 1,
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


_NAMES = sorted(
    {name for of in TABLES["conventions"] for key in ("kind", "marks", "input") for name in of.get(key, ())}
)
_LEAVES = st.sampled_from(
    [None, True, 0, 1.5, "", "user", "LLM", "generation", "gen_ai.choice", "function_call", "[", '{"role": "user"}',
     '[{"type": "text", "text": "q"}]']
)  # fmt: skip
_KEYS = st.sampled_from(
    ["role", "content", "contents", "parts", "type", "message", "message.role", "messages", "choices", "tool_calls",
     "id", "function", "0", "99999999", "args", "kwargs", "output", "event.name", "body", "attributes", "data",
     "observations", "traceId", "startTime", "input", "dataType", "value", "subject"]
)  # fmt: skip
_VALUES = st.recursive(
    _LEAVES, lambda of: st.lists(of, max_size=3) | st.dictionaries(_KEYS, of, max_size=4), max_leaves=12
)


@given(
    st.lists(st.tuples(st.dictionaries(st.sampled_from(_NAMES), _VALUES), st.lists(_VALUES, max_size=2)), max_size=3)
)
def test_no_trace_vanishes_whatever_its_spans_hold(drawn: list[tuple[dict[str, Any], list[Any]]]) -> None:
    spans = [
        understood(Span(trace_id="t", span_id=str(i), parent_id=str(i + 1), attributes=nested(flat), events=events))
        for i, (flat, events) in enumerate(drawn)
    ]
    tally = Tally()
    found = list(conversations(spans, "f", tally)) if spans else []
    assert found or tally.dropped or tally.bad or not spans


@given(st.dictionaries(_KEYS, _VALUES))
def test_a_row_is_kept_or_says_why_not(row: dict[str, Any]) -> None:
    for each in unfolded(row):
        with contextlib.suppress(NoRow):
            assert isinstance(kept(each), (dict, Given))


def test_reasons_are_few_however_many_a_sender_thinks_of(tmp_path: Path) -> None:
    spans = [bare(n, trace=n, **{"openinference.span.kind": f"KIND-{n}"}) for n in range(1, 2001)]
    _, tally = of_spans(tmp_path, *spans)
    assert sum(tally.dropped.values()) == 2000
    assert len(tally.dropped) <= 201


# -------------------------------------------------------------------------------------------------------------- exports


@table("name", sorted(path.name for path in RECORDED.glob("phoenix[-_][f0-9]*")))
def test_what_phoenix_exports_becomes_tasks(name: str) -> None:
    done = prepared(RECORDED / name, RECORDED / "phoenix_annotations-20.26.1.json", turns="every")
    check_two_sums(done.train)
    assert (done.report["unreadable"], done.report["dropped"]) == ({}, {})
    assert [task.metadata.get("rating") for task in done.train] == [None, 1.0]
    assert done.report["feedback"]["joined"] == 1


def langfuse_trace() -> dict[str, Any]:
    """As `GET /api/public/traces/ID` and the button below a trace have it; the names are checked in another test."""
    of = {"traceId": "t-1", "projectId": "p", "environment": "default", "level": "DEFAULT"}
    asked = {"messages": [SYSTEM, {"role": "user", "content": "2 + 3?"}], "tools": []}
    generation = {**of, "id": "o-2", "type": "GENERATION", "name": "call", "parentObservationId": "o-1", "model": "m",
                  "startTime": "2026-11-01T10:00:01.000Z", "endTime": "2026-11-01T10:00:02.000Z", "input": asked,
                  "output": {"role": "assistant", "content": "5"}}  # fmt: skip
    outer = {**of, "id": "o-1", "type": "SPAN", "name": "turn", "parentObservationId": None, "input": {"a": 1, "b": 2},
             "startTime": "2026-11-01T10:00:00.000Z", "output": None}  # fmt: skip
    score = {"id": "s-1", "traceId": "t-1", "observationId": None, "name": "user-feedback", "source": "API",
             "dataType": "BOOLEAN", "value": 0, "stringValue": "False", "comment": "no",
             "createdAt": "2026-11-01T10:00:00.000Z"}  # fmt: skip
    return {"id": "t-1", "timestamp": "2026-11-01T10:00:00.000Z", "name": "turn", "sessionId": "c-1", "input": "2 + 3?",
            "output": "5", "metadata": {}, "observations": [outer, generation], "scores": [score]}  # fmt: skip


def snake(row: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", name): value for name, value in row.items()}


@table("form", ["trace", "button", "pretty", "list of an API", "lines", "blob storage", "CSV"])
def test_what_langfuse_exports_becomes_tasks(tmp_path: Path, form: str) -> None:
    whole, path = langfuse_trace(), tmp_path / ("t.csv" if form == "CSV" else "t.json")
    trace = {name: value for name, value in whole.items() if name not in ("observations", "scores")}
    rows = [*({**row, "sessionId": "c-1"} for row in whole["observations"]), *whole["scores"]]
    if form == "CSV":
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for row in rows:
                writer.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()})
    elif form in ("lines", "blob storage"):
        lines(path, *(map(snake, rows) if form == "blob storage" else rows))
    else:
        body = {
            "trace": whole,
            "button": {"trace": trace, "observations": whole["observations"], "scores": whole["scores"]},
            "pretty": [whole],
            "list of an API": {"data": rows, "meta": {"page": 1}},
        }[form]
        path.write_text(json.dumps(body, indent=2 if form == "pretty" else None))
    done = prepared(path)
    (task,) = done.train
    assert (task.main_query, [dict(m) for m in task.init_messages]) == ("2 + 3?", [SYSTEM])
    assert (task.metadata["rating"], task.metadata["comment"]) == (-1.0, "no")
    trace_of = task.metadata["trace"]
    assert (trace_of["trace_id"], trace_of["conversation_id"], trace_of["model"]) == ("t-1", "c-1", "m")
    assert (done.report["unreadable"], done.report["dropped"]) == ({}, {})


def test_a_trace_of_langfuse_without_its_observations(tmp_path: Path) -> None:
    trace = {**langfuse_trace(), "observations": ["o-1", "o-2"], "scores": ["s-1"]}
    (task,) = prepared(lines(tmp_path / "t.jsonl", trace)).train
    assert (task.main_query, task.metadata["trace"]["answer"]) == ("2 + 3?", "5")


def test_the_names_in_exports_are_those_of_langfuse() -> None:
    from langfuse import api

    def names(model: Any) -> set[str]:
        return {getattr(next(iter(of.metadata), None), "alias", name) for name, of in model.model_fields.items()}

    for row in langfuse_trace()["observations"]:
        assert {*row} <= names(api.ObservationV2)
    (score,) = langfuse_trace()["scores"]
    assert {*score} - {"dataType"} <= names(api.BooleanScore)
    assert names(api.ScoreSubjectV3_Observation) == {"kind", "id", "traceId"}


def test_scores_of_the_third_version_of_langfuses_api(tmp_path: Path) -> None:
    trace = langfuse_trace()
    (score,) = trace.pop("scores")
    of_2 = {name: value for name, value in score.items() if name not in ("traceId", "observationId")}
    for kind, name in (("trace", "t-1"), ("observation", "o-2"), ("session", "c-1")):
        subject = {"kind": kind, "id": name}
        scores = lines(tmp_path / "s.jsonl", {**of_2, "subject": subject})
        (task,) = prepared(lines(tmp_path / "t.jsonl", trace), scores).train
        assert task.metadata["rating"] == -1.0


def test_a_request_on_several_lines(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(request(*reply(1, "q", "a")), indent=1))
    assert [c.query for c in read(tmp_path / "t.json")[0]] == ["q"]


def test_rows_of_logfires_query(tmp_path: Path) -> None:
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "5"}]}]
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": [{"role": "user", "content": "2 + 3?"}]}
    row = {"trace_id": "a" * 32, "span_id": "b" * 16, "parent_span_id": None, "span_name": "chat m", "kind": "span",
           "start_timestamp": "2026-11-01T10:00:00Z", "otel_scope_name": "logfire.openai",
           "attributes": {**attributes, "gen_ai.output.messages": json.dumps(said)}}  # fmt: skip
    (task,) = prepared(lines(tmp_path / "t.jsonl", row)).train
    assert (task.main_query, task.metadata["trace"]["answer"]) == ("2 + 3?", "5")


def test_bad_rows_of_exports_are_named_and_cost_no_good_one_its_place(tmp_path: Path) -> None:
    good = {**langfuse_trace(), "observations": []}
    score = {"traceId": "t-1", "dataType": "NUMERIC"}
    path = lines(
        tmp_path / "t.jsonl",
        good,
        {"id": "x", "input": "no time, no trace"},
        {**score, "value": 7},
        {**score, "value": "many"},
        {**score, "value": 1, "source": "EVAL"},
        {"dataType": "NUMERIC", "value": 1},
        {"data": [3, {"id": "y"}]},
    )
    found, tally = read(path)
    assert [c.query for c in found if hasattr(c, "query")] == ["2 + 3?"]
    assert {reason: tally.first[reason].rpartition(":")[2] for reason in tally.bad} == {
        "no messages (its fields: id, input)": "2",
        'a score: rating must be a number from -1 (bad) to 1 (good), "up" or "down"': "3",
        "a score that is neither a number nor a thumb": "4",
        "a score: response_id or trace_id or conversation_id is required to identify the answer": "6",
        "no messages (its fields: id)": "7",
    }
    assert tally.dropped == {"a score given by a program": 1}
    assert tally.first["a score given by a program"] == f"{path}:5"
    with pytest.raises(DataError, match=r"t\.jsonl:2: no messages"):
        list(read_source(path, 1 << 20, Tally("stop")))


@table(
    ("name", "content", "says"),
    [
        ("t.json", b'[{"a": 1},\n {"b": }]', r"t\.json cannot be read as JSON: .*line 2"),
        ("t.json", b"[" + b" " * 5000 + b"]", "one JSON document of more than 4,000 bytes.*jq -c"),
        ("t.csv", b'a,b\n1,"2', r"t\.csv:\d cannot be read as CSV"),
        ("t.csv", b"a,b\n1,\xff\xfe\n", r"t\.csv:\d cannot be read as CSV"),
        ("t.parquet", b"PAR1....", "is Parquet; convert it first: python -c"),
    ],
)
def test_files_that_cannot_be_read_say_what_to_do(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        list(read_source(path, 1000, Tally()))


def test_deep_exports_and_wrong_items_are_counted(tmp_path: Path) -> None:
    deep = "[" * 90 + "]" * 90
    row = {"traceId": "t", "id": "o", "type": "GENERATION", "startTime": 1, "input": json.loads(deep), "attributes": 7}
    (tmp_path / "t.json").write_text(json.dumps([1, "x", None, row, {"attributes.": json.loads(deep)}]))
    _, tally = read(tmp_path / "t.json")
    assert tally.bad["an item that is not a JSON object"] == 3
    assert tally.dropped == {f"langfuse GENERATION span {NOT_UNDERSTOOD} (langfuse.observation.input)": 1}
