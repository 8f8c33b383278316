r"""Answers: find one in a text, undo its typography, and compare it where it is a plain number.

What is in the last box, after GSM8K's ``####``, or the last number is the answer.  `normalise` undoes what is only
typography.  `quantity` reads what is left as a number with an optional per cent sign or unit, or says None; then the
limited process decides (`astuner_math.limited`).  Everything here is linear in the length of the text, whatever a model
writes: no parser, no other process, regular expressions without nested repetition, and numbers as exact fractions.

Units (``units.yaml``) are those that a word problem may end in, so that 3 hours are 180 minutes and 5 km are not 5 cm.
One that is not listed says nothing, and an answer without one is compared by its number alone: references such as
GSM8K's carry no units at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

_BOX_PARTS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_PLAIN_NUMBER = re.compile(r"(?<![\w.,])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}`` (or ``\fbox{…}``), nested braces included; None without one.

    A box that is never closed (the model was cut off) is no box.
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
    """The last number in plain text, with its sign, thousands separators, fraction and percent sign."""
    matches = _PLAIN_NUMBER.findall(text)
    return matches[-1] if matches else None


def reference_answer(metadata: Mapping[str, Any], field: str) -> str | None:
    """The reference in ``metadata[field]``: what follows GSM8K's last ``####``, else the last box, else all of it.

    None when the field is missing, empty, or neither text nor a number.
    """
    value = metadata.get(field)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    text = str(value)
    answer = text.rpartition("####")[2] if "####" in text else last_boxed(text) or text
    return answer.strip() or None


_CURRENCY = "¤"  # stands for a dollar sign that means money
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt",
    "°": r"^\circ", "²": "^2", "³": "^3", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "，": ",", "％": "%", "＝": "=", "\u00a0": " ", "\u202f": " ",
}  # fmt: skip
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
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"\\(?:mathrm|operatorname)\s*\{ ?([eid]) ?\}"), r"\1"),  # the constants, set upright
    (re.compile(r"\\text(?:bf|it|rm|normal)(?![A-Za-z])|\\mathrm(?![A-Za-z])|\\mbox(?![A-Za-z])"), r"\\text"),
)
_TYPESET = re.compile(r"[\\{~]")
_WRAPPED = re.compile(r"(?:\\(?:text|math(?:bf|it|sf)|boldsymbol|underline|boxed|fbox)\s*)?\{([^{}]*)\}")
_DOLLARS = re.compile(r"\$(?=\s*-?[\d.])")


def normalise(text: str) -> str:
    """The text without typography: one spelling for fractions, spaces, signs, delimiters, degrees."""
    if not text.isascii():
        for symbol, latex in _SYMBOLS.items():
            text = text.replace(symbol, latex)
    text = text.replace(r"\$", _CURRENCY)
    if text.count("$") == 1:
        text = _DOLLARS.sub(_CURRENCY, text)
    text = text.replace("$", "")
    if _TYPESET.search(text):
        for pattern, replacement in _UNTYPESET:
            text = pattern.sub(replacement, text)
    text = " ".join(text.split()).rstrip(".,;").strip()
    while whole := _WRAPPED.fullmatch(text):
        text = whole[1].strip()
    return text


Unit = tuple[str, Fraction]


def _read_units() -> dict[str, Unit]:
    kinds = yaml.safe_load(Path(__file__).with_name("units.yaml").read_text(encoding="utf-8"))
    sizes = [(kind, names, Fraction(size)) for kind, units in kinds.items() for names, size in units.items()]
    return {name: (kind, size) for kind, names, size in sizes for name in names.split()}


_UNITS = _read_units()
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def unit(name: str) -> Unit | None:
    """The dimension of a unit and its size in that dimension's base unit; None when it is not listed."""
    name = name.strip().rstrip(".").lower()
    return _UNITS.get(name) or (_UNITS.get(name[:-1]) if name.endswith("s") else None)


@dataclass(frozen=True)
class Quantity:
    value: Fraction
    percent: bool = False
    unit: Unit | None = None


