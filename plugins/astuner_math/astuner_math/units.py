"""Parse units of measurement and convert numbers between them.

`units.txt` lists the units. pint resolves names, prefixes and plurals and converts in exact fractions. This module
splits phrases into names and small powers, so pint never evaluates text from a model.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

MAX_PHRASE = 80
"""Maximum characters of a unit phrase."""
MAX_FACTORS = 6
"""Maximum number of units in one product."""

_LOCK = threading.Lock()  # a pint registry is not thread-safe
_LATEX = (
    (re.compile(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}"), r" \1 / \2 "),
    (re.compile(r"\\(?:cdot|times)(?![A-Za-z])"), "*"),
    (re.compile(r"\\mu(?![A-Za-z]) ?"), "µ"),
    (re.compile(r"\\Omega(?![A-Za-z])"), "Ω"),
    (re.compile(r"\^\\circ ?(?=[CF](?![A-Za-z]))|\bdeg(?:rees?)?\.? (?=[CF]\b)"), "deg"),
    (re.compile(r"\^\\circ"), " degree "),
)
_TOKEN = re.compile(
    r" ?(?:(?P<per>/|per (?=\w)|an? (?=[A-Za-z]))|(?P<times>[*·-])|(?P<paren>[()])"
    r"|\^ ?\{? ?(?P<power>[-+]?[1-9]) ?\}?(?!\d)|(?<=[A-Za-zµΩ])(?P<raised>[23]|-[1-9])(?!\d)"
    r"|(?P<name>[A-Za-zµμΩ_]+|[¢¤€£¥₹])\.?)"
)
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3}
_SYMBOLS = {"¤": "dollar", "€": "euro", "£": "pound_sterling", "¥": "yen", "₹": "rupee"}
_ALSO = {
    "pound": {"pound_sterling"},
    "degree": {"degree_Celsius", "degree_Fahrenheit"},
}
"""Ambiguous names: the second meaning applies if the other answer uses it."""


@dataclass(frozen=True)
class Unit:
    """Product of powers of units, with pint's names."""

    factors: tuple[tuple[str, int], ...]

    @property
    def expression(self) -> str:
        return " * ".join(f"{name} ** {power}" for name, power in self.factors)


@functools.lru_cache(maxsize=4096)
def parse_unit(phrase: str) -> Unit | None:
    r"""Return the unit that a phrase such as ``km/h``, ``square feet`` or ``m s^{-2}`` names, or None.

    :param phrase: Normalised text without ``\text``.
    """
    if len(phrase) > MAX_PHRASE:
        return None
    for pattern, replacement in _LATEX:
        phrase = pattern.sub(replacement, phrase)
    tokens = _tokens(" ".join(phrase.split()))
    return _product(tokens) if tokens else None


def convert(value: Fraction, source: Unit, target: Unit) -> Fraction | None:
    """Return the value in another unit, or None if the units measure different things."""
    if source == target or _is_also(source, target) or _is_also(target, source):
        return value
    from pint.errors import PintError

    registry = _registry()
    with _LOCK:
        try:
            return Fraction(registry.Quantity(value, source.expression).to(target.expression).magnitude)
        except (PintError, ZeroDivisionError):
            return None


def is_temperature(unit: Unit) -> bool:
    """Return whether the conversion adds an offset, so that no factor exists."""
    return any(name.startswith("degree_") for name, _ in unit.factors)


def _is_also(ambiguous: Unit, unit: Unit) -> bool:
    return any(unit.factors == ((name, 1),) for name in _ALSO.get(_only_name(ambiguous), ()))


def _only_name(unit: Unit) -> str:
    return unit.factors[0][0] if len(unit.factors) == 1 and unit.factors[0][1] == 1 else ""


def _tokens(phrase: str) -> list[tuple[str, str]]:
    """Return (kind, text) of each token, words of one unit joined (``fl oz``); empty if something is not a token."""
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(phrase):
        match = _TOKEN.match(phrase, position)
        if match is None or match.lastgroup is None:
            return []
        kind, text = match.lastgroup.replace("raised", "power"), match[match.lastgroup]
        if kind == "name" and tokens and tokens[-1][0] == "name" and resolve(f"{tokens[-1][1]}_{text}"):
            tokens[-1] = (kind, f"{tokens[-1][1]}_{text}")
        else:
            tokens.append((kind, text))
        position = match.end()
    return tokens


def _product(tokens: list[tuple[str, str]]) -> Unit | None:
    """Multiply the units of a phrase; units after the first ``/`` or ``per`` are in the denominator."""
    factors: Counter[str] = Counter()
    side, next_power, last = 1, 1, ""
    for kind, text in tokens:
        if kind == "per":
            side = -1
        elif kind == "power" or text in _POWERS_AFTER:
            if not last:
                return None
            factors[last] += side * ((_POWERS_AFTER.get(text) or int(text)) - 1)
            last = ""
        elif text in _POWERS:
            next_power = _POWERS[text]
        elif kind == "name":
            name = resolve(text)
            if name is None:
                return None
            factors[name] += side * next_power
            next_power, last = 1, name
    if next_power != 1 or not factors or len(factors) > MAX_FACTORS:
        return None
    return (
        Unit(tuple(sorted((name, power) for name, power in factors.items() if power)))
        if any(factors.values())
        else None
    )


@functools.lru_cache(maxsize=4096)
def resolve(name: str) -> str | None:
    """Return pint's name of one unit, prefix included, or None if `units.txt` does not list it."""
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    registry = _registry()
    for spelling in dict.fromkeys((name, name.lower())):
        with _LOCK:
            parsed = registry.parse_unit_name(spelling)
        for prefix, unit, _ in parsed:
            if prefix and unit in _unprefixed():
                continue
            if not prefix and len(spelling) == 2 and spelling.endswith("s"):  # `gs` is not grams
                continue
            return f"{prefix}{unit}"
    return None


@functools.cache
def _unprefixed() -> frozenset[str]:
    return frozenset(_registry().get_group("unprefixed", create_if_needed=False).members)


@functools.cache
def _load() -> Any:
    import pint

    registry: Any = pint.UnitRegistry(None, non_int_type=Fraction, autoconvert_offset_to_baseunit=True)
    registry.load_definitions(Path(__file__).with_name("units.txt"))
    return registry


def _registry() -> Any:
    """Return the registry, loaded on first use."""
    with _LOCK:
        return _load()
