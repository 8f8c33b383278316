"""Turn traces into tasks, for the task reader ``tracing`` and ``astuner data import``.

Steps: read, split into turns, redact, join feedback, filter, hold out. In training, the policy answers the questions
again.

Redaction finds e-mail addresses, phone numbers and keys by patterns only: names, postal addresses and anything that no
pattern matches remain. Patterns prefer to keep a number rather than to corrupt a calculation, so a phone number needs a
plus sign or its usual separators. Helper models decide whether a task is good, and what the next message of a user
expresses about an answer. Texts of traces are sent as JSON inside the user message, and the verdict is structured.

Invariants: the same files and settings give the same tasks with the same IDs in the same order, and the report accounts
for every turn; answers of other models are only used in prompts and metadata, and none of their tokens is trained; a
replaced text is not replaced again; no text of a trace reaches the system role or is a control token of a chat
template; without a valid verdict nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from astuner import Task, TaskReader
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import Split
from astuner_flywheel.near import THRESHOLD, NearDuplicates
from astuner_flywheel.splits import Sides, split
from astuner_flywheel.support import run
from astuner_flywheel.traces.conversation import (
    IDS,
    TABLES,
    Conversation,
    Feedback,
    Given,
    Opinions,
    Tally,
    Turn,
    said,
    shared_ids,
    turns_of,
)
from astuner_flywheel.traces.messages import text_of
from astuner_flywheel.traces.settings import NearDuplicatesFilter, TracingConfig
from astuner_flywheel.traces.sources import feedback_file, read_source
from astuner_helpers import HelperFailed
from astuner_helpers.members import all_answered
from astuner_helpers.untrusted import neutralise

if TYPE_CHECKING:
    from astuner_helpers import Helper, HelperModels


_PATTERNS = [(name, re.compile(pattern)) for each in TABLES["redacted"] for name, pattern in each.items()]


def redacted(text: str, counts: Counter[str]) -> str:
    """Return ``text`` with ``[email]``, ``[phone]`` and ``[key]`` replacements, and add their numbers to ``counts``."""
    for name, pattern in _PATTERNS:
        text, n = pattern.subn(f"[{name}]", text)
        if n:
            counts[name] += n
    return text


def redacted_message(message: Mapping[str, Any], counts: Counter[str]) -> dict[str, Any]:
    """Return a redacted message (text content, tool calls with text arguments)."""
    found = {**message, "content": redacted(str(message.get("content") or ""), counts)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": redacted(call["function"]["arguments"], counts)}}
            for call in calls
        ]
    return found


T = TypeVar("T")

LONGEST = 20_000
"""Maximum characters of a text to show to a helper model. The middle of longer texts is cut out."""
NO_VERDICT = "no verdict from the helper model"


class TaskVerdict(BaseModel):
    """Whether a question makes a good task."""

    reason: str = Field(description="One sentence.")
    verdict: Literal["GOOD", "BAD"]


class Reaction(BaseModel):
    """What a user's next message says of the answer before it."""

    reason: str = Field(description="One sentence.")
    opinion: Literal["satisfied", "dissatisfied", "unclear"]


async def is_good(helper: Helper, conversation: Conversation, rubric: str) -> bool:
    """Return whether a question makes a good task.

    :raises astuner_helpers.HelperFailed: There is no valid verdict.
    """
    instructions = TABLES["is_good"].replace("{DATA}", TABLES["data"]).replace("{RUBRIC}", rubric)
    said = [m for m in conversation.before if m["role"] in ("user", "assistant") and text_of(m)]
    before = [{"role": str(m["role"]), "text": _cut(text_of(m), 2_000)} for m in said[-6:]]
    shown = {"before": before, "question": _cut(conversation.query)}
    return bool((await _ask(helper, instructions, shown, TaskVerdict, "filter of traces")).verdict == "GOOD")


async def reaction(helper: Helper, conversation: Conversation) -> float | None:
    """Return 1 or -1 for the opinion in the user's next message, or None if it contains none.

    :raises astuner_helpers.HelperFailed: There is no valid verdict.
    """
    instructions = TABLES["reaction"].replace("{DATA}", TABLES["data"])
    shown = {
        "question": _cut(conversation.query),
        "answer": _cut(conversation.answer),
        "next_message": _cut(conversation.after),
    }
    opinion = (await _ask(helper, instructions, shown, Reaction, "implicit feedback")).opinion
    return {"satisfied": 1.0, "dissatisfied": -1.0}.get(opinion)


def wait_for_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T | HelperFailed]:
    """Return the results of `all_answered` from synchronous code, even if a loop runs in this thread.

    :raises HelperFailed: The helper model is unusable. The message has the number of answers and how to continue.
    """

    def stopped(last: HelperFailed, answered: int, failed: int) -> str:
        return (
            f"{last}\nstopped: {failed:,} of {len(work):,} questions have no verdict, {answered:,} were answered. "
            "To continue, repeat the command when the helper model is available; cached answers are reused (unless "
            "its cache is off)"
        )

    return run(all_answered(work, stopped))


