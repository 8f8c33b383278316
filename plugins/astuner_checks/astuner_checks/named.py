"""Checks on what the model wrote (the seeds' "madness"), by name.

A check is a function of one `OutputView`: it says in words what is wrong with one reply, or returns None.  It must not
fire on ordinary text of any language, on symbols, code, JSON, tables or rules made of dashes: a check that does
punishes good behaviour.  Where degenerate and ordinary text cannot be told apart, it stays silent.
"""

from __future__ import annotations

from astuner.contracts.output_check import Check, OutputView
from astuner_checks.characters import find_garbage, garbled
from astuner_checks.formats import format_type_1, non_ascii
from astuner_checks.leaks import control_tokens, find_control_token
from astuner_checks.loops import find_repetition, repetition
from astuner_checks.tool_calls import unknown_tool, wrong_arguments, wrong_toolcall

__all__ = [
    "Check",
    "OutputView",
    "control_tokens",
    "format_type_1",
    "garbled",
    "non_ascii",
    "nonsense",
    "repetition",
    "unknown_tool",
    "wrong_arguments",
    "wrong_toolcall",
]

_FINDERS = (find_control_token, find_garbage, find_repetition)


def nonsense(view: OutputView) -> str | None:
    """Control tokens written as text, text whose bytes are broken, or the same words or letters over and over.

    Random letters are not among them: without a dictionary of every language nobody can tell them from names, hashes or
    abbreviations.
    """
    for text in view.written:
        for find in _FINDERS:
            if found := find(text):
                return f"nonsense: {found}"
    return None
