"""From preferences between answers to a reward for each.

A preference is how often one answer was put before another: 1, 0, or 1/2 for a tie, averaged over the times the two
were compared.  An attempt's reward is the mean of its preferences over the other attempts: with whole rankings the
Borda count, with pairs Copeland's score (Copeland 1951), both divided by what can be had.  So rewards are in [0, 1],
equal answers have equal ones, and the mean of a group in which all were compared is 1/2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Preferences:
    """How often each of ``n`` different answers was put before each other one."""

    n: int
    _found: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def add_ranking(self, ranking: Sequence[Sequence[int]]) -> None:
        """All answers or some of them, best first; those in one entry tie."""
        place = {answer: rank for rank, tied in enumerate(ranking) for answer in tied}
        for a, b in itertools.combinations(sorted(place), 2):
            preference = 0.5 if place[a] == place[b] else float(place[a] < place[b])
            self._found.setdefault((a, b), []).append(preference)
            self._found.setdefault((b, a), []).append(1.0 - preference)

    def of(self, a: int, b: int) -> float | None:
        """The mean; None where the two were not compared."""
        found = self._found.get((a, b))
        return math.fsum(found) / len(found) if found else None

    @property
    def agreement(self) -> float | None:
        """How often two comparisons of the same two answers say the same; None where none was compared twice."""
        pairs = [(x, y) for f in self._compared() for x, y in itertools.combinations(f, 2)]
        return math.fsum(x == y for x, y in pairs) / len(pairs) if pairs else None

    @property
    def ties(self) -> float:
        """The share of comparisons that are ties."""
        everything = [x for found in self._compared() for x in found]
        return math.fsum(x == 0.5 for x in everything) / len(everything) if everything else 0.0

    def rewards(self, times: Sequence[int]) -> list[float]:
        """A reward for each answer.

        :param times: how many attempts gave each answer; they tie with each other.
        """
        return [self._reward(a, times) for a in range(self.n)]

    def _reward(self, a: int, times: Sequence[int]) -> float:
        won, out_of = 0.5 * (times[a] - 1), float(times[a] - 1)
        for b in range(self.n):
            if b != a and (preference := self.of(a, b)) is not None:
                won += times[b] * preference
                out_of += times[b]
        return won / out_of if out_of else 0.5

    def _compared(self) -> list[list[float]]:
        return [found for (a, b), found in self._found.items() if a < b]


def pairs_of(n: int, most: int | None) -> list[tuple[int, int]]:
    """Which of ``n`` answers to compare, every one about as often as every other.

    Neighbours on a circle first, then those two apart, and so on; at least each with its neighbours, so that the
    comparisons hang together.

    :param most: pairs; None: all.
    """
    rounds = [[(i, (i + step) % n) for i in range(n)] for step in range(1, n // 2 + 1)]
    unique = [list(dict.fromkeys((min(p), max(p)) for p in one)) for one in rounds]
    found: list[tuple[int, int]] = []
    for one in unique:
        if most is not None and found and len(found) + len(one) > most:
            break
        found += one
    return found
