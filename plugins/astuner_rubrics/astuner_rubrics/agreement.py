"""Measure the agreement of verdicts with labels.

A label and a verdict are numbers for the same answers. A score agrees if no other label is nearer. An order agrees,
pair by pair, if the same answer is ahead or both tie. An agreement has a confidence interval and the chance level: the
agreement of the best guess without looking at the answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from astuner.contracts.section import Section
from astuner.contracts.statistics import mean, percent, wilson_interval
from astuner_rubrics.labels import Mode, Sample

Z = 1.959964  # for a 95 % interval


@dataclass(frozen=True)
class Rule:
    """Define when a verdict agrees with a label."""

    mode: Mode
    low: float
    high: float
    """Scale of the verdicts."""
    near: float
    """Pointwise: a score within this distance agrees. Otherwise: answers this close to each other tie."""

    @classmethod
    def of(cls, mode: Mode, samples: Sequence[Sample], scale: tuple[float, float]) -> Rule:
        """Return the rule for labels of this kind on this scale.

        Pointwise, the distance is half a step of the labels, or a twentieth of the scale if that is larger. Otherwise,
        answers within a twentieth of the scale tie if the labels have ties; without ties in the labels nothing ties.
        """
        low, high = scale
        twentieth = (high - low) / 20
        if mode is Mode.POINTWISE:
            values = sorted({w for s in samples for w in s.worth})
            steps = [b - a for a, b in itertools.pairwise(values)]
            return cls(mode, low, high, max(min(steps, default=0.0) / 2, twentieth))
        ties = any(a == b for s in samples for a, b in itertools.combinations(s.worth, 2))
        return cls(mode, low, high, twentieth if ties else 0.0)

    def parts(self, worth: Sequence[float], verdict: Sequence[float]) -> tuple[float, ...]:
        """Return the parts of a verdict: 1 right, 0 wrong, 0.5 undecided or a score that is off by less than half."""
        if self.mode is Mode.POINTWISE:
            return tuple(self._score(w, v) for w, v in zip(worth, verdict, strict=True))
        pairs = itertools.combinations(range(len(worth)), 2)
        return tuple(self._pair(worth[i] - worth[j], verdict[i] - verdict[j]) for i, j in pairs)

    def credit(self, worth: Sequence[float], verdict: Sequence[float]) -> float:
        """Return a continuous measure of how right a verdict is, from 0 to 1. Selection maximizes it.

        Pointwise it is 1 - |off| / range. Otherwise it is the mean over pairs of 1/2 + 1/2 tanh(ahead / (range / 5)),
        where ``ahead`` is the lead of the better answer; a pair labeled as a tie counts like a score.
        """
        length = self.high - self.low
        if self.mode is Mode.POINTWISE:
            parts = [1 - abs(self._clamped(w) - v) / length for w, v in zip(worth, verdict, strict=True)]
        else:
            parts = [
                0.5 + 0.5 * math.tanh(5 * math.copysign(1, worth[i] - worth[j]) * (verdict[i] - verdict[j]) / length)
                if worth[i] != worth[j]
                else 1 - abs(verdict[i] - verdict[j]) / length
                for i, j in itertools.combinations(range(len(worth)), 2)
            ]
        return math.fsum(parts) / len(parts)

    def is_right(self, worth: Sequence[float], verdict: Sequence[float]) -> bool:
        """Return whether every part of the verdict is right: the same score or the same order."""
        return all(part == 1.0 for part in self.parts(worth, verdict))

    def is_wrong(self, worth: Sequence[float], verdict: Sequence[float]) -> bool:
        """Return whether some part states the opposite. Undecided parts and scores off by less than half do not."""
        return any(part == 0.0 for part in self.parts(worth, verdict))

    def _score(self, worth: float, verdict: float) -> float:
        off = abs(self._clamped(worth) - verdict)
        return 1.0 if off < self.near else 0.5 if off < (self.high - self.low) / 2 else 0.0

    def _clamped(self, worth: float) -> float:
        return min(self.high, max(self.low, worth))

    def _pair(self, label: float, verdict: float) -> float:
        said = 0 if abs(verdict) <= self.near + 1e-9 else int(math.copysign(1, verdict))
        meant = 0 if label == 0 else int(math.copysign(1, label))
        if said == meant:
            return 1.0
        return 0.5 if said == 0 else 0.0


class Agreement(Section):
    """Share of verdicts that agree with labels."""

    share: float
    low: float
    """Lower end of the 95 % interval of `share` after Wilson (Journal of the American Statistical Association 22 (1927)
    209-212)."""
    high: float
    n: int
    """Examples."""
    chance: float
    """Agreement of the best guess without looking at the answers."""

    @property
    def is_beyond_chance(self) -> bool:
        return self.low > self.chance

    def __str__(self) -> str:
        return f"{percent(self.share)} (95 % interval {percent(self.low)} to {percent(self.high)}, {self.n} examples)"


def agreement(rule: Rule, samples: Sequence[Sample], verdicts: Sequence[Sequence[float]]) -> Agreement:
    """Return the share of scores, pairs, or pairs of each list that agree.

    Pairs of one list are not independent, so the interval counts lists, which makes it too wide rather than too narrow.
    """
    n = len(samples)
    right = [
        sum(part == 1.0 for part in parts) / len(parts)
        for parts in (rule.parts(s.worth, v) for s, v in zip(samples, verdicts, strict=True))
    ]
    low, high = wilson_interval(math.fsum(right), n)
    return Agreement(share=mean(right), low=low, high=high, n=n, chance=chance(rule, samples))


def chance(rule: Rule, samples: Sequence[Sample]) -> float:
    """Return the agreement of the best verdict that is the same for every sample.

    Pointwise it is the agreement of the best constant score. Otherwise it is the agreement of a coin flip per pair, or
    of always declaring a tie.
    """
    if not samples:
        return 0.0
    if rule.mode is Mode.POINTWISE:
        return max(sum(rule.is_right(s.worth, guess.worth) for s in samples) / len(samples) for guess in samples)
    pairs = [s.worth[i] == s.worth[j] for s in samples for i, j in itertools.combinations(range(len(s.worth)), 2)]
    ties = sum(pairs) / len(pairs)
    return max(ties, (1 - ties) / 2)


def fewest(chance_level: float) -> int:
    """Return the minimum number of examples with which perfect agreement exceeds chance: n / (n + z²) > chance."""
    if chance_level >= 1:
        raise ValueError("no agreement exceeds a chance level of 1")
    return max(3, math.floor(Z * Z * chance_level / (1 - chance_level)) + 1)
