"""Finds where a sequence repeats itself: the same unit over and over, without a gap.

Every length of unit up to a limit is tried, so nothing is missed and nothing backtracks: the sequence is compared with
itself, shifted by that length, all at once as one big integer.  Invariant: the sequence is compared with itself at most
once for each length, whatever it holds.  That bounds the comparisons and not the seconds: a comparison takes time in
proportion to the sequence, looking for stretches in its outcome takes more where many almost begin, and every stretch
that is found is looked at for a shorter unit in it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

_DIFFERENT = re.compile(rb"[^\0]")


@dataclass(frozen=True)
class Cycle:
    """``sequence[start : start + period * repeats]`` is one unit of ``period`` items, ``repeats`` times."""

    start: int
    period: int
    repeats: int


def cycles(sequence: Sequence[Hashable], *, longest: int, least: int) -> Iterator[Cycle]:
    """Every maximal stretch that repeats a unit of at most ``longest`` items at least ``least`` times.

    A unit is never itself a repetition: ``abab…`` repeats ``ab``, and not ``abab`` half as often.
    """
    numbers = dict(zip(dict.fromkeys(sequence), range(1, len(sequence) + 1), strict=False))
    packed = array(_typecode(len(numbers)), map(numbers.__getitem__, sequence))
    whole, size, width = int.from_bytes(packed.tobytes(), "little"), len(packed) * packed.itemsize, packed.itemsize
    for period in range(1, min(longest, len(sequence) // least) + 1):
        for cycle in _of_period(_agreement(whole, size, period * width), period, width, least):
            if not _repeats(sequence[cycle.start : cycle.start + period]):
                yield cycle


def _repeats(unit: Sequence[Hashable]) -> bool:
    size = len(unit)
    return any(size % part == 0 and unit[part:] == unit[:-part] for part in range(1, size // 2 + 1))


def _typecode(highest: int) -> str:
    return next(code for code in "BHIL" if highest < 256 ** array(code).itemsize)


def _agreement(whole: int, size: int, shift: int) -> bytes:
    """Zero bytes where the one ``shift`` bytes later is the same."""
    return (whole ^ (whole >> (8 * shift))).to_bytes(size, "little")


def _of_period(agreement: bytes, period: int, width: int, least: int) -> Iterator[Cycle]:
    wanted = bytes(width * period * (least - 1))
    end = len(agreement) - width * period  # behind it, there is nothing to compare with
    at = agreement.find(wanted, 0, end)
    while at != -1:
        different = _DIFFERENT.search(agreement, at, end)
        stop = different.start() if different else end
        start = -(-at // width)  # numbers have zero bytes of their own, so a stretch may begin inside one
        repeats = (stop // width - start) // period + 1
        if repeats >= least:
            yield Cycle(start, period, repeats)
        at = agreement.find(wanted, stop, end)
