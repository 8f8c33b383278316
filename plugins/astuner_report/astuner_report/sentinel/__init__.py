"""The learning sentinel: monitors training metrics and raises alarms when a run stops learning or breaks.

Every rule (`rule`, `rules`, `outcomes`) reads every row and reports a problem once.

Invariant: alarms are a function of the rows of ``metrics.jsonl``, so the sentinel saves no state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from astuner.contracts.errors import RunError
from astuner_report.sentinel.outcomes import OUTCOMES, RewardHacking
from astuner_report.sentinel.rule import Rule, Severity, StepFacts, Verdict
from astuner_report.sentinel.rules import EXPLAINS, FIRST, Lasting
from astuner_report.sentinel.settings import Sentinel as Settings

__all__ = ["RULES", "Alarm", "Lasting", "Rule", "Sentinel", "StepFacts", "Verdict", "causes"]

RULES: tuple[type[Rule], ...] = (*FIRST, *OUTCOMES)
"""All built-in rules, in the order of evaluation."""
RECOVERED = 10
"""Consecutive rows without a finding after which the next finding raises a new alarm; longer than any rule waits."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A problem of a run."""

    step: int
    rule: str
    severity: Severity
    message: str
    advice: str
    is_new: bool = True
    """Whether this is the rule's first alarm in the run."""

    @property
    def is_said(self) -> bool:
        """Return whether to print the alarm: a warning once per run, an error every time it is raised again."""
        return self.is_new or self.severity == "error"

    def as_dict(self) -> dict[str, Any]:
        """Return a line of ``alarms.jsonl``."""
        facts = {name: value for name, value in vars(self).items() if name != "is_new"}
        return {"step": self.step, "time": round(time.time(), 3), **facts}

    def __str__(self) -> str:
        what = "ALARM" if self.severity == "error" else "WARNING"
        return f"{what} ({self.rule}) step {self.step}: {_sentence(self.message)}. {_sentence(self.advice)}"


class _Watched:
    """A rule that monitors a run, and the alarms that it raised."""

    def __init__(self, rule: Rule, policy: str) -> None:
        self.rule, self.policy = rule, policy
        self.held: list[int] = []
        """Steps in which the rule had a finding, and later steps that did not refute it."""
        self.holds = False
        """Whether the rule had a finding recently."""
        self.complains = False
        """Whether the latest verdict was a finding."""
        self._is_said = self._was_said = False
        self._fine = 0

    def see(self, facts: StepFacts, *, validation: bool) -> str:
        """Return the message of the rule, or an empty string if there is none or it was already raised."""
        verdict: Verdict = self.rule.validated(facts) if validation else self.rule.see(facts)
        if verdict is not None:
            self.complains = bool(verdict)
            self._fine = 0 if verdict else self._fine + 1
            self.holds = self.complains or (self.holds and self._fine < RECOVERED)
            self._is_said = self._is_said and self.holds
        if self.complains:
            self.held.append(facts.step)
        return "" if self._is_said else verdict or ""

    def alarm(self, step: int, message: str) -> Alarm:
        """Return the alarm for a message, and record that it was raised."""
        rule, is_new = self.rule, not self._was_said
        self._is_said = self._was_said = True
        return Alarm(
            step=step, rule=rule.name, severity=rule.severity, message=message, advice=rule.advice, is_new=is_new
        )

    def is_explained_by(self, other: _Watched) -> bool:
        """Return whether the finding follows from that of another rule, for the same policy if both monitor one."""
        same = not self.policy or other.policy in ("", self.policy)
        return other.holds and same and self.rule.name in other.rule.explains


