"""The learning sentinel: watches the numbers of a run, and raises an alarm when it stops learning or learns nonsense.

::

    rule        what a rule is, and the small parts that rules are made of
    learning    equal rewards, nothing to learn from, empty loss masks
    engine      old weights, log-probabilities that drift apart
    policy      entropy, answers that are all the same, length
    outcome     reward hacking, failures, gradients
    watch       when an alarm is said, and when again
    statistics  is it a trend, is it more than chance

Invariant: what it says is a function of the rows of ``metrics.jsonl`` alone, so it needs no state of its own.
"""

from __future__ import annotations

from astuner_report.sentinel.watch import RULES, Alarm, Sentinel

__all__ = ["RULES", "Alarm", "Sentinel"]
