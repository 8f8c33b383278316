"""How an attempt ended, and what it is called: from what was raised to a stop reason and a sentence.

Frameworks wrap and swallow errors, so the one that came out says little; what the model tuner saw says more.  A limit
that the policy ran into, or a request that was refused, counts only where it is what ended the workflow: it may have
coped with it and failed of something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from astuner.chat.errors import UnsupportedRequest
from astuner.errors import (
    ContextOverflow,
    EnvironmentFailed,
    EpisodeAborted,
    EpisodeError,
    JudgeFailed,
    ModelFailed,
    PromptTooLong,
    TurnLimitReached,
)
from astuner.rollout.threads import Misbehaved, OutOfTime, place
from astuner.rollout.watchdog import LoopBlocked
from astuner.types import FinishReason, StopReason, Turn, WorkflowOutput

LIMITS = (ContextOverflow, TurnLimitReached)
"""What an agent may run into, cope with, and still be judged by what it returns."""

BEARABLE = (*LIMITS, UnsupportedRequest)
"""What an agent may cope with."""

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


def natural_end(turns: Sequence[Turn]) -> StopReason:
    """Of a workflow that returned."""
    cut_off = turns and turns[-1].generation.finish_reason is FinishReason.LENGTH
    return StopReason.TRUNCATED if cut_off else StopReason.COMPLETED


def unfinished(turns: Sequence[Turn], reason: StopReason) -> WorkflowOutput:
    """What the judge gets when a limit ended the workflow before it returned anything."""
    last = turns[-1].message.get("content") if turns else None
    return WorkflowOutput(response=last or "", metadata={"stop_reason": reason.value})


def blame(error: BaseException, seen: EpisodeError | None) -> tuple[StopReason, str]:
    """What ended the workflow: what the tuner saw, else what was raised or what led to it.

    :param error: what came out of the workflow.
    :param seen: what the tuner raised or found while it ran.
    """
    raised = list(_chain(error))
    known = [e for e in raised if isinstance(e, EpisodeError)]
    led_to_it = list(_chain(error, hidden=True))
    if seen is not None and (not isinstance(seen, BEARABLE) or seen in led_to_it or _is_told(seen, raised)):
        known.insert(0, seen)
    for e in sorted(known, key=lambda e: isinstance(e, BEARABLE)):
        for kind, reason in _OUTCOMES:
            if isinstance(e, kind):
                return reason, str(e)
    before = f"; before that it had coped with this: {seen}" if seen is not None else ""
    return StopReason.WORKFLOW_FAILED, story("the workflow", error) + before


def story(who: str, error: BaseException) -> str:
    """``who raised Kind: message (file:line in function)``."""
    if isinstance(error, Misbehaved):
        return f"{who} {error}"
    return f"{who} raised {type(error).__name__}: {error}{place(error)}"


def late(why: str, error: OutOfTime) -> str:
    """``why``, with the line that blocked the loop where it is known."""
    blocked = next((f": {e}" for e in _chain(error) if isinstance(e, LoopBlocked)), None)
    return why + (blocked if blocked is not None else f", {error}" if str(error) else "")


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
    return any(_bare(str(seen)) in _bare(str(e)) for e in raised)


def _bare(text: str) -> str:
    """Without what a JSON or Python spelling of a text adds."""
    return text.translate({ord(c): None for c in "\\'\""})
