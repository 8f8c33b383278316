"""The environment of one episode: opened before the workflow, stepped by ``model_tuner.gym_step``, closed at the end.

It runs in this process or elsewhere, for example in the environment service, if the part ``environments``
(`astuner.contracts.parts`) hosts it. Both behave the same for the workflow. Calls never overlap. Invariant: any error
of
the environment becomes `EnvironmentFailed` and never a reward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import ConfigError, EnvironmentFailed, PluginError, UnsupportedRequest, shown, told
from astuner.contracts.interrupt import let_the_person_stop
from astuner.contracts.messages import text_of
from astuner.contracts.types import A_REWARD, as_reward
from astuner.plugins import registry
from astuner.plugins.user_code import raised_at
from astuner.rollout.task_copy import copy_data, copy_task

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.contracts.parts import EnvironmentsPart
    from astuner.contracts.types import Task

T = TypeVar("T")


class World:
    """The environment of one task."""

    def __init__(self, config: Config, task: Task) -> None:
        self._config = config
        self._task = task
        self._lock = threading.Lock()
        self._environment: Environment | None = None
        self._closed = False
        self.env_type = task.env_type
        self.exists = task.has_environment
        """Whether the task names an environment."""
        self._host: EnvironmentsPart | None = None
        """Host of an environment outside of this process; None for a class in this process."""
        part = registry.find_optional_part(config.plugins, "environments") if self.exists else None
        if part is not None and (host := part()).hosts(config, self.env_type):
            self._host = host
        self.used = False
        """Whether opening was started, so that there may be something to close."""
        self.last: StepResult | None = None
        """Last result of the environment."""

    @property
    def is_remote(self) -> bool:
        """Whether it runs elsewhere, in the environment service."""
        return self._host is not None

    def open(self) -> Task:
        """Create and reset the environment, unless it is open; blocks.

        :returns: The task, with the environment's first messages and query if the data set has none.
        :raises EnvironmentFailed: It cannot be started.
        """
        self.used = True
        with self._lock:
            self._open()
            started = self.last
        return self._task if started is None else self._call("reset", self._begun, started)

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Act; blocks until the environment has answered.

        :param action: OpenAI-style assistant message; its content may be a list of text parts.
        :returns: Observation, reward, whether the environment is over (terminated or truncated), info.
        :raises EnvironmentFailed: The task has no environment, or the environment failed.
        :raises TypeError: ``action`` is not a message.
        :raises RuntimeError: The environment was already over.
        """
        if not isinstance(action, Mapping):
            raise TypeError(
                f"gym_step takes an assistant message such as {{'role': 'assistant', 'content': …}}, not {action!r}"
            )
        said = {"role": "assistant", **action, "content": _said(action.get("content"))}
        self.used = True
        with self._lock:
            environment = self._open()
            if self.last is not None and self.last.is_over:
                raise RuntimeError("the environment is over. Stop when the third value returned by gym_step is true")
            result = self._call("step", lambda: _checked(environment.step(said), self._task.env_type))
            self._check_open()  # discard an answer that came too late
            self.last = result
        info = {**result.info, "terminated": result.terminated, "truncated": result.truncated}
        return result.observation, float(result.reward), result.is_over, info

    def evaluate(self) -> Evaluation:
        """Return the environment's evaluation of the episode so far; blocks.

        :raises EnvironmentFailed: The environment has no evaluation, or it failed.
        """
        with self._lock:
            return self._call("evaluate", lambda: Evaluation.of(self._open().evaluate()))

    def give_up(self) -> None:
        """Accept no more actions because the episode timed out, and interrupt a step in progress if possible.

        Returns immediately.
        """
        self._closed = True
        if self._environment is not None:
            threading.Thread(target=self._give_up, name=f"end {self.env_type}", daemon=True).start()

    def close(self) -> None:
        """Close the environment, if it was opened. A step in progress is interrupted or awaited."""
        self._closed = True
        try:
            self._interrupt()
        finally:
            with self._lock:
                environment, self._environment = self._environment, None
                if environment is not None:
                    self._call("close", environment.close)

    def _give_up(self) -> None:
        with contextlib.suppress(EnvironmentFailed):  # close() repeats the interruption and reports the error
            self._interrupt()

    def _interrupt(self) -> None:
        environment = self._environment
        if environment is not None:
            self._call("interrupt", environment.interrupt)

    def _begun(self, started: StepResult) -> Task:
        messages = tuple(copy_data(started.as_messages))
        try:
            query = text_of(messages[-1].get("content"))
        except UnsupportedRequest:  # for example a picture
            query = started.observation
        return replace(
            self._task,
            init_messages=tuple(self._task.init_messages) or messages,
            main_query=self._task.main_query or query,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFailed("the episode is over; its environment accepts no more actions")

    def _open(self) -> Environment:
        self._check_open()
        if self._environment is None:
            # assigned before reset, so that close() also closes an environment whose reset fails
            self._environment = environment = self._made()
            self._check_open()
            result = self._call(
                "reset", lambda: _checked(environment.reset(copy_task(self._task)), self._task.env_type)
            )
            self._check_open()  # the episode may have ended during reset
            self.last = result
        return self._environment

    def _made(self) -> Environment:
        name, params = self._task.env_type, self._config.astuner.env_service.params
        if not self.exists:
            raise EnvironmentFailed(
                f"task {self._task.task_id!r} has no env_type, so there is no environment to step. Use a task "
                "reader that sets it, or remove gym_step from the workflow"
            )
        if self._host is not None:
            return self._host.connect(self._config, name)
        try:
            kind: type[Environment] = self._config.resolve("environment", name)
        except PluginError as e:
            raise EnvironmentFailed(str(e)) from e
        return self._call("constructor", kind, params)

    def _call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except (EnvironmentFailed, ConfigError):
            raise
        except BaseException as e:  # includes sys.exit in a library of the environment
            let_the_person_stop(e)
            raise EnvironmentFailed(
                f"the environment {self._task.env_type!r} raised in {what}: {told(e)}{raised_at(e, caller=__file__)}"
            ) from e


def _checked(result: Any, env_type: str) -> StepResult:
    """Return a validated result of an environment."""
    if not isinstance(result, StepResult):
        raise EnvironmentFailed(f"the environment {env_type!r} returned {shown(result)}; it must return a StepResult")
    if (reward := as_reward(result.reward)) is None:
        raise EnvironmentFailed(
            f"the environment {env_type!r} returned the reward {shown(result.reward)}; it must be {A_REWARD}"
        )
    return replace(result, reward=reward, info=dict(result.info))


def _said(content: Any) -> str:
    """Return the text of an agent's message. In AgentScope's lists of blocks, thinking blocks are excluded."""
    if not isinstance(content, (list, tuple)):
        return text_of(content)
    blocks = [block if isinstance(block, Mapping) else vars(block) for block in content]  # 2.x: objects
    return "\n".join(block["text"] for block in blocks if block.get("type") == "text")
