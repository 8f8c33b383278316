"""Call an environment service over HTTP.

`EnvClient` has one blocking method per route. `RemoteEnvironment` makes one instance of the service available as an
`Environment`.

A request is repeated only if that is safe and may help. Reads are safe. A failed create is repeated after the instance
it may have left is released. A step changes the environment, so it is repeated with the same ``request_id``, and only
if the service guarantees to execute it at most once. If the service is full, the client waits.

Invariant: a method returns the answer of the service or raises `EnvironmentFailed`.
"""

from __future__ import annotations

import copy
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from astuner import is_code
from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import ConfigError, EnvironmentFailed
from astuner.contracts.service import variable
from astuner.contracts.types import Task
from astuner_env import older_environment as wire
from astuner_http.client import HttpError, JsonClient

if TYPE_CHECKING:
    from astuner import Config

T = TypeVar("T")

logger = logging.getLogger("astuner.env_service")

URL_VARIABLE = "ASTUNER_ENV_URL"
"""Variable with the URL of a service that was started with the run."""
MAX_REPLY = 1 << 26
TRIES = 5
"""Attempts for a request that gets no answer."""
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubled for each further attempt, with jitter."""
_MAY_PASS = frozenset({None, 408, 425, 502})
"""Status codes that may be temporary: no answer (None), or an answer of a proxy."""
_FULL = frozenset({429, 503})
_jitter = random.Random()
"""Separate generator, so that an agent that seeds ``random`` does not affect the jitter, and vice versa."""


class EnvClient:
    """Client of one environment service. Methods block and are thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        token_name: str = "the token",
        timeout: float = 300.0,
        busy_timeout: float = 600.0,
        start_it: str = "astuner run FILE --with NAME, or set astuner.env_service.url",
    ) -> None:
        """Create a client; no connection is opened yet.

        :param token_name: Name of the token in messages, e.g. the variable it was read from.
        :param timeout: Seconds per request. Choose more than the service's own limits, so that its error is received.
        :param busy_timeout: Seconds to wait for a free slot in a full service.
        :param start_it: Command to suggest if the service cannot be reached.
        :raises ConfigError: The URL or the token is invalid.
        """
        try:
            self._http = JsonClient(url, api_key=token, key_name=token_name, timeout=timeout, max_reply=MAX_REPLY)
        except HttpError as e:
            raise ConfigError(f"the environment service: {e}") from e
        self._token = token
        self._timeout = timeout
        self._busy_timeout = busy_timeout
        self._start_it = start_it
        self._over = threading.Event()

    @property
    def url(self) -> str:
        return self._http.base_url

    def until(self, over: threading.Event) -> EnvClient:
        """Return a copy of the client that stops waiting when ``over`` is set."""
        other = copy.copy(self)
        other._over = over
        return other

    def is_up(self) -> bool:
        """Return whether the service answers."""
        return self._http.is_up("/healthz")

    def task_ids(self, env_type: str, split: str, params: Mapping[str, Any]) -> list[str]:
        """Return the task IDs of a split."""
        body = _body(env_type=env_type, params={**params, "split": split})
        return self._ask("/get_env_profile", body, wire.task_ids)

    def create(self, env_type: str, task: Task, instance_id: str, params: Mapping[str, Any]) -> StepResult:
        """Create an instance and start it on ``task``.

        The returned ``info`` contains ``at_most_once: true`` if the service executes a step only once, even if it is
        sent again with the same ``request_id``.

        :param instance_id: Chosen by the caller. It must be hard to guess: anyone who knows it can use the instance.
        """
        given = wire.params_for(task, params)
        body = _body(env_type=env_type, task_id=task.task_id, instance_id=instance_id, params=given)
        return self._ask("/create", body, wire.started, before_again=lambda: self._forget(instance_id))

    def step(
        self, instance_id: str, action: Mapping[str, Any], *, request_id: str, at_most_once: bool = False
    ) -> StepResult:
        """Send an action to an instance.

        :param request_id: Unique for each step of an instance.
        :param at_most_once: The value from `create`. If false, a step without an answer is not repeated.
        """
        body = _body(instance_id=instance_id, messages=dict(action), params={"request_id": request_id})
        return self._ask("/step", body, wire.stepped, repeatable=at_most_once)

    def evaluate(self, instance_id: str) -> Evaluation:
        """Return the evaluation of the episode so far."""
        found = self._ask("/evaluate", _body(instance_id=instance_id, params={"details": True}), wire.evaluated)
        if isinstance(found, Evaluation):
            return found
        body = _body(instance_id=instance_id, params={"sparse": True})  # a report without a score: ask for success
        score = self._ask("/evaluate", body, lambda data: wire.number("the sparse score", data))
        return Evaluation(score=score, details=found)

    def describe(self, instance_id: str) -> Mapping[str, Any]:
        """Return the description of an instance for people and agents."""
        found = self._ask("/get_info", _body(instance_id=instance_id), lambda data: data)
        return found if isinstance(found, Mapping) else {"info": found}

    def release(self, instance_id: str) -> bool:
        """Release an instance, even if it is busy. Return False if it does not exist."""
        try:
            answer = self._http.post("/release", _body(instance_id=instance_id))
        except HttpError as e:
            raise self._failed(e) from e
        return isinstance(answer, Mapping) and answer.get("success") is True

    # ---------------------------------------------------------------- private

    def _ask(
        self,
        route: str,
        body: Mapping[str, Any],
        read: Callable[[Any], T],
        *,
        repeatable: bool = True,
        before_again: Callable[[], object] = lambda: None,
    ) -> T:
        """Call ``route`` and return its answer, parsed by ``read``.

        :param repeatable: Whether the request may be sent twice.
        :param before_again: Called before a request is repeated that the service may already have executed.
        """
        began = time.monotonic()
        left = TRIES
        while True:
            try:
                return read(wire.data_of(self._http.post(route, body)))
            except wire.NotUnderstood as e:
                raise EnvironmentFailed(f"the environment service at {self.url}{route}: {e}") from e
            except HttpError as e:
                passed = time.monotonic() - began
                if e.status in _FULL:
                    pause, in_time = max(e.after, 1.0), passed < self._busy_timeout
                else:
                    left -= 1
                    pause = FIRST_PAUSE * 2 ** (TRIES - 1 - left)
                    in_time = left > 0 and e.again and e.status in _MAY_PASS and passed < self._timeout
                    in_time = in_time and (repeatable or e.unsent)
                if not in_time:
                    raise self._failed(e) from e
                self._wait(pause * _jitter.uniform(1.0, 1.5))
                if not e.unsent and e.status not in _FULL:
                    before_again()

    def _forget(self, instance_id: str) -> None:
        """Release an instance that an unanswered create may have left."""
        try:
            self.release(instance_id)
        except EnvironmentFailed as e:
            logger.info("releasing instance %s before the next attempt: %s", instance_id, e)

    def _wait(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise EnvironmentFailed(
                f"The episode is over, so the environment service at {self.url} is not called again."
            )

    def _failed(self, error: HttpError) -> EnvironmentFailed:
        code, message, reason = _refusal(error.refusal)
        start = "the environment service"
        if code:
            why = f" ({reason})" if reason else ""
            said = f"{code}: {message}{why}"
            said = said.replace(self._token, "***") if self._token else said
            return EnvironmentFailed(f"{start} at {self.url} answered {error.status} {said}")
        if error.status == 401:
            return EnvironmentFailed(
                f"{start}: {error}. Put the token into the variable that astuner.env_service.token_env names."
            )
        if error.unsent:
            return EnvironmentFailed(f"{start}: {error}. Start it: {self._start_it}")
        return EnvironmentFailed(f"{start}: {error}")


def _body(**fields: Any) -> dict[str, Any]:
    """Return a request body; older services require all of these fields."""
    return {"env_type": "default", "task_id": None, "instance_id": None, "messages": {}, "params": {}, **fields}


def _refusal(document: Any) -> tuple[str, str, str]:
    """Return code, message and reason of a refusal of ASTuner's service; empty strings for other services."""
    detail = document.get("detail") if isinstance(document, Mapping) else None
    if not isinstance(detail, Mapping) or not isinstance(detail.get("code"), str):
        return "", "", ""
    return detail["code"], wire.shown_text(detail.get("message")), wire.shown_text(detail.get("reason"))


class RemoteEnvironment(Environment):
    """Instance in the service. Only `interrupt` may be called while another call is running."""

    def __init__(self, params: Mapping[str, Any] | None = None, *, client: EnvClient, env_type: str) -> None:
        """Create an environment without an instance; `reset` creates the instance.

        :param env_type: Name of the environment in the service.
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
        """Raise `TypeError`: use `EnvClient.task_ids` instead."""
        raise TypeError("RemoteEnvironment cannot list tasks. Call EnvClient.task_ids(env_type, split, params).")

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
                self._instance = instance  # again: `interrupt` may have run before the instance existed
        if self._over.is_set():
            self._release()
            raise EnvironmentFailed("The episode is over; its environment was released.")
        self._at_most_once = started.info.get("at_most_once") is True
        return started

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
        """Release the instance. A failure is only logged, because the service ends idle instances itself."""
        self._over.set()
        self._release()

    def interrupt(self) -> None:
        """Release the instance, so that a running call in another thread raises an error."""
        self.close()

    def _known(self) -> str:
        if self._failure is not None:
            raise EnvironmentFailed(f"The environment is lost: {self._failure}") from self._failure
        if not self._instance:
            raise EnvironmentFailed("The environment is closed or was not reset.")
        return self._instance

    def _release(self) -> None:
        with self._lock:
            instance, self._instance = self._instance, ""
        if not instance:
            return
        try:
            self._client.release(instance)
        except EnvironmentFailed as e:
            logger.warning("could not release instance %s of %s: %s", instance, self._env_type, e)


def service_url(config: Config) -> str:
    """Return the URL of the environment service, or an empty string."""
    return config.astuner.env_service.url or variable(URL_VARIABLE)


def is_remote(config: Config, env_type: str) -> bool:
    """Return whether an environment runs in the service.

    It does if a service is configured, except for environments given as code and tasks of the reader ``environment``:
    these run in this process.
    """
    reader = config.astuner.task_reader.type.rpartition("/")[2]
    if is_code(env_type) or reader == "environment":
        return False
    return reader == "env_service" or bool(service_url(config))


def find_client(config: Config) -> EnvClient:
    """Return a client of the experiment's service; no connection is opened yet.

    :raises ConfigError: No URL is configured, or it is invalid.
    """
    settings = config.astuner.env_service
    url = service_url(config)
    if not url:
        raise ConfigError(
            "No environment service is configured. Start one with --with NAME, or set astuner.env_service.url "
            f"(or the variable {URL_VARIABLE})."
        )
    return EnvClient(
        url,
        token=variable(settings.token_env) if settings.token_env else "",
        token_name=settings.token_env,
        timeout=settings.timeout,
        busy_timeout=settings.busy_timeout,
    )
