"""Match the requests of a rerun to recorded replies.

A request is identified by its agent and its tokens, not by its position, because concurrent agents may call in another
order.

Invariant: a recorded reply is used once, only for the agent that received it, and only for exactly the recorded prompt.
If an agent with remaining recorded replies sends a different request, the run has diverged, and further requests fail
unless the user allowed divergence.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from astuner import AgentRegistry, Config, ExternalSpeaker, Models, ModelTuner, PolicyModel, find_backbone
from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.errors import ConfigError, ModelFailed
from astuner.contracts.parts import ExternalModelPart, ExternalReply
from astuner.contracts.types import Episode, ExternalTurn, Generation, SamplingParams, StopReason, Turn
from astuner_models.serving import make_codec, policy_tokenizer, serve_policies
from astuner_record.episode_log.rows import json_text

_CONTEXT = 12
"""Tokens shown around the position where two prompts differ."""
_SHOWN = 400
"""Characters shown of messages that differ."""


class Diverged(ModelFailed):
    """The workflow sent a request that is not in the recording."""


class Stopped(ModelFailed):
    """The user stopped further model calls."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A difference between a rerun and the recording."""

    turn: int
    """Recorded turn that was expected."""
    agent: str
    token: int | None
    """First differing prompt token; None if the turn was never requested, or was requested from another policy."""
    said: str
    """Description."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Turns to replay, and how to handle divergence."""

    from_turn: int
    """The model answers turns from this index on."""
    to_turn: int | None = None
    """Turns from this index on are not answered."""
    allow_divergence: bool = False
    step: bool = False
    break_at: int | None = None

    def check(self, episode: Episode) -> None:
        """Check the plan against the episode.

        :raises ConfigError: The episode has no such turns.
        """
        turns = last_turn(episode)
        if not turns:
            raise ConfigError(
                f"Episode {episode.workflow_task.episode_id} has no model call, so there is nothing to replay. It "
                f"ended with {episode.stop_reason.value}: {episode.error}"
            )
        if self.from_turn > turns:
            raise ConfigError(
                f"--from-turn {self.from_turn}: the episode has turns 0 to {turns - 1}; {turns} replays all"
            )
        if self.to_turn is not None and self.to_turn <= self.from_turn:
            raise ConfigError(f"--to-turn {self.to_turn} must be greater than --from-turn {self.from_turn}.")


