"""How an attempt ended, and what it is called: from what was raised to a stop reason and a sentence.

Frameworks wrap and swallow errors, so the one that came out says little; what the model tuner saw says more.  A limit
that the policy ran into, or a request that was refused, counts only where it is what ended the workflow: it may have
coped with it and failed of something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from astuner.contracts.errors import (
    ContextOverflow,
    EnvironmentFailed,
    EpisodeAborted,
    EpisodeError,
    JudgeFailed,
    ModelFailed,
    PromptTooLong,
    TurnLimitReached,
    UnsupportedRequest,
    safe_text,
    told,
)
from astuner.contracts.types import Episode, FinishReason, StopReason, Turn, WorkflowOutput
from astuner.plugins.import_hints import import_hint
from astuner.plugins.user_code import raised_at
from astuner.rollout.threads import LoopBlocked, Misbehaved, OutOfTime

if TYPE_CHECKING:
    from astuner.config.schema import AstunerSection

LIMITS = (ContextOverflow, TurnLimitReached)
"""What an agent may run into, cope with, and still be judged by what it returns."""

BEARABLE = (*LIMITS, UnsupportedRequest)
"""What an agent may cope with."""

_NONE = "'NoneType' object"
_HINTS = {
    "'coroutine' object": "; is an `await` missing there?",
    _NONE: "; the model was not asked yet: is the agent given model_tuner, as in model=model_tuner?",
}
"""What an error of a workflow says -> what it mostly means."""

_OUTCOMES: tuple[tuple[type[EpisodeError], StopReason], ...] = (
    (PromptTooLong, StopReason.PROMPT_TOO_LONG),
    (ContextOverflow, StopReason.CONTEXT_OVERFLOW),
    (TurnLimitReached, StopReason.TRUNCATED),
    (EpisodeAborted, StopReason.CHECK_ABORTED),
    (UnsupportedRequest, StopReason.WORKFLOW_FAILED),
    (LoopBlocked, StopReason.TIMED_OUT),
    (ModelFailed, StopReason.MODEL_FAILED),
    (EnvironmentFailed, StopReason.ENVIRONMENT_FAILED),
    (JudgeFailed, StopReason.JUDGE_FAILED),
)


def cut_off(turns: Sequence[Turn], settings: AstunerSection) -> str:
    """Which limit cut off the last reply, and what to raise; empty where none did."""
    if not turns or turns[-1].generation.finish_reason is not FinishReason.LENGTH:
        return ""
    last = turns[-1]
    said = len(last.generation.response_ids)
    return (
        f"the last reply of agent {last.agent!r} was cut off after {said} tokens{advice(cut_by(last, turns, settings))}"
    )


def cut_by(turn: Turn, turns: Sequence[Turn], settings: AstunerSection) -> str:
    """The key of the limit that cut a reply off; empty where it is the model's context or the agent's `max_tokens`.

    :param turns: all of the episode.
    """
    prompt, said = len(turn.generation.prompt_ids), len(turn.generation.response_ids)
    if said >= settings.rollout.max_response_length_in_one_turn:
        return "astuner.rollout.max_response_length_in_one_turn"
    by_index, first = {t.index: t for t in turns}, turn
    while first.continues is not None:
        first = by_index[first.continues]
    most = settings.data.max_response_length
    if most is not None and prompt + said - len(first.generation.prompt_ids) >= most:
        return "astuner.data.max_response_length"
    context = settings.rollout.max_model_len
    return "astuner.rollout.max_model_len" if context is not None and prompt + said >= context else ""


def before_that(reason: StopReason, error: str) -> str:
    """Of an attempt without a verdict, what a reader has to know besides: how its workflow ended, if at a limit."""
    if not reason.is_limit:
        return ""
    return f"; a limit had ended it ({error}), and astuner.rollout.truncated_reward: 0 scores those without a judge"


def ended_by(episode: Episode) -> str:
    """The key of the limit that an agent's next call ran into, as the error names it; empty where none did."""
    if not episode.stop_reason.is_limit and episode.stop_reason is not StopReason.LEFT_OUT:
        return ""
    keys = ("astuner.rollout.multi_turn.max_steps", "astuner.rollout.max_model_len", "astuner.data.max_response_length")
    return next((key for key in keys if f"raise {key}" in episode.error), "")


def advice(key: str) -> str:
    """What to do about a limit, as the end of a sentence."""
    if not key:
        return ", at the end of the model's context or at the max_tokens that the agent asked for"
    return f"; if good answers need more, raise {key}"


def unfinished(turns: Sequence[Turn], reason: StopReason) -> WorkflowOutput:
    """What the judge gets when a limit ended the workflow before it returned anything."""
    last = turns[-1].message.get("content") if turns else None
    return WorkflowOutput(response=last or "", metadata={"stop_reason": reason.value})


def blame(error: BaseException, seen: EpisodeError | None, *, asked: bool = True) -> tuple[StopReason, str]:
    """What ended the workflow: what the tuner saw, else what was raised or what led to it.

    :param error: what came out of the workflow.
    :param seen: what the tuner raised or found while it ran.
    :param asked: whether the model was asked at all.
    """
    raised = list(_chain(error))
    known = [e for e in raised if isinstance(e, EpisodeError)]
    led_to_it = list(_chain(error, hidden=True))
    if seen is not None and (not isinstance(seen, BEARABLE) or seen in led_to_it or _is_told(seen, raised)):
        known.insert(0, seen)
    for e in sorted(known, key=lambda e: isinstance(e, BEARABLE)):
        for kind, reason in _OUTCOMES:
            if isinstance(e, kind):
                return reason, safe_text(e)
    before = f"; before that it had coped with this: {safe_text(seen)}" if seen is not None else ""
    said = safe_text(error)
    hint = next((text for sign, text in _HINTS.items() if sign in said and (sign != _NONE or not asked)), "")
    return StopReason.WORKFLOW_FAILED, story("the workflow", error) + hint + before


def story(who: str, error: BaseException) -> str:
    """Return ``who raised Kind: message (file:line in function)``, and for an import that failed why it may have."""
    if isinstance(error, Misbehaved):
        return f"{who} {error}"
    return f"{who} raised {told(error)}{raised_at(error)}{import_hint(error)}"


def late(why: str, error: OutOfTime, failure: EpisodeError | None = None) -> str:
    """``why``, with the line that blocked the loop where it is known.

    :param failure: What the model tuner raised before, such as the limit that an agent ignored until the time was up.
    """
    blocked = next((f": {e}" for e in _chain(error) if isinstance(e, LoopBlocked)), None)
    before = "" if failure is None else f"; before that, a call of the model failed: {safe_text(failure)}"
    return why + (blocked if blocked is not None else f", {error}" if str(error) else "") + before


def _chain(error: BaseException | None, *, hidden: bool = False) -> Iterator[BaseException]:
    """``error``, and what it was raised from or while handling, outermost first.

    :param hidden: what ``from None`` was to keep out of tracebacks, too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (error.__context__ if hidden or not error.__suppress_context__ else None)


def _is_told(seen: EpisodeError, raised: Sequence[BaseException]) -> bool:
    """Whether one of the errors repeats this one's message, as a framework's own does that heard of it over HTTP."""
    return any(_bare(safe_text(seen)) in _bare(safe_text(e)) for e in raised)


def _bare(text: str) -> str:
    """Without what a JSON or Python spelling of a text adds."""
    return text.translate({ord(c): None for c in "\\'\""})
