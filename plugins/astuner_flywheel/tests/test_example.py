"""The flywheel's example: everything runs, in processes of its own, and what goes around is what it says it is."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner import load_config
from astuner.testing import ScriptedModel
from astuner_flywheel.generation.entry import Generation
from astuner_flywheel.generation.prompts import fenced

EXAMPLE = Path(__file__).parents[3] / "examples" / "flywheel"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # ten processes that import torch, one after the other


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the names of annotations, and flywheel.py for the others
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def users() -> Any:
    yield load("users")
    del sys.modules["users"]


@pytest.fixture(scope="module")
def writer() -> Any:
    yield load("writer")
    del sys.modules["writer"]


@pytest.fixture(scope="module")
def flywheel(users: Any, writer: Any) -> Any:
    load("results")
    yield load("flywheel")
    del sys.modules["flywheel"], sys.modules["results"]


def start(folder: Path) -> str:
    command = [sys.executable, str(EXAMPLE / "flywheel.py"), "--quick", "--seeds", "1", "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ASTUNER_HOME": str(folder / "home")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        printed, _ = process.communicate()
    finally:
        process.terminate()  # it ends what it started
        process.wait(60)
    assert process.returncode == 0, printed
    return printed


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def queries(run: Path) -> set[str]:
    """What the episodes of a run were asked."""
    rows = [row for file in (run / "episodes").glob("step_*.jsonl") for row in read_lines(file)]
    said = [message for row in rows for message in row["turns"][0]["new_messages"]]
    return {message["content"] for message in said if message["role"] == "user"}


def test_once_around_with_real_processes(tmp_path: Path, users: Any, flywheel: Any) -> None:
    printed = start(tmp_path)
    folder = tmp_path / "seed-1"
    kept = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    arms = ("first", "control", "again", "augmented")
    stages = {f"{what}-{arm}" for what in ("train", "ask") for arm in arms} | {"deploy", "augment"}
    assert kept.keys() == stages | {"users.report"}
    size = flywheel.QUICK

    # what users asked and thought is in the collector's database
    with sqlite3.connect(folder / "traces.sqlite") as database:
        spans = [json.loads(text) for (text,) in database.execute("SELECT attributes FROM span_table")]
        opinions = database.execute("SELECT COUNT(*) FROM feedback_table").fetchone()[0]
    database.close()
    assert len(_values(spans, "gen_ai.conversation.id")) == size.asked
    assert _values(spans, "gen_ai.response.model") == {f"first/step-{size.first_steps:06d}"}
    assert 0 < opinions <= size.asked

    # each arm learned from what it says, and starts where it says
    makers = {row["question"] for row in read_lines(folder / "first.jsonl")}
    rng = random.Random(1)
    users.draw(rng, size.first_tasks, users.MAKERS, users.KNOWN, held_out=False)
    asked = {p.question for p in users.draw(rng, size.asked, users.EVERYBODY, users.KNOWN, held_out=False)}
    assert queries(folder / "first") | queries(folder / "control") <= makers
    assert queries(folder / "again") <= asked
    rows = read_lines(folder / "augmented.jsonl")
    more = {row["main_query"]: row["metadata"]["provenance"]["source"] for row in rows}
    assert queries(folder / "augmented") <= more.keys()
    assert {question for question, source in more.items() if source == "sample"} <= asked
    assert Counter(more.values()) == {"sample": kept["augment"]["users"], "seed": kept["augment"]["kept"]}
    assert 0 < kept["augment"]["kept"] <= kept["augment"]["made"] == size.generated < kept["augment"]["written"]
    first = str(folder / "first" / "checkpoints" / f"step-{size.first_steps:06d}")
    for arm, model in (("first", "tiny-calculator"), *((arm, first) for arm in arms[1:])):
        resolved = yaml.safe_load((folder / arm / "resolved.yaml").read_text())["astuner"]
        assert resolved["model"]["path"] == model
        assert resolved["trainer_common"]["total_steps"] == (size.first_steps if arm == "first" else size.further_steps)

    # the same other people asked every model
    held_out = [[one["question"] for one in kept[f"ask-{arm}"]["asked"]] for arm in arms]
    assert held_out[0] == held_out[1] == held_out[2] == held_out[3]
    assert len(set(held_out[0])) == size.held_out
    assert not set(held_out[0]) & (makers | asked | more.keys())
    assert all(one["answer"] for arm in arms for one in kept[f"ask-{arm}"]["asked"])

    report = (tmp_path / "results.md").read_text()
    assert report in printed
    assert [line.split("|")[2].strip() for line in report.splitlines()[2:6]] == list(flywheel.ARMS.values())
    assert not [path for name in ("serve", "collect") for path in (tmp_path / "home" / name).iterdir()]

    again = start(tmp_path)
    assert "train" not in again.replace("flywheel", ""), "a second start makes nothing that is there"
    assert report in again


def _values(spans: list[Any], name: str) -> set[str]:
    """An attribute's values, whether its dots are levels or not."""
    found = set()
    for span in spans:
        at: Any = span
        if name in span:
            at = span[name]
        else:
            for part in name.split("."):
                at = at[part]
        found.add(at)
    return found


def test_people_say_what_they_are_made_to_say(users: Any) -> None:
    rng = random.Random(0)
    said = [users.opinion(rng, right, "12") for right in (True, False) for _ in range(4000)]
    shares = {
        "silent": sum(not each for each in said) / 8000,
        "liked, of the right": sum(each.get("rating") == 1 for each in said[:4000]) / 4000,
        "liked, of the wrong": sum(each.get("rating") == 1 for each in said[4000:]) / 4000,
        "corrected, of the wrong": sum(each.get("correction") == "12" for each in said[4000:]) / 4000,
    }
    heard = 1 - users.SILENT
    expected = [users.SILENT, heard * (1 - users.MISTAKEN), heard * users.MISTAKEN]
    expected.append(heard * (1 - users.MISTAKEN) * users.CORRECTS)
    assert list(shares.values()) == pytest.approx(expected, abs=0.03)


