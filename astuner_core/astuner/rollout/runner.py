"""Run one attempt at one task: a task in, an episode out.

This module catches the errors of user code and infrastructure. Every outcome becomes an `Episode` with a stop reason.
Only Ctrl-C, mistakes in the config and cancellation of the run propagate.

An `EpisodeRunner` is picklable: it contains the config, and creates workflow and judge in the process where it runs,
for
example in a Ray worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.config.loaded import Mistakes
from astuner.config.schema import EndpointSection
from astuner.contracts.errors import AstunerError, ConfigError, EnvironmentFailed, UnsupportedRequest, safe_text
from astuner.contracts.proxies import bypass_proxies
from astuner.contracts.types import (
    Episode,
    JudgeOutput,
    SamplingParams,
    Split,
    StopReason,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.plugins import registry
from astuner.plugins.user_code import written_at
from astuner.rollout.children import end, keep_what_is_started
from astuner.rollout.endings import before_that, blame, cut_off, late, unfinished
from astuner.rollout.judging import Judging, NoVerdict, as_output, call, checked
from astuner.rollout.model_tuner import ModelTuner
from astuner.rollout.parts import OutputChecks
from astuner.rollout.speaker import external_model
from astuner.rollout.task_copy import copy_attempt
from astuner.rollout.threads import GRACE_SECONDS, OutOfTime, TimeLimits, in_own_loop
from astuner.rollout.turns import EpisodeRecorder
from astuner.rollout.world import World
from astuner.support.collector import leave_out_what_is_loaded
from astuner.support.threads import in_daemon_thread

if TYPE_CHECKING:
    from psutil import Process

    from astuner.config import Config
    from astuner.contracts.parts import EndpointPart, EpisodeContextPart
    from astuner.rollout.models import Models

T = TypeVar("T")


class EpisodeRunner:
    """Runs one attempt at one task, from prompt to verdict."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._here = _Here()

    def __reduce__(self) -> tuple[type[EpisodeRunner], tuple[Config]]:
        return type(self), (self.config,)

    def prepare(self) -> None:
        """Find and build workflow, judge and checks, so that mistakes appear before the first episode.

        :raises PluginError: One of them cannot be found, imported or built; or `ConfigError`.
        """
        if self._here.parts is None:
            bypass_proxies(self.config.astuner.endpoint.host)
            if self.config.astuner.endpoint != EndpointSection():
                self.endpoint  # noqa: B018  (raises mistakes in its section; it starts to listen on the first request)
            self._here.parts = _Parts.build(self.config, self._here.limits)

    @property
    def endpoint(self) -> EndpointPart:
        """The HTTP endpoint for agents of other frameworks. It starts on the first request for it.

        :raises astuner.contracts.errors.MissingDependency: No active plugin provides it.
        :raises astuner.contracts.errors.ConfigError: Its address or token is invalid.
        """
        with self._here.lock:  # plain workflows run in their own threads
            if self._here.endpoint is None:
                part: type[EndpointPart] = registry.find_part(
                    self.config.plugins, "endpoint", wanted_by="model_tuner.base_url_and_key"
                )
                self._here.endpoint = part.of(self.config.astuner.endpoint)
            return self._here.endpoint

    async def close(self) -> None:
        """Stop the endpoint, if it was started."""
        with self._here.lock:
            endpoint, self._here.endpoint = self._here.endpoint, None
        if endpoint is not None:
            await endpoint.close()

    async def run(self, workflow_task: WorkflowTask, models: Models, sampling: SamplingParams) -> Episode:
        """Run one attempt. If the engine or the environment fails, start it over; if the judge fails, judge it again.

        Each happens at most ``rollout.max_retries`` times. With a judge that compares attempts, the episode has no
        verdict yet; see `judge_group`.

        :param models: Policy -> engine and codec; see `astuner.rollout.models.one_model`.
        """
        retries = 0
        while True:
            episode = await self._attempt(workflow_task, models, sampling, retries)
            if not episode.stop_reason.is_retried or retries >= self.config.astuner.rollout.max_retries:
                return episode
            retries += 1

    async def judge_group(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the attempts that `run` left open (`astuner.rollout.judging`) with their verdicts.

        :raises astuner.contracts.errors.ConfigError: The judge cannot be called, for example because a budget is spent.
        """
        return await self._parts().judging.judged(episodes)

    async def _attempt(
        self, workflow_task: WorkflowTask, models: Models, sampling: SamplingParams, retries: int
    ) -> Episode:
        parts = self._parts()
        leave_out_what_is_loaded()
        began, started = time.time(), time.perf_counter()
        recorder = EpisodeRecorder()
        world = World(self.config, workflow_task.task)
        output, not_closed = None, ""
        try:
            if world.exists:
                workflow_task = replace(workflow_task, task=await self._ask(world, world.open, "start"))
            for_workflow = copy_attempt(workflow_task)
            tuner = ModelTuner(
                models=models,
                recorder=recorder,
                sampling=sampling,
                config=self.config,
                workflow_task=for_workflow,
                checks=parts.checks,
                endpoint=lambda: self.endpoint,
                world=world,
            )
            try:
                with parts.around(workflow_task.episode_id):
                    output, reason, error = await self._work(parts, for_workflow, tuner)
            finally:
                tuner.close()
                if self._here.endpoint is not None:
                    self._here.endpoint.revoke(tuner)
            cut = cut_off(recorder.turns, self.config.astuner)
            reason = reason or (StopReason.TRUNCATED if cut else StopReason.COMPLETED)
            reason, error = self._limited(workflow_task, reason, error, cut)
            if world.exists and parts.judging.wants_evaluation(output, reason):
                output = output or unfinished(recorder.turns, reason)
                output = replace(output, evaluation=await self._ask(world, world.evaluate, "evaluate"))
        except EnvironmentFailed as e:
            reason, error = StopReason.ENVIRONMENT_FAILED, safe_text(e)
        finally:
            not_closed = await _close(world, workflow_task.episode_id)
        turns, error = recorder.turns, error or not_closed
        verdict: JudgeOutput | None = None
        source = ""
        if reason is StopReason.CHECK_ABORTED:
            verdict = await parts.judging.punish(workflow_task, output, turns, tuner.complaints)
            source = "check"
        elif reason.is_scored and not parts.judging.leaves_open(output, reason):
            try:
                verdict, source, asked_again = await parts.judging.verdict(
                    workflow_task, output or unfinished(turns, reason), turns, reason
                )
            except NoVerdict as e:
                reason, error, asked_again = e.reason, str(e) + before_that(reason, error), e.asked_again
            retries += asked_again
        return Episode(
            workflow_task=workflow_task,
            turns=turns,
            output=output,
            verdict=verdict,
            reward_source=source,
            stop_reason=reason,
            error=error,
            seconds=time.perf_counter() - started,
            retries=retries,
            external=recorder.external,
            started=began,
        )

    def _limited(self, workflow_task: WorkflowTask, reason: StopReason, error: str, cut: str) -> tuple[StopReason, str]:
        """Return stop reason and message of an attempt, with `rollout.truncated_reward` and earlier limits applied.

        In validation nothing is dropped: otherwise success would cover only short answers.

        :param cut: Result of `cut_off`.
        """
        if cut and (reason.is_limit or reason is StopReason.WORKFLOW_FAILED):
            error = f"{error}; before that, {cut}" if error else cut
        drop = self.config.astuner.rollout.truncated_reward == "drop" and workflow_task.split is Split.TRAIN
        if not reason.is_limit or not drop:
            return reason, error
        return StopReason.LEFT_OUT, f"{reason.value}: {error} (dropped: astuner.rollout.truncated_reward is drop)"

    async def _ask(self, world: World, function: Callable[[], T], what: str) -> T:
        """Call the environment in a thread and return its answer.

        :raises EnvironmentFailed: It failed, or an environment in this process did not answer in time (the client of
            the environment service has separate time limits).
        """
        seconds = None if world.is_remote else self.config.astuner.env_service.timeout
        name = f"{what} {world.env_type}"
        try:
            return await asyncio.wait_for(in_daemon_thread(function, name=name), seconds)
        except asyncio.TimeoutError:
            raise EnvironmentFailed(
                f"the environment {world.env_type!r} did not {what} within env_service.timeout = {seconds:g} s"
            ) from None

    def _parts(self) -> _Parts:
        self.prepare()
        assert self._here.parts is not None  # prepare() set it
        return self._here.parts

    async def _work(
        self, parts: _Parts, workflow_task: WorkflowTask, tuner: ModelTuner
    ) -> tuple[WorkflowOutput | None, StopReason | None, str]:
        """Run the workflow and return (output, stop reason unless it returned normally, error message)."""
        timeout = self.config.astuner.rollout.episode_timeout
        started: list[Process] = []
        execute = _execute(parts.make_workflow, workflow_task, tuner, started)
        output, ended = None, None

        def give_up() -> None:
            tuner.close()
            tuner.world.give_up()

        try:
            # Frameworks may swallow the cancellation and return a value (AgentScope does); it is still too late.
            output = await self._here.limits.run(execute, timeout, late=give_up)
        except OutOfTime as e:
            why = f"the workflow did not return within rollout.episode_timeout = {timeout:g} s"
            why = late(why, e, tuner.failure)
            ended = StopReason.TIMED_OUT, why
        except ConfigError:
            raise  # every other episode would fail, too
        except Exception as e:
            ended = blame(e, tuner.failure, asked=tuner.has_spoken)
        finally:
            if started:
                await in_daemon_thread(end, started, name=f"end {workflow_task.episode_id}")
        if tuner.mistake is not None:
            raise tuner.mistake  # as above, but swallowed by a framework
        if ended is not None:
            return None, *ended
        if tuner.failure is None:
            waiting = None if output is None else tuner.find_waiting(output)
            if waiting is None:
                return output, None, ""
            return output, StopReason.WORKFLOW_FAILED if waiting.is_answer else None, waiting.message
        if isinstance(tuner.failure, UnsupportedRequest) and tuner.has_spoken:
            return output, None, f"a request was refused, and the workflow continued: {safe_text(tuner.failure)}"
        return output, *blame(tuner.failure, None)  # raised inside and swallowed by the workflow or its framework


class _Here:
    """State of a runner that stays in this process."""

    def __init__(self) -> None:
        self.limits = TimeLimits()
        self.lock = threading.Lock()
        self.parts: _Parts | None = None
        self.endpoint: EndpointPart | None = None


@dataclass
class _Parts:
    """Workflow factory, judge and checks of a config, built once per process."""

    make_workflow: Callable[[], Any]
    judging: Judging
    checks: OutputChecks
    around: Callable[[str], contextlib.AbstractContextManager[None]]
    """Episode ID -> context manager for the run of its workflow."""

    @classmethod
    def build(cls, config: Config, limits: TimeLimits) -> _Parts:
        from astuner.rollout.parts import build_judge, workflow_factory

        mistakes = Mistakes(config)
        manager = config.plugins
        if config.astuner.env_service.url:  # only the part reads it, so without the part it would be ignored
            key = "astuner.env_service.url"
            mistakes.ask(key, partial(registry.find_part, manager, "environments", wanted_by=key))
        if config.astuner.rollout.merge_level == "text":
            key = "astuner.rollout.merge_level"
            mistakes.ask(key, partial(registry.find_part, manager, "looser_history", wanted_by=f"{key}: text"))
        mistakes.ask("", partial(registry.find_optional_part, manager, "environments"))  # used by every episode
        context: type[EpisodeContextPart] | None = mistakes.ask(
            "", partial(registry.find_optional_part, manager, "episode_context")
        )
        for role, agent in config.astuner.agents.items():
            if agent.model == "external":
                mistakes.ask(f"astuner.agents.{role}", partial(external_model, config, role, agent))
        workflow = mistakes.ask(
            "astuner.rollout.workflow",
            lambda: workflow_factory(config),
            needs=[f"astuner.rollout.{config.astuner.rollout.workflow}"],
        )
        judge: Any = mistakes.ask("astuner.task_judge", lambda: build_judge(config))
        checks = mistakes.ask("astuner.rollout.compute_madness_checklist", lambda: OutputChecks.build(config))
        mistakes.raise_all()
        assert workflow is not None  # `raise_all` raised
        assert checks is not None  # if one of them is None
        written = config.resolve("workflow", config.astuner.rollout.workflow or "")
        judging = Judging(config, judge, limits, written_at(getattr(written, "execute", written)))
        return cls(workflow, judging, checks, context().around if context else lambda _: contextlib.nullcontext())


async def _execute(
    make_workflow: Callable[[], Any], workflow_task: WorkflowTask, tuner: ModelTuner, started: list[Process]
) -> WorkflowOutput:
    workflow = make_workflow()
    keep_what_is_started(started)
    execute = workflow.execute
    name = f"workflow {workflow_task.episode_id}"
    if tuner.world.exists and inspect.iscoroutinefunction(execute):
        # `gym_step` blocks, and workflows in the seeds' style call it in an `async def`, so not on the shared loop.
        returned = await in_own_loop(execute, workflow_task, tuner, name=name)
    else:
        returned = await call(execute, workflow_task, tuner, name=name)
    return checked(as_output, returned, getattr(workflow, "function", execute))


async def _close(world: World, episode_id: str) -> str:
    """Close the environment and return an error message, or an empty string."""
    if not world.used:
        return ""
    closing = asyncio.ensure_future(in_daemon_thread(world.close, name=f"close {episode_id}"))
    await asyncio.wait({closing}, timeout=GRACE_SECONDS)
    if not closing.done():
        closing.cancel()  # the thread still waits for the step in progress and then closes
        return f"the environment did not close within {GRACE_SECONDS:g} s and was abandoned"
    try:
        closing.result()
    except AstunerError as e:
        return safe_text(e)
    return ""
