"""Events of a run and their subscribers.

A run publishes events without knowing its subscribers. Subscribers that plugins register (`register_subscribers`)
receive the events of every run; log sinks (`astuner.LogSink`) are selected by name.

Invariant: events are frozen, and each subscriber receives the events it wants in the order of publication.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from astuner.contracts.errors import AstunerError
from astuner.contracts.types import Episode, Sample, Split


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of events in a run."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """First event of a run, also of a resumed run."""

    run_dir: Path
    name: str
    settings: Mapping[str, Any]
    """The resolved config without secrets."""


@dataclass(frozen=True, kw_only=True)
class RunPlanned(Event):
    """The command and plan of a training run."""

    command: Sequence[str]
    """Command that repeats the run, as separate words. May contain secrets."""
    config_file: Path
    plan: Mapping[str, str]
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """Findings of `astuner.contracts.parts.TaskCheckPart`."""


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    """The run resumes after ``step``. Discard data of later steps; the run folder's own rows are already removed."""

    step: int
    state: Mapping[str, Any]
    """Combined results of `Subscriber.state` at the time of saving; runs of older versions may lack some keys."""


@dataclass(frozen=True, kw_only=True)
class StalenessBounded(Event):
    """Bound on the staleness of the weights that generate."""

    most: int | None
    """Maximum number of updates that the generating weights may lag behind; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class TokenizersLoaded(Event):
    """The tokenizers of the policies are available."""

    load: Mapping[str, Callable[[], Any]]
    """Policy -> function that returns its Hugging Face tokenizer, loaded on demand."""


@dataclass(frozen=True, kw_only=True)
class EpisodeEnded(Event):
    """An episode ended, scored or not."""

    step: int
    episode: Episode


@dataclass(frozen=True, kw_only=True)
class Progressed(Event):
    """Progress: ``done`` of ``total`` ended. ``what`` is ``rollout``, ``validation`` or ``groups``."""

    step: int
    total_steps: int
    done: int
    total: int
    what: str
    remaining: float | None = None
    """Estimated seconds until the run ends; None: unknown."""
    elapsed: float = 0.0
    """Seconds since this process started the run."""


@dataclass(frozen=True, kw_only=True)
class GroupsEnded(Event):
    """All groups of a step, validation or try-out ended. Published before the check for too many failed episodes."""

    step: int
    split: Split
    episodes: Sequence[Episode]
    """Episodes in the order in which their tasks were drawn."""


@dataclass(frozen=True, kw_only=True)
class RolledOut(Event):
    """All episodes of a step ended, and the samples to train on were built."""

    step: int
    episodes: Sequence[Episode]
    """Episodes of all drawn groups, including groups that are not trained on."""
    samples: Mapping[str, Sequence[Sample]]
    """Episode ID -> its samples, without advantages, for the episodes to train on."""


@dataclass(frozen=True, kw_only=True)
class SamplesCredited(Event):
    """A step's samples have advantages. A second event for the same step replaces the first."""

    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True, kw_only=True)
class LogprobsComputed(Event):
    """Log-probabilities that the trainer computed for samples of a step, under the weights before its update.

    They belong to the trained tokens in order, at the sampling temperature, like the recorded ones. So exp(computed -
    recorded) is a token's importance ratio at the start of the update. A trainer reports only values that it computes
    anyway: with a `rollout_is` correction, for all trained samples; otherwise for the samples with a gradient in the
    first optimizer step.
    """

    step: int
    found: Mapping[int, Any]
    """Index of a sample in `SamplesCredited.samples` -> float32 [trained tokens], a NumPy array."""


@dataclass(frozen=True, kw_only=True)
class Measured(Event):
    """Metrics of a step or a validation; ``docs/metrics.md`` lists the names."""

    step: int
    metrics: Mapping[str, float]


class StepEnded(Measured):
    """A training step ended: rollout, credit and update."""


class ValidationEnded(Measured):
    """A validation on the held-out tasks ended."""


@dataclass(frozen=True, kw_only=True)
class Saving(Event):
    """The run's state after ``step`` is about to be saved. Write data to disk before returning."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """Text for the user: a plan, a warning, an alarm."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Training ended. The run folder is complete, except for files that subscribers add now."""

    endings: Mapping[str, int]
    """Stop reason of the run's episodes -> count."""
    error: BaseException | None = None
    """Error that ended the run early. Then subscribers are not asked for a summary."""


@dataclass(frozen=True, kw_only=True)
class RunClosed(Event):
    """The last event; also after a failure."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A subscriber's contribution to the summary of a finished run."""

    lines: Mapping[str, str] = field(default_factory=dict)
    """Label -> text, for the console."""
    verdict: str = ""
    """Text of the verdict, printed last."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Data for ``summary.json``."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Information about the run, passed to a subscriber."""

    config: Any
    """The `Config`."""
    run_dir: Path
    policies: Sequence[str]
    """Trained policies, if the run has several; otherwise empty."""
    trains: bool
    """False: the run only tries episodes and has no report."""
    publish: Callable[[Event], None]
    """Publish an event. Events published while handling another event follow it."""
    stop: Callable[[AstunerError], None]
    """Stop the run with this error after its current operation."""
    resume_command: str = ""
    """Shell command that resumes the run; empty if the run does not train or the command is unknown."""


def _to_terminal(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Subscriber:
    """Receiver of the events of a run.

    By default, a subscriber handles events in its own thread, in order. If it raises or takes longer than two minutes
    for an event, the error is reported once and the subscriber is disabled; the run continues.
    """

    essential: ClassVar[bool] = False
    """Whether the run requires it, e.g. to write to disk. If so, an error of the subscriber ends the run."""
    direct: ClassVar[bool] = False
    """Whether the run calls it directly and waits for it."""
    remark: Callable[[str], None] = staticmethod(_to_terminal)
    """Print a note for the user from any thread, e.g. that a server is temporarily unavailable."""

    def __init__(self, context: RunContext) -> None:
        """Store the required information about the run. Log sinks have a different constructor."""

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        """Return the subscribers for a run, by default one instance.

        :raises ConfigError: The experiment requires something that is not available.
        """
        return [cls(context)]

    @classmethod
    def check(cls, config: Any) -> None:
        """Check a `Config` before the run starts.

        :raises ConfigError: `for_run` would reject it.
        """
        return None

    def wants(self, event: Event) -> bool:
        """Return whether to receive this event. The run calls it directly, so it must be fast."""
        return True

    def handle(self, event: Event) -> None:
        """Handle an event."""
        raise NotImplementedError(f"{type(self).__name__} must implement handle(event)")

    def numbers(self) -> Mapping[str, float]:
        """Return metrics since the last call, for the row of a step or validation. For `direct` subscribers."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Return JSON data to save with the run's state, under unique names. For `direct` subscribers.

        `RunResumed` returns the data when the run resumes.
        """
        return {}

    def summary(self) -> Summary | None:
        """Return its contribution to the summary; called after `RunEnded`. For `direct` subscribers."""
        return None
