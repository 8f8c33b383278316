"""What of the turns becomes tasks: by feedback, length, likeness, and a helper model's verdict.

Invariant: what is left out is counted with its reason, and what stays keeps its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from astuner_flywheel.near import NearDuplicates
from astuner_flywheel.traces.asking import NO_VERDICT, is_good, wait_for_all
from astuner_flywheel.traces.conversation import said
from astuner_flywheel.traces.settings import Length, NearDuplicatesFilter, TracingConfig
from astuner_flywheel.traces.tally import Tally
from astuner_flywheel.traces.threads import Turn
from astuner_helpers import HelperFailed

if TYPE_CHECKING:
    from astuner_helpers import Helper


def by_feedback(turns: Sequence[Turn], keep: str, tally: Tally) -> list[Turn]:
    """Those whose answers were rated, liked, disliked or corrected; or all."""

    def is_kept(turn: Turn) -> bool:
        of = turn.conversation.feedback
        kept = {"rated": of.rating is not None, "liked": of.liked, "disliked": of.disliked}
        return keep == "all" or kept.get(keep, bool(of.correction))

    return _those([is_kept(turn) for turn in turns], turns, f"not {keep} (keep: {keep})", tally)


def by_length(turns: Sequence[Turn], length: Length, tally: Tally) -> list[Turn]:
    longest = float("inf") if length.max is None else length.max
    is_kept = [length.min <= len(turn.conversation.query.strip()) <= longest for turn in turns]
    return _those(is_kept, turns, "a user's message that is too short or too long (filters.length)", tally)


def distinct(turns: Sequence[Turn], tally: Tally) -> list[Turn]:
    """Each question after the same history once: the one that most is known about."""
    chosen: dict[str, int] = {}
    for i in _best_first(turns):
        chosen.setdefault(turns[i].conversation.task_id, i)
    kept = set(chosen.values())
    return _those([i in kept for i in range(len(turns))], turns, "the same question again", tally)


def not_alike(turns: Sequence[Turn], near: NearDuplicatesFilter, tally: Tally) -> list[Turn]:
    """Of questions that nearly repeat each other, the one that most is known about.

    Turns of one thread are compared by all that the user said, so one is not taken for another.
    """
    known = NearDuplicates(near.threshold, numbers_tell_apart=near.numbers_tell_apart)
    kept = {i for i in _best_first(turns) if known.add(str(i), compared(turns[i])) is None}
    reason = "a question that nearly repeats another (filters.near_duplicates)"
    return _those([i in kept for i in range(len(turns))], turns, reason, tally)


def approved(turns: Sequence[Turn], rubric: str, helper: Helper, tally: Tally) -> list[Turn]:
    """Those that a helper model finds good; what it gives no verdict about is left out.

    :raises astuner_helpers.HelperFailed: it cannot be asked, or gives no verdict about more than a tenth.
    """
    verdicts = wait_for_all([is_good(helper, turn.conversation, rubric) for turn in turns])
    judged, good = [], []
    for turn, verdict in zip(turns, verdicts, strict=True):
        if isinstance(verdict, HelperFailed):
            tally.drop(NO_VERDICT, f"{turn.conversation.place}: {verdict}")
        else:
            judged.append(turn)
            good.append(verdict)
    return _those(good, judged, "a helper model found it bad (filters.llm_evaluate)", tally)


def with_answer(turns: Sequence[Turn], config: TracingConfig, tally: Tally) -> list[Turn]:
    has = [bool(reference(turn, config)) for turn in turns]
    return _those(has, turns, "no reference answer (require_answer)", tally)


def reference(turn: Turn, config: TracingConfig) -> str:
    """The reference answer of a turn's task; empty where there is none."""
    conversation = turn.conversation
    liked = config.liked_as_answer and conversation.feedback.liked
    return conversation.feedback.correction or (conversation.answer if liked else "")


def compared(turn: Turn) -> str:
    """What a turn is compared by: all that the user said up to here."""
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
