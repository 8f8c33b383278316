"""Chats as JSON lines: what a line may be, what a bad one costs, and that a huge file needs no huge memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from astuner.contracts.errors import DataError
from astuner_flywheel.traces.conversation import Tally
from astuner_flywheel.traces.sources import read_source
from tests.table import table

from ._traces import assistant, chat, lines, prepared, user


def read(path, on_bad="skip", limit=1 << 20):
    tally = Tally(on_bad)
    return list(read_source(path, limit, tally)), tally


def test_a_line_is_a_conversation_up_to_its_last_answer(tmp_path: Path) -> None:
    kind = {"role": "developer", "content": "Be kind."}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    path = lines(
        tmp_path / "chats.jsonl",
        {"messages": [kind, user("a?"), assistant("a"), user("b?"), assistant("b")]},
        {"messages": [user("c?"), assistant("c"), user("and then?")], "id": 7, "model": "m", "created": 12, "x": [1]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {}}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "7"},
                assistant("seven"),
            ]
        },
        {"messages": [user("d?")]},
        {"messages": [user("e?"), {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": [assistant("hello")]},
    )
    found, tally = read(path)
    assert [(c.query, c.answer, c.after) for c in found] == [
        ("b?", "b", ""),
        ("c?", "c", "and then?"),
        ("what\n[image_url]", "seven", ""),
    ]
    assert found[0].messages[0] == {"role": "system", "content": "Be kind."}
    assert (found[1].conversation_id, found[1].model, found[1].started) == ("7", "m", 12.0)
    assert tally.dropped == {"no text answer": 2, "no user message": 1}
    assert tally.first["no user message"] == f"{path}:6"


def test_every_turn_can_be_a_task_and_each_is_one_once(tmp_path: Path) -> None:
    first = [user("a?"), assistant("a")]
    second = [*first, user("b?"), assistant("b")]
    third = [*second, user("c?"), assistant("c")]
    rows = [{"messages": third}, {"messages": first, "feedback": 1}, chat("z?", "z")]
    path = lines(tmp_path / "c.jsonl", *rows)
    assert [t.main_query for t in prepared(path).train] == ["c?", "z?"]
    done = prepared(path, turns="every")
    assert [t.main_query for t in done.train] == ["a?", "b?", "c?", "z?"]
    assert [t.metadata.get("rating") for t in done.train] == [1.0, None, None, None]
    assert [dict(m) for m in done.train[2].init_messages] == second
    assert done.train[2].task_id == prepared(path).train[0].task_id


def test_feedback_stands_in_the_line_or_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "chats.jsonl",
        chat("a?", "a", feedback={"rating": 0.5, "comment": "ok"}),
        chat("b?", "b", feedback="down", response_id="r-b"),
        chat("c?", "c", thumbs="👍", correction="C"),
        chat("d?", "d", conversation_id="conv-d", feedback={}),
        chat("e?", "e", feedback={"stars": 5}),
        chat("f?", "f", rating=7),
    )
    given = lines(
        tmp_path / "feedback.jsonl",
        {"conversation_id": "conv-d", "rating": "up", "time": 5},
        {"conversation_id": "conv-d", "rating": -0.5, "time": 9},
        {"conversation_id": "conv-d", "correction": "D", "time": 1},
        {"response_id": "r-b", "comment": "wrong"},
        {"response_id": "other", "rating": 1},
        {"rating": 1},
    )
    done = prepared(path, feedback=[str(given)], liked_as_answer=True)
    found = {t.main_query: {k: v for k, v in t.metadata.items() if k != "trace"} for t in done.train}
    assert found == {
        "a?": {"answer": "a", "rating": 0.5, "comment": "ok"},
        "b?": {"rating": -1.0, "comment": "wrong"},
        "c?": {"answer": "C", "rating": 1.0},
        "d?": {"answer": "D", "rating": -0.5},
    }
    bad = done.report["unreadable"]
    assert {reason: (of["count"], of["first"]) for reason, of in bad.items()} == {
        "feedback.stars is not a field; available: rating, thumbs, correction, comment": (1, f"{path}:5"),
        'rating must be a number from -1 (bad) to 1 (good), "up" or "down"': (1, f"{path}:6"),
        "feedback: response_id or trace_id or conversation_id is required to identify the answer": (1, f"{given}:6"),
    }
    feedback = done.report["feedback"]
    assert (feedback["given"], feedback["joined"], feedback["about nothing seen"]) == (5, 4, 1)


def test_a_bad_line_is_named_and_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    good = json.dumps(chat("q?", "a")).encode()
    deep = b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    nan = b'{"messages": [], "x": NaN}'
    rows = [good, b'{"messages": "\xff"}', b"[1]", b"", b'{"a": 1}', deep, nan, good]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(rows))
    found, tally = read(path)
    assert [c.source for c in found] == [f"{path}:1", f"{path}:8"]
    assert sum(tally.bad.values()) == 5
    assert tally.first["a line that is not a JSON object: it is not UTF-8"] == f"{path}:2"
    assert tally.first["no messages (its fields: a)"] == f"{path}:5"
    with pytest.raises(DataError, match=r"chats\.jsonl:2: it is not UTF-8 from byte 14 on\. Correct it, or .*skip"):
        read(path, "stop")
    done = prepared(path)
    assert done.skipped[f"{path}:2"] == "a line that is not a JSON object: it is not UTF-8 (1 in all)"


def test_a_hundred_megabytes_are_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    filler = json.dumps({"messages": [user("x" * 900_000)]}).encode() + b"\n"
    with path.open("wb") as file:
        file.write(json.dumps(chat("first?", "1")).encode() + b"\n")
        for _ in range(60):
            file.write(filler)
        file.write(b"{")
        file.seek(60 << 20, 1)  # one line of 60 MiB, without an end that says so
        file.write(b"\n" + json.dumps(chat("last?", "2")).encode())
    assert path.stat().st_size > 100e6
    tracemalloc.start()
    try:
        found, tally = read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [c.query for c in found] == ["first?", "last?"]
    assert tally.bad == {"a line longer than 1,048,576 bytes (max_line_bytes)": 1}
    assert tally.dropped == {"no text answer": 60}
    assert peak < 20e6


@table(
    ("name", "data", "says"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"hello", "is not a source of traces (it begins with b'hello')"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "is compressed; unpack it first: gunzip a.jsonl.gz"),
        ("a.sqlite", b"{}", "is not a SQLite database"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as refused:
        prepared(path)
    assert says in str(refused.value)
