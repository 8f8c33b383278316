"""Data types that packages exchange: task, workflow task, generation, turn, episode, sample.

Invariant: values are complete and frozen when they are passed on. They are dataclasses instead of pydantic models for
speed: creating a sample of 20,000 tokens takes 1 µs instead of 564 µs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from astuner.contracts.display import Displayed
from astuner.contracts.errors import shown
from astuner.contracts.scalars import as_bool, as_float

if TYPE_CHECKING:
    from astuner.contracts.environment import Evaluation

DEFAULT_AGENT = "default"
"""Name of an agent without a name."""
DEFAULT_ROLE = "default"
"""Role of all agents if `astuner.agents` is empty."""
DEFAULT_POLICY = "default"
"""Policy of an experiment that names no policies."""


class Split(str, Enum):
    """Part of the data that a task belongs to."""

    TRAIN = "train"
    VALIDATION = "validation"


class FinishReason(str, Enum):
    """Why a generation ended."""

    STOP = "stop"
    """The model generated an end token (the last of `response_ids`) or the caller's stop string."""
    LENGTH = "length"
    """The generation reached `max_tokens` or the context limit, without an end token."""
    CANCELLED = "cancelled"
    """The caller disconnected; the tokens so far are returned."""


class StopReason(str, Enum):
    """Why an episode ended."""

    COMPLETED = "completed"
    """The workflow returned an output."""
    TRUNCATED = "truncated"
    """A length limit truncated the last generation, or an agent reached its limit of model calls."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation exceeded the context. It is still judged, because the policy caused it."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The task's first prompt does not fit."""
    CHECK_ABORTED = "check_aborted"
    """An output check failed; the reward is `agent_madness_reward`."""
    WORKFLOW_FAILED = "workflow_failed"
    """The workflow raised, sent an unsupported request to the model, or returned an unusable output."""
    TIMED_OUT = "timed_out"
    """The workflow took longer than `rollout.episode_timeout`."""
    ENVIRONMENT_FAILED = "environment_failed"
    MODEL_FAILED = "model_failed"
    WORKER_LOST = "worker_lost"
    """The process that ran the episode ended or became unreachable."""
    JUDGE_FAILED = "judge_failed"
    """The judge failed repeatedly. The attempt itself is not repeated."""
    LEFT_OUT = "left_out"
    """The episode ended at a limit and was removed from its group (`rollout.truncated_reward: drop`)."""
    CANCELLED = "cancelled"
    """The episode was no longer needed, or the run was interrupted."""

    @property
    def is_limit(self) -> bool:
        """Whether a limit on calls or tokens ended the episode, so that `rollout.truncated_reward` applies."""
        return self in _LIMITS

    @property
    def is_scored(self) -> bool:
        """Whether an episode with this stop reason may have a reward."""
        return self in _SCORED

    @property
    def is_retried(self) -> bool:
        """Whether the attempt may be repeated, because it ended before its reward was known.

        This excludes failures of the judge: repeating attempts that it cannot judge would bias the selection.
        """
        return self in _RETRIED


_LIMITS = {StopReason.TRUNCATED, StopReason.CONTEXT_OVERFLOW}
_SCORED = {StopReason.COMPLETED, StopReason.CHECK_ABORTED, *_LIMITS}
_RETRIED = {StopReason.ENVIRONMENT_FAILED, StopReason.MODEL_FAILED, StopReason.WORKER_LOST}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem from a task reader, as JSON-serializable data."""

    task_id: str
    """Label for users and logs. It need not be unique."""
    main_query: str = ""
    init_messages: Sequence[Mapping[str, Any]] = ()
    """Initial OpenAI-style messages, if the data set has them."""
    env_type: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other data, including the reference answer."""

    @property
    def has_environment(self) -> bool:
        """Whether the task has an environment."""
        return self.env_type not in ("", "no_env")  # legacy data sets use "no_env"


