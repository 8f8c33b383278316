"""Two runs on the same tasks, with paired statistics: what `astuner diff` does.

::

    statistics   small pure functions: intervals and tests for paired numbers, each with its source
    measures     a run's episodes of one validation as numbers per task
    pairing      the tasks that both sides have, and why others are left out
    settings     which keys of the two runs' configs differ
    comparison   all of it together, as data; `text` shows it

Invariant: a statistic is over tasks, never over episodes: attempts at one task are not independent of each other.
Nothing here imports numpy or scipy; 10,000 draws over 1,000 tasks take a second or two in plain Python.
"""

from __future__ import annotations

from astuner_report.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
