"""Runs a recorded episode's workflow again: recorded replies up to a turn, a model's from there on.

The workflow gets the same task, episode id and attempt, so whatever it seeds from those is the same.  Its tools and
environments really run again.  An infrastructure failure is not retried: a fork is looked at by a person.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError
from astuner.contracts.parts import AT_LEISURE
from astuner.contracts.types import Episode, StopReason, WorkflowOutput, WorkflowTask
from astuner.rollout.judging import is_open
from astuner.rollout.model_tuner import ModelTuner
from astuner.rollout.models import Models, sampling_for
from astuner.rollout.runner import EpisodeRunner
from astuner_record.replay.engine import replaying
from astuner_record.replay.outside import replay_outside
from astuner_record.replay.recording import Divergence, Recording, first_difference, last_turn
from astuner_record.replay.stepping import BY_HAND, Stepping

if TYPE_CHECKING:
    from astuner.config import Config

__all__ = ["AT_LEISURE", "BY_HAND", "OVERRIDES", "Fork", "Forker", "Plan"]

OVERRIDES = ("astuner.rollout.max_retries=0",)
"""What is always so in a fork; a person's own overrides win."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a person asked for."""

    from_turn: int
    to_turn: int | None = None
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


@dataclass(frozen=True, kw_only=True)
class Fork:
    """One run of the workflow."""

    episode: Episode
    """With an id of its own."""
    divergences: tuple[Divergence, ...]
    given: tuple[int, ...]
    """The recorded turns that answered."""
    differs_from: int | None
    """The first turn whose reply is not the recorded one; None: all are."""
    stopped: str
    """Why it was ended before the workflow returned; empty if it was not."""
    notes: tuple[str, ...] = ()


class Forker:
    """Forks of one recorded episode."""

    def __init__(
        self,
        config: Config,
        episode: Episode,
        plan: Plan,
        models: Models,
        *,
        on_fork: Callable[[Fork], None] = lambda fork: None,
    ) -> None:
        """
        :param models: what answers from `Plan.from_turn` on.
        :param on_fork: told of each that ends.
        """
        self._config, self._recorded, self._plan, self._models = config, episode, plan, models
        self._on_fork = on_fork
        self._task = _as_read(config, episode.workflow_task)

    async def run(self, times: int = 1) -> list[Fork]:
        """Fork so many times, ``rollout.max_env_worker`` at once."""
        gate = asyncio.Semaphore(self._config.astuner.rollout.max_env_worker)

        async def one(number: int) -> Fork:
            async with gate:
                fork = await self._fork(number)
            self._on_fork(fork)
            return fork

        return list(await asyncio.gather(*(one(number) for number in range(1, times + 1))))

    async def _fork(self, number: int) -> Fork:
        recording = Recording(
            episode=self._recorded,
            from_turn=self._plan.from_turn,
            to_turn=self._plan.to_turn,
            allow_divergence=self._plan.allow_divergence,
            decode=self._decode,
        )
        stepping = Stepping(recording=recording, step=self._plan.step, break_at=self._plan.break_at)

        def watch(tuner: ModelTuner) -> None:
            replay_outside(tuner, recording)
            stepping.watch(tuner)

        runner = _WatchedRunner(self._config, watch)
        runner.prepare()
        sampling = sampling_for(self._config, self._task.split)
        try:
            episode = await runner.run(self._task, replaying(self._models, recording, number), sampling)
            if is_open(episode):  # a judge that compares attempts sees this one alone
                (episode,) = await runner.judge_group([episode])
        finally:
            await runner.close()
        recording.finish(episode.stop_reason)
        return Fork(
            episode=_named(episode, number, recording.stopped),
            divergences=tuple(recording.divergences),
            given=tuple(recording.given),
            differs_from=first_difference(self._recorded, episode),
            stopped=recording.stopped,
            notes=runner.notes(self._recorded),
        )

    def _decode(self, policy: str, ids: Sequence[int]) -> str:
        return self._models[policy].codec.template.decode(ids)


class _WatchedRunner(EpisodeRunner):
    """A runner that shows somebody the model tuner before the workflow gets it."""

    def __init__(self, config: Config, watch: Callable[[ModelTuner], None]) -> None:
        super().__init__(config)
        self._watch = watch
        self._tuner: ModelTuner | None = None

    async def _work(
        self, parts: Any, workflow_task: WorkflowTask, tuner: ModelTuner
    ) -> tuple[WorkflowOutput | None, StopReason | None, str]:
        self._tuner = tuner
        self._watch(tuner)
        return await super()._work(parts, workflow_task, tuner)

    def notes(self, recorded: Episode) -> tuple[str, ...]:
        """What a person should know beside divergences."""
        started = self._tuner.workflow_task.task if self._tuner is not None else None
        task = recorded.workflow_task.task
        if started is None or _plain(started.init_messages) == _plain(task.init_messages):
            return ()
        return (f"the environment {task.env_type!r} began with another observation than it did then",)


def _plain(messages: Any) -> Any:
    return json.loads(json.dumps(list(messages), default=dict))


def _as_read(config: Config, workflow_task: WorkflowTask) -> WorkflowTask:
    """The task as its reader gave it: what an environment said first is its to say again."""
    reference = config.astuner.task_reader.type
    reader = config.resolve("task reader", reference) if reference else None
    if not (inspect.isclass(reader) and getattr(reader, "environment_begins", False)):
        return workflow_task
    return replace(workflow_task, task=replace(workflow_task.task, init_messages=(), main_query=""))


def _named(episode: Episode, number: int, stopped: str) -> Episode:
    """With an id and a number of its own, so that forks stand beside their original."""
    of = episode.workflow_task
    renamed = replace(of, episode_id=f"{of.episode_id}.fork{number}", attempt=number)
    if not stopped:
        return replace(episode, workflow_task=renamed)
    return replace(
        episode,
        workflow_task=renamed,
        stop_reason=StopReason.CANCELLED,
        error=stopped,
        verdict=None,
        reward_source="",
    )
