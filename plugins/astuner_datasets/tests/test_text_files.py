"""Text in a CSV, TSV or JSON file stays the text that it is, as the reader ``jsonl`` reads it."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from astuner.contracts.errors import DataError
from astuner.contracts.types import Split, Task
from astuner_datasets.reader import HuggingFaceConfig, HuggingFaceTaskReader
from astuner_datasets.text_files import guessed_column
from tests.table import table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what datasets imports may warn
    datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def read(folder: Path, path: str, split: Split = Split.TRAIN, on_bad_line: str = "stop", **section: Any) -> list[Task]:
    config = HuggingFaceConfig.model_validate({"dataset_path": path, **section})
    return list(HuggingFaceTaskReader(config, base_dir=folder, on_bad_line=on_bad_line).read(split))


def answers(folder: Path, name: str, text: str | bytes, **section: Any) -> list[Any]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return [task.metadata["answer"] for task in read(folder, name, **section)]


# What stands in a column: pandas and Arrow turn each of these into something else.
COLUMNS = [
    ["2024-01-05", "2024-01-06"],
    ["2024-01-05T10:00:00Z", "2024-01-05 10:00"],
    ["NA", "None", "null", "NaN", "nan", "N/A", "n/a", "NULL", "<NA>", "#N/A", "-nan", "1.#IND"],
    ["007", "012", "100"],
    ["1e5", "2E-3", "3.0"],
    ["true", "False", "TRUE"],
    ["", "x", ""],
    ["9007199254740993", "12345678901234567890123"],
    ["1_000", "1,000", "1.000,5"],
    [" 7", "7 ", "\t7"],
    ["1", "two", "3.5"],
    ["inf", "-Infinity", "0x1F"],
    ["7", "8"],
    ["1.10", "2.50"],
    ['say "x"', "two\nlines", "semi;colon"],
    ["ja", "nein", "Ünïcode"],
    ["10:30", "00:00:01"],
    ["+49 30 123", "-0"],
]


@table("column", COLUMNS)
def test_a_csv_cell_is_the_text_that_stands_there(tmp_path, column):
    quoted = [cell.replace('"', '""') for cell in column]
    lines = [f'"question {n}","{cell}"' for n, cell in enumerate(quoted)]
    assert answers(tmp_path, "q.csv", "\n".join(["question,answer", *lines])) == column
    unquoted = [cell for cell in column if not any(c in cell for c in ',"\n')]
    lines = [f"question {n},{cell}" for n, cell in enumerate(unquoted)]
    assert answers(tmp_path, "plain.csv", "\r\n".join(["question,answer", *lines])) == unquoted
    lines = [f"question {n}\t{cell}" for n, cell in enumerate(c for c in unquoted if "\t" not in c)]
    assert answers(tmp_path, "q.tsv", "\n".join(["question\tanswer", *lines])) == [c for c in unquoted if "\t" not in c]


@table("column", COLUMNS)
def test_json_text_is_the_text_that_stands_there(tmp_path, column):
    rows = [{"question": f"{n}?", "answer": cell} for n, cell in enumerate(column)]
    assert answers(tmp_path, "q.jsonl", "\n".join(map(json.dumps, rows))) == column
    assert answers(tmp_path, "list.json", json.dumps(rows)) == column
    assert answers(tmp_path, "pretty.json", json.dumps(rows, indent=2)) == column
    columns = {"question": [row["question"] for row in rows], "answer": column}
    assert answers(tmp_path, "columns.json", json.dumps(columns)) == column
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text(json.dumps({"question": "held out?", "answer": "2024-01-05"}))
    assert [t.metadata["answer"] for t in read(tmp_path, "data")] == column
    (task,) = read(tmp_path, "data", Split.VALIDATION, validation_split="test")
    assert task.metadata["answer"] == "2024-01-05"


@table(
    "rows",
    [
        [{"answer": 1}, {"answer": "one"}],
        [{"answer": 2**53 + 1}, {"answer": 2**70}],
        [{"answer": 1}, {"answer": 1.0}, {"answer": True}],
        [{"answer": {"a": 1}}, {"answer": {"b": "x"}}],
        [{"answer": {"a": {"c": 1}}}, {"answer": {"a": {"d": [2]}}}],
        [{"answer": []}, {"answer": [1, "2", None]}],
        [{"answer": None}, {"answer": "x"}],
        [{"answer": "x"}, {"answer": "y", "hint": "z"}],
        [{"answer": [{"a": 1}, {"b": 2}]}, {"answer": []}],
        [{"answer": {}}, {"answer": {"2024-01-05": "2024-01-05"}}],
        [{"answer": "2024-01-05", "metadata": {"day": "2024-01-06"}}, {"answer": "x", "metadata": {"n": 7}}],
        [{"answer": [["2024-01-05"]]}, {"answer": [[1]]}],
    ],
)
def test_json_values_keep_their_types_and_absent_keys_stay_absent(tmp_path, rows):
    rows = [{"question": f"{n}?", **row} for n, row in enumerate(rows)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flat = [{k: v for k, v in row.items() if k != "metadata"} | row.get("metadata", {}) for row in rows]
    metadata = [dict(task.metadata) for task in read(tmp_path, "q.jsonl")]
    assert metadata == flat
    assert list(map(repr, metadata)) == list(map(repr, flat))  # 1, 1.0 and True are equal


@table(
    ("name", "text", "messages"),
    [
        ("q.csv", "question,answer\na?,1,2\n", ["line 2 of q.csv", "3 cells", "2 columns"]),
        ("q.csv", "question,answer\n\na?\n", ["line 3 of q.csv", "1 cells"]),
        ("q.csv", 'question,answer\na?,1\nb?,"open\n', ["q.csv", "line 3", "quotation"]),
        ("q.csv", 'question,answer\n"a"b,1\n', ["q.csv", "line 2", "quotation"]),
        ("q.csv", "question,answer,answer\na?,1,2\n", ["q.csv", "'answer'", "Rename"]),
        ("q.csv", b"question,answer\na?,\xe9\n", ["q.csv", "line 2", "0xe9", "UTF-8"]),
        ("q.jsonl", '{"question": "a?"}\n{"question": \n', ["line 2 of q.jsonl", "not JSON"]),
        ("q.jsonl", "{'question': 1}\n", ["line 1 of q.jsonl", "not JSON"]),
        ("q.jsonl", '{"question": "a?", "answer": NaN}\n', ["line 1 of q.jsonl", "NaN"]),
        ("q.json", '[\n {"question": "a?"},\n {"question"}\n]', ["q.json", "line 3"]),
        ("q.json", "[1, 2]", ["row 0", "a number"]),
    ],
)
def test_what_cannot_be_read_names_file_and_line(tmp_path, name, text, messages):
    with pytest.raises(DataError) as e:
        answers(tmp_path, name, text)
    assert [m for m in messages if m not in str(e.value)] == []


def test_bad_lines_can_be_skipped(tmp_path):
    (tmp_path / "q.csv").write_text("question,answer\na?,1\nb?\nc?,3\n")
    (tmp_path / "q.jsonl").write_text('{"question": "a?"}\n{"question"\n\n{"question": "c?"}\n')
    for name in ("q.csv", "q.jsonl"):
        assert [task.main_query for task in read(tmp_path, name, on_bad_line="skip")] == ["a?", "c?"]


def test_parts_of_a_split_are_those_of_datasets(tmp_path):
    (tmp_path / "q.csv").write_text("question,answer\n" + "".join(f"{n}?,{n}\n" for n in range(10)))
    parts = {"train[:2]": 2, "train[20%:]": 8, "train[-3:]": 3, "train[:1]+train[8:]": 3, "all": 10}
    assert {part: len(read(tmp_path, "q.csv", training_split=part)) for part in parts} == parts


def test_a_packed_file_and_the_options_of_a_readme(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.csv.gz").write_bytes(gzip.compress(b"question;answer\na?;007\n"))
    readme = "---\nconfigs:\n- config_name: default\n  data_files: train.csv.gz\n  sep: ';'\n{more}---\n"
    (folder / "README.md").write_text(readme.format(more=""))
    assert [task.metadata["answer"] for task in read(tmp_path, "data")] == ["007"]
    (folder / "README.md").write_text(readme.format(more="  skiprows: 1\n"))
    with pytest.raises(DataError, match=r"train\.csv\.gz: the option skiprows .* not supported"):
        read(tmp_path, "data")


def test_a_long_cell_and_a_byte_order_mark(tmp_path):
    text = "﻿question,answer\na?," + "x" * 300_000
    assert answers(tmp_path, "q.csv", text) == ["x" * 300_000]


def test_parquet_keeps_its_types(tmp_path):
    columns = {"question": ["a?"], "answer": [7], "score": [1.5], "code": ["007"]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "q.parquet")
    assert read(tmp_path, "q.parquet")[0].metadata == {"question": "a?", "answer": 7, "score": 1.5, "code": "007"}


@table(
    ("name", "text", "column"),
    [
        ("q.csv", "question,code\na?,007\n", "code"),
        ("q.csv", "question,code\na?,NA\nb?,x\n", "code"),
        ("q.csv", "question,code\na?,x\n", None),
        ("q.jsonl", '{"question": "a?", "day": "2024-01-05"}', "day"),
        ("q.jsonl", '{"question": "a?", "n": 7, "x": null}', None),
    ],
)
def test_what_an_earlier_download_guessed_is_known(tmp_path, name, text, column):
    (tmp_path / name).write_text(text)
    kind = "csv" if name.endswith("csv") else "json"
    prepared = datasets.load_dataset(kind, data_files=str(tmp_path / name), split="train")
    guess = guessed_column(prepared)
    assert (guess[0] if guess else None) == column


def test_text_files_of_the_hub_are_read_offline_as_they_were_downloaded(tmp_path, monkeypatch):
    cache = tmp_path / "hub" / "datasets--owner--quiz"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    (snapshot / "train.jsonl").write_text('{"question": "a?", "answer": "2024-01-05"}')
    (snapshot / "test.jsonl").write_text('{"question": "b?", "answer": "007"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("astuner_models.hub._unreachable", lambda: "nobody answers")
    assert [task.metadata["answer"] for task in read(tmp_path, "owner/quiz")] == ["2024-01-05"]
    (task,) = read(tmp_path, "owner/quiz", Split.VALIDATION, validation_split="test")
    assert task.metadata["answer"] == "007"
