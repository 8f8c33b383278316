"""What is handed from room to room.

One direction: task, workflow task, generation, turn, episode, sample.  Every value is complete and frozen
when it is handed over; nobody writes into it afterwards.  These are plain dataclasses, not pydantic models:
validating a 20,000-token sample costs 564 µs there and 1 µs here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import shown
from astuner.contracts.scalars import as_bool, as_float

if TYPE_CHECKING:
    from astuner.contracts.environment import Evaluation

DEFAULT_AGENT = "default"
"""The name of an agent that was given none."""
DEFAULT_ROLE = "default"
"""The role of every agent while `astuner.agents` is empty."""
DEFAULT_POLICY = "default"
"""The one policy of an experiment that names none."""


class Split(str, Enum):
    """Which part of the data a task belongs to."""

    TRAIN = "train"
    VALIDATION = "validation"


class FinishReason(str, Enum):
    """Why the engine stopped one generation."""

    STOP = "stop"
    """The model produced an end token (it is the last of `response_ids`), or the caller's stop string."""
    LENGTH = "length"
    """`max_tokens` or the context limit was reached; no end token was added."""
    CANCELLED = "cancelled"
    """The caller went away; the tokens so far are returned."""


class StopReason(str, Enum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The workflow returned an output."""
    TRUNCATED = "truncated"
    """Its last generation was cut off by a length limit, or an agent used up its model calls."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation outgrew the context; still judged, since the policy caused it."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The task's first prompt does not fit, before the policy has said a word."""
    CHECK_ABORTED = "check_aborted"
    """A check on the model's output fired (the seeds' "madness"); rewarded with `agent_madness_reward`."""
    WORKFLOW_FAILED = "workflow_failed"
    """The workflow raised, asked the model for something it refuses, or returned nothing usable."""
    TIMED_OUT = "timed_out"
    """The workflow took longer than `rollout.episode_timeout`."""
    ENVIRONMENT_FAILED = "environment_failed"
    MODEL_FAILED = "model_failed"
    WORKER_LOST = "worker_lost"
    """The process that ran the episode ended, or could not be reached any more."""
    JUDGE_FAILED = "judge_failed"
    """There is no verdict, although the judge was asked again; the attempt itself is never made again for that."""
    LEFT_OUT = "left_out"
    """It ended at a limit, and `rollout.truncated_reward: drop` leaves such episodes out of their groups."""
    CANCELLED = "cancelled"
    """A straggler that was no longer needed, or the run was interrupted."""

    @property
    def is_limit(self) -> bool:
        """Whether a limit on calls or tokens ended the episode: `rollout.truncated_reward` says what it is worth."""
        return self in _LIMITS

    @property
    def is_scored(self) -> bool:
        """Whether an episode that ended like this may carry a reward."""
        return self in _SCORED

    @property
    def is_retried(self) -> bool:
        """Whether another rollout is fair: the attempt ended before anybody knew how good it was.

        Not so when the judge failed: rolling out again whatever it cannot judge would select what it can.
        """
        return self in _RETRIED


_LIMITS = {StopReason.TRUNCATED, StopReason.CONTEXT_OVERFLOW}
_SCORED = {StopReason.COMPLETED, StopReason.CHECK_ABORTED, *_LIMITS}
_RETRIED = {StopReason.ENVIRONMENT_FAILED, StopReason.MODEL_FAILED, StopReason.WORKER_LOST}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem, as a task reader yields it. Pure data, JSON-serialisable."""

    task_id: str
    """A label for people and logs. It may repeat; groups never rely on it."""
    main_query: str = ""
    init_messages: Sequence[Mapping[str, Any]] = ()
    """OpenAI-style messages to start from, when the data set has them."""
    env_type: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Everything else the data set knows, the reference answer included."""

    @property
    def has_environment(self) -> bool:
        """Whether an attempt at it has an environment to act in."""
        return self.env_type not in ("", "no_env")  # the first data sets write the word


@dataclass(frozen=True, kw_only=True)
class WorkflowTask:
    """One attempt at one drawn task: what `Workflow.execute` receives."""

    task: Task
    episode_id: str
    group_id: str
    """The draw this attempt belongs to; all attempts at one draw form a GRPO group."""
    split: Split = Split.TRAIN
    attempt: int = 0
    """0 … num_repeat-1 within the group."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. The distribution sampled from is softmax(logits / temperature), then top-k, then top-p."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means no limit."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the generation and stays in `response_ids`."""
    stop: tuple[str, ...] = ()
    """The token with which the text of the response comes to hold one of these ends the generation, and stays in
    `response_ids`. An engine that cannot see to it, or only to some, goes on: whoever asked cuts what is behind."""
    seed: int | None = None
    """Makes this one generation repeatable where the engine can (otherwise the engine raises)."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One model call, exactly as the engine saw it. Never re-tokenised."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """One per response token, of the distribution that was sampled from (natural log)."""
    finish_reason: FinishReason
    policy_version: int
    """How many updates the weights had seen; -1 when the engine cannot know."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.response_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.response_ids)} response tokens")
        if not self.prompt_ids:
            raise ValueError("a generation needs at least one prompt token")


