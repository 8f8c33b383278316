"""Detect endless repetition of words, letters or lines, which a degenerate model writes.

Ordinary text repeats, too (refrains, laughter, tables, logs, rows of zeros), so the limit depends on the repeated unit
(`_too_often`). A degenerate model does not recover: its loop is long, and it is the end of the reply or at least half
of
it (`_is_the_matter`). Only exact repetition without gaps counts; a loop with increasing numbers looks like a list and
is
accepted. Invariant: linear in the length of the text.

`cycles` finds repetitions. It tries every unit length up to a limit, so it misses nothing and never backtracks: the
sequence is compared with itself, shifted by that length, as one big integer. Invariant: at most one comparison per
length, for any content. This bounds the number of comparisons, not the time: a comparison takes time proportional to
the sequence, searching its result takes longer if many stretches almost begin, and every stretch that is found is
checked for a shorter unit.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

_DENSE_LETTERS = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0002fa1f"
"""Chinese, Japanese, Korean: one letter has as much content as about three letters of other scripts."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\uff66-\uff9f" + _DENSE_LETTERS
"""Also Thai, Lao, Burmese and Khmer: one letter is one token, because words are not always separated."""
_SPACED = re.compile(rf"[^\W\d_{_UNSPACED}]+")
_TOKEN = re.compile(rf"{_SPACED.pattern}|\d+|\n\s*|[^\w\s]|[\w]")
_LETTER = re.compile(r"[^\W\d_]")
_DENSE = re.compile(f"[{_DENSE_LETTERS}]")
_PROSE = frozenset(" \n.,;:!?'’“”-–—…、。，！？；：「」،؟।")
_LITERALS = frozenset(
    ("null", "none", "nil", "nan", "true", "false", "undefined", "None", "Null", "NULL", "NaN", "True", "False", "TRUE")
)
"""Values: a sequence of them is data."""
_SHOUT = frozenset("!?¡¿！？()[]{}<>'\"$^")

_LONGEST_UNIT, _LONGEST_LINES = 128, 32
_LEAST = 5
_LONG_WORD, _LETTERS_IN_UNIT, _LETTERS_OFTEN = 40, 8, 60
_SHOUTING, _RULE, _BARE = 200, 2000, 4000
"""Maximum number of characters without a letter: exclamation marks and brackets; one other sign, as in drawn lines;
several signs (a table of zeros, a map, a picture of signs)."""
_QUOTES = frozenset("\"'`")
_BASES = (frozenset("ACGTUN"), frozenset("acgtun"))


def find_repetition(text: str) -> str | None:
    """Return a description of the repetition, or None."""
    tokens = _TOKEN.findall(text)
    if len(text) >= _LONG_WORD and (found := _blanks(text) or _long_tokens(tokens)):
        return found
    return _first_too_often(tokens, _LONGEST_UNIT, " ") or _lines(text)


def _blanks(text: str) -> str | None:
    blank = next((blank for blank in " \t\n" if len(text) >= _RULE and blank * _RULE in text), None)
    return f"{blank!r} at least {_RULE} times in a row" if blank else None


def _lines(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines()]
    return _first_too_often([f"{line}\n" for line in lines if line], _LONGEST_LINES, "")


def _first_too_often(tokens: Sequence[str], longest: int, between: str) -> str | None:
    ends = [0, *accumulate(map(len, tokens))]
    for cycle in cycles(tokens, longest=longest, least=_LEAST):
        unit = tokens[cycle.start : cycle.start + cycle.period]
        if _is_the_matter(cycle, ends) and cycle.repeats >= _too_often(unit):
            return _named(between.join(unit), cycle)
    return None


def _is_the_matter(cycle: Cycle, ends: Sequence[int]) -> bool:
    """Return whether ``cycle`` is the end of the reply, or at least half of its characters.

    A truncated unit after it does not count. ``ends[i]`` is the number of characters in the first ``i`` items.
    """
    stop = cycle.start + cycle.period * cycle.repeats
    return len(ends) - 1 - stop <= cycle.period or 2 * (ends[stop] - ends[cycle.start]) >= ends[-1]


def _named(unit: str, cycle: Cycle) -> str:
    shown = " ".join(unit.split())
    return f"{shown[:80] + '…' if len(shown) > 80 else shown!r} repeated {cycle.repeats} times"


