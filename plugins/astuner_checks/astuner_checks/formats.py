"""Names that older experiments list: one fixed form of answer, and a switch that has no effect here.

Invariant: a config that names them loads, and nothing is punished that its author did not ask for.
"""

from __future__ import annotations

import re

from astuner.contracts.output_check import OutputView

_OPEN, _CLOSE = "<think>", "</think>"
_BLOCK = re.compile(r"```python[ \t]*\n")
_FENCE = "```"


def format_type_1(view: OutputView) -> str | None:
    """An answer that is not exactly a thought (``<think>…</think>``) and then one block of Python."""
    text, thought = view.text.strip(), bool(view.reasoning.strip())
    if not thought and text.startswith(_OPEN):
        inside, closed, rest = text[len(_OPEN) :].partition(_CLOSE)
        thought, text = bool(closed and inside.strip()), rest.strip()
    if not thought:
        return f"format_type_1: the answer does not begin with a thought, {_OPEN}…{_CLOSE}"
    opened = _BLOCK.match(text)
    inner = text[opened.end() :].removesuffix(_FENCE) if opened else ""
    if not opened or len(inner) + len(_FENCE) != len(text) - opened.end() or _FENCE in inner:
        return "format_type_1: the thought is not followed by one ```python block and nothing else"
    return None


def non_ascii(view: OutputView) -> str | None:
    """Never fires.

    In the config it comes from, the name *turns off* a part of `nonsense` that fires on any letter outside English;
    here `nonsense` has no such part, so there is nothing to turn off.
    """
    return None
