"""Learning to ask: what the guest says to anything, what a booking is worth, and files that are what scripts make."""

from __future__ import annotations

import importlib.util
import json
import re
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

EXAMPLE = Path(__file__).parents[2] / "examples" / "learning_to_ask"
WISH = {"people": "4", "day": "Friday", "hour": "7"}
RIGHT = "Book 4 on Friday at 7."


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning_to_ask_waiter", EXAMPLE / "waiter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WAITER = load()


def play(*replies: str) -> tuple[float, bool, dict[str, Any]]:
    """Reward, success and metrics of a waiter who says this to a guest who said the day only."""
    task = workflow_task("A table on Friday.", wish=WISH, missing=["people", "hour"])
    output = check_workflow(WAITER.Waiter, task, replies=list(replies))
    verdict = check_judge(WAITER.RightTable(), task, output)
    return verdict.reward, verdict.is_success, dict(verdict.metrics)


PEOPLE, DAY, HOUR = WAITER.QUESTIONS.values()


@pytest.mark.skipif(version("agentscope") == "1.0.7", reason="its agent repeats an empty reply")
@table(
    ("replies", "reward", "success"),
    [
        ((PEOPLE, HOUR, RIGHT), 0.6, True),
        ((HOUR, PEOPLE, "Book 4 on Friday at 7"), 0.6, True),
        ((PEOPLE, DAY, HOUR, RIGHT), 0.4, False),  # the day was said
        ((PEOPLE, PEOPLE, HOUR, RIGHT), 0.4, False),  # asked twice
        (("How many people, and what time?", PEOPLE, HOUR, RIGHT), 0.4, False),  # one thing at a time
        ((RIGHT,), 1.0, True),  # guessed; one of 72 is right
        ((PEOPLE, HOUR, "Book 7 on Friday at 4."), 0.0, False),
        ((PEOPLE, HOUR, f"{RIGHT} Book 5 on Friday at 7.", HOUR), 0.0, False),
        (("Book 4 on Friday at 7 or 8.", PEOPLE, DAY, HOUR), 0.0, False),
        ((PEOPLE, DAY, HOUR, ""), 0.0, False),
    ],
)
def test_a_booking_is_worth_what_the_judge_says(replies: tuple[str, ...], reward: float, success: bool) -> None:
    found, is_success, metrics = play(*replies)
    assert (found, is_success) == (pytest.approx(reward), success)
    assert metrics["right"] == float(reward > 0)


@given(
    said=st.text(max_size=80) | st.sampled_from(["(?i)how many|which day", "wish", "{people}", "Book {} on {} at {}"])
)
def test_the_guest_tells_one_thing_or_nothing(said: str) -> None:
    guest = WAITER.Guest(WISH)
    answer = guest.answer(said)
    (asked,) = guest.asked
    told = "Sorry, what do you want to know?" if asked == "unclear" else WISH[asked]
    assert answer == told


def test_the_guest_answers_only_what_is_asked() -> None:
    guest = WAITER.Guest(WISH)
    assert [guest.answer(question) for question in WAITER.QUESTIONS.values()] == list(WISH.values())
    assert guest.answer("how many people and WHICH DAY?") == guest.answer("Tell me everything.")


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / "data" / f"{split}.jsonl").read_text().splitlines()]


@table("split", ["train", "validation", "test"])
def test_what_is_not_missing_stands_in_the_wish(split: str) -> None:
    for row in rows(split):
        assert all(row["wish"][part] in row["main_query"] for part in row["wish"] if part not in row["missing"]), row
        assert "day" not in row["missing"] or not re.search(r"[A-Z]\w+day", row["main_query"]), row


@pytest.mark.slow
def test_the_files_are_what_the_scripts_make(tmp_path: Path) -> None:
    script = """
import json, sys
from itertools import islice
from pathlib import Path
import make_model, make_tasks
for split, size in make_tasks.SIZES.items():
    rows = [json.loads(line) for line in Path(f"data/{split}.jsonl").read_text().splitlines()]
    assert rows == list(islice(make_tasks.tasks(split), size)), split
make_model.make_model(Path(sys.argv[1]), steps=1, count=300)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=EXAMPLE, check=True, capture_output=True)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (EXAMPLE / "tiny_waiter" / name).read_text(), name
