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
from astuner_report.sentinel.outcomes import OUTCOMES, RewardHacking
from astuner_report.sentinel.rule import Rule, Severity, StepFacts, Verdict
from astuner_report.sentinel.rules import EXPLAINS, FIRST, Lasting
from astuner_report.sentinel.settings import Sentinel as Settings

__all__ = ["RULES", "Alarm", "Lasting", "Rule", "Sentinel", "StepFacts", "Verdict", "causes"]

RULES: tuple[type[Rule], ...] = (*FIRST, *OUTCOMES)
"""All that there are, in their order."""
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
        """The steps in which it complained, and those without news after one in which it did."""
        self.holds = False
        """Whether it complained lately."""
        self._complains = self._is_said = self._was_said = False
        self._fine = 0

    def see(self, facts: StepFacts, *, validation: bool) -> str:
        """What is wrong, unless it was said already."""
        verdict: Verdict = self.rule.validated(facts) if validation else self.rule.see(facts)
        if verdict is not None:
            self._complains = bool(verdict)
            self._fine = 0 if verdict else self._fine + 1
            self.holds = self._complains or (self.holds and self._fine < RECOVERED)
            self._is_said = self._is_said and self.holds
        if self._complains:
            self.held.append(facts.step)
        return "" if self._is_said else verdict or ""

    def alarm(self, step: int, message: str) -> Alarm:
        """Say it."""
        rule, is_new = self.rule, not self._was_said
        self._is_said = self._was_said = True
        return Alarm(
            step=step, rule=rule.name, severity=rule.severity, message=message, advice=rule.advice, is_new=is_new
        )

    def is_explained_by(self, other: _Watched) -> bool:
        """Whether what is wrong follows from what another one found, of the same policy where both look at one."""
        same = not self.policy or other.policy in ("", self.policy)
        return other.holds and same and self.rule.name in other.rule.explains


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
        self.grad_clip = StepFacts.grad_clip
        """`optim.grad_clip` of the run; set before the first step."""
        self.found: set[str] = set()
        """What was said of the tasks before the first step, by name."""
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
        """Whether it is no news, since it follows from what else is wrong; what `stop_on` names is never."""
        if watched.rule.name in self._stop_on:
            return False
        told = any(watched.rule.name in EXPLAINS.get(name, ()) for name in self.found)
        return told or any(map(watched.is_explained_by, self._watched))

    @property
    def held(self) -> dict[str, list[int]]:
        """Rule -> the steps in which it complained, about any policy; also what was not said, and what no row since has
        denied."""
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
            f"{alarm.rule}: {alarm.message}; {alarm.advice}. Everything finished is saved"
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


def causes(found: Iterable[str]) -> dict[str, list[str]]:
    """Of rules that found something wrong, those that no other one explains, each with what it explains of the others.

    :param found: names of rules, and of what is said of the tasks before the first step.
    """
    names = dict.fromkeys(found)
    told = {name: [other for other in names if other in EXPLAINS.get(name, ())] for name in names}
    return {name: others for name, others in told.items() if not any(name in of for of in told.values())}


def _as_written(value: float | None) -> float | None:
    """As it stands in ``metrics.jsonl``: what a resumed run reads there gives the same alarms, to the last digit."""
    return float(f"{value:.9g}") if value is not None and math.isfinite(value) else None
