"""The collector over HTTP: what it takes, how it refuses, and that an answer means kept."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from astuner.contracts.errors import ConfigError, DataError, RunError
from astuner_flywheel import commands
from astuner_flywheel.receiver import server
from astuner_flywheel.receiver import store as receiver_store
from astuner_flywheel.receiver.store import Store, nested
from tests.table import table

from ._traces import SAMPLE, Collecting, collecting, lines, prepared, reply, request, span

JSON, PROTOBUF = "application/json", "application/x-protobuf"


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collecting]:
    with collecting(tmp_path / "traces.sqlite") as running:
        yield running


def ask(
    where: Collecting, method: str, path: str, body: bytes | Any = b"", kind: str = JSON, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    host, port = where.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": kind, **{k.replace("_", "-"): v for k, v in headers.items()}}
    with closing(connection):
        connection.request(method, path, raw, sent)
        answer = connection.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}


def spans_in(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [row[0] for row in database.execute("SELECT spanId FROM span_table ORDER BY spanId")]


def protobuf(*traces: int) -> bytes:
    made = ExportTraceServiceRequest()
    scope = made.resource_spans.add().scope_spans.add()
    for trace in traces:
        each = scope.spans.add(trace_id=trace.to_bytes(16, "big"), span_id=trace.to_bytes(8, "big"), name="chat m")
        each.attributes.add(key="gen_ai.operation.name").value.string_value = "chat"
    return bytes(made.SerializeToString())


# --------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize("packed", [False, True])
def test_spans_are_kept_before_they_are_answered_in_the_encoding_of_the_request(
    collector: Collecting, packed: bool
) -> None:
    squeeze, more = (gzip.compress, {"Content_Encoding": "gzip"}) if packed else (bytes, {})
    status, body, headers = ask(collector, "POST", "/v1/traces", squeeze(protobuf(1, 2)), PROTOBUF, **more)
    assert (status, headers["content-type"]) == (200, PROTOBUF)
    assert not ExportTraceServiceResponse.FromString(body).HasField("partial_success")
    assert len(spans_in(collector.path)) == 2
    sent = json.dumps(request(*reply(3, "q", "a"))).encode()
    status, body, headers = ask(collector, "POST", "/v1/traces", squeeze(sent), f"{JSON}; charset=utf-8", **more)
    assert (status, headers["content-type"].partition(";")[0], body) == (200, JSON, b"{}")
    assert len(spans_in(collector.path)) == 4


def test_what_comes_twice_is_kept_once(collector: Collecting) -> None:
    for _ in range(2):
        assert ask(collector, "POST", "/v1/traces", protobuf(1, 2, 2), PROTOBUF)[0] == 200
    assert len(spans_in(collector.path)) == 2
    status, body, _ = ask(collector, "GET", "/metrics")
    counts = json.loads(body)
    assert status == 200
    assert (counts["since_start"]["spans"], counts["since_start"]["duplicates"]) == (2, 4)
    assert counts["in_file"] == {"spans": 2, "feedback": 0}


def test_a_bad_span_costs_no_good_one_its_place(collector: Collecting) -> None:
    good, short, zero = span(1, 1, "chat"), span(1, 2, "chat"), span(1, 3, "chat")
    short["traceId"], zero["spanId"] = "abcd", "0" * 16
    wrong = {**span(1, 4, "chat"), "startTimeUnixNano": "yesterday"}
    status, body, _ = ask(collector, "POST", "/v1/traces", request(good, short, zero, wrong))
    partial = json.loads(body)["partialSuccess"]
    assert (status, partial["rejectedSpans"]) == (200, "3")
    for reason in ("a trace id that is not 16 bytes", "a span id that is not 8 bytes", "an invalid span"):
        assert f"1 × {reason}" in partial["errorMessage"]
    assert spans_in(collector.path) == [good["spanId"]]
    made = ExportTraceServiceRequest.FromString(protobuf(7))
    made.resource_spans[0].scope_spans[0].spans.add(trace_id=b"x", span_id=b"12345678")
    status, body, _ = ask(collector, "POST", "/v1/traces", made.SerializeToString(), PROTOBUF)
    assert ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans == 1
    assert status == 200


def status_of(body: bytes) -> tuple[int, str]:
    """``google.rpc.Status`` without its class: a varint field and a text field."""
    assert body[0] == 0x08
    assert body[2] == 0x12
    start = 4 if body[3] < 0x80 else 5
    return body[1], body[start:].decode()


def test_a_refusal_is_a_status_in_the_encoding_of_the_request(
    collector: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, body, headers = ask(collector, "POST", "/v1/traces", b"\xff\xff no protobuf", PROTOBUF)
    assert (status, headers["content-type"]) == (400, PROTOBUF)
    assert status_of(body)[0] == 3
    assert "not ExportTraceServiceRequest" in status_of(body)[1]
    status, body, _ = ask(collector, "POST", "/v1/traces", b'{"resourceSpans": [', JSON)
    assert (status, json.loads(body)["code"]) == (400, 3)
    status, body, _ = ask(collector, "POST", "/v1/traces", {"messages": []})
    assert (status, json.loads(body)["message"]) == (400, "the body has no resourceSpans (found: messages)")
    status, body, _ = ask(collector, "POST", "/v1/traces", b"x", "text/plain")
    assert status == 415
    assert "send application/x-protobuf or application/json" in status_of(body)[1]
    status, body, _ = ask(collector, "POST", "/v1/traces", b"x", PROTOBUF, Content_Encoding="br")
    assert status == 415
    status, body, _ = ask(collector, "POST", "/v1/traces", b"no gzip", PROTOBUF, Content_Encoding="gzip")
    assert (status, "not gzip" in status_of(body)[1]) == (400, True)
    torn = gzip.compress(protobuf(1))[:-9]
    assert ask(collector, "POST", "/v1/traces", torn, PROTOBUF, Content_Encoding="gzip")[0] == 400
    monkeypatch.setattr(server.Handler, "most_bytes", 1000)
    monkeypatch.setattr(server, "MAX_UNPACKED", 100_000)
    status, body, _ = ask(collector, "POST", "/v1/traces", b"x" * 1001, JSON)
    assert (status, json.loads(body)["code"]) == (413, 8)
    bomb = gzip.compress(b" " * 200_000)
    assert len(bomb) < 1000
    status, body, _ = ask(collector, "POST", "/v1/traces", bomb, JSON, Content_Encoding="gzip")
    assert (status, "unpacked request" in json.loads(body)["message"]) == (413, True)
    assert spans_in(collector.path) == []


def test_a_full_disk_is_answered_so_that_the_exporter_tries_again(
    collector: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: Any, events: Any) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(collector.handler._store, "add_spans", full)
    status, body, headers = ask(collector, "POST", "/v1/traces", protobuf(1), PROTOBUF)
    assert (status, status_of(body)[0], headers["retry-after"]) == (503, 14, "10")
    assert "disk is full" in status_of(body)[1]
    monkeypatch.undo()
    assert ask(collector, "POST", "/v1/traces", protobuf(1), PROTOBUF)[0] == 200


def test_names_with_dots_become_a_tree_as_studio_has_it() -> None:
    assert nested({"a.b.c": 1, "a.b.d": 2, "e": 3}) == {"a": {"b": {"c": 1, "d": 2}}, "e": 3}
    assert nested({"a": 1, "a.b": 2}) == {"a": 1, "a.b": 2}
    assert nested({"a.b": [1], "a.b.c": 2}) == {"a": {"b": [1]}, "a.b.c": 2}
    deep, deeper = ".".join("a" * 50), ".".join("b" * 51)
    found = nested({deep: 1, deeper: 2})
    assert found.pop(deeper) == 2
    assert json.dumps(found).count("{") == 50


def test_a_name_of_very_many_dots_costs_nothing(collector: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    dots = "." * 50_000
    spans = request(*reply(1, "1+5?", "6"), span(1, 999, "chat", **{dots: "x"}))
    status, body, _ = ask(collector, "POST", "/v1/traces", spans)
    assert (status, json.loads(body)) == (200, {})
    assert len(spans_in(collector.path)) == 3
    assert len(prepared(collector.path).train) == 1

    def too_deep(event: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr(receiver_store, "_event", too_deep)
    eventful = {**span(2, 8, "chat"), "events": [{"name": "e"}]}
    status, body, _ = ask(collector, "POST", "/v1/traces", request(eventful, span(2, 9, "chat")))
    assert (status, json.loads(body)["partialSuccess"]["errorMessage"]) == (200, "1 × nested too deeply")
    assert len(spans_in(collector.path)) == 4


# ------------------------------------------------------------------------------------------------------------- feedback


def rate(collector: Collecting, body: Any, **headers: str) -> tuple[int, Any]:
    status, answer, _ = ask(collector, "POST", "/feedback", body, **headers)
    return status, json.loads(answer)


def test_feedback_finds_its_answer_whichever_comes_first(collector: Collecting) -> None:
    early = {"response_id": "r-1", "rating": -1, "correction": "6"}
    assert rate(collector, early) == (200, {"stored": 1, "seen": False})
    ask(collector, "POST", "/v1/traces", request(*reply(1, "1+5?", "7"), *reply(2, "2+2?", "4")))
    assert rate(collector, {"trace_id": f"{2:032X}", "thumbs": "up", "comment": "quick"})[1]["seen"]
    assert rate(collector, {"conversation_id": "nobody", "rating": 0.5}) == (200, {"stored": 3, "seen": False})
    done = prepared(collector.path)
    by_query = {task.main_query: task.metadata for task in done.train}
    assert (by_query["1+5?"]["answer"], by_query["1+5?"]["rating"]) == ("6", -1.0)
    assert (by_query["2+2?"]["comment"], by_query["2+2?"]["rating"]) == ("quick", 1.0)
    assert "answer" not in by_query["2+2?"]
    given = done.report["feedback"]
    assert (given["given"], given["joined"], given["about nothing seen"]) == (3, 2, 1)


def test_feedback_with_several_ids_is_joined_by_the_closest_that_is_known(collector: Collecting) -> None:
    spans = [
        *reply(1, "1+5?", "7", gen_ai__conversation__id="c-1"),
        *reply(2, "2+2?", "5"),
        *reply(3, "3+4?", "7"),
    ]
    ask(collector, "POST", "/v1/traces", request(*spans))
    given = [
        {"response_id": "mine", "conversation_id": "c-1", "correction": "6"},
        {"response_id": "mine", "trace_id": f"{2:032x}", "conversation_id": "nobody", "rating": -1},
        {"response_id": "r-3", "trace_id": f"{2:032x}", "conversation_id": "c-1", "rating": 1},
        {"response_id": "mine", "conversation_id": "nobody", "rating": 1},
    ]
    assert [rate(collector, each)[1]["seen"] for each in given] == [True, True, True, False]
    done = prepared(collector.path)
    by_query = {task.main_query: task.metadata for task in done.train}
    assert by_query["1+5?"]["answer"] == "6"
    assert {query: of.get("rating") for query, of in by_query.items()} == {"1+5?": None, "2+2?": -1.0, "3+4?": 1.0}
    assert done.report["feedback"]["about nothing seen"] == 1


def test_feedback_on_an_earlier_reply_is_not_taken_for_one_on_the_last(tmp_path: Path) -> None:
    first = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"}]}
    more = [*first["messages"], {"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]
    chats = lines(
        tmp_path / "c.jsonl",
        {**first, "response_id": "r-1", "conversation_id": "c"},
        {"messages": more, "response_id": "r-2", "conversation_id": "c"},
    )
    opinions = lines(tmp_path / "f.jsonl", {"response_id": "r-1", "conversation_id": "c", "rating": -1})
    done = prepared(chats, feedback=[str(opinions)], turns="last")
    assert [(task.main_query, task.metadata.get("rating")) for task in done.train] == [("two?", None)]
    done = prepared(chats, feedback=[str(opinions)], turns="every")
    assert [(task.main_query, task.metadata.get("rating")) for task in done.train] == [("one?", -1.0), ("two?", None)]


@table(
    ("body", "param", "says"),
    [
        ({"rating": 1}, "response_id", "is required to identify the answer"),
        ({"response_id": "r"}, "rating", "correction or comment is required"),
        ({"response_id": "r", "rating": 2}, "rating", "from -1 (bad) to 1 (good)"),
        ({"response_id": "r", "rating": True}, "rating", "from -1"),
        ({"response_id": "r", "rating": "great"}, "rating", "from -1"),
        ({"response_id": "r", "rating": 1, "thumbs": "up"}, "thumbs", "same meaning as rating"),
        ({"response_id": 7, "rating": 1}, "response_id", "must be a text"),
        ({"response_id": "r" * 600, "rating": 1}, "response_id", "1 to 512"),
        ({"response_id": "r", "correction": ["6"]}, "correction", "must be a text"),
        ({"response_id": "r", "reward": 1}, "reward", "available: response_id, trace_id"),
        (b'{"response_id": "r", "rating": NaN}', None, "NaN is not a JSON number"),
        (b"[1]", None, "it is not an object"),
        (b"\xff", None, "not UTF-8"),
    ],
)
def test_bad_feedback_is_refused_in_words_and_nothing_is_kept(
    collector: Collecting, body: Any, param: str | None, says: str
) -> None:
    status, answer = rate(collector, body)
    assert status == 422
    assert says in answer["error"]["message"]
    assert answer["error"]["param"] == param
    assert json.loads(ask(collector, "GET", "/metrics")[1])["in_file"]["feedback"] == 0


def log(trace: int, number: int, name: str, body: Any, time: int) -> dict[str, Any]:
    """A log of the last GenAI convention, as OTLP's JSON has it."""
    values = [{"key": key, "value": {"stringValue": value}} for key, value in body.items()]
    ids = {"traceId": f"{trace:032x}", "spanId": f"{number:016x}", "timeUnixNano": str(time)}
    return {**ids, "eventName": name, "body": {"kvlistValue": {"values": values}}}


