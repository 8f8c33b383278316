"""Task in, episode out.

This is the one place that catches what user code and infrastructure raise.  Whatever happens inside becomes an
`Episode` with a stop reason; nothing but `KeyboardInterrupt` and the run's own cancellation gets past it.

An `EpisodeRunner` is picklable: it carries the config, and resolves workflow and judge where it runs, so that a
Ray worker can be handed one.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.chat.errors import UnsupportedRequest
from astuner.errors import (
    AstunerError,
    ConfigError,
    ContextOverflow,
    EnvironmentFailed,
    EpisodeAborted,
    EpisodeError,
    JudgeFailed,
    ModelFailed,
    PromptTooLong,
    TurnLimitReached,
)
from astuner.model_tuner import LIMITS, ModelTuner
from astuner.rollout.checks import OutputChecks
from astuner.rollout.recorder import EpisodeRecorder
from astuner.rollout.returned import as_output, as_verdict
from astuner.rollout.threads import Misbehaved, OutOfTime, TimeLimits, in_daemon_thread, place
from astuner.rollout.watchdog import LoopBlocked
from astuner.types import (
    Episode,
    FinishReason,
    JudgeOutput,
    SamplingParams,
    StopReason,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.endpoint import Endpoint
    from astuner.rollout.models import Models

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


class EpisodeRunner:
    """Runs one attempt at one task from prompt to verdict."""

    def __init__(self, config: Config, *, disabled_plugins: Sequence[str] = ()) -> None:
        self.config = config
        self.disabled_plugins = tuple(disabled_plugins)
        self._parts: _Parts | None = None
        self._limits = TimeLimits()
        self._endpoint: Endpoint | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None, "_endpoint": None}

    def prepare(self) -> None:
        """Resolve and build workflow, judge and checks now, so that their mistakes show before anything runs.

        :raises PluginError, ConfigError: one of them cannot be found, imported or built.
        """
        self._parts = self._parts or _Parts.build(self.config, self.disabled_plugins)

    @property
    def endpoint(self) -> Endpoint:
        """Where agents of other frameworks find their models; it starts when the first one asks for it.

        :raises astuner.errors.ConfigError: its address or token cannot be used.
        """
        if self._endpoint is None:
            from astuner.endpoint import Endpoint

            settings = self.config.astuner.endpoint
            token = os.environ.get(settings.token_env, "") if settings.token_env else ""
            if settings.token_env and not token:
                raise ConfigError(
                    f"astuner.endpoint.token_env: the environment variable {settings.token_env} is not set"
                )
            self._endpoint = Endpoint(settings.host, settings.port, token, settings.reconnect_timeout)
        return self._endpoint

    async def close(self) -> None:
        """Stop the endpoint, if it was started."""
        if self._endpoint is not None:
            await self._endpoint.close()
            self._endpoint = None

    async def run(self, workflow_task: WorkflowTask, models: Models, sampling: SamplingParams) -> Episode:
        """One attempt; a failure of the engine or the environment starts it over, one of the judge asks it again.

        Each at most ``rollout.max_retries`` times.

        :param models: policy -> engine and codec; see `astuner.rollout.models.one_model`.
        """
        retries = 0
        while True:
            episode = await self._attempt(workflow_task, models, sampling, retries)
            if not episode.stop_reason.is_retried or retries >= self.config.astuner.rollout.max_retries:
                return episode
            retries += 1

    async def _attempt(
        self, workflow_task: WorkflowTask, models: Models, sampling: SamplingParams, retries: int
    ) -> Episode:
        self.prepare()
        assert self._parts is not None  # prepare() set it
        started = time.perf_counter()
        recorder = EpisodeRecorder()
        tuner = ModelTuner(
            models=models,
            recorder=recorder,
            sampling=sampling,
            config=self.config,
            workflow_task=workflow_task,
            checks=self._parts.checks,
            endpoint=lambda: self.endpoint,
            disabled_plugins=self.disabled_plugins,
        )
        try:
            output, reason, error = await self._work(workflow_task, tuner)
        finally:
            tuner.close()
            if self._endpoint is not None:
                self._endpoint.revoke(tuner)
            not_closed = await _close_world(tuner)
        error = error or not_closed
        if reason is None:
            reason = _natural_end(recorder.turns)
        verdict, source = None, ""
        if reason is StopReason.CHECK_ABORTED:
            verdict, source = self._punishment(tuner), "check"
        elif reason.is_scored:
            judged = output or _unfinished(recorder.turns, reason)
            source = "judge" if judged.reward is None else "workflow"
            try:
                verdict, asked_again = await self._verdict(workflow_task, judged)
                retries += asked_again
                _check_everybody(verdict, recorder.turns, source)
            except _NoVerdict as e:
                reason, error, source, verdict = StopReason.JUDGE_FAILED, str(e), "", None
                retries += e.asked_again
            except Misbehaved as e:
                reason, error, source, verdict = StopReason.WORKFLOW_FAILED, f"the workflow {e}", "", None
        return Episode(
            workflow_task=workflow_task,
            turns=recorder.turns,
            output=output,
            verdict=verdict,
            reward_source=source,
            stop_reason=reason,
            error=error,
            seconds=time.perf_counter() - started,
            retries=retries,
            external=recorder.external,
        )

    def _punishment(self, tuner: ModelTuner) -> JudgeOutput:
        """What a check that fired is worth; where agents are named, to the one it fired on and to nobody else."""
        reward = self.config.astuner.rollout.agent_madness_reward
        turn = tuner.failure.turn if isinstance(tuner.failure, EpisodeAborted) else None
        if self.config.astuner.agents and turn is not None:
            return JudgeOutput(reward=reward, rewards={turn.agent: reward}, is_success=False)
        return JudgeOutput(reward=reward, is_success=False)

    async def _work(
        self, workflow_task: WorkflowTask, tuner: ModelTuner
    ) -> tuple[WorkflowOutput | None, StopReason | None, str]:
        """Run the workflow to its end: (output, stop reason unless it simply returned, error)."""
        assert self._parts is not None  # prepare() set it
        timeout = self.config.astuner.rollout.episode_timeout
        work = _execute(self._parts.make_workflow, workflow_task, tuner)
        try:
            # A framework may swallow the cancellation and return something (AgentScope does); it is late all the same.
            output = as_output(await self._limits.run(work, timeout, late=tuner.close))
        except OutOfTime as e:
            why = f"the workflow did not return within rollout.episode_timeout = {timeout:g} s"
            return None, StopReason.TIMED_OUT, _and(why, e)
        except ConfigError:
            raise  # no other episode would fare better
        except Exception as e:
            return None, *_blame(e, tuner.failure)
        if tuner.failure is not None:  # raised inside, and swallowed by the workflow or its framework
            return output, *_blame(tuner.failure, None)
        return output, None, ""

    async def _verdict(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> tuple[JudgeOutput, int]:
        """The verdict on ``output``, and how many times the judge was asked again for it.

        :raises _NoVerdict: there is none.
        """
        assert self._parts is not None  # prepare() set it
        if isinstance(output.reward, Mapping):
            return JudgeOutput.per_agent(output.reward, is_success=output.is_success), 0
        if output.reward is not None:
            return JudgeOutput(reward=output.reward, is_success=output.is_success), 0
        judge = self._parts.judge
        if judge is None:
            raise _NoVerdict(
                "the workflow returned no reward and no judge is configured; "
                "set astuner.task_judge.judge, or return WorkflowOutput(reward=…)",
                0,
            )
        asked_again = 0
        while True:
            try:
                return await self._ask(judge, workflow_task, output), asked_again
            except JudgeFailed as e:
                if asked_again >= self.config.astuner.rollout.max_retries:
                    raise _NoVerdict(str(e), asked_again) from e
            asked_again += 1

    async def _ask(self, judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """:raises JudgeFailed: whatever went wrong."""
        timeout, name = self.config.astuner.task_judge.judge_timeout, f"the judge {type(judge).__name__}"
        try:
            return as_verdict(await self._limits.run(_judge(judge, workflow_task, output), timeout))
        except JudgeFailed:
            raise
        except OutOfTime as e:
            why = f"{name} gave no verdict within task_judge.judge_timeout = {timeout:g} s"
            raise JudgeFailed(_and(why, e)) from e
        except Exception as e:
            raise JudgeFailed(_story(name, e)) from e


class _NoVerdict(Exception):
    """The judge failed for good."""

    def __init__(self, message: str, asked_again: int) -> None:
        super().__init__(message)
        self.asked_again = asked_again


class _Parts:
    """Workflow factory, judge and checks of a config, built once per process."""

    def __init__(self, make_workflow: Callable[[], Any], judge: Any, checks: OutputChecks) -> None:
        self.make_workflow = make_workflow
        self.judge = judge
        self.checks = checks

    @classmethod
    def build(cls, config: Config, disabled_plugins: Sequence[str]) -> _Parts:
        from astuner.rollout.external import ExternalModel
        from astuner.rollout.parts import build_judge, workflow_factory

        for role, agent in config.astuner.agents.items():
            if agent.model == "external":
                ExternalModel(role, agent)  # its mistakes show now
        return cls(
            workflow_factory(config, disabled_plugins),
            build_judge(config, disabled_plugins),
            OutputChecks.build(config, disabled_plugins),
        )


async def _execute(make_workflow: Callable[[], Any], workflow_task: WorkflowTask, tuner: ModelTuner) -> Any:
    execute = make_workflow().execute
    return await _call(execute, workflow_task, tuner, name=f"workflow {workflow_task.episode_id}")


async def _judge(judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput) -> Any:
    ask = judge.judge if hasattr(judge, "judge") else judge.compute_reward  # the seeds' older name
    return await _call(ask, workflow_task, output, name=f"judge {workflow_task.episode_id}")


async def _call(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """``async def`` on the loop, plain ``def`` in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await in_daemon_thread(function, *args, name=name)
    return await result if inspect.isawaitable(result) else result