async def _ask(helper: Helper, instructions: str, shown: dict[str, Any], answer: type[Any], purpose: str) -> Any:
    messages = [
        {"role": "system", "content": instructions},
        {"role": "user", "content": json.dumps(shown, ensure_ascii=False, indent=1)},
    ]
    return (await helper.ask(messages, purpose=purpose, answer=answer, temperature=0.0)).data


def _cut(text: str, longest: int = LONGEST) -> str:
    """Return the part of a text to show, without control tokens of chat templates."""
    half = longest // 2
    if len(text) > longest:  # cut before neutralizing: a text of many megabytes must not take minutes
        text = f"{text[:half]}\n… [{len(text) - longest:,} characters] …\n{text[-half:]}"
    return neutralise(text)


def distinct(turns: Sequence[Turn], tally: Tally) -> list[Turn]:
    """Return each question after the same history once, preferring the one with most information."""
    chosen: dict[str, int] = {}
    for i in _best_first(turns):
        chosen.setdefault(turns[i].conversation.task_id, i)
    kept = set(chosen.values())
    return _those([i in kept for i in range(len(turns))], turns, "a repeated question", tally)


def not_alike(turns: Sequence[Turn], near: NearDuplicatesFilter, tally: Tally) -> list[Turn]:
    """Return one of each set of near-duplicate questions, preferring the one with most information.

    Turns of one thread are compared by all messages of the user, so they are not mistaken for each other.
    """
    known = NearDuplicates[int](near.threshold, numbers_tell_apart=near.numbers_tell_apart)
    kept = {i for i in _best_first(turns) if known.add(i, compared(turns[i])) is None}
    reason = "a near-duplicate question (filters.near_duplicates)"
    return _those([i in kept for i in range(len(turns))], turns, reason, tally)


def approved(turns: Sequence[Turn], rubric: str, helper: Helper, tally: Tally) -> list[Turn]:
    """Return turns that a helper model finds good. Turns without a verdict are dropped.

    :raises astuner_helpers.HelperFailed: It is unavailable, or gives no verdict about more than a tenth of the turns.
    """
    verdicts = wait_for_all([is_good(helper, turn.conversation, rubric) for turn in turns])
    judged, good = [], []
    for turn, verdict in zip(turns, verdicts, strict=True):
        if isinstance(verdict, HelperFailed):
            tally.drop(NO_VERDICT, f"{turn.conversation.place}: {verdict}")
        else:
            judged.append(turn)
            good.append(verdict)
    return _those(good, judged, "judged bad by the helper model (filters.llm_evaluate)", tally)


def reference(turn: Turn, config: TracingConfig) -> str:
    """Return the reference answer of a turn's task, or an empty text."""
    conversation = turn.conversation
    liked = config.liked_as_answer and conversation.feedback.liked
    return conversation.feedback.correction or (conversation.answer if liked else "")


def compared(turn: Turn) -> str:
    """Return the text for comparing turns: all messages of the user up to here."""
    return "\n".join(asked for asked, _ in said(turn.conversation.messages, ""))


def _best_first(turns: Sequence[Turn]) -> list[int]:
    def known(i: int) -> tuple[int, int]:
        of = turns[i].conversation.feedback
        return (0 if of.correction else 1 if of.liked else 2 if of.rating is not None else 3, i)

    return sorted(range(len(turns)), key=known)


def _those(is_kept: Sequence[bool], turns: Sequence[Turn], reason: str, tally: Tally) -> list[Turn]:
    for turn, kept in zip(turns, is_kept, strict=True):
        if not kept:
            tally.drop(reason, turn.conversation.place)
    return [turn for turn, kept in zip(turns, is_kept, strict=True) if kept]


