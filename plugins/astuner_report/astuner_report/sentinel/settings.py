"""The section ``astuner.trainer_common.sentinel``, used by `astuner_report.sentinel`."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from astuner.contracts.errors import did_you_mean
from astuner.contracts.section import Section

AlarmRule = Literal[
    "zero_variance",
    "nothing_to_learn",
    "empty_masks",
    "stale_weights",
    "logprob_drift",
    "entropy_collapse",
    "entropy_explosion",
    "duplicate_answers",
    "length_explosion",
    "cut_off",
    "bad_gradients",
    "regularizer_dominates",
    "failures_rising",
    "reward_hacking",
    "learning_rate",
    "policy_broke",
    "random_reward",
    "reward_success_apart",
    "reward_only",
    "no_progress",
    "train_only",
    "same_answer",
    "worse_than_best",
    "invalid_rising",
]
"""Names of the rules in `astuner_report.sentinel.RULES`, in the same order."""


class Sentinel(Section):
    """Settings of the sentinel."""

    enabled: bool = True
    """Monitor the run and raise alarms (docs/sentinel.md)."""
    disable: list[AlarmRule] = Field([])
    """Built-in rules to turn off."""
    stop_on: list[str] = Field([])
    """Rules, built-in or from `rules`, whose alarm ends the run before its next step. Finished work is saved."""
    rules: list[str] = Field([])
    """Additional rules: a registered name, `module->Class` or `path/to/rules.py->Class`."""
    held_out: list[str] = Field([])
    """Metrics that should not fall while the reward rises, such as `judge/NAME` of a judge that gives no reward."""

    @model_validator(mode="after")
    def _stops_on_rules(self) -> Sentinel:
        known = [*get_args(AlarmRule), *self.rules]
        for name in self.stop_on:
            if name not in known:
                hint = did_you_mean(name, known, f"; known rules: {', '.join(known)}")
                raise ValueError(f"stop_on: {name!r} is not a known rule{hint}")
        return self


class SentinelKeys(Section):
    """Keys that the sentinel adds to ``astuner.trainer_common``."""

    sentinel: Sentinel = Sentinel()
    """Rules that monitor the run and raise alarms."""
