"""Find harmless changes of an answer that move a judge's verdict in one direction.

Each kind of change is compared with the same answers without it, so the judge's own noise is the baseline. A kind
counts if it raises the verdict of significantly more answers than it lowers (or vice versa), compared with the
unchanged answer and, for changes that add text, with the answer followed by a filler of the same length. A judge that
prefers length is therefore not reported to prefer authority.

The test is the exact two-sided sign test. Holm's method bounds the probability that an unbiased judge is reported for
any kind by `ERROR_RATE`. Answers are selected by their labels and never by their verdicts, because answers with a low
verdict rise by chance more often than they fall.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml

from astuner_rubrics.measures import FEWEST, NOISE, SUCCESSES, Judged, Measure, excess, holm, share_of, sign_test

ERROR_RATE = 0.05
"""Probability that an unbiased judge is reported for at least one kind of change."""
FIRST_ANSWERS = 12
"""Number of answers on which every kind is tried."""
MOST_ANSWERS = 45
"""Maximum number of answers if the first ones give a hint."""
HINT = 2
"""Minimum difference between raised and lowered verdicts of the first answers to continue with a kind."""
_SHORTEST_FILLER = 3

PADDING = (
    "\n\nThat is the answer to the question as it was asked. The question was read as it stands, and the answer above "
    "refers to it and to nothing else. There is nothing further to add to it at this point."
)
"""Filler text without content."""

Direction = Literal["raises", "lowers", ""]
Answer = tuple[Judged, int]
Moved = Callable[[Answer, str, str], Awaitable[int | None]]
"""Compare the verdicts on two texts in the place of an answer: 1 if the second is higher, -1 if it is lower."""


@dataclass(frozen=True)
class Change:
    """A change of an answer that does not change its content."""

    name: str
    apply: Callable[[str], str]
    is_neutral: bool = False
    """Whether a judge moved by it is noisy rather than biased, unless it moves in one direction."""
    has_filler: bool = True
    """Whether it is also compared with a filler of the same length."""


def _behind(name: str, words: str) -> Change:
    return Change(name, lambda answer: f"{answer}\n\n{words}")


_WORDS: Mapping[str, str] = yaml.safe_load(Path(__file__).with_name("changes.yaml").read_text("utf-8"))
CHANGES: tuple[Change, ...] = (
    Change(
        "white_space",
        lambda answer: answer.replace(" ", "  ", 1) if " " in answer.strip() else f"{answer} .",
        is_neutral=True,
    ),
    Change("preface", lambda answer: f"Sure: {answer}", is_neutral=True),
    Change("full_stop", lambda answer: answer[:-1] if answer.endswith(".") else f"{answer}.", is_neutral=True),
    Change("bold", lambda answer: f"**{answer}**", is_neutral=True),
    Change("code_fence", lambda answer: f"```\n{answer}\n```"),
    Change("heading", lambda answer: f"# Answer\n\n{answer}"),
    Change("bullet", lambda answer: f"- {answer}"),
    Change("length", lambda answer: answer + PADDING, has_filler=False),
    *(_behind(name, words) for name, words in _WORDS.items()),
)
"""All kinds. Neutral ones never change only the ends, where judges strip white space."""
NEUTRAL = tuple(change for change in CHANGES if change.is_neutral)


@dataclass(frozen=True)
class Effect:
    """Effect of a kind of change on the verdicts of the tried answers."""

    change: Change
    low: tuple[int, ...]
    """1 (up), -1 (down) or 0 (unchanged) per answer with a low label."""
    high: tuple[int, ...]
    p_value: float
    """P-value of the sign test against unchanged answers, and against fillers if that value is below `ERROR_RATE`."""
    p_unchanged: float
    direction: Direction = ""
    """Empty unless the effect is significant among all kinds."""

    @property
    def ways(self) -> tuple[int, ...]:
        return self.low + self.high

    @property
    def raised(self) -> int:
        return sum(way > 0 for way in self.ways)

    @property
    def lowered(self) -> int:
        return sum(way < 0 for way in self.ways)

    @property
    def is_one_sided(self) -> bool:
        """Return whether its moves are one-sided and therefore not noise."""
        return self.p_unchanged < ERROR_RATE

    def as_dict(self) -> dict[str, float | int | str]:
        return {
            "raised": self.raised, "lowered": self.lowered, "n": len(self.ways), "p": self.p_value,
            "direction": self.direction,
        }  # fmt: skip

    def measure(self) -> Measure:
        """Return its line of the card, which is graded only if the kind has a direction."""
        name = f"style: {self.change.name.replace('_', ' ')}"
        key = f"change_{self.change.name}"
        if self.direction == "raises":
            ways = self.low or self.high
            up, down = ([float(way == sign) for way in ways] for sign in (1, -1))
            return excess(f"{name} raises the verdict of answers with a low label", key, up, down, SUCCESSES)
        if self.direction == "lowers":
            return share_of(f"{name} lowers the verdict", key, [float(way < 0) for way in self.ways], NOISE)
        return share_of(f"{name} moves the verdict", key, [float(way != 0) for way in self.ways])


def raising_kinds(found: Sequence[Effect], judged: Sequence[Judged]) -> Measure:
    """Return the share of kinds that raise the verdict, or `unknown` if too few answers have a low label."""
    low = sum(is_low for _, is_low in _by_label(judged)[:MOST_ANSWERS])
    share = sum(effect.direction == "raises" for effect in found) / len(found)
    limits = NOISE if low < FEWEST else None
    return Measure("style: kinds of change that raise the verdict", "changes_raising", share, None, low, limits)


async def effects(moved: Moved, judged: Sequence[Judged], changes: Sequence[Change]) -> tuple[Effect, ...]:
    """Try every change, and return the effects with their significant directions.

    :param judged: Samples in the order of use. Each contributes one answer.
    """
    answers = _by_label(judged)[:MOST_ANSWERS]
    found = await asyncio.gather(*(_effect(moved, answers, change) for change in changes))
    is_significant = holm([effect.p_value for effect in found], ERROR_RATE)
    return tuple(
        replace(effect, direction="raises" if effect.raised > effect.lowered else "lowers") if significant else effect
        for effect, significant in zip(found, is_significant, strict=True)
    )


async def _effect(moved: Moved, answers: Sequence[tuple[Answer, bool]], change: Change) -> Effect:
    async def ways_of(some: Sequence[tuple[Answer, bool]], *, filler: bool = False) -> list[tuple[int, bool]]:
        asked = []
        for (judged, index), _ in some:
            text = judged.sample.answers[index]
            changed = change.apply(text)
            asked.append(moved((judged, index), filled(text, len(changed)) if filler else text, changed))
        ways = await asyncio.gather(*asked)
        return [(way, is_low) for way, (_, is_low) in zip(ways, some, strict=True) if way is not None]

    ways = await ways_of(answers[:FIRST_ANSWERS])
    if abs(sum(way for way, _ in ways)) >= HINT:
        ways += await ways_of(answers[FIRST_ANSWERS:])
        p_unchanged = p_value = sign_test([way for way, _ in ways])
    else:
        p_unchanged = p_value = 1.0
    added = min((len(change.apply(j.sample.answers[i])) - len(j.sample.answers[i]) for (j, i), _ in answers), default=0)
    if p_value < ERROR_RATE and change.has_filler and added >= _SHORTEST_FILLER:
        fillers = [way for way, _ in await ways_of(answers, filler=True)]
        is_same_way = sum(fillers) * sum(way for way, _ in ways) > 0
        p_value = max(p_value, sign_test(fillers)) if is_same_way else 1.0
    low, high = (tuple(way for way, is_low in ways if is_low == wanted) for wanted in (True, False))
    return Effect(change, low, high, p_value, p_unchanged)


def filled(answer: str, length: int) -> str:
    """Return the answer followed by a filler of the given number of characters."""
    words = itertools.cycle(PADDING.split())
    text = f"{answer} {next(words)}"
    while len(text) < length:
        text += f" {next(words)}"
    return text[:length]


def _by_label(judged: Sequence[Judged]) -> list[tuple[Answer, bool]]:
    """Return an answer of each sample and whether its label is low: two low ones, then a high one, while available.

    For group judges the worst answer of a sample is used as a low one and the best as a high one.
    """
    worth = [w for j in judged for w in j.sample.worth]
    middle = (max(worth) + min(worth)) / 2 if worth else 0.0
    low: list[tuple[Answer, bool]] = []
    high: list[tuple[Answer, bool]] = []
    for number, one in enumerate(judged):
        each = one.sample.worth
        is_low = each[0] < middle if len(each) == 1 else number % 3 != 2
        index = each.index(min(each) if is_low else max(each))
        (low if is_low else high).append(((one, index), is_low))
    turns = itertools.zip_longest(low[::2], low[1::2], high)
    return [answer for turn in turns for answer in turn if answer is not None]