BRANCH_REASONS = {
    "repeated_request": "the same first request was sent again, as a retry or to draw another answer",
    "new_conversation": "the request mentions nothing that the model said in this episode",
    "history_retold": "what the model said comes back inside another's message (a multi-agent formatter)",
    "tools_changed": "the messages go on from a turn, but the list of tools, which is part of the prompt, is another",
    "messages_removed": "a message that a turn was answered under is gone, such as a one-shot hint",
    "messages_inserted": "a message was put in before a reply of the model",
    "history_rewritten": "messages before a reply, or the reply itself, were changed",
    "template_not_incremental": "in such a conversation, the chat template writes what follows a reply in another way",
}
"""Every reason, with what it means."""

STARTS = frozenset({"new_conversation", "repeated_request"})
"""Branch reasons of turns that have nothing of the model's to go on from."""

APPROXIMATIONS = {
    "whitespace": "white space in a message differs",
    "names": "the name of a speaker or of a tool differs",
    "call_ids": "tool calls are the same, but have other ids",
    "reasoning": "the reasoning that comes back with a reply is another",
    "calls": "tool calls differ, in their names, arguments or number",
    "tools": "the list of tools, which is part of the prompt, is another",
}
"""What may be overlooked, the least first."""


def gravest(overlooked: Iterable[str]) -> str:
    """The one of several approximations that is reported; empty for none."""
    return max(overlooked, key=["", *APPROXIMATIONS].index, default="")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A generation with its place in the episode: who spoke, and what the agent saw of it."""

    index: int
    """0, 1, 2 … in the order the calls were answered, over all agents of the episode."""
    agent: str
    generation: Generation
    continues: int | None
    """The turn whose prompt + response begin this turn's prompt, exactly; None starts a branch."""
    branch_reason: str = ""
    """Why this turn does not continue an earlier one of its agent (`BRANCH_REASONS`); empty for a first turn or a
    continuation."""
    request: Sequence[Mapping[str, Any]] = ()
    """Only the messages that are new since the turn this one continues (all of them on a branch)."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools offered, when they differ from those of the turn this one continues."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """The reply as an OpenAI-style assistant message."""
    role: str = DEFAULT_ROLE
    """The entry of `astuner.agents` that applies to the agent; advantages are computed per role."""
    policy: str = DEFAULT_POLICY
    """The policy that spoke."""
    trained: bool = True
    """Whether the turn may enter a sample; not so for an agent with `train: false`, nor where the reply is `lost`."""
    lost: bool = False
    """Whether it would train, but its reply reached nobody: the client that asked for it went away."""
    approximation: str = ""
    """What was overlooked to continue this turn, or one that its prompt holds (`rollout.merge_level: text`)."""
    started: float | None = None
    """When the request came, in seconds since 1970; None where nobody wrote it down."""
    seconds: float | None = None
    """From the request to the reply."""
    notes: dict[str, int] = field(default_factory=dict)
    """What was passed over in the request, or is in the prompt in another way, by metric; not in the episode log."""

    @property
    def has_predecessor(self) -> bool:
        """Whether it goes on from something that the model said in this episode."""
        return self.continues is not None or bool(self.branch_reason and self.branch_reason not in STARTS)


def wasted_prompt(turns: Iterable[Turn]) -> int:
    """Prompt tokens that were encoded and computed again, since their turns could not continue an earlier one."""
    return sum(len(t.generation.prompt_ids) for t in turns if t.continues is None and t.has_predecessor)


@dataclass(frozen=True, kw_only=True)
class ExternalTurn:
    """What a model outside of the run answered. It has no token ids, so it can never enter a sample."""

    index: int
    """Its place among the turns of the episode."""
    agent: str
    role: str
    model: str
    request: Sequence[Mapping[str, Any]]
    """The messages that are new since it spoke for this agent last (all of them where the earlier ones changed)."""
    message: Mapping[str, Any]
    prompt_tokens: int = 0
    """As the other side counts them; 0 where it does not say."""
    completion_tokens: int = 0
    started: float | None = None
    """As of a `Turn`."""
    seconds: float | None = None


@dataclass(kw_only=True)
class WorkflowOutput:
    """What a workflow returns. `reward` is None when a judge is to decide.

    When the context or the turn limit ended a workflow before it could return one, the judge gets an output whose
    `response` is the text of the model's last reply, and whose `metadata` is `{"stop_reason": …}`, the stop reason.
    """

    reward: float | Mapping[str, float] | None = None
    """One reward for all agents, or one for each: agent or role -> reward (an agent's own entry wins)."""
    is_success: bool | None = None
    response: Any = None
    """The agent's answer, in the words of agentscope.tuner; optional."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the judge needs to see, e.g. `final_answer`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Finite numbers to average over the step, logged as `workflow/<name>`."""
    evaluation: Evaluation | None = None
    """What the task's environment says about the episode, for a judge that wants it (`Judge.wants_evaluation`)."""

    def __post_init__(self) -> None:
        self.is_success = check_success("is_success", self.is_success)


def is_finite(value: object) -> bool:
    """Return whether it is a real number of any library that a float can hold, and no NaN."""
    return as_float(value) is not None


LARGEST_REWARD = 1e9
"""Rewards are from minus this to this: trainers square and add them as float32, which ends at 3.4e38."""
A_REWARD = "a finite number from -1e9 to 1e9"
SUCCESS_TOLERANCE = 1e-6
"""A reward that is below 1 by no more than this counts as success: sums of float32 numbers round by less."""


def as_reward(value: object) -> float | None:
    """Return ``value`` as a reward, `A_REWARD` of any library's; None where it is not one."""
    reward = as_float(value)
    return None if reward is None or abs(reward) > LARGEST_REWARD else reward


def is_reward(value: object) -> bool:
    """Whether it is `A_REWARD` of Python's own, and no truth value: what JSON calls a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and as_reward(value) is not None


def counts_as_success(reward: float, stated: bool | None = None, *, at: float = 1.0) -> bool:
    """Return whether an attempt succeeded: what was stated, else whether the reward reaches ``at``.

    Invariant: this is the only place that compares a reward with what success takes (`SUCCESS_TOLERANCE`).
    """
    return reward >= at - SUCCESS_TOLERANCE if stated is None else stated


def check_success(name: str, value: Any) -> bool | None:
    """Return the truth value, of any library, as Python's; None stays None.

    :raises ValueError: it is something else, such as a word or a number.
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
    """A judge's verdict on one episode."""

    reward: float
    is_success: bool | None = None
    """None means: a reward of 1 or more counts as success, and one that is lower by no more than `SUCCESS_TOLERANCE`.
    Nothing else is taken for a truth value."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers to average over the step, logged as `judge/<name>`."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Agent or role -> reward, where they differ; empty: `reward` is everybody's. See `per_agent`."""

    def __post_init__(self) -> None:
        own = {"reward": _own_reward(self.reward), "rewards": {n: _own_reward(r) for n, r in self.rewards.items()}}
        for name, value in {**own, "is_success": check_success("is_success", self.is_success)}.items():
            object.__setattr__(self, name, value)  # Python's own numbers from here on

    @property
    def succeeded(self) -> bool:
        """Whether it counts as success (`counts_as_success`)."""
        return counts_as_success(self.reward, self.is_success)

    @classmethod
    def per_agent(
        cls,
        rewards: Mapping[str, float],
        *,
        is_success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> JudgeOutput:
        """A verdict with a reward for each agent or role.

        Its `reward`, the episode's, is the mean of all entries, each counted once: of a role's entry whatever the
        number of its agents, of agents that do not train, and of a role that did not speak.

        :raises ValueError: there is no entry, or one is not a finite number.
        """
        if not rewards:
            raise ValueError("a mapping of rewards must have at least one entry")
        each = cls(reward=0.0, rewards=rewards, is_success=is_success, metrics=metrics or {})
        return replace(each, reward=math.fsum(rewards.values()) / len(rewards))


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished attempt, good or bad. A failed episode is data, not a crash."""

    workflow_task: WorkflowTask
    turns: Sequence[Turn]
    output: WorkflowOutput | None
    verdict: JudgeOutput | None
    """The reward and where it came from; None exactly when the episode is not scored."""
    reward_source: str = ""
    """`workflow`, `judge`, `check` or `limit`; empty when the episode is not scored."""
    stop_reason: StopReason
    error: str = ""
    """One paragraph: what failed, where; empty when nothing did."""
    seconds: float = 0.0
    retries: int = 0
    """How many times an infrastructure failure made us start over, and a judge's failure ask it again."""
    external: Sequence[ExternalTurn] = ()
    """What models outside of the run answered."""
    started: float | None = None
    """When the attempt began, in seconds since 1970; None where nobody wrote it down."""

    @property
    def is_open(self) -> bool:
        """Whether it waits for its group's verdicts."""
        return self.verdict is None and self.stop_reason.is_scored

    def closed(self, reason: StopReason, why: str) -> Episode:
        """What an open one is when it will have no verdict."""
        return replace(self, stop_reason=reason, error=why)

    @property
    def reward(self) -> float | None:
        """The episode's reward; the mean where agents have their own."""
        return self.verdict.reward if self.verdict else None

    def reward_of(self, agent: str, role: str) -> float | None:
        """The reward of one agent: its own entry, else its role's, else everybody's; None when it has none."""
        if self.verdict is None or not self.verdict.rewards:
            return self.reward
        return self.verdict.rewards.get(agent, self.verdict.rewards.get(role))

    @property
    def is_success(self) -> bool | None:
        return None if self.verdict is None else self.verdict.succeeded


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training sequence: a root-to-leaf path through an episode's tree of turns.

    `input_ids`, `loss_mask` and `logprobs` have the same length n.  A position is trained where
    `loss_mask` is 1: the model generated that token, and no other sample trains it.
    """

    episode_id: str
    group_id: str
    agent: str
    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    """Of the sampling distribution, at positions the model generated; 0.0 elsewhere."""
    policy_version: int
    """Of the oldest generation on the path."""
    reward: float
    """The agent's."""
    advantage: float = 0.0
    """Set by `astuner.rollout.credit`; the same for every sample of an episode and agent."""
    token_weight: float = 0.0
    """Set by `astuner.rollout.credit`: what each trained token's loss is multiplied with before summing."""
    role: str = DEFAULT_ROLE
    policy: str = DEFAULT_POLICY
    """The policy that this sample trains."""

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