_INTEGER = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+"
_DECIMAL = rf"(?P<decimal>(?:{_INTEGER})(?:\.\d*)?|\.\d+)"
_REPEATING = r"(?P<before>\d*)\.(?P<fixed>\d*)\\overline\s*\{(?P<repeat>\d+)\}"
_SLASH = r"(?P<top>\d+) ?/ ?(?P<bottom>\d+)"
_FRAC = r"(?:(?P<whole>\d+) ?)?\\frac\s*\{ ?(?P<sign2>-?) ?(?P<over>\d+) ?\}\s*\{ ?(?P<under>\d+) ?\}"
_MIXED = r"(?P<whole2>\d+) (?P<over2>\d+) ?/ ?(?P<under2>\d+)"
_POWER = r"(?: ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{? ?(?P<ten>[-+]?\d{1,3}) ?\}?|[eE](?P<exponent>[-+]?\d{1,3}))?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?P<money>[{_CURRENCY}€£]?) ?(?P<sign3>-?)"
    rf"(?:{_REPEATING}|{_MIXED}|{_SLASH}|{_FRAC}|{_DECIMAL}{_POWER})"
)
_PERCENT = re.compile(r" ?(?:%|\\text\s*\{ ?per ?cent ?\}|per ?cent)", re.IGNORECASE)
_DEGREE = re.compile(r" ?\^\\circ")
_WORDS = re.compile(
    r" ?\\text\s*\{ ?(?P<text>[A-Za-z][A-Za-z. -]*)\}(?: ?\^ ?\{?[23]\}?)?"
    r"|(?P<space> ?)(?P<bare>[A-Za-z]+\.?(?: [A-Za-z]+)*)"
)
_MONEY = {_CURRENCY: "dollar", "€": "euro", "£": "gbp"}
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "cot", "csc", "log", "ln", "exp", "max", "mod", "of"}
_MATH_WORDS = _FUNCTIONS | {"pi", "or", "and", "to", "infinity", "theta", "alpha", "beta"}


def quantity(text: str) -> Quantity | None:
    """Read normalised text as one number, or say None: it is something else, and not for this module."""
    match = _NUMBER.match(text)
    if match is None:
        return None
    if (several := _compound(text)) is not None:
        return several
    try:
        value = _value(match)
    except ZeroDivisionError:
        return None
    if "-" in (match["sign"], match["sign3"]):
        value = -value
    return _with_suffix(value, match["money"], text[match.end() :])


_PART = re.compile(
    rf"(?P<size>{_DECIMAL}) ?(?:\\text\s*\{{ ?(?P<set>[A-Za-z]+)\.? ?\}}|(?P<bare>[A-Za-z]+)\.?)(?:,? and |,? ?|$)"
)


def _compound(text: str) -> Quantity | None:
    """Several numbers with ever smaller units of one kind (`1 hour 30 minutes`), in the smallest of them."""
    total, last, at = Fraction(0), None, 0
    while at < len(text):
        part = _PART.match(text, at)
        found = unit(part["set"] or part["bare"]) if part else None
        if part is None or found is None or (last and (found[0] != last[0] or found[1] >= last[1])):
            return None
        total += Fraction(re.sub("[ ,]", "", part["size"]).rstrip(".")) * found[1]
        last, at = found, part.end()
    return Quantity(total / last[1], unit=last) if last else None


def _with_suffix(value: Fraction, money: str, rest: str) -> Quantity | None:
    """What the text behind a number makes of it; None where that text is algebra."""
    if money:
        scale = SCALES.get(rest.strip().lower()) if rest else 1
        return Quantity(value * scale, unit=unit(_MONEY[money])) if scale else None
    if not rest:
        return Quantity(value)
    if _PERCENT.fullmatch(rest):
        return Quantity(value, percent=True)
    if _DEGREE.fullmatch(rest):
        return Quantity(value, unit=unit("degree"))
    words = _WORDS.fullmatch(rest)
    return _with_words(value, words) if words else None


def _with_words(value: Fraction, words: re.Match[str]) -> Quantity | None:
    """A number and words behind it: a scale (million), a unit, or a noun (apples), which says nothing."""
    phrase = (words["text"] or words["bare"]).strip()
    first, _, others = phrase.partition(" ")
    if scale := SCALES.get(first.lower()):
        value, phrase = value * scale, others
    known = unit(phrase)
    if words["text"] is None and known is None and not scale:
        is_product = not words["space"] or len(first) == 1  # `5ab`, `5 x`
        if is_product or _MATH_WORDS.intersection(phrase.lower().split()):
            return None
    return Quantity(value, unit=None if words[0].rstrip("}").endswith(("2", "3")) else known)


