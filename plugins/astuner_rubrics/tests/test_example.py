"""The example without a reward function: it runs, and only the people and the stand-in know what people want."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner_rubrics.grading import Grader
from astuner_rubrics.rubric_file import load_rubrics
from tests.table import table

EXAMPLE = Path(__file__).parents[3] / "examples" / "rubrics"
NAMES = ("desk", "people", "stand_in", "rubrics")
pytestmark = pytest.mark.timeout(1200)  # four processes that import torch, one after the other


@pytest.fixture(scope="module")
def example() -> Any:
    """Its modules, by name; they import each other as a script's neighbours do."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in NAMES:
            sys.modules.pop(name, None)


def start(folder: Path) -> str:
    command = [sys.executable, str(EXAMPLE / "rubrics.py"), "--quick", "--folder", str(folder)]
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


@pytest.mark.slow
def test_from_comparisons_to_a_trained_model_with_real_processes(tmp_path: Path, example: Any) -> None:
    printed = start(tmp_path)
    at = tmp_path / "seed-1"
    size = example["rubrics"].QUICK
    labels = {name: read_lines(at / f"{name}.jsonl") for name in ("samples", "labels", "coin")}
    assert len(labels["samples"]) > size.asked // 4
    assert [row["answers"] for row in labels["coin"]] == [row["answers"] for row in labels["samples"]]

    # the rubrics were learned from people's comparisons, checked with others, and are what the run was judged by
    learned = load_rubrics(at / "rubrics-learned.yaml")
    assert learned.learned is not None
    assert learned.learned.train + len(learned.learned.held_out) == len(labels["samples"])
    card = json.loads((at / "card.json").read_text())
    left_out = card["labels"]["left_out_learned_from"] + card["labels"]["left_out_near"]
    assert card["labels"]["n"] + left_out == len(labels["labels"])
    files = {"polite": str(EXAMPLE / "polite.yaml"), "learned": str(at / "rubrics-learned.yaml")}
    for arm, file in files.items():
        resolved = yaml.safe_load((at / arm / "resolved.yaml").read_text())["astuner"]["task_judge"]
        assert (resolved["judge"], resolved["rubrics"]["file"]) == ("rubrics", file)
        rows = read_lines(at / arm / "episodes" / "step_000001.jsonl")
        assert {row["reward_source"] for row in rows} == {"judge"}

    # whoever is asked in the end was never asked before
    held_out = {question for question, _ in json.loads((at / "train-learned.json").read_text())["after"]}
    before = {row["question"] for row in read_lines(tmp_path / "tasks.jsonl")}
    assert len(held_out) == size.held_out
    assert not held_out & (before | {row["question"] for rows in labels.values() for row in rows})

    report = (tmp_path / "results.md").read_text()
    assert report in printed
    assert [line.split("|")[2].strip() for line in report.splitlines()[6:9]] == list(example["rubrics"].ARMS.values())
    again = start(tmp_path)
    assert "seed 1: " not in again, "a second start makes nothing that is there"
    assert report in again


def test_people_like_what_they_want_and_click_on_it(example: Any) -> None:
    desk, people = example["desk"], example["people"]
    late = desk.Question(0, "Mia", "cups")
    best = "We are sorry. They come on Monday. This is section 4 of our terms."
    assert people.worth(late.text, best) == 1.0
    assert people.worth(late.text, f"Dear Mia, {best} Thank you for writing.") == 1.0, "nobody cares"
    assert people.worth(late.text, "They cost 9 euros. Buy our new pens now!") == 0.0
    price = desk.Question(4, "Mia", "cups")
    assert people.worth(price.text, "They cost 9 euros.") == pytest.approx(8 / 9)
    asked = [(late, best, "They cost 9 euros."), (late, "They come on Monday.", best), (late, best, best)] * 200
    labels = people.compared(asked, random.Random(0))
    assert len(labels) == 400
    right = [row["preferred"] == row["answers"].index(best) for row in labels]
    assert sum(right) / 400 == pytest.approx(1 - people.MISTAKEN, abs=0.03)


def test_held_out_questions_are_others_and_none_is_lost(example: Any) -> None:
    desk = example["desk"]
    sides = [{q.text for q in desk.questions(held_out=side)} for side in (True, False)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == len(desk.WORDINGS) * len(desk.NAMES) * len(desk.THINGS)
    for question in desk.questions(held_out=False):
        assert desk.about(question.text) == question.about


@table("noise", [0.0, 1.0])
def test_the_stand_in_grades_by_the_words_of_a_criterion(example: Any, monkeypatch: Any, noise: float) -> None:
    stand_in = example["stand_in"]
    monkeypatch.setattr(stand_in, "NOISE", noise)
    answers = ["We are sorry. They come on Monday. Buy our new pens now!", "They cost 9 euros. Thank you for writing."]
    criteria = [text for _, texts in stand_in.WORDS.values() for text in texts]
    grader = Grader(None, 0, 10)  # type: ignore[arg-type]
    content = grader.messages("Mia writes: Where are my cups?", answers, [f"The answer {c}." for c in criteria])
    found = [row["grades"] for row in stand_in.reply({"messages": content})["grades"]]
    wanted = [[10, 0]] * 2 + [[0, 10]] * 2 + [[10, 0]] * 2 + [[0, 0]] * 3 + [[0, 10]]
    assert found == [[abs(10 * noise - grade) for grade in row] for row in wanted]
    (_, middle), *_ = [(row["criterion"], row["grades"]) for row in stand_in.reply(
        {"messages": grader.messages("Where?", answers, ["The answer is good."])})["grades"]]  # fmt: skip
    assert middle == [5, 5]


def test_agreement_if_nobody_erred_lacks_what_no_rubric_asks_for(example: Any, tmp_path: Path) -> None:
    question, plain = "Mia writes: How much are the cups?", "They cost 9 euros."
    pairs = [(plain, "They come on Monday."), (plain, f"{plain} This is section 1 of our terms.")]
    rows = [{"question": question, "answers": two, "preferred": 1} for two in pairs]  # the first is a wrong click
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stand_in, agreement = example["stand_in"], example["rubrics"].if_nobody_erred
    every = [{"criterion": stand_in.WORDS[name][1][0], "weight": w} for name, w in example["people"].WANTED.items()]
    assert agreement(tmp_path / "l.jsonl", every) == 1.0
    assert agreement(tmp_path / "l.jsonl", every[:-1]) == 0.75


def test_the_table_compares_by_what_people_want(example: Any) -> None:
    question = "Mia writes: How much are the cups?"
    best, worst = (question, "They cost 9 euros. This is section 1 of our terms."), (question, "We are sorry. Buy!")
    report = example["rubrics"].table({1: {"before": [worst] * 8, "polite": [worst] * 8, "learned": [best] * 8}})
    rows = [[cell.strip() for cell in line.split("|")] for line in report.splitlines()[2:5]]
    assert [row[3] for row in rows] == ["0.00 [0.00, 0.00]", "0.00 [0.00, 0.00]", "1.00 [1.00, 1.00]"]
    assert rows[2][4:8] == ["100 %"] * 4
    assert "'trained on learned rubrics' minus 'untrained': +1.00, 95 % interval +1.00 to +1.00" in report