def test_what_comes_as_logs_is_joined_to_its_span_whichever_comes_first(collector: Collecting) -> None:
    logs = [log(1, 1, "gen_ai.user.message", {"content": "q"}, 5), log(1, 1, "gen_ai.choice", {"content": "a"}, 6)]
    other = [log(1, 1, "http.request", {"content": "x"}, 7), {"body": {"stringValue": "plain"}}]
    body = {"resourceLogs": [{"scopeLogs": [{"logRecords": [*logs, *other, {**logs[0], "timeUnixNano": "x"}]}]}]}
    for _ in range(2):  # sent again, kept once
        status, answer, _ = ask(collector, "POST", "/v1/logs", body)
        assert (status, json.loads(answer)["partialSuccess"]["rejectedLogRecords"]) == (200, "3")
    assert "2 × a log that is not a GenAI event" in json.loads(answer)["partialSuccess"]["errorMessage"]
    ask(collector, "POST", "/v1/traces", request(span(1, 1, "chat")))
    (task,) = prepared(collector.path).train
    assert (task.main_query, task.metadata["trace"]["answer"]) == ("q", "a")
    status, answer, _ = ask(collector, "POST", "/v1/logs", b"\xff", PROTOBUF)
    assert (status, "not ExportLogsServiceRequest" in status_of(answer)[1]) == (400, True)


