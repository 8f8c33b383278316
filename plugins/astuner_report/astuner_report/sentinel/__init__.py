"""The learning sentinel: watches the numbers of a run, and raises an alarm when it stops learning or learns nonsense.

Every rule (`rules`, and what a rule is: `rule`) sees every row, and says a thing once.
Invariant: what is said is a function of the rows of ``metrics.jsonl`` alone, so it needs no state of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from astuner.contracts.errors import RunError
from astuner_report.sentinel.rule import Rule, Severity, StepFacts, Verdict
from astuner_report.sentinel.rules import RULES, Lasting, RewardHacking
from astuner_report.sentinel.settings import Sentinel as Settings

__all__ = ["RULES", "Alarm", "Lasting", "Rule", "Sentinel", "StepFacts", "Verdict"]

RECOVERED = 10
"""Rows in a row without a complaint, after which the next one is a new alarm; more than a rule waits for."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something is wrong with a run."""

    step: int
    rule: str
    severity: Severity
    message: str
    advice: str
    is_new: bool = True
    """Whether the rule raised none before in this run."""

    @property
    def is_said(self) -> bool:
        """Whether a person is told at once: a warning once in a run, an error each time that it comes back."""
        return self.is_new or self.severity == "error"

    def as_dict(self) -> dict[str, Any]:
        """A line of ``alarms.jsonl``."""
        facts = {name: value for name, value in vars(self).items() if name != "is_new"}
        return {"step": self.step, "time": round(time.time(), 3), **facts}

    def __str__(self) -> str:
        what = "ALARM" if self.severity == "error" else "WARNING"
        return f"{what} ({self.rule}) step {self.step}: {self.message}; {self.advice}"


class _Watched:
    """A rule at work, and what it has said."""

    def __init__(self, rule: Rule, policy: str) -> None:
        self.rule, self.policy = rule, policy
        self.held: list[int] = []
        """The steps in which it complained."""
        self._holds = False
        self._fine = 0

    def see(self, facts: StepFacts, *, validation: bool) -> Alarm | None:
        rule = self.rule
        verdict: Verdict = rule.validated(facts) if validation else rule.see(facts)
        if verdict is None:
            return None
        if not verdict:
            self._fine += 1
            self._holds = self._holds and self._fine < RECOVERED
            return None
        self._fine = 0
        is_new, held = not self.held, self._holds
        self._holds = True
        self.held.append(facts.step)
        if held:
            return None
        return Alarm(
            step=facts.step, rule=rule.name, severity=rule.severity, message=verdict, advice=rule.advice, is_new=is_new
        )


class Sentinel:
    """Watches one run."""

    def __init__(
        self, settings: Settings, policies: Sequence[str], own: Mapping[str, type[Rule]] = MappingProxyType({})
    ) -> None:
        """
        :param policies: those that train, where the run tells several apart; else none.
        :param own: rules beside `RULES`, under what `settings` calls them.
        """
        self.max_staleness: int | None = None
        """What the backbone says of its weights, see `StepFacts.max_staleness`; set before the first step."""
        self._settings, self._policies, self._rules = settings, policies, (*RULES, *own.values())
        self._watched = list(self._at_work())
        self._stop_on = frozenset(own[name].name if name in own else name for name in settings.stop_on)
        self._stops: Alarm | None = None

    def see(self, step: int, row: Mapping[str, float]) -> list[Alarm]:
        """Look at the next row of numbers, of a training step or of a validation; the alarms to raise."""
        if "val/success" in row:
            validation = True
        elif "reward/mean" in row:
            validation = False
        else:
            return []
        alarms = []
        numbers = {name: _as_written(value) for name, value in row.items()}
        for watched in self._watched:
            facts = StepFacts(step=step, row=numbers, policy=watched.policy, max_staleness=self.max_staleness)
            if alarm := watched.see(facts, validation=validation):
                alarms.append(alarm)
        self._stops = next((alarm for alarm in alarms if alarm.rule in self._stop_on), self._stops)
        return alarms

    @property
    def held(self) -> dict[str, list[int]]:
        """Rule -> the steps in which it complained, about any policy; also those that were not said."""
        return {
            name: sorted({step for w in self._watched if w.rule.name == name for step in w.held})
            for name in dict.fromkeys(w.rule.name for w in self._watched)
        }

    @property
    def stops(self) -> RunError | None:
        """Why the run is to end: an alarm was raised that `stop_on` names."""
        if (alarm := self._stops) is None:
            return None
        return RunError(
            f"the run stops after step {alarm.step}, as astuner.trainer_common.sentinel.stop_on says for "
            f"{alarm.rule}: {alarm.message}; {alarm.advice}. Everything finished is saved: continue with --resume"
        )

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begin anew with the rows that a run wrote before it was resumed; what they gave rise to was said then.

        :param rows: of ``metrics.jsonl``.
        """
        self._watched = list(self._at_work())
        for row in rows:
            self.see(int(row["step"]), {name: value for name, value in row.items() if name not in ("step", "time")})
        self._stops = None  # the person knows, and goes on

    def _at_work(self) -> Iterator[_Watched]:
        settings = self._settings
        several = tuple(self._policies) or ("",)
        for rule in self._rules:
            if rule.name in settings.disable or not settings.enabled:
                continue
            for policy in several if rule.per_policy else ("",):
                yield _Watched(RewardHacking(settings.held_out) if rule is RewardHacking else rule(), policy)


def _as_written(value: float | None) -> float | None:
    """As it stands in ``metrics.jsonl``: what a resumed run reads there gives the same alarms, to the last digit."""
    return float(f"{value:.9g}") if value is not None and math.isfinite(value) else None