@dataclass(kw_only=True)
class Recording:
    """Recorded turns before `Plan.from_turn`, and how one fork used them."""

    episode: Episode
    plan: Plan
    decode: Callable[[str, Sequence[int]], str] = field(default=lambda policy, ids: str(list(ids)))
    """Decodes token IDs of a policy to text."""
    divergences: list[Divergence] = field(default_factory=list)
    stopped: str = ""
    """Why no further model calls are answered; empty while they are."""
    next_turn: int = 0
    """Index of the next reply."""
    sources: dict[str, int | None] = field(default_factory=dict)
    """Agent -> recorded turn of its last reply, or None if the model answered."""
    given: list[int] = field(default_factory=list)
    """Recorded turns that were used."""

    def __post_init__(self) -> None:
        received = [turn for turn in self.episode.turns if not turn.lost]  # agents repeat requests of lost replies
        recorded: list[Turn | ExternalTurn] = [*received, *self.episode.external]
        self._left = [turn for turn in recorded if turn.index < self.plan.from_turn]

    def expected(self, agent: str) -> int | None:
        """Return the recorded turn that an agent should request next, or None if the model answers."""
        return next((turn.index for turn in self._left if turn.agent == agent), None)

    def stop(self, why: str) -> None:
        """Stop answering model calls."""
        self.stopped = self.stopped or why

    def take(self, agent: str, policy: str, prompt_ids: Sequence[int]) -> Turn | None:
        """Return the recorded turn that answers a request, or None if the model answers.

        :raises Diverged: The recording has a different request.
        :raises Stopped: No further model calls are answered.
        """
        self._check_stopped()
        left = [turn for turn in self._left if isinstance(turn, Turn) and turn.agent == agent]
        for turn in left:
            if turn.policy == policy and tuple(turn.generation.prompt_ids) == tuple(prompt_ids):
                self._give(turn)
                return turn
        self._ask_the_model(agent, self._difference(left[0], policy, prompt_ids) if left else None)
        return None

    def take_outside(self, agent: str, request: Sequence[Any]) -> ExternalTurn | None:
        """Return the recorded turn of an external model, matched by the new messages; raise as `take`."""
        self._check_stopped()
        turn = next((turn for turn in self._left if isinstance(turn, ExternalTurn) and turn.agent == agent), None)
        if turn is not None and list(turn.request) == list(request):
            self._give(turn)
            return turn
        self._ask_the_model(agent, None if turn is None else _heard_otherwise(turn, request))
        return None

    def finish(self, ended: StopReason) -> None:
        """Record a divergence for each recorded turn that the finished workflow never requested."""
        if self.stopped or (self.divergences and not self.plan.allow_divergence):
            return
        for turn in sorted(self._left, key=lambda turn: turn.index):
            said = f"was not requested: the workflow ended first ({ended.value})"
            if not any(d.turn == turn.index for d in self.divergences):
                self.divergences.append(_left_at(turn, f"turn {turn.index} of agent {turn.agent!r} {said}"))

    def _check_stopped(self) -> None:
        if self.plan.to_turn is not None and self.next_turn >= self.plan.to_turn:
            self.stop(f"stopped before turn {self.plan.to_turn} (--to-turn)")
        if self.stopped:
            raise Stopped(self.stopped)

    def _give(self, turn: Turn | ExternalTurn) -> None:
        self._left.remove(turn)
        self.given.append(turn.index)
        self.sources[turn.agent] = turn.index

    def _ask_the_model(self, agent: str, divergence: Divergence | None) -> None:
        """Let the model answer.

        :raises Diverged: The plan does not allow divergence.
        """
        if divergence is not None:
            self.divergences.append(divergence)
        if self.divergences and not self.plan.allow_divergence:
            raise Diverged(self.divergences[0].said)
        self.sources[agent] = None

    def _difference(self, expected: Turn, policy: str, prompt_ids: Sequence[int]) -> Divergence:
        who = f"turn {expected.index} of agent {expected.agent!r}"
        if expected.policy != policy:
            return _left_at(expected, f"{who} used policy {expected.policy!r} in the recording, and {policy!r} now")
        recorded = expected.generation.prompt_ids
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(recorded, prompt_ids, strict=False)))
        before = self.decode(policy, recorded[max(0, same - _CONTEXT) : same])
        then, now = (self.decode(policy, ids[same : same + _CONTEXT]) for ids in (recorded, prompt_ids))
        said = (
            f"{who}: the prompt differs from token {same} on (recorded {len(recorded)} tokens, now {len(prompt_ids)}), "
            f"after {before!r}: recorded {then!r}, now {now!r}"
        )
        return _left_at(expected, said, same)


def _heard_otherwise(expected: ExternalTurn, request: Sequence[Any]) -> Divergence:
    then, now = (json.dumps(list(messages), ensure_ascii=False)[:_SHOWN] for messages in (expected.request, request))
    said = (
        f"turn {expected.index} of agent {expected.agent!r}, external model {expected.model!r}: messages differ: "
        f"recorded {then}, now {now}"
    )
    return _left_at(expected, said)


def _left_at(expected: Turn | ExternalTurn, said: str, token: int | None = None) -> Divergence:
    return Divergence(turn=expected.index, agent=expected.agent, token=token, said=said)


def last_turn(episode: Episode) -> int:
    """Return the index after the last turn, including turns of external models."""
    return max([turn.index for turn in episode.turns] + [turn.index for turn in episode.external], default=-1) + 1


