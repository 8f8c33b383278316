"""Units a word problem may end in, so that 3 hours are 180 minutes and 5 km are not 5 cm.

A unit that is not listed says nothing, and an answer without one is compared by its number alone: references
such as GSM8K's carry no units at all.
"""

from __future__ import annotations

from fractions import Fraction

_SPELLINGS = """
length: mm millimeter millimetre = 1/1000 | cm centimeter centimetre = 1/100 | m meter metre = 1
    | km kilometer kilometre = 1000
imperial length: inch inches = 1 | ft foot feet = 12 | yd yard = 36 | mile = 63360
mass: mg milligram = 1/1000 | g gram = 1 | kg kilogram = 1000 | tonne = 1000000
imperial mass: oz ounce = 1 | lb lbs pound = 16
volume: ml milliliter millilitre = 1/1000 | l liter litre = 1
time: s sec second = 1 | min minute = 60 | h hr hour = 3600 | day = 86400 | week = 604800
long time: month = 1 | year yr = 12
money: cent = 1/100 | dollar usd = 1
euro: euro eur = 1
angle: degree deg = 1
"""

Unit = tuple[str, Fraction]


def _read() -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    for line in _SPELLINGS.replace("\n    |", " |").strip().splitlines():
        dimension, _, entries = line.partition(":")
        for entry in entries.split("|"):
            names, _, factor = entry.partition("=")
            table |= {name: (dimension, Fraction(factor.strip())) for name in names.split()}
    return table


_UNITS = _read()
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def unit(name: str) -> Unit | None:
    """The dimension of a unit and its size in that dimension's base unit; None when it is not listed."""
    name = name.strip().rstrip(".").lower()
    return _UNITS.get(name) or (_UNITS.get(name[:-1]) if name.endswith("s") else None)
