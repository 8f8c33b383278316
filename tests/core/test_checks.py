"""Checks on the model's output fire on gibberish and never on ordinary text."""

from __future__ import annotations

import pytest

from astuner.errors import ConfigError
from astuner.rollout.checks import OutputChecks

CHECKS = OutputChecks(["nonsense", "wrong_toolcall"])

ORDINARY = [
    "",
    "café, für, ¿cómo?, naïve",
    "€5, £3, x², π, √2, x ≤ 3, a → b, ÷, ∑∞",
    "Привет, как дела?",
    "你好，世界。",
    "こんにちは",
    "مرحبا بالعالم",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε",
    "-" * 200,
    "=" * 300,
    " " * 300 + "x",
    "\n" * 100,
    "| a | b |\n|---|---|\n" + "| 0 | 1 |\n" * 40,
    "0, " * 100,
    "1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
    "ha ha ha ha ha",
    "def f(x):\n    return x\n" * 5,
    '{"a": [1, 2, {"b": null}]}',
    "<tool_response>\n5\n</tool_response>",
    "no no no, really no",
    "AAAA BBBB",
    "aaaaaaaaaah!",
    "\\boxed{21}",
    "😀" * 50,
    "yes\n" * 6,
    "import os\nimport sys\n" * 4,
    "1. one\n2. two\n3. three\n",
    "x = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]",
    "0x" + "00" * 100,
    "ACGT" * 9,
]

GIBBERISH = [
    "very good " * 20,
    "word " * 30,
    "a" * 60,
    "the cat sat the cat sat " * 12,
    "<|im_start|>user",
    "xyzxyz" * 30,
    "nein " * 13,
]


@pytest.mark.parametrize("text", ORDINARY, ids=lambda t: t[:20])
def test_ordinary_text_of_any_kind_passes(text: str) -> None:
    assert CHECKS.check({"role": "assistant", "content": text}) is None


@pytest.mark.parametrize("text", GIBBERISH, ids=lambda t: t[:20])
def test_gibberish_is_named(text: str) -> None:
    assert str(CHECKS.check({"role": "assistant", "content": text})).startswith("nonsense: ")


def test_a_tool_call_that_cannot_be_read_is_named() -> None:
    complaint = CHECKS.check(
        {"role": "assistant", "content": "", "unparsed_tool_calls": ['{"name": "calc", "arguments": ']}
    )
    assert str(complaint).startswith("wrong_toolcall: cannot read")


def test_checks_are_chosen_by_name() -> None:
    assert OutputChecks([]).check({"content": "word " * 30}) is None
    with pytest.raises(ConfigError, match="there are nonsense, wrong_toolcall"):
        OutputChecks(["typo"])


def test_long_replies_are_checked_in_linear_time() -> None:
    """A pattern that backtracks over a megabyte would hang here, and pytest-timeout would name this test."""
    assert CHECKS.check({"content": "The quick brown fox jumps over the lazy dog number {}. " * 20_000}) is not None
    assert CHECKS.check({"content": " ".join(f"token{i} a{i}b" for i in range(100_000))}) is None
