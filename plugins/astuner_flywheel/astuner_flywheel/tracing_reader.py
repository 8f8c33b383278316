"""From traces to tasks, once: the task reader ``tracing``, and what ``astuner data import`` writes into files.

Read, split into turns, redact, join feedback, leave out, hold out.  The policy answers anew.  Invariants: the same
files and settings give the same tasks with the same ids in the same order, and the report accounts for every turn;
what another model answered is at most part of a prompt or of the metadata, and no token of it is ever trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner import Task, TaskReader
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import Split
from astuner_flywheel.near import THRESHOLD
from astuner_flywheel.splits import Sides, split
from astuner_flywheel.traces import filters
from astuner_flywheel.traces.conversation import Conversation, Tally, Turn, shared_ids, turns_of
from astuner_flywheel.traces.feedback import IDS, Feedback, Given, Opinions
from astuner_flywheel.traces.filters import NO_VERDICT, reaction, redacted, redacted_message, wait_for_all
from astuner_flywheel.traces.settings import TracingConfig
from astuner_flywheel.traces.sources import feedback_file, read_source
from astuner_helpers import HelperFailed

if TYPE_CHECKING:
    from astuner_helpers import Helper, HelperModels


Say = Callable[[str], None]
SECTION = "astuner.task_reader.tracing"
_TOLD_EVERY = 20_000


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The tasks, and what became of everything else."""

    train: Sequence[Task]
    validation: Sequence[Task]
    report: dict[str, Any]
    skipped: dict[str, str]
    """Where something could not be read first, and why, with how often."""


def prepare(
    config: TracingConfig,
    base_dir: Path,
    helper_models: HelperModels | None = None,
    say: Say = lambda line: None,
) -> Prepared:
    """Read the sources of ``config`` and make tasks of them.

    :param base_dir: what relative paths start from.
    :param say: is told what goes on, a line at a time.
    :raises DataError: a source cannot be read, or no task is left.
    :raises ConfigError: a helper model is needed and there is none.
    :raises astuner_helpers.HelperFailed: a helper model gives no verdict about more than a tenth of what it is
        asked; what it said so far is kept.
    """
    tally, opinions = Tally(config.on_bad_trace), Opinions()
    conversations = _read(config, base_dir, tally, opinions, say)
    opinions.file(_ids(conversations))
    turns = turns_of(conversations, config.turns)
    tally.read["turns"] = len(turns)
    counts: Counter[str] = Counter()
    turns = _joined(turns, opinions)
    if config.pii == "redact":
        turns = [replace(turn, conversation=_redacted(turn.conversation, counts)) for turn in turns]
    inferred = {"inferred": 0}
    if config.implicit_feedback is not None:
        helper = _helper(helper_models, config.implicit_feedback.helper_model, "implicit_feedback.helper_model")
        turns, inferred = _inferred(turns, helper, say)
    kept = _filtered(turns, config, helper_models, tally, say)
    if not kept:
        raise DataError(_nothing_left(config, tally, opinions))
    sides = _sides(kept, config)
    report = {
        "sources": config.sources,
        **tally.report(),
        "feedback": {**opinions.report(), **inferred, **_opinions_of(turns)},
        "redacted": dict(counts),
        "tasks": len(kept),
        "with a reference answer": sum("answer" in task.metadata for task in [*sides.train, *sides.validation]),
        "split": sides.report(),
    }
    skipped = {tally.first[reason]: f"{reason} ({n} in all)" for reason, n in tally.bad.items()}
    return Prepared(train=sides.train, validation=sides.validation, report=report, skipped=skipped)


def _read(config: TracingConfig, base_dir: Path, tally: Tally, opinions: Opinions, say: Say) -> list[Conversation]:
    found: list[Conversation] = []
    for name in config.sources:
        say(f"reading {name}")
        for each in read_source(base_dir / Path(name).expanduser(), config.max_line_bytes, tally):
            if isinstance(each, Given):
                opinions.add([each])
            else:
                found.append(each)
                if len(found) % _TOLD_EVERY == 0:
                    say(f"{len(found):,} conversations so far")
    for name in config.feedback:
        opinions.add(feedback_file(base_dir / Path(name).expanduser(), config.max_line_bytes, tally))
    return found


def _ids(conversations: Sequence[Conversation]) -> dict[str, set[str]]:
    """What feedback can name.  Of all that was read: a reply that is no turn of its own is not taken for another."""
    seen: dict[str, set[str]] = {name: set() for name in IDS}
    for of in conversations:
        seen["response_id"].update(of.response_ids)
        seen["trace_id"].add(of.trace_id)
        seen["conversation_id"].add(of.conversation_id or of.session)
    return seen


def _joined(turns: Sequence[Turn], opinions: Opinions) -> list[Turn]:
    """The turns with what is known about their answers: beside the chat, and from elsewhere."""
    shared = shared_ids(turns)
    found = []
    for turn in turns:
        of = turn.conversation
        name = of.conversation_id or of.session
        given = opinions.about(
            response_ids=of.response_ids,
            trace_id=of.trace_id,
            conversation_id=name,
            is_last=turn.is_last and name not in shared,
        )
        found.append(replace(turn, conversation=replace(of, feedback=of.feedback.merged(given))))
    return found


def _redacted(conversation: Conversation, counts: Counter[str]) -> Conversation:
    feedback = conversation.feedback
    return replace(
        conversation,
        messages=tuple(redacted_message(message, counts) for message in conversation.messages),
        answer=redacted(conversation.answer, counts),
        after=redacted(conversation.after, Counter()),  # counted where it is the next turn's own
        feedback=replace(
            feedback,
            correction=redacted(feedback.correction, counts),
            comment=redacted(feedback.comment, counts),
        ),
    )


