"""Measure two or more ways of doing the same work, so that their ratio is reliable.

The sides take turns, one repetition each, so other load on the machine affects all of them.  Ratios use medians over
repetitions. CPU time (of all threads of this process) hardly depends on other load, but wall time does, so both are
recorded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Side = Callable[[], object]


@dataclass
class Timings:
    """Seconds of each repetition of a side."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median_wall(self) -> float:
        return statistics.median(self.wall)

    @property
    def median_cpu(self) -> float:
        return statistics.median(self.cpu)

    @property
    def min_wall(self) -> float:
        return min(self.wall)

    @property
    def min_cpu(self) -> float:
        return min(self.cpu)


def timed(side: Side, into: Timings) -> None:
    """Run ``side`` once and record its time."""
    wall, cpu = time.perf_counter(), time.process_time()
    side()
    into.wall.append(time.perf_counter() - wall)
    into.cpu.append(time.process_time() - cpu)


def interleave(sides: Mapping[str, Side], *, repeats: int, warm_up: int = 2) -> dict[str, Timings]:
    """Run every side ``warm_up + repeats`` times, in turns, with a different first side in every round."""
    names = list(sides)
    found = {name: Timings() for name in names}
    for number in range(warm_up + repeats):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            timed(sides[name], found[name] if number >= warm_up else Timings())
    return found