Say = Callable[[str], None]
SECTION = "astuner.task_reader.tracing"
_TOLD_EVERY = 20_000


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The tasks, and the report on everything else."""

    train: Sequence[Task]
    validation: Sequence[Task]
    report: dict[str, Any]
    skipped: dict[str, str]
    """Places of unreadable data and the reasons with their numbers."""


def prepare(
    config: TracingConfig,
    base_dir: Path,
    helper_models: HelperModels | None = None,
    say: Say = lambda line: None,
) -> Prepared:
    """Read the sources of ``config``, and create tasks from them.

    :param base_dir: Base of relative paths.
    :param say: Receives progress lines.
    :raises DataError: A source cannot be read, or no task is left.
    :raises ConfigError: A helper model is required and missing.
    :raises astuner_helpers.HelperFailed: A helper model gives no verdict about more than a tenth of its questions.
        Answers so far are cached.
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
    known = [turn.conversation.feedback for turn in turns]
    told = {"liked": sum(of.liked for of in known), "disliked": sum(of.disliked for of in known)}
    told["corrected"] = sum(bool(of.correction) for of in known)
    report = {
        "sources": config.sources,
        **tally.report(),
        "feedback": {**opinions.report(), **inferred, **told},
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
    """Return all IDs that feedback can name, including replies without a turn, so that no other turn matches."""
    seen: dict[str, set[str]] = {name: set() for name in IDS}
    for of in conversations:
        seen["response_id"].update(of.response_ids)
        seen["trace_id"].add(of.trace_id)
        seen["conversation_id"].add(of.conversation_id or of.session)
    return seen


def _joined(turns: Sequence[Turn], opinions: Opinions) -> list[Turn]:
    """Return the turns with feedback from the chat and from other sources."""
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
        after=redacted(conversation.after, Counter()),  # counted in the next turn
        feedback=replace(
            feedback,
            correction=redacted(feedback.correction, counts),
            comment=redacted(feedback.comment, counts),
        ),
    )


def _inferred(turns: list[Turn], helper: Helper, say: Say) -> tuple[list[Turn], dict[str, int]]:
    """Return turns with ratings inferred from the users' next messages, and their numbers.

    Answers without a verdict remain unrated.
    """
    asked = [i for i, t in enumerate(turns) if t.conversation.after and t.conversation.feedback.rating is None]
    say(f"asking {helper.name} for the users' opinions on {len(asked):,} answers")
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
    keep, length = config.keep, config.filters.length
    is_kept = [_is_wanted(turn.conversation.feedback, keep) for turn in turns]
    kept = _those(is_kept, turns, f"not {keep} (keep: {keep})", tally)
    if config.require_answer:
        is_kept = [bool(reference(turn, config)) for turn in kept]
        kept = _those(is_kept, kept, "no reference answer (require_answer)", tally)
    if length is not None:
        longest = float("inf") if length.max is None else length.max
        is_kept = [length.min <= len(turn.conversation.query.strip()) <= longest for turn in kept]
        kept = _those(is_kept, kept, "a user's message that is too short or too long (filters.length)", tally)
    kept = distinct(kept, tally)
    if config.filters.near_duplicates is not None:
        kept = not_alike(kept, config.filters.near_duplicates, tally)
    if (judged := config.filters.llm_evaluate) is not None and kept:
        helper = _helper(helper_models, judged.helper_model, "filters.llm_evaluate.helper_model")
        say(f"asking {helper.name} about {len(kept):,} tasks")
        kept = approved(kept, judged.rubric, helper, tally)
    return kept


def _is_wanted(feedback: Feedback, keep: str) -> bool:
    wanted = {"rated": feedback.rating is not None, "liked": feedback.liked, "disliked": feedback.disliked}
    return keep == "all" or wanted.get(keep, bool(feedback.correction))


def _helper(helper_models: HelperModels | None, name: str, key: str) -> Helper:
    if helper_models is None:
        raise ConfigError(f"{SECTION}.{key}: {name!r} requires a section astuner.helper_models.{name}")
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
    """Return the task that asks a turn's question again."""
    of = turn.conversation
    metadata: dict[str, Any] = {}
    if answer := reference(turn, config):
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


def _nothing_left(config: TracingConfig, tally: Tally, opinions: Opinions) -> str:
    counted = (tally.bad + tally.dropped).most_common(6)
    reasons = [f"{n} × {reason} (first: {tally.first[reason]})" for reason, n in counted]
    given = opinions.report()["given"]
    hint = "" if config.keep == "all" else f"; {given} feedback entries were found; use keep: all to keep every answer"
    what = "; ".join(reasons) or "the sources contain no conversations"
    return f"no tasks are left from {', '.join(config.sources)}: {what}{hint}"


class TracingTaskReader(TaskReader):
    """Read the sources once, for all splits.

    :param base_dir: Base of relative paths. None: the working directory.
    :param helper_models: Helper models for filters.
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
        """Places and reasons of unreadable data."""

    @property
    def report(self) -> dict[str, Any]:
        """Return what was read, dropped and held out. Reads the sources if necessary."""
        return self._read().report

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> TracingTaskReader:
        return cls(section, context.base_dir, context.helper_models)

    def read(self, split: Split) -> Iterator[Task]:
        """Yield the tasks of ``split``, oldest conversation first.

        :raises astuner.contracts.errors.DataError: A source cannot be read, or no task is left.
        :raises astuner_helpers.HelperFailed: A helper model gives no verdict.
        """
        prepared = self._read()
        yield from prepared.train if split is Split.TRAIN else prepared.validation

    def _read(self) -> Prepared:
        if self._prepared is None:
            self._prepared = prepare(self.config, self._base_dir, self._helper_models)
            self.skipped = self._prepared.skipped
        return self._prepared