async def _close_world(tuner: ModelTuner) -> str:
    """Give the environment back; what went wrong with that, if anything did."""
    if not tuner.world.is_open:
        return ""
    try:
        await in_daemon_thread(tuner.world.close, name=f"close {tuner.workflow_task.episode_id}")
    except AstunerError as e:
        return str(e)
    return ""


def _check_everybody(verdict: JudgeOutput, turns: Sequence[Turn], source: str) -> None:
    """Whether every agent that trained has a reward.

    :raises Misbehaved, _NoVerdict: the workflow, or the judge, left one out.
    """
    if not verdict.rewards:
        return
    missing = {t.agent: t.role for t in turns if t.trained and not verdict.rewards.keys() & {t.agent, t.role}}
    if missing:
        agent, role = next(iter(missing.items()))
        text = (
            f"returned rewards for {', '.join(verdict.rewards)}, and none for the agent {agent!r} (role {role!r}), "
            "which trains; add its name or role, or set train: false for it in astuner.agents"
        )
        raise Misbehaved(text) if source == "workflow" else _NoVerdict(f"the judge {text}", 0)


def _unfinished(turns: Sequence[Turn], reason: StopReason) -> WorkflowOutput:
    """What the judge gets when a limit ended the workflow before it returned anything."""
    last = turns[-1].message.get("content") if turns else None
    return WorkflowOutput(response=last or "", metadata={"stop_reason": reason.value})


