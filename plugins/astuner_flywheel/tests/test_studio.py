"""AgentScope Studio's databases: every layout and every producer's spans, and files that are none or cannot be had."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from astuner.contracts.errors import DataError
from astuner_flywheel.traces import sources
from astuner_flywheel.traces.conversation import Tally
from astuner_flywheel.traces.messages import Unreadable, parse_msg
from astuner_flywheel.traces.sources import NO_MESSAGES, read_source
from tests.table import table

from ._traces import SAMPLE, prepared

NATALIA = "Natalia sold clips to 48 of her friends in April"


def read(path: Path, on_bad: Any = "skip") -> tuple[list[Any], Tally]:
    tally = Tally(on_bad)
    return list(read_source(path, 1 << 20, tally)), tally


def test_the_sample_gives_what_each_producer_was_asked_and_answered() -> None:
    found, tally = read(SAMPLE)
    assert tally.read == {"spans": 24, "traces": 5, "conversations": 5}
    assert not tally.bad
    assert not tally.dropped
    by_session = {c.session or c.conversation_id: c for c in found}
    of_107, of_1021 = by_session["Diffk48WwsDTuDusttDNEj"], by_session["nsPiRMjm7YkaAA2T8R3NtS"]
    of_2 = by_session["3a746ad61222402ca7467ca9805ab959"]
    for each in (of_107, of_1021):
        assert each.query.startswith(NATALIA)
        assert [m["role"] for m in each.messages] == ["system", "user"]
        assert each.messages[0]["content"].startswith("\nYou are an agent specialized in solving math problems")
        assert each.answer == "\\boxed{72}"
        assert each.conversation_id == ""  # AgentScope 1.x names its process there
    assert of_1021.response_ids[:2] == ("chatcmpl-dd4738c0fa21", "chatcmpl-a57fc90ba7a7")
    assert (of_2.messages, of_2.answer) == (
        ({"role": "system", "content": "s"}, {"role": "user", "content": "q"}),
        "\\boxed{72}",
    )
    assert of_2.conversation_id == "3a746ad61222402ca7467ca9805ab959"


def test_the_sample_becomes_tasks_and_is_left_as_it_is() -> None:
    before = SAMPLE.read_bytes()
    done = prepared(SAMPLE)
    assert [task.main_query[:48] for task in done.train] == [NATALIA, "q"]
    assert done.train[0].task_id == prepared(SAMPLE).train[0].task_id
    trace = done.train[0].metadata["trace"]
    assert (trace["source"], trace["model"], trace["answer"]) == ("studio_sample.sqlite", "think", "\\boxed{72}")
    assert "answer" not in done.train[0].metadata
    assert done.report["dropped"]["a repeated question"]["count"] == 3
    assert SAMPLE.read_bytes() == before
    assert sorted(p.name for p in SAMPLE.parent.iterdir()) == ["studio_sample.sqlite"]


def a_layout(path: Path, columns: str, *rows: tuple[Any, ...]) -> Path:
    with closing(sqlite3.connect(path)) as made, made:
        made.execute(f"CREATE TABLE span_table ({columns})")
        made.executemany(f"INSERT INTO span_table VALUES ({', '.join('?' * len(rows[0]))})", rows)
    return path


def msg(role: str, content: Any) -> str:
    return f"Msg(id='x', name={role!r}, content={content!r}, role={role!r}, metadata=None, timestamp='2025-10-01')"


def test_the_oldest_layout_has_messages_as_python_text_only(tmp_path: Path) -> None:
    asked = {"input": {"args": [], "kwargs": {"msg": msg("user", "What's 2 + 3?\n")}}}
    said = msg("assistant", [{"type": "thinking", "thinking": "easy"}, {"type": "text", "text": "It's 5."}])
    columns = "id text, traceId text, parentSpanId text, name text, startTime text, attributes json, run_id text"
    attributes = json.dumps({**asked, "output": said})
    row = ("s1", "t1", None, "ReActAgent.reply", "2025-10-01T10:00:00.000Z", attributes, "r1")
    found, _ = read(a_layout(tmp_path / "old.sqlite", columns, row))
    assert [(c.query, c.answer, c.session, c.conversation_id) for c in found] == [
        ("What's 2 + 3?\n", "It's 5.", "r1", "")
    ]
    assert found[0].started == 1759312800.0


def test_an_unnested_span_of_an_older_agentscope_keeps_its_system_prompt(tmp_path: Path) -> None:
    """Sent to another collector than Studio, which converts it: attributes as JSON text, no operation names."""
    reply = {
        "project.run_id": "r1",
        "input": json.dumps({"args": [msg("user", "q")], "kwargs": {}}),
        "output": msg("assistant", "a"),
    }
    call = {"input": json.dumps({"args": [[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]]})}
    columns = "traceId text, spanId text, parentSpanId text, name text, startTimeUnixNano text, attributes json"
    found, _ = read(
        a_layout(
            tmp_path / "raw.db",
            columns,
            ("t", "a", None, "ReActAgent.reply", "1700000000000000000", json.dumps(reply)),
            ("t", "b", "a", "OpenAIChatModel.__call__", "1700000000000000001", json.dumps(call)),
        )
    )
    assert [[m["content"] for m in c.messages] for c in found] == [["s", "q"]]
    assert (found[0].answer, found[0].session) == ("a", "r1")


@table(
    "text",
    [
        "Msg(name='x', content=__import__('os').system('touch /tmp/astuner-was-run'), role='user')",
        "Msg(name='x', content=[x for x in ().__class__.__bases__], role='user')",
        "Msg(name='x', content=f'{1+1}', role='user')",
        "open('/etc/passwd')",
        "Msg(name='x', content='cut off",
        "[" * 5000,
        "Msg(role='user', content=" + "(" * 90 + "1" + ")" * 90 + "**9**9**9)",
        "Msg(\0)",
        "Msg(role='emperor', content='q')",
    ],
)
def test_a_message_as_python_text_is_read_and_never_run(text: str) -> None:
    with pytest.raises(Unreadable):
        parse_msg(text)
    assert not Path("/tmp/astuner-was-run").exists()


def test_one_bad_span_is_counted_and_named_or_stops(tmp_path: Path) -> None:
    columns = "traceId text, name text, attributes json"
    good = {"input": {"kwargs": {"msg": msg("user", "q")}}, "output": msg("assistant", "a")}
    path = a_layout(
        tmp_path / "some.sqlite",
        columns,
        ("t1", "ReActAgent.reply", "{no json"),
        ("t2", "ReActAgent.reply", json.dumps({**good, "output": "Msg(content=run(), role='assistant')"})),
        ("t3", "ReActAgent.reply", json.dumps(good)),
        ("t4", "ReActAgent.reply", json.dumps({})),
    )
    found, tally = read(path)
    assert [c.trace_id for c in found] == ["t3"]
    assert tally.bad == {
        "span attributes that are not a JSON object": 1,
        "content of a Msg as text is not a literal": 1,
    }
    assert tally.first["span attributes that are not a JSON object"] == f"{path}, trace t1"
    assert tally.dropped == {f"invoke_agent span {NO_MESSAGES}": 1}
    with pytest.raises(
        DataError, match=r"trace t1: span attributes that are not a JSON object\. Correct it, or .* skip"
    ):
        read(path, "stop")


# ---------------------------------------------------------------------------------------------------- what is no source


def test_files_that_are_no_database_of_traces_are_named_with_what_was_found(tmp_path: Path) -> None:
    def says(path: Path) -> str:
        with pytest.raises(DataError) as refused:
            read(path)
        return str(refused.value)

    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as made, made:
        made.execute("CREATE TABLE run_table (id)")
        made.execute("CREATE TABLE message_table (id)")
    assert "no span_table (tables: message_table, run_table); supported are databases of" in says(other)
    newer = a_layout(tmp_path / "newer.sqlite", "id text, title text, payload blob", ("1", "t", b""))
    assert "a span_table without name and attributes (columns: id, title, payload)" in says(newer)
    text = tmp_path / "text.db"
    text.write_text("hello")
    assert "is not a SQLite database (it begins with b'hello')" in says(text)
    (tmp_path / "empty.sqlite").write_bytes(b"")
    assert "is empty" in says(tmp_path / "empty.sqlite")
    assert "correct the path" in says(tmp_path / "missing.sqlite")
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(SAMPLE.read_bytes()[:9000])
    assert "cannot be read" in says(torn)
    assert "sqlite3 torn.sqlite .recover" in says(torn)
    spoilt = tmp_path / "spoilt.sqlite"
    spoilt.write_bytes(sources.MAGIC + b"\xff" * 5000)
    assert "is not a SQLite database" in says(spoilt)


def test_a_locked_database_is_waited_for_and_then_named(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    path.write_bytes(SAMPLE.read_bytes())
    with closing(sqlite3.connect(path, isolation_level=None)) as studio:
        studio.execute("BEGIN EXCLUSIVE")
        is_said = pytest.raises(DataError, match=r"stayed locked for 0\.2 s; wait until its writer is done")
        with is_said, sources.snapshot(path, timeout=0.2):
            raise AssertionError
        studio.execute("COMMIT")
    assert len(read(path)[0]) == 5


@table("journal", ["delete", "wal"])
def test_a_database_is_read_while_studio_writes_and_does_not_hold_it_up(tmp_path: Path, journal: str) -> None:
    path = tmp_path / "studio.sqlite"
    path.write_bytes(SAMPLE.read_bytes())
    with closing(sqlite3.connect(path, timeout=0.0, isolation_level=None)) as studio:
        studio.execute(f"PRAGMA journal_mode = {journal}")
        studio.execute("DELETE FROM span_table WHERE traceId = '7d97b62f9886a9dab04e579fda4062a3'")
        with sources.snapshot(path) as copy:
            studio.execute("DELETE FROM span_table")  # would raise at once were the file still locked
            layout = sources.check_layout(copy, path)
            assert len(list(sources.traces(copy, layout, str(path), Tally()))) == 4
    assert read(path)[0] == []
