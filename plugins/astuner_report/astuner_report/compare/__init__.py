"""Two runs on the same tasks, with paired statistics: what `astuner diff` does.

::

    measures     a run's episodes of one validation as numbers per task, and the tasks that both sides have
    comparison   which settings differ, and all of it together, as data; `text` shows it

Invariant: a statistic is over tasks, never over episodes: attempts at one task are not independent of each other.
"""

from __future__ import annotations

from astuner_report.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