class Sentinel:
    """Monitors one run."""

    def __init__(
        self, settings: Settings, policies: Sequence[str], own: Mapping[str, type[Rule]] = MappingProxyType({})
    ) -> None:
        """Create the rules of a run.

        :param policies: policies that train, if the run distinguishes several; otherwise empty.
        :param own: additional rules, by their names in `settings`.
        """
        self.max_staleness: int | None = None
        """Bound on the age of weights, see `StepFacts.max_staleness`; set before the first step."""
        self.grad_clip = StepFacts.grad_clip
        """`optim.grad_clip` of the run; set before the first step."""
        self.found: set[str] = set()
        """Names of the alarms about the tasks that were raised before the first step."""
        self._settings, self._policies, self._rules = settings, policies, (*RULES, *own.values())
        self._watched = list(self._at_work())
        self._stop_on = frozenset(own[name].name if name in own else name for name in settings.stop_on)
        self._stops: Alarm | None = None

    def see(self, step: int, row: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms to raise for the next row of a training step or a validation."""
        if "val/success" in row:
            validation = True
        elif "reward/mean" in row:
            validation = False
        else:
            return []
        said: list[tuple[_Watched, str]] = []
        numbers = {name: _as_written(value) for name, value in row.items()}
        for watched in self._watched:
            facts = StepFacts(
                step=step,
                row=numbers,
                policy=watched.policy,
                max_staleness=self.max_staleness,
                grad_clip=self.grad_clip,
            )
            if message := watched.see(facts, validation=validation):
                said.append((watched, message))
        alarms = [watched.alarm(step, message) for watched, message in said if not self._is_explained(watched)]
        self._stops = next((alarm for alarm in alarms if alarm.rule in self._stop_on), self._stops)
        return alarms

    def _is_explained(self, watched: _Watched) -> bool:
        """Return whether a finding follows from another one. Rules in `stop_on` always raise their alarm."""
        if watched.rule.name in self._stop_on:
            return False
        told = any(watched.rule.name in EXPLAINS.get(name, ()) for name in self.found)
        return told or any(map(watched.is_explained_by, self._watched))

    @property
    def held(self) -> dict[str, list[int]]:
        """Return the steps in which each rule had a finding, for any policy.

        This includes findings that raised no alarm and steps that did not refute an earlier finding.
        """
        return {
            name: sorted({step for w in self._watched if w.rule.name == name for step in w.held})
            for name in dict.fromkeys(w.rule.name for w in self._watched)
        }

    @property
    def complaining(self) -> set[str]:
        """Return the rules whose latest verdict is a finding, for any policy."""
        return {watched.rule.name for watched in self._watched if watched.complains}

    @property
    def stops(self) -> RunError | None:
        """Return the error that ends the run, if an alarm of `stop_on` was raised."""
        if (alarm := self._stops) is None:
            return None
        return RunError(
            f"astuner.trainer_common.sentinel.stop_on stopped the run after step {alarm.step} ({alarm.rule}): "
            f"{_sentence(alarm.message)}. All finished work is saved. {_sentence(alarm.advice)}"
        )

    def replay(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Restart with the rows that a run wrote before it was resumed; their alarms were raised then.

        :param rows: rows of ``metrics.jsonl``.
        """
        self._watched = list(self._at_work())
        for row in rows:
            self.see(int(row["step"]), {name: value for name, value in row.items() if name not in ("step", "time")})
        self._stops = None  # resuming after the alarm is the user's decision

    def _at_work(self) -> Iterator[_Watched]:
        settings = self._settings
        several = tuple(self._policies) or ("",)
        for rule in self._rules:
            if rule.name in settings.disable or not settings.enabled:
                continue
            for policy in several if rule.per_policy else ("",):
                yield _Watched(RewardHacking(settings.held_out) if rule is RewardHacking else rule(), policy)


def causes(found: Iterable[str]) -> dict[str, list[str]]:
    """Return the rules that no other one explains, each with the rules that it explains.

    :param found: names of rules that had a finding, and of alarms about the tasks before the first step.
    """
    names = dict.fromkeys(found)
    told = {name: [other for other in names if other in EXPLAINS.get(name, ())] for name in names}
    return {name: others for name, others in told.items() if not any(name in of for of in told.values())}


def _sentence(text: str) -> str:
    """Return a text with a capital letter and without a period; a user's rule may have neither."""
    return text[:1].upper() + text[1:].rstrip(".")


def _as_written(value: float | None) -> float | None:
    """Return a number as ``metrics.jsonl`` stores it, so that a resumed run raises exactly the same alarms."""
    return float(f"{value:.9g}") if value is not None and math.isfinite(value) else None
