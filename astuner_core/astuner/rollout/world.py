"""The environment of one episode, as the workflow steps it: ``model_tuner.gym_step``.

It is made, and reset to the task, when the first action comes; the runner closes it when the episode ends, however.
Invariant: whatever the environment raises becomes `EnvironmentFailed`, so it is never a reward.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.chat.messages import text_of
from astuner.environment import Environment, StepResult
from astuner.errors import EnvironmentFailed, PluginError

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.types import Task


class World:
    """One task's environment. One step at a time."""

    def __init__(self, config: Config, task: Task, disabled_plugins: Sequence[str] = ()) -> None:
        self._config = config
        self._task = task
        self._disabled_plugins = disabled_plugins
        self._lock = threading.Lock()
        self._environment: Environment | None = None
        self._closed = False
        self.used = False
        """Whether anybody has begun to step it, so that there may be something to close."""
        self.started: StepResult | None = None
        """What the reset answered."""

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Act; blocks until the environment has answered.

        :param action: an OpenAI-style assistant message; its content may be a list of text parts.
        :returns: observation, reward, whether it is over (terminated or truncated), info.
        :raises EnvironmentFailed: the task names no environment, or it failed.
        :raises TypeError: ``action`` is no message.
        """
        if not isinstance(action, Mapping):
            raise TypeError(
                f"gym_step takes an assistant message such as {{'role': 'assistant', 'content': …}}, not {action!r}"
            )
        said = {"role": "assistant", **action, "content": _said(action.get("content"))}
        self.used = True
        with self._lock:
            environment = self._open()
            self._check_open()  # the episode may have ended while the environment was made
            result = self._call("step", environment.step, said)
        info = {**result.info, "terminated": result.terminated, "truncated": result.truncated}
        return result.observation, result.reward, result.terminated or result.truncated, info

    def close(self) -> None:
        """Give everything back, if there is anything; waits for a step that is under way."""
        self._closed = True
        with self._lock:
            environment, self._environment = self._environment, None
            if environment is not None:
                self._call("close", environment.close)

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFailed("the episode is over; its environment takes no more actions")

    def _open(self) -> Environment:
        self._check_open()
        if self._environment is None:
            name = self._task.env_type
            if not name:
                raise EnvironmentFailed(
                    f"task {self._task.task_id!r} has no env_type, so there is no environment to step; use a task "
                    "reader that sets it, or leave gym_step out of the workflow"
                )
            try:
                kind = self._config.resolve("environment", name, self._disabled_plugins)
            except PluginError as e:
                raise EnvironmentFailed(str(e)) from e
            environment = self._call("constructor", kind, self._config.section("environment", name))
            self._environment = environment  # known before it is reset, so that close() gives back one that cannot be
            self.started = self._call("reset", environment.reset, self._task)
        return self._environment

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except EnvironmentFailed:
            raise
        except Exception as e:
            raise EnvironmentFailed(
                f"the environment {self._task.env_type!r} raised in {what}: {type(e).__name__}: {e}"
            ) from e


def _said(content: Any) -> str:
    """The text of an agent's message; AgentScope's content is a list of blocks, of which thoughts are not said."""
    if not isinstance(content, (list, tuple)):
        return text_of(content)
    blocks = [block if isinstance(block, Mapping) else vars(block) for block in content]  # 2.x: objects
    return "\n".join(block["text"] for block in blocks if block.get("type") == "text")
