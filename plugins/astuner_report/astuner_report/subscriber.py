"""Subscribers that monitor a run (sentinel) and report on it (origin, energy, report)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from astuner import RunDir, append_jsonl
from astuner.contracts.errors import ConfigError, PluginError
from astuner.contracts.events import (
    Event,
    GroupsEnded,
    Measured,
    Note,
    RunContext,
    RunEnded,
    RunPlanned,
    RunResumed,
    StalenessBounded,
    Subscriber,
    Summary,
)
from astuner.contracts.statistics import mean
from astuner.contracts.types import Episode, Split
from astuner_report.curve import draw_reward_curve
from astuner_report.duplicates import duplicates, same_answer, sampled_entropy
from astuner_report.rendering import lasted
from astuner_report.run_report import origin, write_report
from astuner_report.run_report.energy import EnergyMeter
from astuner_report.run_report.files import is_measured, read_rows
from astuner_report.run_report.sampling import RECENT, sampling_note
from astuner_report.run_report.summary import summary_lines
from astuner_report.sentinel import RULES, Alarm, Rule, Sentinel
from astuner_report.sentinel.settings import SentinelKeys
from astuner_report.slices import Slices, slice_metrics

_MOST_ALARMS = 5
"""Maximum number of alarms in the summary."""


class Watch(Subscriber):
    """The sentinel: raises alarms, and ends the run for those in `sentinel.stop_on`."""

    direct = True

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._run_dir = RunDir(context.run_dir)
        settings = context.config.keys_of(SentinelKeys).sentinel
        self._sentinel = Sentinel(settings, context.policies, _own_rules(context.config))
        self._sentinel.grad_clip = context.config.astuner.trainer_common.optim.grad_clip
        self._recent: deque[float] = deque(maxlen=RECENT)
        """Success of the last training steps."""
        self._has_explained = False
        self._slices: Slices = {}
        self._numbers: dict[Split, Mapping[str, float]] = {}

    @classmethod
    def check(cls, config: Any) -> None:
        _own_rules(config)

    def handle(self, event: Event) -> None:
        if isinstance(event, GroupsEnded):
            self._numbers[event.split] = self._measured(event.split, event.episodes)
        elif isinstance(event, RunPlanned):
            self._slices = event.tasks.get("slices", {})
            self._of_tasks(event.tasks)
        elif isinstance(event, StalenessBounded):
            self._sentinel.max_staleness = event.most
        elif isinstance(event, RunResumed):
            self._sentinel.replay(self._run_dir.read_metrics())
        elif isinstance(event, Measured):
            self._explain_sampling(event)
            for alarm in self._sentinel.see(event.step, event.metrics):
                append_jsonl(self._run_dir.alarms, alarm.as_dict())
                if alarm.is_said:
                    self._context.publish(Note(text=str(alarm)))
            if (error := self._sentinel.stops) is not None:
                self._context.stop(error)

    def _measured(self, split: Split, episodes: Sequence[Episode]) -> Mapping[str, float]:
        slices = slice_metrics(self._slices, split, episodes)
        if split is Split.VALIDATION:
            return same_answer(episodes) | slices
        return duplicates(episodes) | sampled_entropy(episodes, self._context.policies) | slices

    def _explain_sampling(self, event: Measured) -> None:
        """Explain once why training and validation success differ."""
        if (success := event.metrics.get("success/mean")) is not None:
            self._recent.append(success)
        validation = event.metrics.get("val/success")
        if validation is None or not self._recent or self._has_explained:
            return
        rollout = self._context.config.astuner.rollout.model_dump()
        if note := sampling_note(rollout, mean(self._recent), validation):
            self._has_explained = True
            self._context.publish(Note(text=note))

    def _of_tasks(self, checked: Mapping[str, Any]) -> None:
        """Raise the alarms about the tasks, unless `data.leakage` allows them.

        A resumed run prints them again, but does not record them again.
        """
        said = {row.get("rule") for row in read_rows(self._run_dir.alarms, [], bool)}
        for found in checked.get("alarms", ()) if checked.get("leakage") != "allow" else ():
            alarm = Alarm(step=0, severity="warning", **found)
            self._sentinel.found.add(alarm.rule)
            if alarm.rule not in said:
                append_jsonl(self._run_dir.alarms, alarm.as_dict())
            self._context.publish(Note(text=str(alarm)))

    def numbers(self) -> Mapping[str, float]:
        split = Split.VALIDATION if Split.VALIDATION in self._numbers else Split.TRAIN  # its row is published directly
        return self._numbers.pop(split, {})


class Report(Subscriber):
    """Records the origin of a run when it begins, and writes its report when it ends for any reason."""

    direct = True

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._run_dir = RunDir(context.run_dir)
        self._energy = EnergyMeter()
        self._facts: Mapping[str, Any] = {}
        self._curve = ""

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        return [cls(context)] if context.trains else []

    def handle(self, event: Event) -> None:
        if isinstance(event, RunPlanned):
            origin.begin(
                self._run_dir,
                command=event.command,
                config_file=event.config_file,
                plan=event.plan,
                energy=str(self._energy),
            )
            if event.tasks:
                self._run_dir.write_json(self._run_dir.tasks, event.tasks)
        elif isinstance(event, RunEnded) and event.error is not None:
            try:
                origin.end(self._run_dir, event.error)
                write_report(self._run_dir, event.endings)
            except Exception as e:  # must not hide the error that ended the run
                said = f"Could not write the report of this run ({type(e).__name__}: {e})."
                again = f"Try again with: astuner report {self._run_dir.path}"
                self._context.publish(Note(text=f"{said} {again}"))
        elif isinstance(event, RunEnded):
            origin.end(self._run_dir)
            self._facts = write_report(self._run_dir, event.endings)
            self._curve = draw_reward_curve(read_rows(self._run_dir.metrics, [], is_measured), self._run_dir.curve)

    def numbers(self) -> dict[str, float]:
        return self._energy.since_last()

    def summary(self) -> Summary | None:
        if not self._facts:
            return None
        return Summary(
            lines={
                "Optimizer steps": _trained(self._facts),
                "Alarms": _alarms(self._facts["alarms"]),
                **summary_lines(self._facts, self._run_dir),
                "Reward curve": self._curve,
                "Report": str(self._run_dir.report_html),
            },
            verdict=self._facts["verdict"]["text"],
            next_command=(self._facts["next"] or {}).get("command", ""),
            facts={"report": self._facts, **{key: self._facts[key] for key in ("next", "informative_episodes")}},
        )


def _own_rules(config: Any) -> dict[str, type[Rule]]:
    """Return the rules of `sentinel.rules` by their references.

    :raises ConfigError: a rule does not have a unique name.
    :raises PluginError: a rule cannot be found or is not a `Rule`.
    """
    found: dict[str, type[Rule]] = {}
    for reference in config.keys_of(SentinelKeys).sentinel.rules:
        rule: type[Rule] = config.resolve("sentinel rule", reference)
        if not isinstance(rule, type) or not issubclass(rule, Rule):
            raise PluginError(
                f"The sentinel rule {reference!r} is {rule!r}. Make it a subclass of astuner_report.sentinel.Rule"
            )
        if getattr(rule, "name", "") in {"", *(r.name for r in (*RULES, *found.values()))}:
            raise ConfigError(
                f"astuner.trainer_common.sentinel.rules: the name of {reference} is missing or already in use. Set a "
                'unique one in its class: name = "…"'
            )
        found[reference] = rule
    return found


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> str:
    still = [a for a in alarms if a["current"]]
    current = [", ".join(filter(None, (f"{a['rule']} since step {a['step']}", lasted(a)))) for a in still]
    past = [f"{a['rule']} in steps {a['first_step']} to {a['last_step']}" for a in alarms if not a["current"]]
    texts = [f"{len(those)}{kind}: {_shortened(those)}" for those, kind in ((current, ""), (past, " past")) if those]
    return "\n".join(texts if current or not past else ["none now", *texts]) or "none"


def _shortened(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_ALARMS} more" if len(texts) > _MOST_ALARMS else ""
    return "; ".join(texts[:_MOST_ALARMS]) + more


def _trained(facts: Mapping[str, Any]) -> str:
    """Return the text of the line `Optimizer steps`: how often the weights changed, and the tokens with a gradient."""
    updated, taken = facts["updated"], facts["updated"]["optimizer_steps"]
    steps, of = updated["steps"], updated["of"]
    which = f"all {of:,}" if steps == of else f"{steps:,} of {of:,}"
    changed = f"{which} training steps updated the weights" if of else "no training step finished"
    counted = "" if taken is None else f"{taken:,.0f}, "
    return f"{counted}{changed}; {updated['tokens']:,.0f} tokens in updates"
