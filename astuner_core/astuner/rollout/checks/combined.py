"""The seeds' `nonsense`: everything about a reply's text that no sane model writes.

It is `control_tokens`, `garbled` and `repetition` under one name; each can also be asked for alone.  Random letters
are not among them: without a dictionary of every language nobody can tell them from names, hashes or abbreviations.
"""

from __future__ import annotations

from astuner.rollout.checks.characters import find_garbage
from astuner.rollout.checks.leaks import find_control_token
from astuner.rollout.checks.loops import find_repetition
from astuner.rollout.checks.view import OutputView

_FINDERS = (find_control_token, find_garbage, find_repetition)


def nonsense(view: OutputView) -> str | None:
    """Control tokens written as text, text whose bytes are broken, or the same words or letters over and over."""
    for text in view.written:
        for find in _FINDERS:
            if found := find(text):
                return f"nonsense: {found}"
    return None
