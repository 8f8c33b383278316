"""The learning sentinel: watches the numbers of a run, and raises an alarm when it stops learning or learns nonsense.

::

    rule   what a rule is, and the small parts that rules are made of
    rules  all of them
    watch  when an alarm is said, and when again

Invariant: what it says is a function of the rows of ``metrics.jsonl`` alone, so it needs no state of its own.
"""

from __future__ import annotations

from astuner_report.sentinel.rule import Rule, StepFacts, Verdict
from astuner_report.sentinel.rules import RULES
from astuner_report.sentinel.watch import Alarm, Sentinel

__all__ = ["RULES", "Alarm", "Rule", "Sentinel", "StepFacts", "Verdict"]
