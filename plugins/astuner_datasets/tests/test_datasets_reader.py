"""The huggingface reader on real Parquet files and saved data sets; no network."""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path

import pytest

from astuner.contracts.errors import DataError, MissingDependency
from astuner.contracts.types import Split
from astuner.testing import check_task_reader
from astuner_datasets.reader import HuggingFaceConfig, HuggingFaceTaskReader, hub_name, why_no_data_set
from astuner_models import hub
from tests.table import table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what datasets imports may warn
    datasets = pytest.importorskip("datasets")

ROWS = {"question": ["6*7?", "1+1?", "2+2?"], "answer": ["#### 42", "#### 2", "#### 4"]}


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def rows(**columns) -> object:
    return datasets.Dataset.from_dict(columns or ROWS)


def reader(folder: Path, path: str, on_bad_line: str = "stop", **section) -> HuggingFaceTaskReader:
    config = HuggingFaceConfig.model_validate({"dataset_path": path, **section})
    return HuggingFaceTaskReader(config, base_dir=folder, on_bad_line=on_bad_line)


def read(folder: Path, path: str, split: Split = Split.TRAIN, **settings) -> list:
    return list(reader(folder, path, **settings).read(split))


def test_a_parquet_file(tmp_path):
    rows().to_parquet(tmp_path / "gsm.parquet")
    tasks = read(tmp_path, "gsm.parquet")
    assert [(t.task_id, t.main_query) for t in tasks] == [("train:0", "6*7?"), ("train:1", "1+1?"), ("train:2", "2+2?")]
    assert tasks[0].metadata == {"question": "6*7?", "answer": "#### 42"}
    assert read(tmp_path, "gsm.parquet") == tasks


def test_it_keeps_the_contract_of_a_task_reader(tmp_path):
    rows().to_parquet(tmp_path / "gsm.parquet")
    source = reader(tmp_path, "gsm.parquet", training_split="train[:2]", validation_split="train[2:]")
    assert len(check_task_reader(source)) == 2


def test_a_part_of_a_split(tmp_path):
    rows().to_parquet(tmp_path / "gsm.parquet")
    settings = {"training_split": "train[:2]", "validation_split": "train[2:]"}
    assert len(read(tmp_path, "gsm.parquet", **settings)) == 2
    assert [t.main_query for t in read(tmp_path, "gsm.parquet", Split.VALIDATION, **settings)] == ["2+2?"]


@table("kind", ["parquet", "jsonl"])
def test_a_folder_of_files(tmp_path, kind):
    folder = tmp_path / "data"
    folder.mkdir()
    for split, data in (("train", rows()), ("test", rows(question=["3+3?"], answer=["6"]))):
        path = folder / f"{split}-00000-of-00001.{kind}"
        data.to_parquet(path) if kind == "parquet" else data.to_json(path)
    assert len(read(tmp_path, "data")) == 3
    assert [t.main_query for t in read(tmp_path, "data", Split.VALIDATION, validation_split="test")] == ["3+3?"]


def test_a_folder_from_save_to_disk(tmp_path):
    datasets.DatasetDict(train=rows(), test=rows(question=["3+3?"], answer=["6"])).save_to_disk(tmp_path / "saved")
    assert len(read(tmp_path, "saved")) == 3
    assert [t.main_query for t in read(tmp_path, "saved", Split.VALIDATION, validation_split="test")] == ["3+3?"]
    with pytest.raises(DataError, match=r"split 'dev' of saved: its splits are train, test"):
        read(tmp_path, "saved", training_split="dev")


def test_a_single_split_from_save_to_disk(tmp_path):
    rows().save_to_disk(tmp_path / "one")
    assert len(read(tmp_path, "one")) == 3


def test_a_local_path_wins_over_a_name_on_the_hub(tmp_path):
    rows(question=["local?"], answer=["1"]).save_to_disk(tmp_path / "gsm8k" / "main")
    assert [t.main_query for t in read(tmp_path, "gsm8k/main")] == ["local?"]


def test_an_absolute_path(tmp_path):
    rows().save_to_disk(tmp_path / "one")
    assert len(read(Path("/nowhere"), str(tmp_path / "one"))) == 3


def test_a_version_that_asks_whether_to_run_a_script_is_told_no(tmp_path, monkeypatch):
    asked = []
    load_dataset_builder = datasets.load_dataset_builder

    def of_version_3(path, name=None, trust_remote_code=None, **options):
        asked.append(trust_remote_code)
        return load_dataset_builder(path, name, **options)

    monkeypatch.setattr(datasets, "load_dataset_builder", of_version_3)
    rows().to_parquet(tmp_path / "train.parquet")
    assert len(read(tmp_path, str(tmp_path))) == 3
    assert asked == [False]