def _natural_end(turns: Sequence[Turn]) -> StopReason:
    cut_off = turns and turns[-1].generation.finish_reason is FinishReason.LENGTH
    return StopReason.TRUNCATED if cut_off else StopReason.COMPLETED


def _blame(error: BaseException, seen: EpisodeError | None) -> tuple[StopReason, str]:
    """What ended the workflow: what the tuner saw, else what was raised or what led to it.

    Frameworks wrap errors in their own, so the type at the top says little.  A limit that the policy ran into counts
    only when there is nothing else: the workflow may have coped with it.
    """
    known = [e for e in (seen, *_chain(error)) if isinstance(e, EpisodeError)]
    for e in sorted(known, key=lambda e: isinstance(e, LIMITS)):
        for kind, reason in _OUTCOMES:
            if isinstance(e, kind):
                return reason, str(e)
    return StopReason.WORKFLOW_FAILED, _story("the workflow", error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, and what it was raised from or while handling, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _and(why: str, late: OutOfTime) -> str:
    """``why``, with the line that blocked the loop where it is known."""
    more = next((f": {e}" for e in _chain(late) if isinstance(e, LoopBlocked)), f", {late}" if str(late) else "")
    return why + more


def _story(who: str, error: BaseException) -> str:
    """``who raised Kind: message (file:line in function)``."""
    if isinstance(error, Misbehaved):
        return f"{who} {error}"
    return f"{who} raised {type(error).__name__}: {error}{place(error)}"
