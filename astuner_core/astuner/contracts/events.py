"""What happens in a run, as events, and who is told.

A run publishes; it knows none of its subscribers.  Those that a plugin registers (`register_subscribers`) are beside
every run; log sinks (`astuner.LogSink`) are chosen by name.  Invariant: an event is frozen, and every subscriber hears
all that it wants in the order in which they were published.
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
    """Something that happened in a run."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Before anything else, also of a run that is continued."""

    run_dir: Path
    name: str
    settings: Mapping[str, Any]
    """The resolved config, secrets removed."""


@dataclass(frozen=True, kw_only=True)
class RunPlanned(Event):
    """What was asked for, and what will be done, of a run that trains."""

    command: Sequence[str]
    """What runs the same experiment again, as words; may hold secrets."""
    config_file: Path
    plan: Mapping[str, str]
    tasks: Mapping[str, Any] = field(default_factory=dict)
    """What `astuner.contracts.parts.TaskCheckPart` found in them."""


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    """The run goes on after ``step``: what was written of later ones is to be forgotten; the folder's own rows are."""

    step: int
    state: Mapping[str, Any]
    """What `Subscriber.state` said when the state was saved, all together; an older run's may lack some."""


@dataclass(frozen=True, kw_only=True)
class StalenessBounded(Event):
    """What a backbone knows of its weights."""

    most: int | None
    """Updates that weights may be behind when they generate; None: not known."""


@dataclass(frozen=True, kw_only=True)
class TokenizersLoaded(Event):
    """The tokenizers of the policies are at hand."""

    load: Mapping[str, Callable[[], Any]]
    """Policy -> its Hugging Face tokenizer, asked for only where it is needed."""


@dataclass(frozen=True, kw_only=True)
class EpisodeEnded(Event):
    """One episode is over, scored or not."""

    step: int
    episode: Episode


@dataclass(frozen=True, kw_only=True)
class Progressed(Event):
    """``done`` of ``total`` have ended; ``what``: ``rollout``, ``validation`` or ``groups``."""

    step: int
    total_steps: int
    done: int
    total: int
    what: str


@dataclass(frozen=True, kw_only=True)
class GroupsEnded(Event):
    """The whole groups of a step, a validation or a try-out, before anybody looks whether too many episodes failed."""

    step: int
    split: Split
    episodes: Sequence[Episode]
    """In the order in which their tasks were drawn."""


@dataclass(frozen=True, kw_only=True)
class RolledOut(Event):
    """All episodes of a step have ended, and those to train on were cut into samples."""

    step: int
    episodes: Sequence[Episode]
    """Of all groups that were drawn, also those that are not trained on."""
    samples: Mapping[str, Sequence[Sample]]
    """Episode id -> its samples, without advantages; of those that are trained on."""


@dataclass(frozen=True, kw_only=True)
class SamplesCredited(Event):
    """A step's samples have their advantages; published again, it replaces what was said of the step before."""

    step: int
    samples: Sequence[Sample]


@dataclass(frozen=True, kw_only=True)
class LogprobsComputed(Event):
    """What the trainer computed for samples of a step: log-probabilities under the weights before its update.

    They are of the trained tokens in their order, of the distribution at the sampling temperature, as those that the
    rollout recorded; so exp(theirs - recorded) is a token's importance ratio when the update begins.  A trainer reports
    what it computes anyway: under a `rollout_is` correction its own pass over all samples that it trains, otherwise the
    first optimizer step's, so samples of later ones are missing, and so are those without a gradient.
    """

    step: int
    found: Mapping[int, Any]
    """Place of a sample in `SamplesCredited.samples` -> float32 [trained tokens], a numpy array."""


@dataclass(frozen=True, kw_only=True)
class Measured(Event):
    """Numbers of a step or of a validation; names as in ``docs/metrics.md``."""

    step: int
    metrics: Mapping[str, float]


class StepEnded(Measured):
    """A training step is over: rolled out, credited, updated."""


class ValidationEnded(Measured):
    """The held-out tasks were tried."""


@dataclass(frozen=True, kw_only=True)
class Saving(Event):
    """The run's state as of ``step`` is about to be saved: who keeps something has it on the disk when it returns."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """Something a person should read: a plan, a warning, an alarm."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """Nothing more will be trained; the run folder is complete but for what subscribers add to it now."""

    endings: Mapping[str, int]
    """How the run's episodes ended: kind -> how many."""
    error: BaseException | None = None
    """What ended it before its time; then nobody is asked for a summary."""


@dataclass(frozen=True, kw_only=True)
class RunClosed(Event):
    """The last event; also after a failure."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a subscriber adds to the summary of a run that came to its end."""

    lines: Mapping[str, str] = field(default_factory=dict)
    """Label -> text, for a person."""
    verdict: str = ""
    """The one line that is read last."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For ``summary.json``."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a subscriber is given of its run."""

    config: Any
    """The `Config`."""
    run_dir: Path
    policies: Sequence[str]
    """Those that train, where the run tells several apart; else none."""
    trains: bool
    """False: the run only tries episodes out, and has no report."""
    publish: Callable[[Event], None]
    """Tell everybody; what is published while an event is being told follows it."""
    stop: Callable[[AstunerError], None]
    """End the run, in order, after what it is doing, with this error."""
    resume_command: str = ""
    """The command that continues the run, for a shell; empty where nothing is trained, or it is not known."""


def _to_terminal(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Subscriber:
    """Is told what happens in a run.

    By default in a thread of its own, in order, where one that raises, or takes longer than two minutes for an event,
    is reported once and left out of the rest of the run; it never stops it, nor holds it up.
    """

    essential: ClassVar[bool] = False
    """True: the run cannot go on without it (what it must have on disk), so what it raises ends the run."""
    direct: ClassVar[bool] = False
    """True: told by the run itself, which waits for it."""
    remark: Callable[[str], None] = staticmethod(_to_terminal)
    """To be called from any thread: the run tells the person, e.g. that a server is down for the moment."""

    def __init__(self, context: RunContext) -> None:
        """Keep what is needed of the run; a log sink, which is made of its section, has a constructor of its own."""

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        """Those to have beside a run, by default one made with its context; what the plugin hook's target is asked for.

        :raises ConfigError: the run asks for something that cannot be had.
        """
        return [cls(context)]

    @classmethod
    def check(cls, config: Any) -> None:
        """Whether `for_run` would refuse this `Config`, before anything starts.

        :raises ConfigError: it would.
        """
        return None

    def wants(self, event: Event) -> bool:
        """Whether to be told of this event; asked by the run, and answered at once."""
        return True

    def handle(self, event: Event) -> None:
        """Take note of an event."""
        raise NotImplementedError(f"{type(self).__name__}.handle(event) takes note of an event")

    def numbers(self) -> Mapping[str, float]:
        """What it measured since it was last asked, for the row of a step or a validation; it is `direct` then."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """What it needs to count on in a run that is resumed, as JSON under names of its own; it is `direct` then.

        It comes back with `RunResumed`.
        """
        return {}

    def summary(self) -> Summary | None:
        """What it has to say at the end, asked after `RunEnded`; it is `direct` then."""
        return None
