"""Checks on what the model wrote (the seeds' "madness"), by name.

A check is a function of one `OutputView`: it says in words what is wrong with one reply, or returns None.  It must not
fire on ordinary text of any language, on symbols, code, JSON, tables or rules made of dashes: a check that does
punishes good behaviour.  Where degenerate and ordinary text cannot be told apart, it stays silent.
"""

from __future__ import annotations

from astuner.rollout.checks.characters import garbled
from astuner.rollout.checks.chosen import OutputChecks
from astuner.rollout.checks.combined import nonsense
from astuner.rollout.checks.formats import format_type_1, non_ascii
from astuner.rollout.checks.leaks import control_tokens
from astuner.rollout.checks.loops import repetition
from astuner.rollout.checks.tool_calls import unknown_tool, wrong_arguments, wrong_toolcall
from astuner.rollout.checks.view import Check, OutputView

__all__ = [
    "Check",
    "OutputChecks",
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