def _inferred(turns: list[Turn], helper: Helper, say: Say) -> tuple[list[Turn], dict[str, int]]:
    """The turns with ratings read from what users said next, and what that gave: an answer whose question the helper
    gives no verdict about stays unrated.
    """
    asked = [i for i, t in enumerate(turns) if t.conversation.after and t.conversation.feedback.rating is None]
    say(f"asking {helper.name} what users thought of {len(asked):,} answers")
    found = failed = 0
    for i, rating in zip(asked, wait_for_all([reaction(helper, turns[i].conversation) for i in asked]), strict=True):
        if isinstance(rating, HelperFailed):
            failed += 1
        elif rating is not None:
            of = turns[i].conversation
            known = replace(of.feedback, rating=rating, inferred=True)
            turns[i] = replace(turns[i], conversation=replace(of, feedback=known))
            found += 1
    return turns, {"inferred": found} | ({NO_VERDICT: failed} if failed else {})


def _filtered(
    turns: Sequence[Turn], config: TracingConfig, helper_models: HelperModels | None, tally: Tally, say: Say
) -> list[Turn]:
    kept = filters.by_feedback(turns, config.keep, tally)
    if config.require_answer:
        kept = filters.with_answer(kept, config, tally)
    if config.filters.length is not None:
        kept = filters.by_length(kept, config.filters.length, tally)
    kept = filters.distinct(kept, tally)
    if config.filters.near_duplicates is not None:
        kept = filters.not_alike(kept, config.filters.near_duplicates, tally)
    if (judged := config.filters.llm_evaluate) is not None and kept:
        helper = _helper(helper_models, judged.helper_model, "filters.llm_evaluate.helper_model")
        say(f"asking {helper.name} about {len(kept):,} tasks")
        kept = filters.approved(kept, judged.rubric, helper, tally)
    return kept


def _helper(helper_models: HelperModels | None, name: str, key: str) -> Helper:
    if helper_models is None:
        raise ConfigError(f"{SECTION}.{key}: {name!r} needs a section astuner.helper_models.{name}")
    return helper_models.get(name, where=f"{SECTION}.{key}")


def _sides(turns: Sequence[Turn], config: TracingConfig) -> Sides:
    tasks = [task_of(turn, config) for turn in turns]
    if not config.validation_share:
        return Sides(train=tuple(tasks), validation=())
    groups = {task.task_id: turn.group for task, turn in zip(tasks, turns, strict=True)}
    near = config.filters.near_duplicates
    return split(
        tasks,
        validation_share=config.validation_share,
        seed=config.seed,
        threshold=THRESHOLD if near is None else near.threshold,
        numbers_tell_apart=near is not None and near.numbers_tell_apart,
        group=lambda task: groups[task.task_id],
    )


def task_of(turn: Turn, config: TracingConfig) -> Task:
    """The task that asks again what was asked."""
    of = turn.conversation
    metadata: dict[str, Any] = {}
    if answer := filters.reference(turn, config):
        metadata["answer"] = answer
    if of.feedback.rating is not None:
        metadata |= {"rating": of.feedback.rating} | ({"rating_inferred": True} if of.feedback.inferred else {})
    if of.feedback.comment:
        metadata["comment"] = of.feedback.comment
    metadata["trace"] = {
        "source": Path(of.source).name,
        "trace_id": of.trace_id,
        "span_id": of.span_id,
        "conversation_id": of.conversation_id or of.session,
        "model": of.model,
        "answer": of.answer,
    }
    return Task(task_id=of.task_id, main_query=of.query, init_messages=tuple(of.before), metadata=metadata)


def _opinions_of(turns: Sequence[Turn]) -> dict[str, int]:
    known: list[Feedback] = [turn.conversation.feedback for turn in turns]
    return {
        "liked": sum(of.liked for of in known),
        "disliked": sum(of.disliked for of in known),
        "corrected": sum(bool(of.correction) for of in known),
    }


def _nothing_left(config: TracingConfig, tally: Tally, opinions: Opinions) -> str:
    counted = (tally.bad + tally.dropped).most_common(6)
    reasons = [f"{n} × {reason} (first: {tally.first[reason]})" for reason, n in counted]
    given = opinions.report()["given"]
    hint = "" if config.keep == "all" else f"; {given} pieces of feedback were found, and keep: all takes every answer"
    what = "; ".join(reasons) or "the sources hold no conversation"
    return f"no task is left of {', '.join(config.sources)}: {what}{hint}"


class TracingTaskReader(TaskReader):
    """Reads the sources once, whichever split is asked for first.

    :param base_dir: what relative paths start from; None is the working directory.
    :param helper_models: for the filters that ask one.
    """

    config: TracingConfig

    def __init__(
        self, config: TracingConfig, base_dir: Path | None = None, helper_models: HelperModels | None = None
    ) -> None:
        super().__init__(config)
        self._base_dir = base_dir or Path()
        self._helper_models = helper_models
        self._prepared: Prepared | None = None
        self.skipped: Mapping[str, str] = {}
        """What could not be read: where it came up first, and why."""

    @property
    def report(self) -> dict[str, Any]:
        """What was read, left out and held out; reads the sources if that was not done yet."""
        return self._read().report

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> TracingTaskReader:
        return cls(section, context.base_dir, context.helper_models)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``, oldest conversation first.

        :raises astuner.contracts.errors.DataError: a source cannot be read, or no task is left.
        :raises astuner_helpers.HelperFailed: a helper model gives no verdict.
        """
        prepared = self._read()
        yield from prepared.train if split is Split.TRAIN else prepared.validation

    def _read(self) -> Prepared:
        if self._prepared is None:
            self._prepared = prepare(self.config, self._base_dir, self._helper_models)
            self.skipped = self._prepared.skipped
        return self._prepared
