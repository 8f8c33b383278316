"""Estimate the remaining time of a run from its own phases, or from an earlier run of the same experiment.

A step has two phases, rollout and update; validations and saves are further phases. The remaining time is the rest of
the current phase plus the mean duration of every later phase. Durations that are not measured yet come from an earlier
run (`Timing`). Without one, an update counts as long as a rollout, and a rollout as long as a validation per episode.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from astuner.contracts.events import Event, Progressed, RunResumed, SamplesCredited, Saving, StepEnded, ValidationEnded

if TYPE_CHECKING:
    from astuner.config import Config

RECENT = 8
"""Number of recent phases in a mean."""
LEAST_SECONDS = 1.0
"""Least remaining time while work is left."""
_STARTS = {SamplesCredited: "update", Saving: "saving"}
"""Events that start a phase."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Amount of work of a run."""

    steps: int
    """0: unknown, or the run does not train."""
    validation_freq: int
    save_freqs: tuple[int, ...]
    groups: int
    """Groups of a step."""
    repeat: int
    """Episodes of a group."""
    validation_tasks: int
    """0: the run does not validate."""
    validation_repeat: int = 1
    """Episodes of a validation task."""
    parallel: int = 1
    """Episodes that run concurrently."""
    validates_first: bool = True
    """Whether the run validates before the first step."""

    @classmethod
    def of(cls, config: Config, *, steps: int, validation_tasks: int) -> Schedule:
        a = config.astuner
        common = a.trainer_common
        return cls(
            steps=steps,
            validation_freq=common.test_freq,
            save_freqs=(common.save_freq, common.resume_freq),
            groups=a.data.train_batch_size,
            repeat=a.rollout.num_repeat,
            validation_tasks=validation_tasks,
            validation_repeat=a.rollout.val_kwargs.num_repeat,
            parallel=a.rollout.max_env_worker,
            validates_first=common.val_before_train,
        )

    def validations(self, first: int) -> int:
        """Return the number of validations after the steps from ``first`` to the last."""
        return self._due(self.validation_freq, first) if self.validation_tasks else 0

    @property
    def all_validations(self) -> int:
        """Number of validations of the complete run."""
        return self.validations(1) + (self.validates_first and self.validation_tasks > 0)

    def saves(self, first: int) -> int:
        """Return the number of saves after the steps from ``first`` to the last."""
        return sum(self._due(every, first) for every in self.save_freqs)

    def _due(self, every: int, first: int) -> int:
        if first > self.steps:
            return 0
        regular = self.steps // every - (first - 1) // every
        return regular + bool(self.steps % every)  # also after the last step


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Mean durations in an earlier run, in seconds; 0: not measured."""

    start: float = 0.0
    """Before the first phase and after the last, such as loading the model and writing the report."""
    rollout: float = 0.0
    update: float = 0.0
    validation: float = 0.0
    """Duration of a complete validation."""
    saving: float = 0.0
    fastest: float = 0.0
    """Shortest step."""
    slowest: float = 0.0
    """Longest step."""
    step_cost: float = 0.0
    validation_cost: float = 0.0
    steps: int = 0
    """Number of measured steps."""
    source: str = ""

    def total(self, schedule: Schedule, *, step: float = 0.0) -> float:
        """Return the seconds of a complete run.

        :param step: Seconds of a step; default: the mean.
        """
        return (
            self.start
            + schedule.steps * (step or self.rollout + self.update)
            + schedule.all_validations * self.validation
            + schedule.saves(1) * self.saving
        )

    def total_cost(self, schedule: Schedule) -> float:
        """Return the cost of helper models in a complete run, in the currency of their prices."""
        return schedule.steps * self.step_cost + schedule.all_validations * self.validation_cost


class RunClock:
    """Current phase, elapsed time and remaining time of a run.

    :param earlier: Durations of an earlier run, used until this run has its own.
    :param started: Start of the run on ``clock``. Default: now.
    """

    def __init__(
        self,
        schedule: Schedule,
        earlier: Timing | None = None,
        *,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule, self._earlier, self._clock = schedule, earlier or Timing(), clock
        self._started = clock() if started is None else started
        self._recent: dict[str, deque[float]] = {}
        """Phase -> recent durations."""
        self._in_step: dict[str, float] = {}
        """Phase -> seconds in the current step. On asynchronous backbones, rollout and update alternate in a step."""
        self._phase, self._since = "starting", self._started
        self._step = 1
        """Step of the current phase."""
        self._done = self._total = 0
        self._running = 0
        """Concurrent units of the current phase, in the unit of its count."""
        self._latest = {"validation": -1, "saving": -1}
        """Phase -> step of the latest one."""

    def progress(self, event: Progressed) -> Progressed:
        """Return the event with the elapsed and remaining time."""
        phase = "rollout" if event.what == "groups" else event.what
        if phase != "starting" and (phase, event.step) != (self._phase, self._step):
            self._begin(phase, event.step)
        self._done, self._total = event.done, event.total
        parallel = self._schedule.parallel
        self._running = {"groups": parallel // self._schedule.repeat, "update": 0}.get(event.what, parallel)
        return replace(event, elapsed=self._clock() - self._started, remaining=self.remaining())

    def observe(self, event: Event) -> str:
        """Record an event; return the phase that it starts, or an empty string."""
        if isinstance(event, RunResumed):
            self._step = event.step + 1
        elif isinstance(event, StepEnded):
            self._begin("between", event.step)
            for phase, seconds in self._in_step.items():
                self._recent.setdefault(phase, deque(maxlen=RECENT)).append(seconds)
            self._in_step = {}
        elif isinstance(event, ValidationEnded):
            self._begin("between", event.step)
        return _STARTS.get(type(event), "")

    def remaining(self) -> float | None:
        """Return the estimated seconds until the run ends, at least `LEAST_SECONDS`; None: unknown."""
        schedule, step, phase = self._schedule, self._step, self._phase
        validation = self._length("validation", self._earlier.validation)
        share = schedule.validation_tasks * schedule.validation_repeat / (schedule.groups * schedule.repeat)
        rollout = self._length("rollout", self._earlier.rollout) or (validation / share if share else 0.0)
        if not schedule.steps or not rollout:
            return None
        update = self._length("update", self._earlier.update) or rollout
        validation = validation or rollout * share
        saving = self._length("saving", self._earlier.saving)
        seconds = 0.0
        if phase == "starting":
            seconds = rollout + update + (validation if step == 1 and schedule.validates_first else 0.0)
        elif phase == "warm start":
            warm = self._length("warm start", 0.0)
            seconds = self._rest(warm) + (self._total - step) * warm
            step = self._total
        elif phase != "between":
            lengths = {"rollout": rollout, "update": update, "validation": validation, "saving": saving}
            seconds = self._rest(lengths[phase]) + (update if phase == "rollout" else 0.0)
        validated, saved = (step + (self._latest[name] == step) for name in ("validation", "saving"))
        seconds += max(schedule.steps - step, 0) * (rollout + update)
        seconds += schedule.validations(validated) * validation + schedule.saves(saved) * saving
        return max(seconds, LEAST_SECONDS)

    def _begin(self, phase: str, step: int) -> None:
        self._end_phase()
        self._phase, self._step, self._since = phase, step, self._clock()
        self._done = self._total = 0
        if phase in self._latest:
            self._latest[phase] = step

    def _end_phase(self) -> None:
        seconds = self._clock() - self._since
        if self._phase in self._latest:
            self._recent.setdefault(self._phase, deque(maxlen=RECENT)).append(seconds)
        elif self._phase != "starting":
            phase = "rollout" if self._phase == "between" else self._phase
            self._in_step[phase] = self._in_step.get(phase, 0.0) + seconds

    def _length(self, phase: str, earlier: float) -> float:
        """Return the expected seconds of a phase: measured, from an earlier run, or from its progress; 0: unknown."""
        recent = self._recent.get(phase)
        expected = fmean(recent) if recent else earlier
        if phase != self._phase:
            return expected
        if self._passed >= expected and self._done:
            running = min(self._running, self._total - self._done)
            return self._passed * self._total / (self._done + running / 2)  # on average, half of each is over
        return max(expected, self._passed) if expected else 0.0

    def _rest(self, length: float) -> float:
        return max(length - self._passed, 0.0)

    @property
    def _passed(self) -> float:
        """Seconds in the current phase of the current step."""
        return self._in_step.get(self._phase, 0.0) + self._clock() - self._since


def duration_text(seconds: float) -> str:
    """Return a duration for people, such as ``2 h 05 min``, ``3 min 20 s`` or ``12 s``."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def timing_of(rows: Sequence[Mapping[str, Any]], schedule: Schedule, *, elapsed: float = 0.0, source: str) -> Timing:
    """Return the durations in the metrics of an earlier run of the same experiment.

    :param rows: Rows of ``metrics.jsonl``.
    :param schedule: Amount of work of the new run, whose number of validation episodes may differ.
    :param elapsed: Seconds of the earlier run, including its start and end; 0: unknown. For a resumed run, these are
        less than its rows, and the time of start and end counts as 0.
    """
    steps = [row for row in rows if "time/rollout" in row and "time/step" in row]
    validations = [row for row in rows if "time/validation" in row]
    saves = [row["time/save"] for row in steps if row.get("time/save")]

    def mean(values: Sequence[float]) -> float:
        return fmean(values) if values else 0.0

    used = sum(row.get("time/step", 0.0) + row.get("time/save", 0.0) + row.get("time/validation", 0.0) for row in rows)
    rollout = mean([min(row["time/rollout"], row["time/step"]) for row in steps])
    return Timing(
        start=max(elapsed - used, 0.0),
        rollout=rollout,
        update=mean([row["time/step"] for row in steps]) - rollout,
        validation=mean([row["time/validation"] / _tasks(row) for row in validations]) * schedule.validation_tasks,
        saving=mean(saves),
        fastest=min((row["time/step"] for row in steps), default=0.0),
        slowest=max((row["time/step"] for row in steps), default=0.0),
        step_cost=mean([_cost(row) for row in steps]),
        validation_cost=mean([_cost(row) / _tasks(row) for row in validations]) * schedule.validation_tasks,
        steps=len(steps),
        source=source,
    )


def _tasks(row: Mapping[str, Any]) -> float:
    """Return the number of tasks of a validation."""
    return max(float(row.get("val/tasks", 0)) + float(row.get("val/unscored_tasks", 0)), 1.0)


def _cost(row: Mapping[str, Any]) -> float:
    """Return the cost of helper models since the previous row."""
    return sum(float(cost) for name, cost in row.items() if name.startswith("helper/") and name.endswith("/cost"))
