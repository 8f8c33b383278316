"""Task in, episode out.

This is the one place that catches what user code and infrastructure raise.  Whatever happens inside becomes an
`Episode` with a stop reason; nothing but `KeyboardInterrupt` and the run's own cancellation gets past it.

An `EpisodeRunner` is picklable: it carries the config, and resolves workflow and judge where it runs, so that a
Ray worker can be handed one.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from astuner.errors import (
    ConfigError,
    ContextOverflow,
    EnvironmentFailed,
    EpisodeAborted,
    JudgeFailed,
    ModelFailed,
    PluginError,
    TurnLimitReached,
)
from astuner.rollout.checks import OutputChecks
from astuner.rollout.recorder import EpisodeRecorder
from astuner.rollout.threads import in_daemon_thread
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
    from astuner.backbone import InferenceEngine
    from astuner.chat.codec import ChatCodec
    from astuner.config import Config
    from astuner.model_tuner import ModelTuner

GRACE_SECONDS = 5.0
"""How long a cancelled workflow may tidy up before it is left behind."""

_OUTCOMES: tuple[tuple[type[BaseException], StopReason], ...] = (
    (ContextOverflow, StopReason.CONTEXT_OVERFLOW),
    (TurnLimitReached, StopReason.TRUNCATED),
    (EpisodeAborted, StopReason.CHECK_ABORTED),
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None}

    def prepare(self) -> None:
        """Resolve and build workflow, judge and checks now, so that their mistakes show before anything runs.

        :raises PluginError, ConfigError: one of them cannot be found, imported or built.
        """
        self._parts = self._parts or _Parts.build(self.config, self.disabled_plugins)

    async def run(
        self, workflow_task: WorkflowTask, engine: InferenceEngine, codec: ChatCodec, sampling: SamplingParams
    ) -> Episode:
        """One attempt; an infrastructure failure starts it over, at most ``rollout.max_retries`` times."""
        retries = 0
        while True:
            episode = await self._attempt(workflow_task, engine, codec, sampling, retries)
            if not episode.stop_reason.is_retried or retries >= self.config.astuner.rollout.max_retries:
                return episode
            retries += 1

    async def _attempt(
        self,
        workflow_task: WorkflowTask,
        engine: InferenceEngine,
        codec: ChatCodec,
        sampling: SamplingParams,
        retries: int,
    ) -> Episode:
        from astuner.model_tuner import ModelTuner

        self.prepare()
        assert self._parts is not None  # prepare() set it
        started = time.perf_counter()
        recorder = EpisodeRecorder()
        tuner = ModelTuner(
            engine=engine,
            codec=codec,
            recorder=recorder,
            sampling=sampling,
            config=self.config,
            workflow_task=workflow_task,
            checks=self._parts.checks,
        )
        try:
            output, reason, error = await self._work(workflow_task, tuner)
        finally:
            tuner.close()
        if reason is None:
            reason = _natural_end(tuner, recorder.turns)
        verdict, source = None, ""
        if reason is StopReason.CHECK_ABORTED:
            verdict, source = (
                JudgeOutput(reward=self.config.astuner.rollout.agent_madness_reward, is_success=False),
                "check",
            )
        elif reason.is_scored:
            try:
                verdict, source = await self._verdict(workflow_task, output or WorkflowOutput())
            except JudgeFailed as e:
                reason, error = StopReason.JUDGE_FAILED, str(e)
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
        )

    async def _work(
        self, workflow_task: WorkflowTask, tuner: ModelTuner
    ) -> tuple[WorkflowOutput | None, StopReason | None, str]:
        """Run the workflow to its end: (output, stop reason unless it simply returned, error)."""
        assert self._parts is not None  # prepare() set it
        timeout = self.config.astuner.rollout.episode_timeout
        work = asyncio.ensure_future(_execute(self._parts.make_workflow, workflow_task, tuner))
        try:
            done, _ = await asyncio.wait({work}, timeout=timeout)
        except asyncio.CancelledError:
            await _give_up(work)
            raise
        if not done:
            # A framework may swallow the cancellation and return something (AgentScope does); it is late all the same.
            tuner.close()
            await _give_up(work)
            return (
                None,
                StopReason.TIMED_OUT,
                f"the workflow did not return within rollout.episode_timeout = {timeout:g} s",
            )
        try:
            output = _as_output(work.result())
        except asyncio.CancelledError:
            return None, StopReason.WORKFLOW_FAILED, "the workflow cancelled itself"
        except ConfigError:
            raise  # no other episode would fare better
        except Exception as e:
            return None, *_blame(e)
        if tuner.failure is not None:  # raised inside, and swallowed by the workflow or its framework
            reason, error = _blame(tuner.failure)
            return output, reason, error
        return output, None, ""

    async def _verdict(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> tuple[JudgeOutput, str]:
        assert self._parts is not None  # prepare() set it
        if output.reward is not None:
            return JudgeOutput(reward=output.reward, is_success=output.is_success), "workflow"
        judge = self._parts.judge
        if judge is None:
            raise JudgeFailed(
                "the workflow returned no reward and no judge is configured; "
                "set astuner.task_judge.judge, or return WorkflowOutput(reward=…)"
            )
        timeout = self.config.astuner.task_judge.judge_timeout
        try:
            answer = await asyncio.wait_for(_ask(judge, workflow_task, output), timeout)
            return _as_verdict(answer), "judge"
        except JudgeFailed:
            raise
        except (asyncio.TimeoutError, TimeoutError):
            raise JudgeFailed(
                f"{_name(judge)} gave no verdict within task_judge.judge_timeout = {timeout:g} s"
            ) from None
        except Exception as e:
            raise JudgeFailed(f"{_name(judge)} raised {_where(e)}") from e


class _Parts:
    """Workflow factory, judge and checks of a config, built once per process."""

    def __init__(self, make_workflow: Callable[[], Any], judge: Any, checks: OutputChecks) -> None:
        self.make_workflow = make_workflow
        self.judge = judge
        self.checks = checks

    @classmethod
    def build(cls, config: Config, disabled_plugins: Sequence[str]) -> _Parts:
        from astuner.rollout.parts import build_judge, workflow_factory

        return cls(
            workflow_factory(config, disabled_plugins),
            build_judge(config, disabled_plugins),
            OutputChecks(config.astuner.rollout.compute_madness_checklist),
        )


async def _execute(make_workflow: Callable[[], Any], workflow_task: WorkflowTask, tuner: ModelTuner) -> Any:
    try:
        return await _call(make_workflow().execute, workflow_task, tuner)
    except SystemExit as e:  # an agent that calls sys.exit() ends its episode, not the run
        raise RuntimeError(f"the workflow called sys.exit({e.code!r})") from e


async def _call(execute: Callable[..., Any], workflow_task: WorkflowTask, tuner: ModelTuner) -> Any:
    if inspect.iscoroutinefunction(execute):
        return await execute(workflow_task, tuner)
    result = await in_daemon_thread(execute, workflow_task, tuner, name=f"workflow {workflow_task.episode_id}")
    return await result if inspect.isawaitable(result) else result


async def _ask(judge: Any, workflow_task: WorkflowTask, output: WorkflowOutput) -> Any:
    ask = judge.judge if hasattr(judge, "judge") else judge.compute_reward  # the seeds' older name
    if inspect.iscoroutinefunction(ask):
        return await ask(workflow_task, output)
    answer = await in_daemon_thread(ask, workflow_task, output, name=f"judge {workflow_task.episode_id}")
    return await answer if inspect.isawaitable(answer) else answer


async def _give_up(work: asyncio.Future[Any]) -> None:
    """Cancel and wait a little; what still runs then is left behind, its model calls refused."""
    work.cancel()
    await asyncio.wait({work}, timeout=GRACE_SECONDS)
    if work.done() and not work.cancelled():
        work.exception()  # seen: an abandoned workflow's error is of no interest


def _as_output(returned: Any) -> WorkflowOutput:
    """Accept our `WorkflowOutput`, one shaped like agentscope.tuner's, or a bare reward."""
    if isinstance(returned, WorkflowOutput):
        output = returned
    elif isinstance(returned, (int, float)) and not isinstance(returned, bool):
        output = WorkflowOutput(reward=float(returned))
    elif hasattr(returned, "reward") and hasattr(returned, "response"):
        output = WorkflowOutput(
            reward=returned.reward, response=returned.response, metrics=dict(returned.metrics or {})
        )
    else:
        raise PluginError(f"the workflow returned {returned!r}; it must return a WorkflowOutput")
    reward = output.reward
    if reward is None:
        return output
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise PluginError(
            f"the workflow returned the reward {reward!r}; it must be a finite number, or None to ask the judge"
        )
    return replace(output, reward=float(reward))


