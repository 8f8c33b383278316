"""Why an episode ended early, in words, and what a person can do about it."""

from __future__ import annotations

from astuner.contracts.types import StopReason

_WORDS: dict[StopReason, tuple[str, str]] = {
    StopReason.TRUNCATED: (
        "a length limit cut off its last reply, or an agent used up its model calls; it was judged as it was",
        "Raise astuner.rollout.max_response_length_in_one_turn or astuner.rollout.multi_turn.max_steps if good answers "
        "are cut off.",
    ),
    StopReason.CONTEXT_OVERFLOW: (
        "the conversation outgrew the context; it was judged as it was",
        "Raise astuner.rollout.max_model_len, or have the agent keep less of its history.",
    ),
    StopReason.CHECK_ABORTED: (
        "a check found the model's reply to be madness, and ended it with agent_madness_reward",
        "Read the reply; astuner.rollout.compute_madness_checklist says which checks there are.",
    ),
    StopReason.PROMPT_TOO_LONG: (
        "the task's first prompt does not fit",
        "Raise astuner.rollout.max_model_len or astuner.data.max_prompt_length, or shorten the task.",
    ),
    StopReason.WORKFLOW_FAILED: (
        "the workflow raised, asked the model for something that it refuses, or returned nothing usable",
        "Step through it with breakpoints: astuner run FILE --backbone debug",
    ),
    StopReason.TIMED_OUT: (
        "the workflow took longer than astuner.rollout.episode_timeout",
        "Look for the turn or tool that waited; raise astuner.rollout.episode_timeout if the work takes that long.",
    ),
    StopReason.ENVIRONMENT_FAILED: (
        "the environment failed, also when it was tried again",
        "Look at the environment service's log, whose name run.log has; try one by hand: astuner env try NAME",
    ),
    StopReason.MODEL_FAILED: (
        "the inference engine failed, also when it was tried again",
        "Look at the engine's messages in run.log, and at the memory of its machine: astuner doctor",
    ),
    StopReason.WORKER_LOST: (
        "the process that ran it ended, or could not be reached any more",
        "Look for a kill by the system (out of memory) with: dmesg; lower astuner.rollout.max_env_worker.",
    ),
    StopReason.JUDGE_FAILED: (
        "there is no verdict, although the judge was asked again",
        "Judge it again, or with another judge: astuner replay RUN EPISODE",
    ),
    StopReason.LEFT_OUT: (
        "a limit on calls, tokens or context ended it, and it was left out of its group",
        "Raise that limit, or have such episodes scored: astuner.rollout.truncated_reward: judge",
    ),
    StopReason.CANCELLED: (
        "it was a straggler that was no longer needed, or the run was interrupted",
        "Nothing is wrong with it; it is neither judged nor trained on.",
    ),
}
"""What happened, and what to do; an episode that completed has neither."""


def explained(stop_reason: StopReason, error: str) -> dict[str, str] | None:
    """What, why and advice; None for an episode that completed."""
    if stop_reason not in _WORDS:
        return None
    what, advice = _WORDS[stop_reason]
    return {"what": what, "why": error, "advice": advice}
