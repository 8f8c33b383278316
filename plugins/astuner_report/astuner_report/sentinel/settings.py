"""``astuner.trainer_common.sentinel``: what watches a run; `astuner_report.sentinel` acts on it."""

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
"""The rules of `astuner_report.sentinel.RULES`, in their order."""


class Sentinel(Section):
    enabled: bool = True
    """Watch the run and raise alarms (docs/sentinel.md)."""
    disable: list[AlarmRule] = Field([])
    """Rules that are not watched."""
    stop_on: list[str] = Field([])
    """Rules whose alarm ends the run before its next step, those of `rules` included; everything finished is saved."""
    rules: list[str] = Field([])
    """Rules beside these: a registered name, `module->Class` or `path/to/rules.py->Class`."""
    held_out: list[str] = Field([])
    """Metrics that should not fall while the reward rises, such as `judge/NAME` of a judge that gives no reward."""

    @model_validator(mode="after")
    def _stops_on_rules(self) -> Sentinel:
        known = [*get_args(AlarmRule), *self.rules]
        for name in self.stop_on:
            if name not in known:
                hint = did_you_mean(name, known, f"; there are {', '.join(known)}")
                raise ValueError(f"stop_on: there is no rule {name!r}{hint}")
        return self


class SentinelKeys(Section):
    sentinel: Sentinel = Sentinel()
    """What watches the run and raises alarms."""