@dataclass(frozen=True, kw_only=True)
class WorkflowTask:
    """One attempt at a drawn task: the input of `Workflow.execute`."""

    task: Task
    episode_id: str
    group_id: str
    """Draw of the task; all attempts at one draw form a GRPO group."""
    split: Split = Split.TRAIN
    attempt: int = 0
    """Index within the group, 0 ... num_repeat-1."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Tokens are drawn from softmax(logits / temperature), then top-k, then top-p."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is unlimited."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the generation; they stay in `response_ids`."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation when one of them is complete; its last token stays in `response_ids`. An engine
    may ignore some or all of them; then the caller truncates the response."""
    seed: int | None = None
    """Seed of this generation. An engine that does not support seeds raises."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One model call with the engine's exact tokens. They are never re-tokenized."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural log-probability of each response token under the sampling distribution."""
    finish_reason: FinishReason
    policy_version: int
    """Number of updates of the weights; -1 if unknown."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.response_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.response_ids)} response tokens")
        if not self.prompt_ids:
            raise ValueError("a generation needs at least one prompt token")


BRANCH_REASONS = {
    "repeated_request": "the same first request was sent again, as a retry or for another answer",
    "new_conversation": "the request contains no earlier reply of the model in this episode",
    "history_retold": "earlier replies appear inside messages of other speakers (a multi-agent formatter)",
    "tools_changed": "the messages continue a turn, but the list of tools, which is part of the prompt, changed",
    "messages_removed": "a message before an earlier reply was removed, such as a one-time hint",
    "messages_inserted": "a message was inserted before an earlier reply",
    "history_rewritten": "messages before an earlier reply, or the reply itself, changed",
    "template_not_incremental": "the chat template renders the messages after a reply differently in this conversation",
}
"""Branch reason -> its meaning."""

STARTS = frozenset({"new_conversation", "repeated_request"})
"""Branch reasons of turns without an earlier reply to continue."""

APPROXIMATIONS = {
    "whitespace": "white space in a message differs",
    "names": "the name of a speaker or a tool differs",
    "call_ids": "IDs of tool calls differ",
    "reasoning": "the reasoning returned with a reply differs",
    "calls": "names, arguments or number of tool calls differ",
    "tools": "the list of tools, which is part of the prompt, differs",
}
"""Differences that `rollout.merge_level: text` ignores -> their meaning, least severe first."""


def gravest(overlooked: Iterable[str]) -> str:
    """Return the most severe of several approximations, or an empty string."""
    return max(overlooked, key=["", *APPROXIMATIONS].index, default="")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A generation with its agent, its messages and its position in the episode."""

    index: int
    """Position in the order of replies, over all agents of the episode, starting at 0."""
    agent: str
    generation: Generation
    continues: int | None
    """Turn whose prompt and response are exactly the start of this turn's prompt; None starts a branch."""
    branch_reason: str = ""
    """Why this turn does not continue an earlier turn of its agent (`BRANCH_REASONS`). Empty for the first turn and for
    continuations."""
    request: Sequence[Mapping[str, Any]] = ()
    """New messages since the turn that this one continues; on a branch, all messages."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Offered tools, if they differ from the turn that this one continues."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """The reply as an OpenAI-style assistant message."""
    role: str = DEFAULT_ROLE
    """Entry of `astuner.agents` that applies to the agent; advantages are computed per role."""
    policy: str = DEFAULT_POLICY
    """Policy that generated the reply."""
    trained: bool = True
    """Whether the turn may enter a sample. False for an agent with `train: false` and for a `lost` reply."""
    lost: bool = False
    """Whether the reply of a trained agent was not delivered, because the client disconnected."""
    approximation: str = ""
    """Difference that was ignored to continue this turn, or an earlier turn in its prompt (`rollout.merge_level:
    text`)."""
    started: float | None = None
    """Time of the request, in seconds since 1970; None if unknown."""
    seconds: float | None = None
    """Duration from request to reply."""
    notes: dict[str, int] = field(default_factory=dict)
    """Metric -> count of request details that were ignored or rendered differently. Not in the episode log."""

    @property
    def has_predecessor(self) -> bool:
        """Whether an earlier reply of the model in this episode precedes it."""
        return self.continues is not None or bool(self.branch_reason and self.branch_reason not in STARTS)


def wasted_prompt(turns: Iterable[Turn]) -> int:
    """Return the number of prompt tokens that were recomputed because turns could not continue an earlier one."""
    return sum(len(t.generation.prompt_ids) for t in turns if t.continues is None and t.has_predecessor)


@dataclass(frozen=True, kw_only=True)
class ExternalTurn:
    """A reply of an external model. It has no token IDs, so it never enters a sample."""

    index: int
    """Position among the turns of the episode."""
    agent: str
    role: str
    model: str
    request: Sequence[Mapping[str, Any]]
    """New messages since its last reply for this agent; all messages if earlier ones changed."""
    message: Mapping[str, Any]
    prompt_tokens: int = 0
    """Count reported by the server; 0 if it reports none."""
    completion_tokens: int = 0
    started: float | None = None
    """As in `Turn`."""
    seconds: float | None = None


@dataclass(kw_only=True)
class WorkflowOutput:
    """Result of a workflow. If `reward` is None, the judge is called.

    If the context or the turn limit ended the workflow before it returned, the judge receives an output whose
    `response` is the text of the last reply and whose `metadata` is `{"stop_reason": ...}`.
    """

    reward: float | Mapping[str, float] | None = None
    """One reward for all agents, or agent or role -> reward. An agent's entry takes precedence over its role's."""
    is_success: bool | None = None
    response: Any = None
    """The agent's answer, as in agentscope.tuner; optional."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Data for the judge, e.g. `final_answer`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite numbers, averaged over the step and logged as `workflow/<name>`."""
    evaluation: Evaluation | None = None
    """Evaluation by the task's environment, for judges with `Judge.wants_evaluation`."""

    def __post_init__(self) -> None:
        self.is_success = check_success("is_success", self.is_success)


