"""``astuner.trainer_common.sentinel``: what watches a run; `astuner_report.sentinel` acts on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from astuner.contracts.section import Section

AlarmRule = Literal[
    "zero_variance",
    "nothing_to_learn",
    "empty_masks",
    "stale_weights",
    "logprob_drift",
    "entropy_collapse",
    "duplicate_answers",
    "length_explosion",
    "cut_off",
    "reward_hacking",
    "bad_gradients",
    "failures_rising",
]
"""The rules of `astuner_report.sentinel.RULES`, in their order."""


class Sentinel(Section):
    enabled: bool = True
    """Watch the run and raise alarms (docs/sentinel.md)."""
    disable: list[AlarmRule] = Field([])
    """Rules that are not watched."""
    stop_on: list[AlarmRule] = Field([])
    """Rules whose alarm ends the run before its next step; everything finished is saved."""
    held_out: list[str] = Field([])
    """Metrics that should not fall while the reward rises, such as `judge/NAME` of a judge that gives no reward."""


class SentinelKeys(Section):
    sentinel: Sentinel = Sentinel()
    """What watches the run and raises alarms."""
