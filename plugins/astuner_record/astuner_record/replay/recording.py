"""Which recorded reply answers which request.

A request is known by who asks and by its tokens, not by its place: agents that talk at the same time may come in
another order.  Invariant: a recorded reply is given once, and only to the agent it was given to, for exactly the
recorded prompt.  Where an agent that has recorded replies left asks for something else, the run has left the record,
and nothing is answered after that unless the person allowed it.
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
"""Tokens shown around the place where two prompts part."""
_SHOWN = 400
"""Characters shown of messages that differ."""


class Diverged(ModelFailed):
    """The workflow asked for something that the recorded run did not."""


class Stopped(ModelFailed):
    """The person wanted no more model calls."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a run of the workflow left the record."""

    turn: int
    """The recorded turn that was expected."""
    agent: str
    token: int | None
    """The first token of the prompt that differs; None: the turn was never asked for, or with another policy."""
    said: str
    """A sentence."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a person asked for."""

    from_turn: int
    """Turns with this index and later ones are the model's."""
    to_turn: int | None = None
    """No turn with this index or a later one is asked for."""
    allow_divergence: bool = False
    step: bool = False
    break_at: int | None = None

    def check(self, episode: Episode) -> None:
        """:raises ConfigError: the episode has no such turns."""
        turns = last_turn(episode)
        if not turns:
            raise ConfigError(
                f"episode {episode.workflow_task.episode_id} has no model call, so there is nothing to replay; it "
                f"ended as {episode.stop_reason.value}: {episode.error}"
            )
        if self.from_turn > turns:
            raise ConfigError(
                f"--from-turn {self.from_turn}: the episode has the turns 0 to {turns - 1}; {turns} replays all of them"
            )
        if self.to_turn is not None and self.to_turn <= self.from_turn:
            raise ConfigError(f"--to-turn {self.to_turn}: it must come after --from-turn {self.from_turn}")


@dataclass(kw_only=True)
class Recording:
    """The recorded turns before `Plan.from_turn`, and what became of them in one fork."""

    episode: Episode
    plan: Plan
    decode: Callable[[str, Sequence[int]], str] = field(default=lambda policy, ids: str(list(ids)))
    """Policy and token ids -> text."""
    divergences: list[Divergence] = field(default_factory=list)
    stopped: str = ""
    """Why no more model calls are answered, once that is so."""
    next_turn: int = 0
    """The index that the next reply will have."""
    sources: dict[str, int | None] = field(default_factory=dict)
    """Agent -> the recorded turn that its last reply was, or None: the model's."""
    given: list[int] = field(default_factory=list)
    """The recorded turns that were given."""

    def __post_init__(self) -> None:
        received = [turn for turn in self.episode.turns if not turn.lost]  # what reached nobody is asked for once more
        recorded: list[Turn | ExternalTurn] = [*received, *self.episode.external]
        self._left = [turn for turn in recorded if turn.index < self.plan.from_turn]

    def expected(self, agent: str) -> int | None:
        """The recorded turn that an agent should ask for next; None: the model answers."""
        return next((turn.index for turn in self._left if turn.agent == agent), None)

    def stop(self, why: str) -> None:
        """Answer no more."""
        self.stopped = self.stopped or why

    def take(self, agent: str, policy: str, prompt_ids: Sequence[int]) -> Turn | None:
        """The recorded turn that answers a request; None: the model is to.

        :raises Diverged: the record has something else.
        :raises Stopped: no more is to be asked.
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
        """As `take`, of a model outside of the run, which is known by the messages that are new to it."""
        self._check_stopped()
        turn = next((turn for turn in self._left if isinstance(turn, ExternalTurn) and turn.agent == agent), None)
        if turn is not None and list(turn.request) == list(request):
            self._give(turn)
            return turn
        self._ask_the_model(agent, None if turn is None else _heard_otherwise(turn, request))
        return None

    def finish(self, ended: StopReason) -> None:
        """The workflow is over: what was recorded and never asked for is a divergence too."""
        if self.stopped or (self.divergences and not self.plan.allow_divergence):
            return
        for turn in sorted(self._left, key=lambda turn: turn.index):
            said = f"was never asked for: the workflow ended before ({ended.value})"
            if not any(d.turn == turn.index for d in self.divergences):
                self.divergences.append(_left_at(turn, f"turn {turn.index} of agent {turn.agent!r} {said}"))

    def _check_stopped(self) -> None:
        if self.plan.to_turn is not None and self.next_turn >= self.plan.to_turn:
            self.stop(f"stopped before turn {self.plan.to_turn}, as --to-turn says")
        if self.stopped:
            raise Stopped(self.stopped)

    def _give(self, turn: Turn | ExternalTurn) -> None:
        self._left.remove(turn)
        self.given.append(turn.index)
        self.sources[turn.agent] = turn.index

    def _ask_the_model(self, agent: str, divergence: Divergence | None) -> None:
        """:raises Diverged: it is not to be asked."""
        if divergence is not None:
            self.divergences.append(divergence)
        if self.divergences and not self.plan.allow_divergence:
            raise Diverged(self.divergences[0].said)
        self.sources[agent] = None

    def _difference(self, expected: Turn, policy: str, prompt_ids: Sequence[int]) -> Divergence:
        who = f"turn {expected.index} of agent {expected.agent!r}"
        if expected.policy != policy:
            return _left_at(expected, f"{who} was the policy {expected.policy!r} then, and is {policy!r} now")
        recorded = expected.generation.prompt_ids
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(recorded, prompt_ids, strict=False)))
        before = self.decode(policy, recorded[max(0, same - _CONTEXT) : same])
        then, now = (self.decode(policy, ids[same : same + _CONTEXT]) for ids in (recorded, prompt_ids))
        said = (
            f"{who}: the prompt differs from token {same} on ({len(recorded)} tokens then, {len(prompt_ids)} now), "
            f"after {before!r}: then {then!r}, now {now!r}"
        )
        return _left_at(expected, said, same)


def _heard_otherwise(expected: ExternalTurn, request: Sequence[Any]) -> Divergence:
    then, now = (json.dumps(list(messages), ensure_ascii=False)[:_SHOWN] for messages in (expected.request, request))
    said = (
        f"turn {expected.index} of agent {expected.agent!r}, the model {expected.model!r} outside of the run: it hears "
        f"something else: then {then}, now {now}"
    )
    return _left_at(expected, said)


def _left_at(expected: Turn | ExternalTurn, said: str, token: int | None = None) -> Divergence:
    return Divergence(turn=expected.index, agent=expected.agent, token=token, said=said)


def last_turn(episode: Episode) -> int:
    """The index after the last turn, those of models outside of the run among them."""
    return max([turn.index for turn in episode.turns] + [turn.index for turn in episode.external], default=-1) + 1


def first_difference(episode: Episode, other: Episode) -> int | None:
    """The first turn whose reply is not the same, or that only one has; None: there is none."""
    one, two = ({t.index: (t.agent, tuple(t.generation.response_ids)) for t in e.turns} for e in (episode, other))
    return next((index for index in sorted({*one, *two}) if one.get(index) != two.get(index)), None)


_UNLIMITED = 1 << 30


class ReplayEngine(InferenceEngine):
    """One policy's model in one fork."""

    def __init__(self, inner: InferenceEngine, recording: Recording, policy: str, fork: int) -> None:
        self.max_model_len = inner.max_model_len
        self._inner, self._recording, self._policy, self._fork = inner, recording, policy, fork

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        episode_id = self._recording.episode.workflow_task.episode_id
        agent = session.removeprefix(f"{episode_id}/")  # `PolicySpeaker` names sessions so
        turn = self._recording.take(agent, self._policy, prompt_ids)
        if turn is not None:
            return turn.generation
        return await self._inner.generate(prompt_ids, sampling, session=f"{session}/fork{self._fork}")