def is_finite(value: object) -> bool:
    """Return whether a value is a finite real number of any library."""
    return as_float(value) is not None


LARGEST_REWARD = 1e9
"""Maximum absolute reward: trainers sum squares of rewards in float32, whose limit is 3.4e38."""
A_REWARD = "a finite number from -1e9 to 1e9"
SUCCESS_TOLERANCE = 1e-6
"""Tolerance below 1 for a reward that counts as success, for rounding errors of float32 sums."""


def as_reward(value: object) -> float | None:
    """Return a number of any library as a reward, or None if it is not `A_REWARD`."""
    reward = as_float(value)
    return None if reward is None or abs(reward) > LARGEST_REWARD else reward


def is_reward(value: object) -> bool:
    """Return whether ``value`` is `A_REWARD` as a Python int or float, like a number in JSON. Bools are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and as_reward(value) is not None


def counts_as_success(reward: float, stated: bool | None = None, *, at: float = 1.0) -> bool:
    """Return whether an attempt succeeded: the stated value, otherwise whether the reward reaches ``at``.

    Invariant: only this function compares rewards with the success threshold (`SUCCESS_TOLERANCE`).
    """
    return reward >= at - SUCCESS_TOLERANCE if stated is None else stated


def check_success(name: str, value: Any) -> bool | None:
    """Return a truth value of any library as a Python bool; None stays None.

    :raises ValueError: The value is something else, such as a string or a number.
    """
    found = as_bool(value)
    if found is None and value is not None:
        raise ValueError(f"{name} must be True, False or None, not {shown(value)}")
    return found


def _own_reward(value: object) -> float:
    if (reward := as_reward(value)) is None:
        raise ValueError(f"a reward must be {A_REWARD} (or use JudgeOutput.per_agent), not {shown(value)}")
    return reward


@dataclass(frozen=True, kw_only=True)
class JudgeOutput:
    """A judge's verdict on an episode."""

    reward: float
    is_success: bool | None = None
    """Whether the episode succeeded. None: a reward of at least 1 - `SUCCESS_TOLERANCE` counts as success. Only truth
    values are accepted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers, averaged over the step and logged as `judge/<name>`."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Agent or role -> reward, if they differ. Empty: `reward` applies to all agents. See `per_agent`."""

    def __post_init__(self) -> None:
        own = {"reward": _own_reward(self.reward), "rewards": {n: _own_reward(r) for n, r in self.rewards.items()}}
        for name, value in {**own, "is_success": check_success("is_success", self.is_success)}.items():
            object.__setattr__(self, name, value)  # as Python numbers

    @property
    def succeeded(self) -> bool:
        """Whether the episode counts as success (`counts_as_success`)."""
        return counts_as_success(self.reward, self.is_success)

    @classmethod
    def per_agent(
        cls,
        rewards: Mapping[str, float],
        *,
        is_success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> JudgeOutput:
        """Return a verdict with a reward for each agent or role.

        The episode's `reward` is the mean of all entries. Each entry counts once, regardless of the number of agents
        in a role, and including agents that are not trained and roles without turns.

        :raises ValueError: ``rewards`` is empty, or an entry is not a finite number.
        """
        if not rewards:
            raise ValueError("rewards must have at least one entry")
        each = cls(reward=0.0, rewards=rewards, is_success=is_success, metrics=metrics or {})
        return replace(each, reward=math.fsum(rewards.values()) / len(rewards))


@dataclass(frozen=True, kw_only=True, repr=False)
class Episode(Displayed):
    """A finished attempt, successful or failed."""

    workflow_task: WorkflowTask
    turns: Sequence[Turn]
    output: WorkflowOutput | None
    verdict: JudgeOutput | None
    """The reward; None if and only if the episode is not scored."""
    reward_source: str = ""
    """`workflow`, `judge`, `check` or `limit`; empty if the episode is not scored."""
    stop_reason: StopReason
    error: str = ""
    """Description of the failure in one paragraph; empty without a failure."""
    seconds: float = 0.0
    retries: int = 0
    """Number of restarts after infrastructure failures and of repeated calls of the judge."""
    external: Sequence[ExternalTurn] = ()
    """Replies of external models."""
    started: float | None = None
    """Start of the attempt, in seconds since 1970; None if unknown."""

    def __repr__(self) -> str:
        ended = f"{self.stop_reason.value}, reward {self.reward}, {len(self.turns)} turns"
        return f"Episode({self.workflow_task.episode_id}: {ended})"

    @property
    def is_open(self) -> bool:
        """Whether it waits for the verdicts of its group."""
        return self.verdict is None and self.stop_reason.is_scored

    def closed(self, reason: StopReason, why: str) -> Episode:
        """Return an open episode as one without a verdict."""
        return replace(self, stop_reason=reason, error=why)

    @property
    def reward(self) -> float | None:
        """The episode's reward; the mean if agents have different rewards."""
        return self.verdict.reward if self.verdict else None

    def reward_of(self, agent: str, role: str) -> float | None:
        """Return an agent's reward: its own entry, its role's, or the reward for all agents; None without one."""
        if self.verdict is None or not self.verdict.rewards:
            return self.reward
        return self.verdict.rewards.get(agent, self.verdict.rewards.get(role))

    @property
    def is_success(self) -> bool | None:
        return None if self.verdict is None else self.verdict.succeeded


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A training sequence: a path from the root to a leaf of an episode's tree of turns.

    `input_ids`, `loss_mask` and `logprobs` have the same length n. Where `loss_mask` is 1, the model generated the
    token, and only this sample trains it.
    """

    episode_id: str
    group_id: str
    agent: str
    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    """Log-probabilities under the sampling distribution for generated tokens; 0.0 elsewhere."""
    policy_version: int
    """Policy version of the oldest generation on the path."""
    reward: float
    """Reward of the agent."""
    advantage: float = 0.0
    """Set by `astuner.rollout.credit`; the same for all samples of an agent in an episode."""
    token_weight: float = 0.0
    """Set by `astuner.rollout.credit`: factor of each trained token's loss before summing."""
    role: str = DEFAULT_ROLE
    policy: str = DEFAULT_POLICY
    """Policy that this sample trains."""

    def __post_init__(self) -> None:
        n = len(self.input_ids)
        if not len(self.loss_mask) == len(self.logprobs) == n:
            raise ValueError(
                f"sample of episode {self.episode_id}: {n} tokens, but {len(self.loss_mask)} mask entries "
                f"and {len(self.logprobs)} logprobs"
            )
        if n and self.loss_mask[0]:
            raise ValueError(
                f"sample of episode {self.episode_id}: its first token has no context to be predicted from"
            )

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)