def _too_often(unit: Sequence[str]) -> float:
    """Return the number of repetitions from which ``unit`` is not ordinary text.

    Longer units have lower limits. Limits are higher if one item per line is a list, and highest for data.
    """
    text = "".join(unit)
    letters, dense = sum(map(_is_letter, text)), len(_DENSE.findall(text))
    if not letters:
        may_cover = _SHOUTING if _SHOUT.issuperset(text) else _RULE if len(text) == 1 else _BARE
        return may_cover / len(text)
    weight = letters + 2 * dense
    words = _SPACED.findall(" ".join(unit))
    signs = sum(not (_is_letter(sign) or sign.isspace() or sign in _PROSE) for sign in text)
    if signs >= 0.2 * (letters + signs) or (words and _LITERALS.issuperset(words)):  # markup, code, data
        return max(_of_weight(weight, 80, 40, 30), 1000 / len(text))
    if "\n" in text:  # logs, labels, machine instructions
        return _of_weight(weight, 80, 20, 8)
    if letters == sum(map(len, words)) < 2.5 * len(words):  # laughter, moves, chords, bytes
        return 40
    if weight < 4:
        return 60
    return _of_weight(weight, 40, 15, 6)  # prayers are repeated ten or thirty-three times


def _of_weight(weight: int, short: int, sentence: int, paragraph: int) -> int:
    return short if weight < 30 else sentence if weight < 120 else paragraph


def _is_letter(character: str) -> bool:
    """Return whether a character is a letter, or a vowel sign, which belongs to its letter."""
    return character.isalpha() or unicodedata.category(character).startswith("M")


def _long_tokens(tokens: Sequence[str]) -> str | None:
    """Describe endless repetition inside one word, or of one digit, or return None."""
    if max(map(len, tokens), default=0) <= _LONG_WORD:
        return None
    for token, before, after in zip(tokens, ["", *tokens], [*tokens[1:], ""], strict=False):
        if len(token) >= _RULE and token.isdigit() and len(set(token)) == 1:
            return f"{token[0]!r} {len(token)} times in a row"
        if len(token) <= _LONG_WORD or not _SPACED.match(token) or _is_data(token, before[-1:], after[:1]):
            continue
        for cycle in cycles(token, longest=_LETTERS_IN_UNIT, least=_LETTERS_OFTEN):
            return _named(token[cycle.start : cycle.start + cycle.period], cycle)
    return None


def _is_data(word: str, before: str, after: str) -> bool:
    """Return whether ``word`` is part of a key, a dump or base64, a quoted string, or a sequence of DNA bases.

    Lowercase bases must be at least two: only ``a`` is an endless a.
    """
    if any(beside.isdigit() or beside in "+/=_" for beside in (before, after) if beside):
        return True
    if before and after and before in _QUOTES and after in _QUOTES:
        return True
    letters = frozenset(word)
    return letters <= _BASES[0] or (letters <= _BASES[1] and len(letters) > 1)


# ---- where a sequence repeats itself ---------------------------------------------------------------------------------

_DIFFERENT = re.compile(rb"[^\0]")


@dataclass(frozen=True)
class Cycle:
    """``sequence[start : start + period * repeats]`` is one unit of ``period`` items, ``repeats`` times."""

    start: int
    period: int
    repeats: int


def cycles(sequence: Sequence[Hashable], *, longest: int, least: int) -> Iterator[Cycle]:
    """Yield every maximal stretch that repeats a unit of at most ``longest`` items at least ``least`` times.

    A unit is never itself a repetition: ``abab…`` repeats ``ab``, not ``abab``.
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
    """Return zero bytes where the byte ``shift`` positions later is equal."""
    return (whole ^ (whole >> (8 * shift))).to_bytes(size, "little")


def _of_period(agreement: bytes, period: int, width: int, least: int) -> Iterator[Cycle]:
    wanted = bytes(width * period * (least - 1))
    end = len(agreement) - width * period  # after it, there is nothing to compare with
    at = agreement.find(wanted, 0, end)
    while at != -1:
        different = _DIFFERENT.search(agreement, at, end)
        stop = different.start() if different else end
        start = -(-at // width)  # numbers contain zero bytes, so a stretch may start inside one
        repeats = (stop // width - start) // period + 1
        if repeats >= least:
            yield Cycle(start, period, repeats)
        at = agreement.find(wanted, stop, end)