def test_nobody_is_asked_in_the_end_what_was_learned_from(users: Any) -> None:
    rng = random.Random(3)
    learned = users.draw(rng, 400, users.EVERYBODY, users.KNOWN, held_out=False)
    held_out = users.draw(rng, 200, users.EVERYBODY, users.OTHERS, held_out=True)
    assert Counter(p.wording in users.MAKERS for p in learned)[True] > 100
    assert not {(p.wording, p.a, p.b) for p in learned} & {(p.wording, p.a, p.b) for p in held_out}
    of_learned, of_held_out = ([p.question for p in problems] for problems in (learned, held_out))
    assert users.without_near(of_held_out, of_learned) == of_held_out
    assert users.without_near(of_learned, of_learned) == []


def test_the_table_counts_and_compares(flywheel: Any, users: Any) -> None:
    def answers(*right: bool) -> list[Any]:
        return [users.Asked(str(i), i % 8, "1", "1", each) for i, each in enumerate(right)]

    none, half, every = answers(*[False] * 16), answers(*[True, False] * 8), answers(*[True] * 16)
    report = flywheel.table({1: {"first": none, "control": half, "again": every, "augmented": half}})
    rows = [[cell.strip() for cell in line.split("|")] for line in report.splitlines()[2:6]]
    assert [row[5].split()[0] for row in rows] == ["0.0", "50.0", "100.0", "50.0"]
    assert [row[6] for row in rows] == ["0.008", "", "0.008", "1"]
    assert "'first model': +100.0 points" in report
    assert "'+ more of the old tasks': +50.0 points" in report
    assert """"+ users' feedback, augmented" minus "+ users' feedback": -50.0 points""" in report


def test_the_writer_writes_from_what_it_is_shown_and_its_mistakes_are_found(
    tmp_path: Path, users: Any, writer: Any, flywheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(writer, "FAULTY", 0.5)
    shown = users.draw(random.Random(5), 12, [1, 6], users.KNOWN, held_out=False)
    lines = [{"question": problem.question, "answer": problem.answer} for problem in shown]
    (tmp_path / "users.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    with ScriptedModel(writer.Writer(1)) as model:
        settings = {"seeds": tmp_path / "users.jsonl", "tasks": 40, "folder": tmp_path / "generated"}
        given = [f"astuner.task_reader.data_generation.{name}={value}" for name, value in settings.items()]
        given.append(f"astuner.helper_models.writer.base_url={model.base_url}")
        report = Generation(load_config(EXAMPLE / "augment.yaml", given)).run()
    assert report["made"] == 40
    assert report["rejected"].keys() == {"another answer", "near-duplicate", "not answerable"}
    assert min(report["rejected"].values()) >= 3
    rows = read_lines(tmp_path / "generated" / "train.jsonl")
    new = [row for row in rows if row["metadata"]["provenance"]["source"] == "seed"]
    assert (len(rows), len(new)) == (52, 40)
    understood = [writer.understand(row["main_query"]) for row in new]
    assert {problem.wording for problem in understood} == {1, 6}
    assert all(name not in row["main_query"] for row in new for name in (*users.KNOWN, *users.OTHERS))
    answers = [row["metadata"]["answer"] for row in new]
    assert sum(p.answer == answer for p, answer in zip(understood, answers, strict=True)) >= 38

    # what is close to the held-out questions goes, whoever wrote it
    ours = [row["main_query"].replace(row["main_query"].split()[0], "Sam") for row in new[:3]]
    found = flywheel.write_apart(rows, ours, tmp_path / "apart.jsonl")
    left = {row["main_query"] for row in read_lines(tmp_path / "apart.jsonl")}
    assert users.without_near(list(left), ours) == list(left)
    assert {row["question"] for row in lines} <= left
    assert found["near"] >= 1
    assert not any(flywheel.is_held_out(p.wording, p.a, p.b) for p in map(writer.understand, left))
    assert len(left) == 12 + found["kept"] == 52 - found["near"] - found["reserved"]


def test_a_wrong_answer_that_every_solution_agrees_on_is_kept_and_counted(
    tmp_path: Path, writer: Any, flywheel: Any
) -> None:
    said = writer.Writer(1)
    wrong = next(
        problem
        for a in range(2, 13)
        for b in range(2, 13)
        for name in writer.NAMES
        if (problem := writer.understand(f"{name} had {a + b} cups and lost {b}. How many remain?")) is not None
        and not flywheel.is_held_out(problem.wording, problem.a, problem.b)
        and said._believed(problem) != problem.answer
    )
    asked = [{"content": text} for text in ("You answer a question. …", fenced("QUESTION", wrong.question, "secret"))]
    answers = Counter(said({"messages": asked})["answer"] for _ in range(50))
    ((most, count),) = answers.most_common(1)
    assert most == str(int(wrong.answer) + 1)
    assert 40 < count <= 50
    about = {"answer": most, "provenance": {"source": "seed"}}
    row = {"task_id": "gen-1", "main_query": wrong.question, "metadata": about}
    found = flywheel.write_apart([row], [], tmp_path / "left.jsonl")
    assert found == {"made": 1, "near": 0, "reserved": 0, "kept": 1, "wrong": 1}
