"""Map exceptions of an attempt to a stop reason and an error message.

Agent frameworks wrap or swallow exceptions, so the exception that leaves the workflow is often not the cause. Errors
recorded by the model tuner take precedence. Limits and refused requests are an exception: an agent can recover from
them, so they count only if they ended the workflow.
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
"""Limits that an agent can handle and still return a result to be judged."""

BEARABLE = (*LIMITS, UnsupportedRequest)
"""Errors that an agent can handle and continue from."""

_NONE = "'NoneType' object"
_HINTS = {
    "'coroutine' object": "; is an `await` missing?",
    _NONE: "; the model was never called: pass it to the agent, as in model=model_tuner",
}
"""Fragment of a workflow's error -> its most likely cause."""

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
    """Return which limit truncated the last reply and which key to raise, or an empty string."""
    if not turns or turns[-1].generation.finish_reason is not FinishReason.LENGTH:
        return ""
    last = turns[-1]
    said, how_to_raise = len(last.generation.response_ids), advice(cut_by(last, turns, settings))
    return f"the last reply of agent {last.agent!r} was truncated after {said} tokens{how_to_raise}"


def cut_by(turn: Turn, turns: Sequence[Turn], settings: AstunerSection) -> str:
    """Return the key of the limit that truncated a reply.

    The result is empty for the model's own context length and for `max_tokens` of the request.

    :param turns: All turns of the episode.
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
    """Return a note for an attempt without a verdict whose workflow ended at a limit, otherwise an empty string."""
    if not reason.is_limit:
        return ""
    return f"; it ended at a limit ({error}). To score it without a judge, set astuner.rollout.truncated_reward: 0"


def ended_by(episode: Episode) -> str:
    """Return the key of the limit that refused an agent's next call, as named in the error, or an empty string."""
    if not episode.stop_reason.is_limit and episode.stop_reason is not StopReason.LEFT_OUT:
        return ""
    keys = ("astuner.rollout.multi_turn.max_steps", "astuner.rollout.max_model_len", "astuner.data.max_response_length")
    return next((key for key in keys if f"raise {key}" in episode.error), "")


def advice(key: str) -> str:
    """Return the advice about a limit, as the end of a sentence."""
    if not key:
        return ", at the end of the model's context or at the request's max_tokens"
    return f"; if good answers need more, raise {key}"


def unfinished(turns: Sequence[Turn], reason: StopReason) -> WorkflowOutput:
    """Return the output to judge if a limit ended the workflow before it returned one."""
    last = turns[-1].message.get("content") if turns else None
    return WorkflowOutput(response=last or "", metadata={"stop_reason": reason.value})


def blame(error: BaseException, seen: EpisodeError | None, *, asked: bool = True) -> tuple[StopReason, str]:
    """Return the stop reason and message for a failed workflow.

    The error recorded by the model tuner takes precedence over the raised exception and its causes.

    :param error: Exception that left the workflow.
    :param seen: Error that the model tuner recorded during the episode, if any.
    :param asked: Whether the model was called.
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
    before = f"; it had recovered from an earlier error: {safe_text(seen)}" if seen is not None else ""
    said = safe_text(error)
    hint = next((text for sign, text in _HINTS.items() if sign in said and (sign != _NONE or not asked)), "")
    return StopReason.WORKFLOW_FAILED, story("the workflow", error) + hint + before


def story(who: str, error: BaseException) -> str:
    """Return ``source raised Type: message (file:line in function)``, with a hint for a failed import."""
    if isinstance(error, Misbehaved):
        return f"{who} {error}"
    return f"{who} raised {told(error)}{raised_at(error)}{import_hint(error)}"


def late(why: str, error: OutOfTime, failure: EpisodeError | None = None) -> str:
    """Return the message for a timeout, with the line that blocked the event loop if it is known.

    :param failure: Earlier error of the model tuner, for example a limit that the agent ignored until the timeout.
    """
    blocked = next((f": {e}" for e in _chain(error) if isinstance(e, LoopBlocked)), None)
    before = "" if failure is None else f"; an earlier call of the model had failed: {safe_text(failure)}"
    return why + (blocked if blocked is not None else f", {error}" if str(error) else "") + before


def _chain(error: BaseException | None, *, hidden: bool = False) -> Iterator[BaseException]:
    """Yield an exception and its causes and contexts, outermost first.

    :param hidden: Include contexts suppressed with ``from None``.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (error.__context__ if hidden or not error.__suppress_context__ else None)


def _is_told(seen: EpisodeError, raised: Sequence[BaseException]) -> bool:
    """Return whether one of the errors repeats this message, as errors of frameworks do that call over HTTP."""
    return any(_bare(safe_text(seen)) in _bare(safe_text(e)) for e in raised)


def _bare(text: str) -> str:
    """Return a text without the quotes and backslashes of its JSON or Python notation."""
    return text.translate({ord(c): None for c in "\\'\""})
