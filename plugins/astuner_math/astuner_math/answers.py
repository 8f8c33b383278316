r"""Find an answer in a text and normalize its typography.

The answer is in the last box, follows GSM8K's ``####``, or is the last number. `normalise` removes typography;
`astuner_math.values` parses and compares the result. All functions take time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from astuner_math.quantities import CURRENCY

_BOX_PARTS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_PLAIN_NUMBER = re.compile(r"(?<![\w.,])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{…}`` or ``\fbox{…}`` with nested braces, or None.

    A box without a closing brace (truncated output) does not count.
    """
    found: tuple[int, int] | None = None
    open_braces: list[int | None] = []  # where a box's content starts; None for any other brace
    for part in _BOX_PARTS.finditer(text):
        token = part[0]
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                found = (start, part.start())
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(part.end())
    return text[found[0] : found[1]] if found else None


def last_number(text: str) -> str | None:
    """Return the last number in plain text, with its sign, thousands separators, fraction and percent sign."""
    matches = _PLAIN_NUMBER.findall(text)
    return matches[-1] if matches else None


def reference_answer(metadata: Mapping[str, Any], field: str) -> str | None:
    """Return the reference in ``metadata[field]``: text after GSM8K's last ``####``, else the last box, else all text.

    Return None if the field is missing, empty, or neither a string nor a number.
    """
    value = metadata.get(field)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    text = str(value)
    answer = text.rpartition("####")[2] if "####" in text else last_boxed(text) or text
    return answer.strip() or None


_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "―": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "÷": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt", "°": r"^\circ", "℃": r"^\circ C", "℉": r"^\circ F",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∈": r"\in ", "ℝ": r"\mathbb{R}", "±": r"\pm ",
    "∅": r"\emptyset ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "，": ",", "；": ";", "：": ":",
    "∶": ":", "％": "%", "＝": "=", "′": "'", "″": "''",
    "\u2019": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u2007": " ",
}  # fmt: skip
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_UNRAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_UNTYPESET = (
    (re.compile(r"\\[()\[\]]"), ""),  # math delimiters
    (re.compile(r"\\(?:(?:left|right|[bB]ig{1,2}[lr]?)(?![A-Za-z])|(?:text)?color\s*\{[^{}]*\})"), ""),
    (re.compile(r"\\(?:(?:display|text)style|bf|it|rm|tiny|small|large|Large|huge|Huge)(?![A-Za-z])"), ""),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\[!]"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])"), " "),  # `\\ ` ends a matrix row
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\mathord\s*(?=\{,\})"), ""),
    (re.compile(r"(?<=[1-9])\{,\}(?=\d{3}(?!\d))|(?<=\d\d)\{,\}(?=\d{3}(?!\d))"), ","),  # 1{,}234
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # 3{,}14
    (re.compile(r"\{([.,:;'])\}"), r"\1"),
    (re.compile(r"\\colon(?![A-Za-z])"), ":"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"\\(?:mathrm|operatorname)\s*\{ ?([eid]) ?\}"), r"\1"),  # the constants, set upright
    (re.compile(r"\\text(?:bf|it|rm|normal)(?![A-Za-z])|\\mathrm(?![A-Za-z])|\\mbox(?![A-Za-z])"), r"\\text"),
)
_TYPESET = re.compile(r"[\\{~]")
_WRAPPED = re.compile(r"(?:\\(?:text|math(?:bf|it|sf)|boldsymbol|underline|boxed|fbox)\s*)?\{([^{}]*)\}")
_DOLLARS = re.compile(r"\$(?=\s*-?[\d.])")


def normalise(text: str) -> str:
    """Return the text in one spelling for fractions, spaces, signs, delimiters and degrees."""
    if not text.isascii():
        for symbol, latex in _SYMBOLS.items():
            text = text.replace(symbol, latex)
        text = _SUPERSCRIPTS.sub(lambda m: f"^{{{m[0].translate(_UNRAISED)}}}", text)
    text = text.replace(r"\$", CURRENCY)
    if text.count("$") == 1:
        text = _DOLLARS.sub(CURRENCY, text)
    text = text.replace("$", "")
    if _TYPESET.search(text):
        for pattern, replacement in _UNTYPESET:
            text = pattern.sub(replacement, text)
    text = " ".join(text.split()).rstrip(".,;").strip()
    while whole := _WRAPPED.fullmatch(text):
        text = whole[1].strip()
    return text