def _as_verdict(answer: Any) -> JudgeOutput:
    """Accept our `JudgeOutput`, one shaped like it, or the seeds' ``(raw_reward, is_success)``."""
    if isinstance(answer, JudgeOutput):
        return answer
    if isinstance(answer, tuple) and len(answer) == 2:
        return JudgeOutput(reward=answer[0], is_success=None if answer[1] is None else bool(answer[1]))
    if hasattr(answer, "reward"):
        return JudgeOutput(reward=answer.reward, metrics=dict(getattr(answer, "metrics", None) or {}))
    raise TypeError(f"it returned {answer!r}; it must return a JudgeOutput")


def _natural_end(tuner: ModelTuner, turns: Sequence[Turn]) -> StopReason:
    if tuner.context_overflow:
        return StopReason.CONTEXT_OVERFLOW
    if turns and turns[-1].generation.finish_reason is FinishReason.LENGTH:
        return StopReason.TRUNCATED
    return StopReason.COMPLETED


def _blame(error: BaseException) -> tuple[StopReason, str]:
    for kind, reason in _OUTCOMES:
        if isinstance(error, kind):
            return reason, str(error)
    return StopReason.WORKFLOW_FAILED, f"the workflow raised {_where(error)}"


def _where(error: BaseException) -> str:
    """``Kind: message (file:line in function)`` of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _name(judge: Any) -> str:
    return f"the judge {type(judge).__name__}"
