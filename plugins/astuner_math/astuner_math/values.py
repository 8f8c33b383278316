r"""Classify a normalized answer into typed values, and compare values of the same kind.

A text has one or more readings: ``14:30`` is a time of day, or a ratio if the other answer is a ratio; ``18`` is a
number, or algebra if the other answer is ``x=18``. Two answers are compared by the first kind of `KINDS` that both
have. Answers without a common kind differ: a date never equals a number.

Algebra is the last kind and the only one that needs the limited process (`astuner_math.limited`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from astuner_math.notation import one_notation
from astuner_math.quantities import Quantity, quantity, ungrouped, untext
from astuner_math.times import Moment, TimeOfDay, date, time_of_day
from astuner_math.units import Unit, convert, is_temperature, parse_unit

MAX_TYPED = 200
"""Maximum characters of a date, time, range or list; a longer text is a number or algebra."""
MAX_PARTS = 20
"""Maximum number of parts of a list."""


@dataclass(frozen=True)
class AlgebraQuestion:
    """Pair of texts that require a symbolic comparison."""

    reference: str
    candidate: str


Verdict = bool | AlgebraQuestion | None
"""Whether two values are equal; None defers to the next kind that both answers have."""


@dataclass(frozen=True)
class Range:
    """Range of dates, times or quantities."""

    low: Reading
    high: Reading

    def equals(self, other: Range) -> Verdict:
        return _decided(self.low, other.low) and _decided(self.high, other.high)


@dataclass(frozen=True)
class Ratio:
    """Ratio as shares of the total."""

    shares: tuple[Fraction, ...]

    def equals(self, other: Ratio) -> bool:
        return self.shares == other.shares


@dataclass(frozen=True)
class Listing:
    """Unordered list of dates, times, ranges or quantities."""

    parts: tuple[Reading, ...]

    def equals(self, other: Listing) -> Verdict:
        if all(_is_number(part) for part in (*self.parts, *other.parts)):
            return None  # math-verify reads sets of numbers
        left = list(other.parts)
        for part in self.parts:
            match = next((one for one in left if _decided(part, one)), None)
            if match is None:
                return False
            left.remove(match)
        return not left


@dataclass(frozen=True)
class Word:
    """Answer in words; case is ignored."""

    text: str

    def equals(self, other: Word) -> Verdict:
        return self.text.lower() == other.text.lower() if is_word(self.text) or is_word(other.text) else None


@dataclass(frozen=True)
class Verbatim:
    """Numbers with several points, such as a version or an address."""

    text: str

    def equals(self, other: Verbatim) -> bool:
        return self == other


@dataclass(frozen=True)
class Algebra:
    """Expression for symbolic comparison, with an optional unit."""

    body: str
    unit: Unit | None = None

    def equals(self, other: Algebra) -> bool | AlgebraQuestion:
        """Return a question about the two bodies, with the other one converted to this unit if both have one."""
        if self.unit == other.unit:
            return AlgebraQuestion(self.body, other.body)
        if any(_is_degrees(a) and _is_radians(b) for a, b in ((self, other), (other, self))):
            return AlgebraQuestion(self.in_radians(), other.in_radians())
        if self.unit is None or other.unit is None:
            return AlgebraQuestion(self.body, other.body)
        factor = convert(Fraction(1), other.unit, self.unit)
        if factor is None or is_temperature(self.unit) or is_temperature(other.unit):
            return False
        return AlgebraQuestion(self.body, rf"\frac{{{factor.numerator}}}{{{factor.denominator}}} \cdot ({other.body})")

    def in_radians(self) -> str:
        """Return the body as an angle in radians."""
        return rf"\frac{{\pi}}{{180}} \cdot ({self.body})" if _is_degrees(self) else self.body


def _is_degrees(angle: Algebra) -> bool:
    return angle.unit is not None and angle.unit.factors == (("degree", 1),)


def _is_radians(angle: Algebra) -> bool:
    """Return whether an angle is in radians: by its unit, or by a multiple of pi without a unit."""
    return angle.unit.factors == (("radian", 1),) if angle.unit else r"\pi" in angle.body


Value = Moment | TimeOfDay | Range | Ratio | Listing | Quantity | Word | Verbatim | Algebra
Reading = Mapping[type, Value]
KINDS = (Moment, TimeOfDay, Range, Ratio, Listing, Quantity, Word, Verbatim, Algebra)


def compare(reference: str, candidate: str) -> bool | AlgebraQuestion:
    """Return whether two normalized answers are equal, or the question that requires algebra."""
    if reference == candidate:
        return True
    mine, other = readings(reference), readings(candidate)
    if _has_unit(mine) and Quantity not in other:
        other = readings(candidate, letters_are_units=True)
    elif _has_unit(other) and Quantity not in mine:
        mine = readings(reference, letters_are_units=True)
    verdict = _compare(mine, other)
    return False if verdict is None else verdict


def _compare(mine: Reading, other: Reading) -> Verdict:
    for kind in KINDS:
        if kind in mine and kind in other:
            verdict: Verdict = mine[kind].equals(other[kind])  # type: ignore[arg-type]  # both have this kind
            if verdict is not None:
                return verdict
    return None


def _decided(mine: Reading, other: Reading) -> bool:
    """Return whether two parts of larger values are equal, without algebra."""
    return _compare(mine, other) is True


def readings(text: str, *, letters_are_units: bool = False) -> Reading:
    """Return the possible values of a normalized answer, by kind.

    :param letters_are_units: Whether single letters after a number are units.
    """
    number = quantity(text, letters_are_units=letters_are_units)
    if number is not None and _PLAIN_NUMBER.fullmatch(text):
        return {Quantity: number, Algebra: Algebra(ungrouped(text))}
    if len(text) <= MAX_TYPED:
        if typed := _typed(text, number):
            return typed
        if number is None and (named := _NAMED.match(text)):
            rest = readings(text[named.end() :], letters_are_units=letters_are_units)
            if Algebra not in rest or _has_unit(rest):
                return rest
    if number is not None:
        value, unit = number.value, number.unit
        body = Algebra(rf"\frac{{{value.numerator}}}{{{value.denominator}}}", unit) if unit else _algebra(text)
        return {Quantity: number, Algebra: body}
    found: dict[type, Value] = {Algebra: _algebra(text)}
    if text.replace(" ", "").isalpha():
        found[Word] = Word(text)
    return found


def _has_unit(reading: Reading) -> bool:
    number = reading.get(Quantity)
    return isinstance(number, Quantity) and number.unit is not None


def _is_number(reading: Reading) -> bool:
    number = reading.get(Quantity)
    return isinstance(number, Quantity) and number.is_bare


def _typed(text: str, number: Quantity | None) -> Reading | None:
    """Return the readings of a text that is not just a number, or None."""
    plain = untext(text)
    if moment := date(plain):
        return {Moment: moment}
    found: dict[type, Value] = {}
    time = time_of_day(plain)
    if time is not None:
        found[TimeOfDay] = time
        if _ZERO_FIRST.search(plain):  # 7:05 is not a ratio
            return found
    if shares := ratio(plain):
        found.update(_ratio_readings(plain, shares, is_time=time is not None))
    if bounds := number_range(plain):
        found[Range] = bounds
    if found or number is not None:
        return found or None
    if _SEVERAL_POINTS.fullmatch(plain):
        return {Verbatim: Verbatim(plain)}
    if listing := _listing(plain):
        plain_numbers = all(_is_number(part) for part in listing.parts)
        return {Listing: listing, **({Algebra: _algebra(text)} if plain_numbers else {})}
    if interval := _CLOSED.fullmatch(text):
        low, high = _simple(interval["low"]), _simple(interval["high"])
        if low and high:
            return {Range: Range(low, high), Algebra: _algebra(text)}
    return None


_NAMED = re.compile(
    r"(?:[A-Za-z](?:_\{?\w{1,9}\}?)? ?= ?|= ?|\\(?:approx|sim|text ?\{ ?[Aa]nswer:? ?\}) ?|≈ ?|[Aa]bout )"
)
_PLAIN_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d*)?")
_ZERO_FIRST = re.compile(r"(?<!\d)0\d")
_SEVERAL_POINTS = re.compile(r"v?\d+(?:\.\d+){2,}")
_CLOSED = re.compile(r"\[ ?(?P<low>[^,;\[\]()]{1,40}) ?[,;] ?(?P<high>[^,;\[\]()]{1,40}) ?\]")


def _simple(text: str) -> Reading | None:
    """Return the readings of a date, a time of day or a quantity, or None."""
    text = text.strip()
    if moment := date(text):
        return {Moment: moment}
    if time := time_of_day(text):
        return {TimeOfDay: time}
    number = quantity(text)
    return {Quantity: number} if number else None


_RATIO = re.compile(r"\d+(?:\.\d+)?(?:(?: ?: ?| to )\d+(?:\.\d+)?)+")


def ratio(text: str) -> tuple[Fraction, ...] | None:
    """Return the parts of `2:3:5` or `1 to 2` as shares of the total; None for other text and for only zeros."""
    if not _RATIO.fullmatch(text):
        return None
    parts = [Fraction(part) for part in re.findall(r"\d+(?:\.\d+)?", text)]
    return tuple(part / sum(parts) for part in parts) if any(parts) else None


def _ratio_readings(text: str, shares: tuple[Fraction, ...], *, is_time: bool) -> dict[type, Value]:
    """Return the readings of a ratio: `3:4` is also 3/4. A possible time is a fraction only in lowest terms."""
    found: dict[type, Value] = {Ratio: Ratio(shares)}
    if len(shares) == 2 and shares[1]:
        numbers = [Fraction(part) for part in re.findall(r"\d+(?:\.\d+)?", text)]
        is_lowest = math.gcd(*(int(part) for part in numbers)) == 1
        if not is_time or is_lowest:
            found[Quantity] = Quantity(shares[0] / shares[1])
        if not is_time:
            found[Algebra] = Algebra(text)
    return found


_SEPARATORS = re.compile(r" (?:to|through|thru|until|till) | ?-{1,3} ?|\.{2,3}| ?\\[lc]?dots ?| and ")
_FROM = re.compile(r"(?P<from>from |between )", re.IGNORECASE)
_DASHABLE = re.compile(r"[¤€£¥]?\d[\d.,:]*(?:(?: ?[A-Za-z%¤€£'\"]| ?\^\\circ).*)?", re.DOTALL)
"""Operands of a dash: numbers without sign, fraction or power."""


def number_range(text: str) -> Range | None:
    """Parse `3-5`, `from 3 to 5` or `9 am to 5 pm`; return None for other text.

    A dash is a range if the second number is larger, otherwise a minus sign.
    """
    lead = _FROM.match(text)
    body = text[lead.end() :] if lead else text
    is_between = lead is not None and lead["from"].lower().startswith("b")
    for separator in list(_SEPARATORS.finditer(body))[:8]:
        sign = separator[0].strip()
        if (sign == "and") != is_between:
            continue
        low, high = body[: separator.start()], body[separator.end() :]
        if (bounds := _bounds(low, high)) and (sign.isalpha() or _is_dashed(low, high, bounds)):
            return bounds
    return None


def _bounds(low: str, high: str) -> Range | None:
    """Return both ends; a missing unit, currency or percent sign is copied from the other end."""
    first, second = _simple(low), _simple(high)
    if first is None or second is None or first.keys() != second.keys():
        return None
    a, b = first.get(Quantity), second.get(Quantity)
    if isinstance(a, Quantity) and isinstance(b, Quantity):
        if a.is_bare:
            first = {Quantity: Quantity(a.value, b.percent, b.unit)}
        elif b.is_bare:
            second = {Quantity: Quantity(b.value, a.percent, a.unit)}
    return Range(first, second)


def _is_dashed(low: str, high: str, bounds: Range) -> bool:
    """Return whether a dash between two texts is a range and not a difference."""
    a, b = bounds.low.get(Quantity), bounds.high.get(Quantity)
    if not (isinstance(a, Quantity) and isinstance(b, Quantity)):
        return True
    if not (_DASHABLE.fullmatch(low) and _DASHABLE.fullmatch(high)):
        return False
    start = a.value if a.unit == b.unit or not (a.unit and b.unit) else convert(a.value, a.unit, b.unit)
    return start is not None and start < b.value


_COMMAS = re.compile(r"(?<!\d),|,(?!\d)|;| and | or ")


def _listing(text: str) -> Listing | None:
    """Parse dates, times, ranges or quantities separated by commas, `and` or `or`."""
    if any(bracket in text for bracket in "()[]"):
        return None
    parts = [part for part in (part.strip() for part in _COMMAS.split(text)) if part]
    if not 2 <= len(parts) <= MAX_PARTS:
        return None
    found: list[Reading] = []
    for part in parts:
        bounds = number_range(part)
        one: Reading | None = {Range: bounds} if bounds else _simple(part)
        if one is None:
            return None
        found.append(one)
    return Listing(tuple(found))


def is_word(text: str) -> bool:
    """Return whether an answer is words, not a product of variables: `no`, `Tuesday`, `option B`."""
    return re.fullmatch(r"no|[A-Za-z]{3,}|[A-Za-z]+(?: [A-Za-z]+)+", text, re.IGNORECASE) is not None


_UNIT_STARTS = re.compile(r" ?\\text\s*\{| ?\^\\circ| (?=[A-Za-zµΩ]{2})")
_UNIT_TAIL = 60
"""Number of characters at the end of a text to search for a unit."""


def _algebra(text: str) -> Algebra:
    """Return the text in the form for the limited process, with its unit separated."""
    body, unit = _split_unit(text)
    return Algebra(one_notation(ungrouped(body)), unit)


def _split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Split `5\sqrt{2} \text{ cm}` into its number and its unit."""
    if "," in text or ";" in text:
        return text, None
    for start in _unit_starts(text):
        body, phrase = text[:start].strip(), untext(text[start:]).strip()
        if body and not body.endswith(("=", "<", ">", "^", "_", "{", "(")) and (unit := parse_unit(phrase)):
            return body, unit
    return text, None


def _unit_starts(text: str) -> Iterator[int]:
    for match in _UNIT_STARTS.finditer(text, max(0, len(text) - _UNIT_TAIL)):
        yield match.start()
