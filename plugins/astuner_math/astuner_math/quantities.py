r"""Parse one number with an optional percent sign, currency or unit, and compare two of them.

The regular expressions have no nested repetition and numbers are exact fractions, so parsing takes time linear in the
length of the text. The package's README lists the number formats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from astuner_math.units import Unit, convert, parse_unit

CURRENCY = "¤"
"""Replacement for a dollar sign that means money, in normalized text."""
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MONEY_SCALES = {"k": 10**3, "m": 10**6, "mn": 10**6, "bn": 10**9, "b": 10**9, "tn": 10**12}


@dataclass(frozen=True)
class Quantity:
    """Number with an optional percent sign or unit."""

    value: Fraction
    percent: bool = False
    unit: Unit | None = None

    @property
    def is_bare(self) -> bool:
        """Whether it has neither a percent sign nor a unit (a noun is allowed)."""
        return not self.percent and self.unit is None

    def equals(self, other: Quantity) -> bool:
        return equal_quantities(self, other)


_GROUPS = "|".join(
    (
        r"[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)(?:\.\d*)?",  # 1,234,567.8
        r"[1-9]\d?(?:,\d{2})+,\d{3}(?!\d|,\d)(?:\.\d*)?",  # 12,34,567.8
        r"[1-9]\d{0,2}(?:\.\d{3}){2,}(?!\d|\.\d)(?:,\d+)?",  # 1.234.567,8
        r"[1-9]\d{0,2}(?:\.\d{3})+,\d+(?![\d.,])",  # 1.234,8
        r"[1-9]\d{0,2}(?: \d{3})+(?!\d| \d)(?:[.,]\d+)?",  # 1 234 567,8
        r"[1-9]\d{0,2}(?:'\d{3})+(?!\d|'\d)(?:[.,]\d+)?",  # 1'234'567.8
        r"[1-9]\d{0,2}(?:_\d{3})+(?!\d|_\d)(?:[.,]\d+)?",  # 1_234_567.8
    )
)
_DECIMAL = rf"(?P<decimal>{_GROUPS}|\d+,(?:\d{{1,2}}|\d{{4,}})(?![\d,.])|0,\d+(?![\d,.])|\d+(?:\.\d*)?|\.\d+)"
_REPEATING = r"(?P<before>\d*)\.(?P<fixed>\d*)\\overline\s*\{(?P<repeat>\d+)\}"
_SLASH = r"(?P<top>\d+) ?/ ?(?P<bottom>\d+)"
_FRAC = r"(?:(?P<whole>\d+) ?)?\\frac\s*\{ ?(?P<sign2>-?) ?(?P<over>\d+) ?\}\s*\{ ?(?P<under>\d+) ?\}"
_MIXED = r"(?P<whole2>\d+) (?P<over2>\d+) ?/ ?(?P<under2>\d+)"
_POWER = r"(?: ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{? ?(?P<ten>[-+]?\d{1,3}) ?\}?|[eE](?P<exponent>[-+]?\d{1,3}))?"
_MONEY = r"US ?¤|Rs\.?|USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|[¤€£¥₹]"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?(?P<money>{_MONEY})? ?(?P<sign3>-?)"
    rf"(?:{_REPEATING}|{_MIXED}|{_SLASH}|{_FRAC}|{_DECIMAL}{_POWER})"
)
_CURRENCIES = {"US¤": "dollar", "US ¤": "dollar", "Rs": "rupee", "Rs.": "rupee"}
_GROUPED = re.compile(rf"(?<![\w.,'])(?:{_GROUPS})(?![\w'])")
_PERCENT = re.compile(r" ?(?:%|per ?cent)", re.IGNORECASE)
_NOUN = re.compile(r"[A-Za-z][A-Za-z. -]*(?: ?\^ ?\{?[23]\}?)?")
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "cot", "csc", "log", "ln", "exp", "max", "mod", "of"}
_CONNECTIVES = {"and", "or", "to"}
_MATH_WORDS = _FUNCTIONS | _CONNECTIVES | {"pi", "infinity", "theta", "alpha", "beta"}
MAX_UNIT_WORDS = 8
_LETTERS = frozenset("mglsh")
"""Letters that are units without ``\\text``; any other single letter is a variable."""
_SHORT_UNITS = frozenset(
    ("mm", "cm", "km", "mg", "kg", "ml", "ft", "yd", "oz", "lb", "hr", "yr", "in", "mi", "gb", "mb", "kb", "tb")
)
"""Two lowercase letters that are a unit directly after a number; other pairs are a product of variables."""


def quantity(text: str, *, letters_are_units: bool = False) -> Quantity | None:
    """Parse normalized text as one number, or return None.

    :param letters_are_units: Whether ``N`` in ``5 N`` is a unit (the other answer has one) and not a variable.
    """
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
    found = _with_suffix(value, match["money"] or "", text[match.end() :], letters_are_units)
    is_comma_a_list = found is not None and found.is_bare and _is_decimal_comma(match["decimal"] or "")
    return None if is_comma_a_list else found


def ungrouped(text: str) -> str:
    """Return a text without thousands separators in its numbers.

    A comma or a space inside a longer text is kept, because it may separate the numbers of a list.
    """
    if _GROUPED.fullmatch(text, text.startswith(("-", "+"))):
        return _plain(text)
    if not any(separator in text for separator in ".'_"):
        return text
    return _GROUPED.sub(lambda m: m[0] if set(m[0]) <= set("0123456789, ") else _plain(m[0]), text)


def _is_decimal_comma(decimal: str) -> bool:
    return "," in decimal and re.fullmatch(_GROUPS, decimal) is None


def _plain(number: str) -> str:
    """Return digits and at most one point. Of two kinds of separators, the last one is the decimal separator."""
    digits = re.sub("[ '_]", "", number)
    comma, point = digits.rfind(","), digits.rfind(".")
    is_alone = digits == number
    if min(comma, point) >= 0:
        return digits.replace(",", "") if point > comma else digits.replace(".", "").replace(",", ".")
    if comma >= 0:
        is_thousands = is_alone and re.fullmatch(_GROUPS, digits) is not None
        return digits.replace(",", "" if is_thousands else ".")
    return digits.replace(".", "") if digits.count(".") > 1 else digits


_PART = re.compile(rf"(?P<size>{_DECIMAL}) ?(?:(?P<name>[A-Za-z]+)\.?|(?P<mark>\^\\circ|''|\"|'))(?:,? and |,? ?|$)")
_MARKS = {r"^\circ": "degree", "'": "foot", "''": "inch", '"': "inch"}
_ARC_MARKS = {"'": "arcminute", "''": "arcsecond", '"': "arcsecond"}
_CLOCK_UNITS = {"h", "hr", "hrs", "hour", "hours", "min", "mins", "s", "sec", "secs", "d", "day", "days"}


def _compound(text: str) -> Quantity | None:
    """Parse numbers with decreasing units of one kind (`1 hour 30 minutes`), converted to the smallest unit."""
    parts: list[tuple[Fraction, str]] = []
    text, position = untext(text), 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        parts.append((Fraction(_plain(part["size"]).rstrip(".")), part["name"] or part["mark"]))
        position = part.end()
    names = [name for _, name in parts]
    is_mark = names[-1] in _MARKS
    if len(parts) == 1 and (not is_mark or names == [r"^\circ"]):
        return None
    return _total([(size, parse_unit(_in_context(name, names))) for size, name in parts])


def _in_context(name: str, names: list[str]) -> str:
    """Resolve a short name by its context: `'` after degrees is an arcminute, `m` among times is a minute."""
    if name in _MARKS:
        return (_ARC_MARKS if r"^\circ" in names or "degrees" in names else {}).get(name, _MARKS[name])
    return "minute" if name == "m" and _CLOCK_UNITS.intersection(names) else name


def _total(parts: list[tuple[Fraction, Unit | None]]) -> Quantity | None:
    total, last = Fraction(0), None
    for size, unit in parts:
        if unit is None:
            return None
        if last is not None:
            ratio = convert(Fraction(1), last, unit)
            if ratio is None or ratio <= 1:
                return None
            total *= ratio
        total, last = total + size, unit
    return Quantity(total, unit=last)


def _with_suffix(value: Fraction, money: str, rest: str, letters_are_units: bool) -> Quantity | None:
    """Return the quantity for a number and the text after it, or None if the text is algebra."""
    is_text = r"\text" in rest or r"\circ" in rest
    phrase = untext(rest).strip()
    if money:
        return _with_money(value, _CURRENCIES.get(money, money), phrase)
    if not phrase:
        return Quantity(value)
    if _PERCENT.fullmatch(phrase):
        return Quantity(value, percent=True)
    first, _, others = phrase.partition(" ")
    if scale := SCALES.get(first.lower()):
        value, phrase, is_text = value * scale, others, True
    known, name = _leading_unit(phrase)
    if known is not None:
        is_unit = is_text or letters_are_units or _is_unit_without_text(name, has_space=rest.startswith(" "))
        if is_unit:
            return Quantity(value, unit=known)
        if name == phrase:
            return None
    if phrase and not _NOUN.fullmatch(phrase):
        return None
    is_product = not rest.startswith(" ") or len(first) == 1  # `5ab`, `5 x`
    if not is_text and (is_product or _MATH_WORDS.intersection(phrase.lower().split())):
        return None
    return Quantity(value)


def _leading_unit(phrase: str) -> tuple[Unit | None, str]:
    """Return the unit at the start of a phrase and its words (`feet` in `feet tall`); only nouns may follow."""
    words = phrase.split(" ")
    for count in range(min(len(words), MAX_UNIT_WORDS), 0, -1):
        name, noun = " ".join(words[:count]), " ".join(words[count:])
        is_noun = _NOUN.fullmatch(noun) and len(words[count]) > 1 and _CONNECTIVES.isdisjoint(words[count:])
        if (is_noun or not noun) and (unit := parse_unit(name)):
            return unit, name
    return None, ""


def _is_unit_without_text(phrase: str, *, has_space: bool) -> bool:
    r"""Return whether letters without ``\text`` are a unit and not a product of variables."""
    if len(phrase) == 1:
        return phrase.lower() in _LETTERS or not phrase.isalpha() or not phrase.isascii()
    if len(phrase) == 2 and phrase.isalpha() and phrase.islower():
        return has_space or phrase in _SHORT_UNITS
    return True


def _with_money(value: Fraction, currency: str, phrase: str) -> Quantity | None:
    unit = parse_unit(currency)
    if scale := SCALES.get(phrase.lower()) or _MONEY_SCALES.get(phrase.lower()):
        return Quantity(value * scale, unit=unit)
    if not phrase or parse_unit(phrase) == unit:
        return Quantity(value, unit=unit)
    rate = parse_unit(f"{currency} {phrase}") if re.match(r"/|per |an? ", phrase) else None
    return Quantity(value, unit=rate) if rate else None


_TEXT = re.compile(r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


def untext(text: str) -> str:
    r"""Return the text without ``\text{}``, with spaces around its words."""
    if r"\text" not in text:
        return text
    return " ".join(_TEXT.sub(r" \1 ", text).split())


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
    number = _plain(part["decimal"]).rstrip(".")
    return Fraction(number) * Fraction(10) ** int(part["ten"] or part["exponent"] or 0)


def equal_quantities(a: Quantity, b: Quantity) -> bool:
    """Return whether two quantities are the same answer.

    They must agree to six decimal places (math-verify's rounding). Below 0.01, the tolerance shrinks in proportion to
    the value. 50% equals 0.5 and also 50, because references often omit the sign. Units are converted if both are
    known; a missing or unknown unit is ignored.
    """
    if a.percent != b.percent:
        if a.unit or b.unit:
            return False
        return _close(a.value, b.value) or (
            _close(a.value / 100, b.value) if a.percent else _close(a.value, b.value / 100)
        )
    if a.unit and b.unit:
        there, back = convert(a.value, a.unit, b.unit), convert(b.value, b.unit, a.unit)
        return there is not None and back is not None and (_close(there, b.value) or _close(a.value, back))
    return _close(a.value, b.value)


def _close(x: Fraction, y: Fraction) -> bool:
    return abs(x - y) <= Fraction(1, 2_000_000) * min(Fraction(1), 100 * max(abs(x), abs(y)))
