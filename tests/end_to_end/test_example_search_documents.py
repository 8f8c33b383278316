"""Searching documents: what is found for anything, what an answer is worth, files that are what scripts make."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.testing import check_judge, check_workflow, workflow_task
from tests.table import table

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_documents"
SPLITS = ("train", "validation", "test")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search_documents_librarian", EXAMPLE / "librarian.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIBRARIAN = load()
TEXTS = {split: dict(LIBRARIAN.sections(EXAMPLE / "documents" / split)) for split in SPLITS}
INDEX = LIBRARIAN.Index(TEXTS["test"].items())


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / "data" / f"{split}.jsonl").read_text().splitlines()]


TWO_SEARCHES = next(row for row in rows("test") if "lives" in row["main_query"])
PERSON = TWO_SEARCHES["main_query"].partition("where ")[2].removesuffix(" lives?")
ANSWER = f"Answer: {TWO_SEARCHES['answer']}"


def search(query: str) -> str:
    call = {"name": "search", "arguments": {"query": query}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def play(*replies: str) -> tuple[float, dict[str, Any]]:
    task = workflow_task(**TWO_SEARCHES)
    output = check_workflow(LIBRARIAN.Librarian, task, replies=list(replies))
    verdict = check_judge(LIBRARIAN.RightAndRead(), task, output)
    return verdict.reward, dict(verdict.metrics)


@table(
    ("replies", "reward", "right", "grounded"),
    [
        ((search(PERSON), search(TWO_SEARCHES["source"]), ANSWER), 1.0, 1.0, 1.0),
        ((search(PERSON), ANSWER), 0.0, 1.0, 0.0),  # a guess
        ((search(TWO_SEARCHES["source"]), "Answer: none"), 0.0, 0.0, 1.0),
        ((search(TWO_SEARCHES["source"]), f"{ANSWER} Answer: none"), 0.0, 0.0, 1.0),  # one answer
        ((search(TWO_SEARCHES["source"]), ANSWER.lower()), 0.0, 0.0, 1.0),
        ((f"# {TWO_SEARCHES['source']}\n{ANSWER}",), 0.0, 1.0, 0.0),  # what the agent says itself is not read
        ((search(""), "Answer: "), 0.0, 0.0, 0.0),
        ((search("x").replace("query", "words"), ANSWER), 0.0, 1.0, 0.0),  # a call without the argument
    ],
)
def test_an_answer_is_worth_what_the_judge_says(
    replies: tuple[str, ...], reward: float, right: float, grounded: float
) -> None:
    found, metrics = play(*replies)
    assert (found, metrics["right"], metrics["grounded"]) == (reward, right, grounded)


@table("title", list(TEXTS["test"]))
def test_a_title_finds_its_document(title: str) -> None:
    assert INDEX.best(title) == f"# {title}\n{TEXTS['test'][title]}"


@table("query", ["", "!?", "xyzzy", "NOT", '"', "title:", "NEAR(", "'; DROP TABLE sections; --", "\x00"])
def test_a_hostile_query_finds_nothing(query: str) -> None:
    assert INDEX.best(query) is None


@given(query=st.text(max_size=80))
def test_a_search_finds_a_document_or_nothing(query: str) -> None:
    found = INDEX.best(query)
    assert found is None or found.partition("\n")[0].removeprefix("# ") in TEXTS["test"]


def test_questions_are_held_out_by_document() -> None:
    assert not {*TEXTS["train"]} & {*TEXTS["test"]}
    assert not {*TEXTS["validation"]} & ({*TEXTS["train"]} | {*TEXTS["test"]})
    for split in SPLITS:
        for row in rows(split):
            assert row["documents"] == split
            fact = row["main_query"].split()[2]
            assert f"- {fact} {row['answer']}" in TEXTS[split][row["source"]].splitlines()


@pytest.mark.slow
@pytest.mark.skipif(version("agentscope") < "2", reason="the model was made with the tool schema of 2.x")
def test_the_files_are_what_the_scripts_make(tmp_path: Path) -> None:
    script = """
import json, sys
from pathlib import Path
import librarian, make_model, make_tasks
for split in make_tasks.SPLITS:
    world = make_tasks.World(split)
    assert [*world.documents()] == [*librarian.sections(Path("documents") / split)], split
    rows = [json.loads(line) for line in Path(f"data/{split}.jsonl").read_text().splitlines()]
    assert rows == list(world.tasks()), split
make_model.make_model(Path(sys.argv[1]), steps=1, worlds=3)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=EXAMPLE, check=True, capture_output=True)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (EXAMPLE / "tiny_librarian" / name).read_text(), name
