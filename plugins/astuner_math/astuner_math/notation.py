r"""Rewrite intervals and sets of real numbers in the one notation that math-verify reads.

`]0,1]`, `\{x \mid 0<x \le 1\}` and `x \in (0;1]` become `(0,1]`.
"""

from __future__ import annotations

import re

_SET_BUILDER = re.compile(
    r"\\\{ ?[A-Za-z](?: ?\\in ?(?:\\mathbb ?\{ ?R ?\}|\\mathbb ?R|\\R))? ?(?:\\mid|\\colon|\||:|\\vert)"
    r" ?(?P<condition>[^{}]*)\\\}"
)
_MEMBER = re.compile(r"[A-Za-z] ?\\in ?(?=[\[\](\\{])")
_INFINITY = re.compile(r"(?<![A-Za-z\\])(?:oo|inf|infty|infinity)(?![A-Za-z])")
_UNION = re.compile(r" ?(?:\\cup(?![A-Za-z])|(?<=[\])\[]) (?:U|u|or|union) (?=[\[(\]])|(?<=[\])\[])U(?=[\[(\]])) ?")
_INTERVAL = re.compile(
    r"(?P<open>[\[\](]) ?(?P<low>[^,;\[\]]+?) ?(?P<sep>[,;]) ?(?P<high>[^,;\[\]]+?) ?(?P<close>[\])\[])"
)


def one_notation(text: str) -> str:
    r"""Return intervals and sets in math-verify's notation; other text is returned unchanged."""
    return _intervals(_union_of_relations(_condition(text)))


def _condition(text: str) -> str:
    r"""Return the condition of `\{x \mid x>2\}` and the set of `x \in (0,1)`."""
    if built := _SET_BUILDER.fullmatch(text):
        return built["condition"].strip()
    return _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text


def _intervals(text: str) -> str:
    """Return intervals in one notation: `]0,1]` as `(0,1]`, a semicolon as a comma, `oo` as infinity."""
    if not text or text[0] not in "[](":
        return text
    parts = [_INTERVAL.fullmatch(part.strip()) for part in _UNION.split(text)]
    if not all(parts):
        return text
    return r" \cup ".join(_interval(part) for part in parts if part)


def _interval(part: re.Match[str]) -> str:
    low, high = (_INFINITY.sub(r"\\infty", part[end]) for end in ("low", "high"))
    if part["sep"] == ";":
        low, high = low.replace(",", "."), high.replace(",", ".")
    opening, closing = "[" if part["open"] == "[" else "(", "]" if part["close"] == "]" else ")"
    return f"{opening}{low},{high}{closing}"


_OR = re.compile(r" ?(?:\\lor(?![A-Za-z])|\\text ?\{ ?or ?\}|(?<= )or(?= )) ?")
_RELATION = re.compile(r"(?P<name>[A-Za-z]) ?(?P<sign><|>|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])) ?(?P<bound>[^<>=,]+)")
_SIGNS = {"<": "(-\\infty,{})", ">": "({},\\infty)", r"\le": "(-\\infty,{}]", r"\ge": "[{},\\infty)"}


def _union_of_relations(text: str) -> str:
    r"""Return `x<-2 \text{ or } x>2` as a union; other text is returned unchanged."""
    relations = [_RELATION.fullmatch(part.strip()) for part in _OR.split(text)]
    if len(relations) < 2 or len({part["name"] if part else "" for part in relations}) > 1:
        return text
    if not all(relations):
        return text
    return r" \cup ".join(_SIGNS[p["sign"].removesuffix("q")].format(p["bound"].strip()) for p in relations if p)