class NoEngine(InferenceEngine):
    """Stands where no model is wanted: everything is recorded."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        raise ModelFailed(
            "the workflow asks for more than was recorded, and no model is loaded; for one write --from-turn K"
        )


def replaying(models: Models, recording: Recording, fork: int) -> Models:
    """``models``, answering from ``recording`` as far as that goes."""
    return {
        policy: PolicyModel(ReplayEngine(model.engine, recording, policy, fork), model.codec)
        for policy, model in models.items()
    }


@contextlib.contextmanager
def real_models(config: Config, checkpoint: Path | None) -> Iterator[Models]:
    """The models of the run, loaded and answering.

    :raises astuner.contracts.errors.CheckpointError: the checkpoint lacks a policy's model.
    """
    backbone, _ = find_backbone(config)
    with serve_policies(backbone, config, checkpoint) as (_, models):
        yield models


def tokenizers_only(config: Config) -> Models:
    """Codecs without models, for a replay that is recorded from end to end.

    :raises astuner.contracts.errors.MissingDependency: transformers is not installed.
    """
    engine = NoEngine(config.astuner.rollout.max_model_len or _UNLIMITED)
    models: Mapping[str, PolicyModel] = {
        policy: PolicyModel(engine, make_codec(config, policy_tokenizer(config, policy)))
        for policy in AgentRegistry.of(config.astuner).policies
    }
    return models


class RecordedModel(ExternalModelPart):
    """One agent's model: the recorded answers first, then the real one's."""

    def __init__(self, real: ExternalModelPart, recording: Recording, agent: str) -> None:
        self.name = real.name
        self._real, self._recording, self._agent = real, recording, agent
        self._heard: list[Any] = []

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ExternalReply:
        plain = json.loads(json_text(list(messages)))  # as the log holds them
        known = len(self._heard) if plain[: len(self._heard)] == self._heard else 0  # as `ExternalSpeaker` wrote them
        turn = self._recording.take_outside(self._agent, plain[known:])
        self._heard = plain
        if turn is None:
            return await self._real.chat(messages, tools, options)
        return ExternalReply(
            message=turn.message,
            finish_reason="tool_calls" if turn.message.get("tool_calls") else "stop",  # the log has it not
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
        )


def replay_outside(tuner: ModelTuner, recording: Recording) -> None:
    """Have the models outside of the run answer from ``recording`` in this episode."""
    find = tuner._speaker

    def found(agent_name: str, role: str | None) -> Any:
        speaker = find(agent_name, role)
        if isinstance(speaker, ExternalSpeaker) and not isinstance(speaker.model, RecordedModel):
            speaker.model = RecordedModel(speaker.model, recording, agent_name)
        return speaker

    setattr(tuner, "_speaker", found)  # noqa: B010  # mypy takes no assignment to a method