def test_a_file_of_before_takes_logs_too(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with collecting(path):
        pass
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE event_table")
    with pytest.raises(DataError, match="contain no conversations"):
        prepared(path)
    with collecting(path) as collector:
        logs = [{"scopeLogs": [{"logRecords": [log(1, 1, "gen_ai.user.message", {"content": "q"}, 5)]}]}]
        assert ask(collector, "POST", "/v1/logs", {"resourceLogs": logs})[0] == 200
    with pytest.raises(DataError, match="1 × a log without its span"):
        prepared(path)


def test_scores_of_langfuse_are_feedback(collector: Collecting) -> None:
    ask(collector, "POST", "/api/public/otel/v1/traces", request(*reply(1, "1+5?", "7"), *reply(2, "2+2?", "4")))
    score = {"name": "user", "traceId": f"{1:032x}", "value": 0, "dataType": "BOOLEAN", "comment": "no"}
    status, body, _ = ask(collector, "POST", "/api/public/scores", [score])
    assert (status, json.loads(body)) == (202, {"message": "Accepted"})
    bad = [{**score, "value": 9, "dataType": "NUMERIC"}, 7, {**score, "traceId": f"{2:032x}", "value": 1}]
    status, body, _ = ask(collector, "POST", "/api/public/scores", bad)
    told = json.loads(body)
    assert (status, told["accepted"], told["rejected"], [e["id"] for e in told["errors"]]) == (207, 1, 2, ["0", "1"])
    batch = [{"type": "trace-create", "body": {"id": "t"}}, {"type": "score-create", "body": score}]
    status, body, _ = ask(collector, "POST", "/api/public/ingestion", {"batch": batch})
    assert (status, json.loads(body)["errors"][0]["message"]) == (207, "not a score; send spans as OTLP")
    by_query = {task.main_query: task.metadata for task in prepared(collector.path).train}
    assert (by_query["1+5?"]["rating"], by_query["1+5?"]["comment"], by_query["2+2?"]["rating"]) == (-1.0, "no", 1.0)
    assert ask(collector, "POST", "/api/public/scores", [score], "text/plain")[0] == 415  # as a web page could send it
    assert ask(collector, "POST", "/api/public/scores", b"{torn")[0] == 400
    assert ask(collector, "POST", "/api/public/scores", {"batch": 7})[0] == 400
    for huge in ({"value": 10**4000, "dataType": "NUMERIC"}, {"timestamp": 10**4000}):
        assert ask(collector, "POST", "/api/public/scores", {**score, **huge})[0] in (202, 207)
    assert rate(collector, {"response_id": "r", "rating": 1, "time": 10**4000})[0] == 422


@table("name, value", [("resource", 5), ("resource", "text"), ("resource", [1]), ("scopeSpans", [{"scope": True}])])
def test_a_resource_or_scope_that_is_no_object_is_refused(collector: Collecting, name: str, value: Any) -> None:
    body = request(span(1, 1, "chat"))
    body["resourceSpans"][0][name] = value
    status, said, _ = ask(collector, "POST", "/v1/traces", body)
    assert (status, b"is not an object" in said) == (400, True), said


@table("change", [{"\ud83d": 1}, {"kind": "\ud83d"}])
def test_half_a_character_in_a_name_costs_its_span_alone(collector: Collecting, change: dict[str, Any]) -> None:
    broken = {**span(1, 1, "chat"), **change}
    status, said, _ = ask(collector, "POST", "/v1/traces", request(broken, span(2, 2, "chat")))
    assert (status, json.loads(said)["partialSuccess"]["rejectedSpans"]) == (200, "1")
    status, _, _ = ask(collector, "POST", "/v1/traces", {"resourceSpans": [{"resource": {"\ud83d": 1}}]})
    assert status == 400


# ------------------------------------------------------------------------------------------------------------- who may


def test_web_pages_do_not_get_in(collector: Collecting) -> None:
    assert rate(collector, {"response_id": "r", "rating": 1}, Host="evil.example:4318")[0] == 403
    status, body, _ = ask(collector, "POST", "/v1/traces", protobuf(1), PROTOBUF, Host="evil.example")
    assert (status, status_of(body)[0]) == (403, 7)
    # What a page may send without asking first is no content type of ours, and asking is not answered.
    assert ask(collector, "POST", "/feedback", {"response_id": "r", "rating": 1}, "text/plain")[0] == 415
    status, _, headers = ask(collector, "OPTIONS", "/feedback", Origin="https://evil.example")
    assert status == 404
    assert "access-control-allow-origin" not in headers
    assert spans_in(collector.path) == []


def test_a_key_is_wanted_of_everybody_where_there_is_one(tmp_path: Path) -> None:
    with collecting(tmp_path / "t.sqlite", key="k" * 20) as collector:
        feedback = {"response_id": "r", "rating": 1}
        assert ask(collector, "GET", "/health")[0] == 200
        assert rate(collector, feedback)[1]["error"]["code"] == "invalid_api_key"
        assert rate(collector, feedback, Authorization="Bearer wrong")[0] == 401
        status, body, _ = ask(collector, "POST", "/v1/traces", protobuf(1), PROTOBUF)
        assert (status, status_of(body)[0]) == (401, 16)
        right = {"Authorization": f"Bearer {'k' * 20}"}
        assert rate(collector, feedback, **right)[0] == 200
        assert ask(collector, "POST", "/v1/traces", protobuf(1), PROTOBUF, **right)[0] == 200
        assert ask(collector, "GET", "/nothing", **right)[0] == 404


def test_others_need_a_key_to_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def collect(host: str, key_env: str | None) -> None:
        commands.collect(tmp_path / "t.sqlite", host=host, key_env=key_env)

    with pytest.raises(ConfigError, match=r"--host: .*0\.0\.0\.0.* --key-env"):
        collect("0.0.0.0", None)
    with pytest.raises(ConfigError, match="--key-env: the variable MY_KEY is not set"):
        collect("127.0.0.1", "MY_KEY")
    monkeypatch.setenv("MY_KEY", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        collect("127.0.0.1", "MY_KEY")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- the file


def test_a_file_has_one_collector_and_only_its_own_kind(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with closing(Store(path)) as store:
        store.add_spans([])
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(RunError, match=rf"another collector \(pid {os.getpid()}\) writes to"):
            Store(path)
    with closing(Store(path)) as again:
        assert again.counts() == {"spans": 0, "feedback": 0}
    studio = tmp_path / "studio.sqlite"
    studio.write_bytes(SAMPLE.read_bytes())
    with pytest.raises(DataError, match="a database of another program"):
        Store(studio)
    assert studio.read_bytes() == SAMPLE.read_bytes()
    with closing(sqlite3.connect(path)) as newer:
        newer.execute("PRAGMA user_version = 9")
    with pytest.raises(DataError, match="has version 9, but this collector writes version 1"):
        Store(path)
    with pytest.raises(DataError, match="of version 9, but 1 is supported"):
        prepared(path)
    with pytest.raises(DataError, match="cannot write to"):
        Store(lines(tmp_path / "file", {}) / "t.sqlite")


def test_a_file_that_others_could_read_is_closed_to_them_and_that_is_said(tmp_path, monkeypatch):
    path = tmp_path / "traces.sqlite"
    with closing(Store(path)) as store:
        assert store.remark == ""
    path.chmod(0o644)
    with closing(Store(path)) as store:
        assert store.remark == f"{path} was readable by others (mode 0644) and is now private (0600)"
        assert not [file.name for file in tmp_path.glob("traces.sqlite*-*") if file.stat().st_mode & 0o077]
    assert path.stat().st_mode & 0o777 == 0o600

    def not_yours(self, mode):
        raise PermissionError(1, "Operation not permitted")

    path.chmod(0o640)
    monkeypatch.setattr(type(path), "chmod", not_yours)
    with closing(Store(path)) as store:
        assert "is readable by others; its owner must change that (Operation not permitted)" in store.remark


@pytest.mark.slow
def test_the_command_collects_until_it_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "traces.sqlite"
    command = [sys.executable, "-m", "astuner", "data", "collect", str(path), "--port", "0", "--json"]
    environment = {**os.environ, "ASTUNER_HOME": str(tmp_path / "home")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        where = json.loads(running.stdout.readline())
        access = Path(where["access"])
        assert json.loads(access.read_text()) == {
            "traces_url": where["traces_url"],
            "feedback_url": where["feedback_url"],
            "api_key": None,
            "database": str(path),
            "pid": running.pid,
        }
        assert access.stat().st_mode & 0o077 == 0
        second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert second.returncode != 0
        assert f"another collector (pid {running.pid}) writes to {path}" in second.stderr
        reached = Collecting(path, None, where["traces_url"].removesuffix("/v1/traces"))  # type: ignore[arg-type]
        assert ask(reached, "POST", "/v1/traces", protobuf(1), PROTOBUF)[0] == 200
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert json.loads(said)["in_file"] == {"spans": 1, "feedback": 0}
    assert not access.exists()
    assert not list(tmp_path.glob("traces.sqlite-*"))  # the write-ahead log is back in the file
