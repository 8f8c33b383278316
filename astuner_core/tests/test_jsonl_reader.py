"""The jsonl reader: lazy, exact about what is wrong and where, never more than one line in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from astuner.builtin.jsonl import JsonlConfig, JsonlTaskReader
from astuner.contracts.errors import DataError
from astuner.contracts.types import Split
from astuner.testing import check_task_reader
from tests.table import table


def write(folder: Path, *lines: bytes | str | dict, name: str = "train.jsonl", end: bytes = b"\n") -> Path:
    path = folder / name
    encoded = [
        json.dumps(x).encode() if isinstance(x, dict) else x.encode() if isinstance(x, str) else x for x in lines
    ]
    path.write_bytes(b"".join(line + end for line in encoded))
    return path


def reader(folder: Path, on_bad_line: str = "stop", **section) -> JsonlTaskReader:
    config = JsonlConfig.model_validate({"training": {"file_path": "train.jsonl"}, **section})
    return JsonlTaskReader(config, base_dir=folder, on_bad_line=on_bad_line)


def read(folder: Path, split: Split = Split.TRAIN, **settings) -> list:
    return list(reader(folder, **settings).read(split))


def test_a_line_becomes_a_task(tmp_path):
    write(tmp_path, {"question": "6*7?", "answer": "#### 42"}, {"id": 7, "question": "1+1?", "answer": "2"})
    first, second = read(tmp_path)
    assert (first.task_id, first.main_query) == ("train.jsonl:1", "6*7?")
    assert first.metadata == {"question": "6*7?", "answer": "#### 42"}
    assert second.task_id == "7"


def test_it_keeps_the_contract_of_a_task_reader(tmp_path):
    write(tmp_path, *({"question": f"{n}+1?"} for n in range(30)))
    write(tmp_path, {"question": "b"}, name="val.jsonl")
    assert len(check_task_reader(reader(tmp_path, validation={"file_path": "val.jsonl"}))) == 30


def test_splits_are_files_of_their_own(tmp_path):
    write(tmp_path, {"query": "a"})
    write(tmp_path, {"query": "b"}, name="val.jsonl")
    assert [t.main_query for t in read(tmp_path, Split.VALIDATION, validation={"file_path": "val.jsonl"})] == ["b"]
    assert read(tmp_path, Split.VALIDATION) == []


@table("field", ["main_query", "question", "problem", "query", "prompt"])
def test_the_usual_query_fields_are_found(tmp_path, field):
    write(tmp_path, {"other": "x", field: "the query"})
    assert read(tmp_path)[0].main_query == "the query"


def test_the_first_usual_field_wins_and_a_named_one_wins_over_all(tmp_path):
    write(tmp_path, {"prompt": "p", "question": "q", "text": "t", "key": "k1"})
    assert read(tmp_path)[0].main_query == "q"
    (task,) = read(tmp_path, query_field="text", id_field="key")
    assert (task.main_query, task.task_id) == ("t", "k1")


def test_the_agentjet_layout_is_read(tmp_path):
    messages = [{"role": "system", "content": "s"}]
    write(
        tmp_path,
        {
            "main_query": "q",
            "task_id": "t1",
            "init_messages": messages,
            "env_type": "math",
            "metadata": {"answer": "5"},
            "level": 3,
        },
    )
    (task,) = read(tmp_path)
    assert (task.task_id, task.env_type, list(task.init_messages)) == ("t1", "math", messages)
    assert task.metadata["answer"] == "5"
    assert task.metadata["level"] == 3


def test_messages_alone_are_a_task(tmp_path):
    write(tmp_path, {"init_messages": [{"role": "user", "content": "hi"}]})
    assert read(tmp_path)[0].main_query == ""


@table("end", [b"\n", b"\r\n"])
def test_line_ends_and_a_byte_order_mark(tmp_path, end):
    write(tmp_path, b'\xef\xbb\xbf{"query": "a"}', {"query": "b"}, end=end)
    assert [t.main_query for t in read(tmp_path)] == ["a", "b"]
    with (tmp_path / "train.jsonl").open("ab") as file:
        file.write(b'{"query": "no newline at the end"}')
    assert read(tmp_path)[2].main_query == "no newline at the end"


BAD = {
    "empty": (b"", "the line is empty"),
    "blank": (b"  \t", "the line is empty"),
    "cut off": (b'{"query": "a', "not JSON at column"),
    "two objects": (b'{"query": "a"} {"query": "b"}', "not JSON at column 16"),
    "latin-1": (b'{"query": "caf\xe9"}', r"byte 15 of the line \(0xe9\) is not UTF-8"),
    "utf-16": ('{"query": "a"}'.encode("utf-16"), "not UTF-8"),
    "nul bytes": (b"\0" * 50, "not JSON"),
    "NaN": (b'{"query": "a", "x": NaN}', "NaN is not valid JSON"),
    "nested": (b'{"query": ' + b"[" * 100_000, "nested too deeply"),
    "nested in another": (b'{"query": "a", "x": ' + b'{"a":' * 600 + b"1" + b"}" * 601, "more than 64 nested levels"),
    "1e400": (b'{"query": "a", "x": [1e400]}', "too large"),
    "half a pair": (b'{"query": "\\ud83d"}', "surrogates not allowed"),
    "role": (b'{"init_messages": [{"role": 5}]}', "field 'role' is a number; it must be text"),
    "digits": (b'{"query": "a", "x": ' + b"1" * 5000 + b"}", "the JSON cannot be read"),
    "huge": (b'{"query": "' + b"x" * 200_000 + b'"}', r"longer than 150,000 bytes"),
    "list": (b'["a"]', "this is a list"),
    "text": (b'"a"', "this is text"),
    "null": (b"null", "this is null"),
    "no query": (b'{"text": "a"}', r"field main_query or question.*fields: text.*query_field"),
    "no fields": (b"{}", "fields: none"),
    "empty query": (b'{"query": "  "}', "'query' is empty"),
    "null query": (b'{"query": null}', "is missing"),
    "query is a number": (b'{"query": 5}', "is a number; a query must be text"),
    "query is a list": (b'{"query": ["a"]}', "is a list"),
    "id is a list": (b'{"query": "a", "id": []}', "the id is a list"),
    "messages": (b'{"query": "a", "init_messages": "hi"}', "init_messages"),
    "messages without role": (b'{"query": "a", "init_messages": [{}]}', "init_messages"),
    "env_type": (b'{"query": "a", "env_type": 5}', "env_type"),
}


@table("name", BAD)
def test_a_bad_line_stops_with_its_place_and_fault(tmp_path, name):
    line, fault = BAD[name]
    path = write(tmp_path, {"query": "a"}, line, {"query": "b"})
    tasks = reader(tmp_path, max_line_bytes=150_000).read(Split.TRAIN)
    assert next(tasks).main_query == "a"
    with pytest.raises(DataError, match=fault) as failure:
        next(tasks)
    assert str(failure.value).startswith(f"{path}:2: ")
    assert "on_bad_line: skip" in str(failure.value)


def test_bad_lines_can_be_skipped_and_are_counted_once(tmp_path):
    lines = [line for line, _ in BAD.values()]
    path = write(tmp_path, {"query": "a"}, *lines, {"query": "b"})
    source = reader(tmp_path, on_bad_line="skip", max_line_bytes=150_000)
    for _ in range(2):
        tasks = list(source.read(Split.TRAIN))
        assert [t.main_query for t in tasks] == ["a", "b"]
        assert tasks[1].task_id == f"train.jsonl:{len(lines) + 2}"
    assert list(source.skipped) == [f"{path}:{n}" for n in range(2, len(lines) + 2)]
    assert source.skipped[f"{path}:2"] == "the line is empty"


@pytest.mark.parametrize("size", [149_998, 149_999, 150_000, 150_001, 150_002, 150_003, 300_000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_size_limit_is_exact_and_the_next_line_is_found(tmp_path, size, end):
    line = b'{"query": "' + b"x" * (size - 13) + b'"}'
    assert len(line) == size
    write(tmp_path, line, {"query": "next"}, end=end)
    source = reader(tmp_path, on_bad_line="skip", max_line_bytes=150_000)
    assert [t.main_query for t in source.read(Split.TRAIN)][-1] == "next"
    assert len(source.skipped) == (size > 150_000)


def test_reading_is_lazy(tmp_path):
    write(tmp_path, {"query": "a"}, "not json")
    assert next(reader(tmp_path).read(Split.TRAIN)).main_query == "a"


def test_an_empty_file_says_so(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match=r"train\.jsonl contains no tasks: .*empty"):
        read(tmp_path)


def test_a_file_of_bad_lines_says_so(tmp_path):
    write(tmp_path, "x", "y")
    with pytest.raises(DataError, match=r"all 2 lines are bad; .*not JSON"):
        read(tmp_path, on_bad_line="skip")


def test_a_missing_file_a_folder_and_a_locked_file_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"cannot read the train tasks in .*train\.jsonl.*correct file_path"):
        read(tmp_path)
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(DataError, match="not a folder"):
        read(tmp_path)
    (tmp_path / "train.jsonl").rmdir()
    write(tmp_path, {"query": "a"}).chmod(0)
    if os.geteuid():  # root reads everything
        with pytest.raises(DataError, match="permissions"):
            read(tmp_path)


def test_an_absolute_path_and_the_working_directory(tmp_path, monkeypatch):
    path = write(tmp_path, {"query": "a"})
    config = JsonlConfig.model_validate({"training": {"file_path": str(path)}})
    assert len(list(JsonlTaskReader(config, base_dir=Path("/nowhere")).read(Split.TRAIN))) == 1
    monkeypatch.chdir(tmp_path)
    config = JsonlConfig.model_validate({"training": {"file_path": "train.jsonl"}})
    assert len(list(JsonlTaskReader(config).read(Split.TRAIN))) == 1


@table("section", [{}, {"training": {}}, {"training": {"file_path": ""}}, {"trainig": {}}])
def test_a_section_that_names_no_file_is_refused(section):
    with pytest.raises(ValidationError):
        JsonlConfig.model_validate(section)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(rows=st.lists(st.dictionaries(st.text(min_size=1), JSON_VALUES, max_size=4), min_size=1, max_size=5))
def test_whatever_json_can_hold_comes_back(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    reserved = {"metadata", "init_messages", "env_type", "id", "task_id"}
    rows = [{**{k: v for k, v in row.items() if k not in reserved}, "main_query": "q"} for row in rows]
    write(folder, *rows)
    tasks = read(folder)
    assert [dict(t.metadata) for t in tasks] == rows
    assert [t.main_query for t in tasks] == ["q"] * len(rows)


@given(junk=st.lists(st.binary(max_size=80), max_size=8))
def test_no_bytes_raise_anything_but_a_data_error(tmp_path_factory, junk):
    folder = tmp_path_factory.mktemp("junk")
    write(folder, {"query": "good"}, *junk)
    source = reader(folder, on_bad_line="skip", max_line_bytes=64)
    tasks = list(source.read(Split.TRAIN))
    assert tasks[0].main_query == "good"
    lines = (folder / "train.jsonl").read_bytes().count(b"\n")
    assert len(tasks) + len(source.skipped) == lines
