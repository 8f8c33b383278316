"""Countdown: what a try is worth, how a game goes, and files that are what the script makes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.testing import check_judge, check_workflow, workflow_task
from tests.table import table

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GAME = load("game")
NO_EXPRESSION, AT_MOST_ONCE = "That is no expression.", "Use the numbers, each at most once."


@table(
    ("said", "told"),
    [
        ("(3+5)*9", "That is 72."),
        ("3 + 5 * 9", "That is 48."),
        (" 9-(5/3) ", "That is 22/3."),
        ("5/3/9", "That is 5/27."),  # exact: no float has that value
        ("3-5-9", "That is -11."),
        ("3+5", "That is 8."),  # not each must be used
        ("9", "That is 9."),
        ("3+5+5", AT_MOST_ONCE),
        ("(3+5)*9*9", AT_MOST_ONCE),
        ("35+9", AT_MOST_ONCE),
        ("72", AT_MOST_ONCE),
        ("9/(3-3)", "That divides by zero."),
        ("", NO_EXPRESSION),
        ("-3+5+9", NO_EXPRESSION),  # a sign is no operator
        ("3**5**9", NO_EXPRESSION),
        ("3//5+9", NO_EXPRESSION),
        ("3(5)+9", NO_EXPRESSION),
        ("3+5+09", NO_EXPRESSION),
        ("(3+5)*9.0", NO_EXPRESSION),
        ("(3+5)*9 = 72", NO_EXPRESSION),
        ("That is 72.", NO_EXPRESSION),
        ("(3+5)*9\n", NO_EXPRESSION),
        ("(3+5)*\u0669", NO_EXPRESSION),  # another script's nine
        ("__import__('os').abort()", NO_EXPRESSION),
        ("9**9**9**9", NO_EXPRESSION),
        ("(" * 5000 + "3", NO_EXPRESSION),
        ("(" * 20 + "3" + ")" * 19, NO_EXPRESSION),
    ],
)
def test_a_try_is_told_its_exact_value_or_what_is_wrong(said: str, told: str) -> None:
    assert GAME.told(said, [5, 3, 9]) == told


@given(said=st.text(max_size=60) | st.text("0123456789+-*/() ", max_size=45))
def test_no_text_breaks_the_game(said: str) -> None:
    assert GAME.told(said, [3, 5, 9]).endswith(".")


def play(*replies: str) -> tuple[float, int]:
    """The reward of a game of 3 5 9 make 72, and how many of the replies it took."""
    task = workflow_task("3 5 9 make 72", numbers=[3, 5, 9], target=72)
    output = check_workflow(GAME.Player, task, replies=list(replies))
    return check_judge(GAME.Reached(), task, output).reward, replies.index(output.response) + 1


@table(
    ("replies", "reward", "tries"),
    [
        (("(3+5)*9", "3", "5"), 1.0, 1),
        (("3+5+9", "9*(5+3)", "5"), 1.0, 2),
        (("3+5+9", "72", "(5+3)*9"), 1.0, 3),
        (("3+5+9", "72", "8*9"), 0.0, 3),
        (("3+5+9", "That is 72.", "nothing"), 0.0, 3),
    ],
)
def test_three_tries_and_the_last_one_counts(replies: tuple[str, ...], reward: float, tries: int) -> None:
    assert play(*replies) == (reward, tries)


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / "data" / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture
def make_tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "game", GAME)
    return load("make_tasks")


def test_no_set_of_numbers_is_in_two_splits() -> None:
    sets = [{frozenset(row["numbers"]) for row in rows(split)} for split in ("train", "validation", "test")]
    assert sum(map(len, sets)) == len(frozenset.union(*map(frozenset, sets))) == 126


@pytest.mark.slow
def test_the_files_are_what_the_script_makes(make_tasks: ModuleType) -> None:
    for split in ("train", "validation", "test"):
        assert make_tasks.tasks(split) == rows(split)


@pytest.mark.slow
def test_fixed_expressions_reach_what_the_page_says(make_tasks: ModuleType) -> None:
    """The page's naive figure, of the three that, one by one, reach most of what is left of training."""

    def ways(row: dict[str, Any]) -> set[str]:
        right = f"That is {row['target']}."
        return {
            way for way in make_tasks.EXPRESSIONS if GAME.told(way.format(*row["numbers"]), row["numbers"]) == right
        }

    left, tried = [ways(row) for row in rows("train")], list[str]()
    for _ in range(GAME.TRIES):
        reached = Counter(way for of_one in left for way in of_one)
        tried.append(max(make_tasks.EXPRESSIONS, key=lambda way: reached[way]))
        left = [of_one for of_one in left if tried[-1] not in of_one]
    held_out = rows("test")
    share = sum(not ways(row).isdisjoint(tried) for row in held_out) / len(held_out)
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert f"{share:.1%}".replace("%", " %") in page
    assert [way for way in tried if f"`{way}`" not in page] == []
