"""The learning sentinel: watches the numbers of a run, and raises an alarm when it stops learning or learns nonsense.

::

    rules  all of them, and the small parts that they are made of; what a rule is: `astuner.contracts.sentinel_rule`
    watch  when an alarm is said, and when again

Invariant: what it says is a function of the rows of ``metrics.jsonl`` alone, so it needs no state of its own.
"""

from __future__ import annotations

from astuner.contracts.sentinel_rule import Rule, StepFacts, Verdict
from astuner_report.sentinel.rules import RULES, Lasting
from astuner_report.sentinel.watch import Alarm, Sentinel

__all__ = [
    "RULES",
    "Alarm",
    "Lasting",
    "Rule",
    "Sentinel",
    "StepFacts",
    "Verdict",
]
