"""An environment that lives in the service: the same contract as one in this process.

Invariant: an instance that was asked for is released, also when its creation was given up half way; and once a call
has failed, nothing more is asked of the instance, since nobody knows what state it is in.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import EnvironmentFailed
from astuner.contracts.types import Task
from astuner_env.env_service.client import EnvClient

logger = logging.getLogger("astuner.env_service")


class RemoteEnvironment(Environment):
    """One instance in the service. One call at a time, but for `interrupt`."""

    def __init__(self, params: Mapping[str, Any] | None = None, *, client: EnvClient, env_type: str) -> None:
        """
        :param env_type: the environment's name in the service.
        """
        super().__init__(params)
        self._over = threading.Event()
        self._client = client.until(self._over)
        self._env_type = env_type
        self._lock = threading.Lock()
        self._instance = ""  # empty: none to release
        self._at_most_once = False
        self._steps = 0
        self._failure: EnvironmentFailed | None = None

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        """Not known to the class: the service is asked by `EnvClient.task_ids`."""
        raise TypeError("ask EnvClient.task_ids(env_type, split, params); a RemoteEnvironment is one instance")

    def reset(self, task: Task) -> StepResult:
        self._release()
        instance = secrets.token_hex(16)
        with self._lock:
            self._instance, self._steps, self._failure = instance, 0, None
        try:
            started = self._client.create(self._env_type, task, instance, self.params)
        except EnvironmentFailed as e:
            self._failure = e
            raise
        finally:
            with self._lock:
                self._instance = instance  # again: `interrupt` may have come before there was anything to release
        if self._over.is_set():
            self._release()
            raise EnvironmentFailed("the episode is over; its environment is given back")
        self._at_most_once = started.at_most_once
        return started.result

    def step(self, action: Mapping[str, Any]) -> StepResult:
        self._steps += 1
        request_id = str(self._steps)
        try:
            return self._client.step(self._known(), action, request_id=request_id, at_most_once=self._at_most_once)
        except EnvironmentFailed as e:
            self._failure = e
            raise

    def evaluate(self) -> Evaluation:
        return self._client.evaluate(self._known())

    def describe(self) -> Mapping[str, Any]:
        return self._client.describe(self._known())

    def close(self) -> None:
        """Release the instance; a service that cannot be told is logged, since the instance ends by itself there."""
        self._over.set()
        self._release()

    def interrupt(self) -> None:
        """End the call that is under way in another thread, by taking its instance away; it then raises."""
        self.close()

    def _known(self) -> str:
        if self._failure is not None:
            raise EnvironmentFailed(f"its environment is lost: {self._failure}") from self._failure
        if not self._instance:
            raise EnvironmentFailed("the environment was not reset, or is closed")
        return self._instance

    def _release(self) -> None:
        with self._lock:
            instance, self._instance = self._instance, ""
        if not instance:
            return
        try:
            self._client.release(instance)
        except EnvironmentFailed as e:
            logger.warning("the instance %s of %s could not be released: %s", instance, self._env_type, e)