def first_difference(episode: Episode, other: Episode) -> int | None:
    """Return the first turn whose reply differs or that only one episode has, or None if there is none."""
    one, two = ({t.index: (t.agent, tuple(t.generation.response_ids)) for t in e.turns} for e in (episode, other))
    return next((index for index in sorted({*one, *two}) if one.get(index) != two.get(index)), None)


_UNLIMITED = 1 << 30


class ReplayEngine(InferenceEngine):
    """Model of one policy in one fork."""

    def __init__(self, inner: InferenceEngine, recording: Recording, policy: str, fork: int) -> None:
        self.max_model_len = inner.max_model_len
        self._inner, self._recording, self._policy, self._fork = inner, recording, policy, fork

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        episode_id = self._recording.episode.workflow_task.episode_id
        agent = session.removeprefix(f"{episode_id}/")  # `PolicySpeaker` builds session names this way
        turn = self._recording.take(agent, self._policy, prompt_ids)
        if turn is not None:
            return turn.generation
        return await self._inner.generate(prompt_ids, sampling, session=f"{session}/fork{self._fork}")


class NoEngine(InferenceEngine):
    """Engine for a rerun in which every reply is recorded."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        raise ModelFailed(
            "The workflow sent more requests than were recorded, and no model is loaded. Add --from-turn K."
        )


def replaying(models: Models, recording: Recording, fork: int) -> Models:
    """Return ``models`` that answer from ``recording`` first."""
    return {
        policy: PolicyModel(ReplayEngine(model.engine, recording, policy, fork), model.codec)
        for policy, model in models.items()
    }


@contextlib.contextmanager
def real_models(config: Config, checkpoint: Path | None) -> Iterator[Models]:
    """Load the run's models, and yield them.

    :raises astuner.contracts.errors.CheckpointError: The checkpoint lacks the model of a policy.
    """
    backbone, _ = find_backbone(config)
    with serve_policies(backbone, config, checkpoint) as (_, models):
        yield models


def tokenizers_only(config: Config) -> Models:
    """Return codecs without models, for a rerun in which every reply is recorded.

    :raises astuner.contracts.errors.MissingDependency: transformers is not installed.
    """
    engine = NoEngine(config.astuner.rollout.max_model_len or _UNLIMITED)
    models: Mapping[str, PolicyModel] = {
        policy: PolicyModel(engine, make_codec(config, policy_tokenizer(config, policy)))
        for policy in AgentRegistry.of(config.astuner).policies
    }
    return models


class RecordedModel(ExternalModelPart):
    """External model of one agent that returns recorded answers first."""

    def __init__(self, real: ExternalModelPart, recording: Recording, agent: str) -> None:
        self.name = real.name
        self._real, self._recording, self._agent = real, recording, agent
        self._heard: list[Any] = []

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ExternalReply:
        plain = json.loads(json_text(list(messages)))  # same form as in the log
        known = len(self._heard) if plain[: len(self._heard)] == self._heard else 0  # same rule as `ExternalSpeaker`
        turn = self._recording.take_outside(self._agent, plain[known:])
        self._heard = plain
        if turn is None:
            return await self._real.chat(messages, tools, options)
        return ExternalReply(
            message=turn.message,
            finish_reason="tool_calls" if turn.message.get("tool_calls") else "stop",  # not in the log
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
        )


def replay_outside(tuner: ModelTuner, recording: Recording) -> None:
    """Let external models answer from ``recording`` in this episode."""
    find = tuner._speaker

    def found(agent_name: str, role: str | None) -> Any:
        speaker = find(agent_name, role)
        if isinstance(speaker, ExternalSpeaker) and not isinstance(speaker.model, RecordedModel):
            speaker.model = RecordedModel(speaker.model, recording, agent_name)
        return speaker

    setattr(tuner, "_speaker", found)  # noqa: B010  # mypy takes no assignment to a method
