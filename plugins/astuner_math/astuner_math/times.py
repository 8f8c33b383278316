"""Parse and compare dates and times of day."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """Date with an optional time of day. A missing part equals only a missing part."""

    year: int | None
    month: int
    day: int | None
    time: TimeOfDay | None = None

    def equals(self, other: Moment) -> bool:
        if (self.year, self.month, self.day) != (other.year, other.month, other.day):
            return False
        return self.time.equals(other.time) if self.time and other.time else self.time is other.time


@dataclass(frozen=True)
class TimeOfDay:
    """Time of day with an optional zone."""

    seconds: int
    is_half_known: bool
    """Whether the half of the day is certain: from AM or PM, or from an hour of the 24-hour clock."""
    has_half: bool
    """Whether AM or PM is present."""
    zone: str = ""

    def equals(self, other: TimeOfDay) -> bool:
        """Compare two times; ignore a missing zone, and a missing AM or PM if the other time has one."""
        if self.zone and other.zone and self.zone != other.zone:
            return False
        is_half_ignored = (self.has_half or other.has_half) and not (self.is_half_known and other.is_half_known)
        return (self.seconds - other.seconds) % ((12 if is_half_ignored else 24) * 3600) == 0


_CLOCK = re.compile(
    r"(?P<hour>[01]?\d|2[0-4])(?:(?P<separator>[:.h]) ?(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?)?"
    r"(?: ?(?P<half>[ap])\.? ?m\.?| ?(?P<suffix>o'? ?clock|hours|hrs|h|uhr))?"
)
_ZONE = re.compile(r" \(?(?P<zone>utc|gmt|z|[ecmp][sd]?t|bst|cest|cet|ist|jst)\)?")
_NAMED_TIMES = (("noon", "12 pm"), ("midnight", "12 am"))


def time_of_day(text: str) -> TimeOfDay | None:
    """Parse `2:30 pm`, `14:30` or `noon`; return None for other text and for a single number."""
    low, zone = text.lower(), ""
    for word, clock in _NAMED_TIMES:
        if low in (word, f"12 {word}", f"12:00 {word}"):
            low = clock
    match = _CLOCK.match(low)
    if match is None:
        return None
    if rest := low[match.end() :]:
        named = _ZONE.fullmatch(rest)
        if named is None:
            return None
        zone = named["zone"]
    return _time(match, zone) if _is_clock(match) else None


def _is_clock(match: re.Match[str]) -> bool:
    """Return whether a text of this form is a time: 14 and 14.30 are numbers, and 2:10:15 is a ratio."""
    half, suffix = match["half"], match["suffix"] or ""
    if match["second"] and not half:
        return re.search(r"(?<!\d)0\d", match[0]) is not None
    by_separator = {":": True, "h": not suffix, ".": suffix == "uhr"}
    return bool(half) or suffix.startswith("o") or by_separator.get(match["separator"], suffix == "uhr")


def _time(match: re.Match[str], zone: str) -> TimeOfDay:
    half, hour = match["half"], int(match["hour"])
    is_half_known = bool(half) or hour == 0 or hour > 12
    if half and hour <= 12:
        hour = hour % 12 + 12 * (half == "p")
    seconds = hour * 3600 + int(match["minute"] or 0) * 60 + int(match["second"] or 0)
    return TimeOfDay(seconds, is_half_known, bool(half), zone)


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?P<day>0?[1-9]|[12]\d|3[01]) ?(?:\^ ?\{?)? ?(?:st|nd|rd|th)?\}?"
_YEAR = r"(?P<year>\d{4})"
_DATES = tuple(
    re.compile(rf"(?:on )?(?:the )?(?:(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\.?,? )?{form}")
    for form in (
        rf"(?:the )?{_DAY}(?: of)?[ -]?{_MONTH}(?:,?[ -]{_YEAR})?",
        rf"{_MONTH} ?(?:the )?{_DAY}(?:,? ?{_YEAR})?",
        rf"{_MONTH},?(?: of)?[ -]{_YEAR}",
        rf"{_YEAR},?[ -]{_MONTH}[ -]{_DAY}",
    )
)
_ISO = re.compile(r"(?P<year>\d{4})(?:-(?P<month>\d\d?)-(?P<day>\d\d?)|-(?P<month2>0[1-9]|1[0-2]))")
_YEAR_FIRST = re.compile(
    r"(?P<year>\d{4})(?P<sep>[/.]) ?(?P<month>0?[1-9]|1[0-2])(?P=sep) ?(?P<day>0?[1-9]|[12]\d|3[01])"
)
_YEAR_LAST = re.compile(r"(?P<a>\d{1,2})(?P<sep>[-/.]) ?(?P<b>\d{1,2})(?P=sep) ?(?P<year>\d{4})")
_WITH_TIME = re.compile(r",? at |, ?| |t")


def date(text: str) -> Moment | None:
    """Parse a date, with or without a year, a day or a time of day; return None for other text.

    `05.03.2024` has the day first, `3/5/2024` and `3-5-2024` the month, unless one of them is above 12.
    """
    low = text.lower()
    if (found := _date(low)) is not None:
        return found
    for gap in _WITH_TIME.finditer(low):
        left, right = low[: gap.start()], low[gap.end() :]
        for day, clock in ((left, right), (right, left)):
            moment = _date(day)
            if moment and (time := time_of_day(clock.removesuffix("z"))):
                return Moment(moment.year, moment.month, moment.day, time)
    return None


def _date(low: str) -> Moment | None:
    if match := _ISO.fullmatch(low):
        day = int(match["day"]) if match["day"] else None
        return Moment(int(match["year"]), int(match["month"] or match["month2"]), day)
    if match := _YEAR_FIRST.fullmatch(low):
        return Moment(int(match["year"]), int(match["month"]), int(match["day"]))
    if match := _YEAR_LAST.fullmatch(low):
        return _in_order(int(match["a"]), int(match["b"]), int(match["year"]), is_day_first=match["sep"] == ".")
    for form in _DATES:
        if match := form.fullmatch(low):
            part = match.groupdict()
            year, day = (int(part[name]) if part.get(name) else None for name in ("year", "day"))
            return Moment(year, _MONTHS.index(part["month"][:3]) + 1, day)
    return None


def _in_order(a: int, b: int, year: int, *, is_day_first: bool) -> Moment | None:
    day, month = (a, b) if is_day_first else (b, a)
    if month > 12:
        day, month = month, day
    return Moment(year, month, day) if 1 <= month <= 12 and 1 <= day <= 31 else None
