"""Equality of two answers as mathematics, by math-verify and sympy. Runs only inside the limited process.

math-verify reads LaTeX with a grammar of its own (no `eval` of names) and compares exactly where it can, else to
six decimal places.  Its own timeouts use signals and are off: the limits around this process do that job.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off, every time

_TARGETS = (LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig())
_SPELLED = re.compile(r"(?<![A-Za-z\\])(pi|sqrt|sin|cos|tan|log|ln|infty)(?![A-Za-z])")
_SQRT_CALL = re.compile(r"(?<!\\)\bsqrt ?\(([^()]*)\)")
_ENUMERATION = re.compile(r" (?:\\text ?\{ ?)?(?:or|and)(?: ?\})? ")


class Unreadable(ValueError):
    """math-verify cannot read this as mathematics."""


def read(text: str) -> list[Any]:
    """Parse a normalised answer (`astuner_math.quantity.normalise`).

    :raises Unreadable: nothing in it parses.
    """
    latex = _ENUMERATION.sub(", ", text.replace("¤", "").replace("€", ""))
    latex = _SQRT_CALL.sub(r"\\sqrt{\1}", latex)
    latex = _SPELLED.sub(r"\\\1 ", latex)
    latex = re.sub(r"(?<!\\)%", r"\\%", latex)
    found: list[Any] = parse(f"${latex}$", extraction_config=_TARGETS, parsing_timeout=None)
    if not found:
        raise Unreadable(text)
    return found


def equal(reference: list[Any], candidate: list[Any]) -> bool:
    """Whether two parsed answers are the same mathematics; a relation may name the set of its solutions."""
    return bool(verify(reference, candidate, allow_set_relation_comp=True, timeout_seconds=None))