def test_name_subset_and_revision_reach_the_hub(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "_unreachable", lambda: "")
    rows().to_parquet(tmp_path / "test.parquet")
    load_dataset_builder = datasets.load_dataset_builder

    def from_the_hub(*args, **kwargs):
        asked.append((args, kwargs))
        return load_dataset_builder(
            "parquet", data_files={s: str(tmp_path / "test.parquet") for s in ("train", "test")}
        )

    monkeypatch.setattr(datasets, "load_dataset_builder", from_the_hub)
    assert len(read(tmp_path, "gsm8k/main", revision="abc123")) == 3
    read(tmp_path, "openai/gsm8k", Split.VALIDATION, name="socratic", validation_split="test")
    assert asked == [
        (("openai/gsm8k", "main"), {"revision": "abc123"}),
        (("openai/gsm8k", "socratic"), {"revision": None}),
    ]


def test_without_a_network_the_message_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"dataset_path is gsm8k/main, which is not on this machine.*save_to_disk"):
        read(tmp_path, "gsm8k/main")


def test_without_datasets_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_unreachable", lambda: "")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match=r"pip install astuner-datasets"):
        read(tmp_path, "gsm8k/main")


def test_an_unknown_split_names_the_known_ones(tmp_path):
    rows().to_parquet(tmp_path / "gsm.parquet")
    with pytest.raises(DataError, match=r"split 'test' of gsm\.parquet.*train"):
        read(tmp_path, "gsm.parquet", training_split="test")


def test_a_broken_file_and_an_unknown_one_are_named(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        read(tmp_path, "bad.parquet")
    (tmp_path / "data.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"\.zip is not a supported file type"):
        read(tmp_path, "data.zip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        read(tmp_path, "empty")


def test_no_validation_split_no_tasks(tmp_path):
    rows().save_to_disk(tmp_path / "one")
    assert read(tmp_path, "one", Split.VALIDATION) == []


def test_fields_can_be_named(tmp_path):
    rows(text=["q"], key=[5], answer=["1"]).save_to_disk(tmp_path / "one")
    (task,) = read(tmp_path, "one", query_field="text", id_field="key")
    assert (task.task_id, task.main_query) == ("5", "q")


def test_a_bad_row_stops_with_its_place_or_is_skipped_and_counted_once(tmp_path):
    rows(question=["a", None, "", "d"], answer=["1"] * 4).save_to_disk(tmp_path / "one")
    with pytest.raises(DataError, match=r"^one\[train\] row 1: field .* is missing"):
        read(tmp_path, "one")
    source = reader(tmp_path, "one", on_bad_line="skip")
    for _ in range(2):
        assert [t.task_id for t in source.read(Split.TRAIN)] == ["train:0", "train:3"]
    assert list(source.skipped) == ["one[train] row 1", "one[train] row 2"]


def test_a_data_set_without_a_task_says_so(tmp_path):
    rows(question=["", " "]).save_to_disk(tmp_path / "one")
    with pytest.raises(DataError, match="no usable task in 2 rows"):
        read(tmp_path, "one", on_bad_line="skip")


def test_dates_become_text_and_bytes_are_refused_by_column(tmp_path):
    rows(question=["a"], day=[datetime.date(2024, 1, 2)], tags=[["x", "y"]]).save_to_disk(tmp_path / "one")
    assert read(tmp_path, "one")[0].metadata == {"question": "a", "day": "2024-01-02", "tags": ["x", "y"]}
    rows(question=["a"], image=[b"\x89PNG"]).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"'image' is a bytes.*; remove that column"):
        read(tmp_path, "two")


def test_names_of_data_sets() -> None:
    found = {path: hub_name(path) for path in NAMES}
    assert found == NAMES


NAMES = {
    "gsm8k/main": ("openai/gsm8k", "main"),
    "gsm8k/socratic": ("openai/gsm8k", "socratic"),
    "gsm8k": ("openai/gsm8k", "main"),
    "openai/gsm8k": ("openai/gsm8k", None),
    "openai/gsm8k/main": ("openai/gsm8k", "main"),
    "squad": ("squad", None),
    "hendrycks/competition_math": ("hendrycks/competition_math", None),
}


def test_a_folder_needs_no_hub(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert why_no_data_set("mine", tmp_path) == ""