def _value(match: re.Match[str]) -> Fraction:
    part = match.groupdict()
    if part["repeat"]:
        fixed, repeat = part["fixed"], part["repeat"]
        head = Fraction(int((part["before"] or "0") + fixed), 10 ** len(fixed))
        return head + Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(fixed))
    if part["over2"]:
        return int(part["whole2"]) + Fraction(int(part["over2"]), int(part["under2"]))
    if part["top"]:
        return Fraction(int(part["top"]), int(part["bottom"]))
    if part["over"]:
        over = -int(part["over"]) if part["sign2"] else int(part["over"])
        return int(part["whole"] or 0) + Fraction(over, int(part["under"]))
    number = part["decimal"].replace(",", "").replace(" ", "").rstrip(".")
    return Fraction(number) * Fraction(10) ** int(part["ten"] or part["exponent"] or 0)


def equal_quantities(a: Quantity, b: Quantity) -> bool:
    """Whether two plain numbers are the same answer.

    They agree to six decimal places (math-verify's rounding), or for numbers below 0.01 to as many digits as
    0.01 has then.  50% equals 0.5 and, since references often drop the sign, 50.  Units are converted when both
    are known; a missing or unknown one is ignored.
    """
    x, y = a.value, b.value
    if a.unit and b.unit:
        if a.unit[0] != b.unit[0]:
            return False
        x, y = x * a.unit[1], y * b.unit[1]
    if _close(x, y):
        return True
    if a.percent != b.percent:
        return _close(x / 100, y) if a.percent else _close(x, y / 100)
    return False


def _close(x: Fraction, y: Fraction) -> bool:
    return abs(x - y) <= Fraction(1, 2_000_000) * min(Fraction(1), 100 * max(abs(x), abs(y)))


_CLOCK = re.compile(
    r"(?P<hour>[01]?\d|2[0-3])(?::(?P<minute>[0-5]\d))?(?: ?(?:\\text\s*\{ ?)?(?P<half>[ap])\.? ?m\.? ?\}?)?",
    re.IGNORECASE,
)


def clock(text: str) -> tuple[int, bool] | None:
    """A time of day as minutes, and whether AM or PM is said; None for other text, and for a number alone."""
    named = {"noon": "12 pm", "midnight": "12 am"}.get(text.lower(), text)
    match = _CLOCK.fullmatch(named)
    if match is None or not (match["half"] or match["minute"]):
        return None
    hour, minute, half = int(match["hour"]), int(match["minute"] or 0), (match["half"] or "").lower()
    if half and hour <= 12:
        hour = hour % 12 + 12 * (half == "p")
    return hour * 60 + minute, bool(half)


_RATIO = re.compile(r"\d+(?:\.\d+)?(?:(?: ?: ?| to | ?\\text\s*\{ ?to ?\} ?)\d+(?:\.\d+)?)+")


def ratio(text: str) -> tuple[Fraction, ...] | None:
    """The parts of `2:3:5` or `1 to 2` as shares of the whole; None for other text, and for nothing but zeros."""
    if not _RATIO.fullmatch(text):
        return None
    parts = [Fraction(part) for part in re.findall(r"\d+(?:\.\d+)?", text)]
    return tuple(part / sum(parts) for part in parts) if any(parts) else None


def is_word(text: str) -> bool:
    """Whether an answer is words, not a product of variables: `no`, `Tuesday`, `option B`."""
    return re.fullmatch(r"no|[A-Za-z]{3,}|[A-Za-z]+(?: [A-Za-z]+)+", text, re.IGNORECASE) is not None


def quick_verdict(reference: str, candidate: str) -> bool | None:
    """Whether two normalised answers are equal where that is certain without algebra; None where it is not."""
    if reference == candidate:
        return True
    times = clock(reference), clock(candidate)
    if times[0] and times[1] and (times[0][1] or times[1][1]):
        whole_day = 24 if times[0][1] and times[1][1] else 12  # a missing AM or PM is ignored, as a missing unit is
        later, earlier = max(times[0][0], times[1][0]), min(times[0][0], times[1][0])
        return (later - earlier) % (whole_day * 60) == 0
    mine, other = quantity(reference), quantity(candidate)
    if mine and other:
        return equal_quantities(mine, other)
    shares = ratio(reference), ratio(candidate)
    if shares[0] and (shares[1] or len(shares[0]) > 2):  # `1:2` may be `1/2` too, `1:2:3` is nothing else
        return shares[0] == shares[1]
    if is_word(reference) and candidate.replace(" ", "").isalpha():
        return reference.lower() == candidate.lower()
    return None
