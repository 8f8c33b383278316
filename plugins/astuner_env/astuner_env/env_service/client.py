"""The environment service over HTTP, where it is, and an environment in it as if it were in this process.

The client has one method per route, each blocking until there is an answer or none can be had.

A request is made again when that may help and does no harm.  Reading is harmless; an instance is created again only
after the one that may have come of the first request was released; a step, which changes the world, is sent again only
where the service promised to carry it out at most once, under the same ``request_id``.  A full service is waited for.

Invariant: a method returns what the service said, or raises `EnvironmentFailed`.
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
"""Where a service that was started beside the run listens."""
MAX_REPLY = 1 << 26
TRIES = 5
"""Times a request is made that gets no answer."""
FIRST_PAUSE = 0.5
"""Seconds before it is made a second time; doubled every time, with jitter."""
_MAY_PASS = frozenset({None, 408, 425, 502})
"""With which the same request may fare better: there was no answer at all, or one of something in between."""
_FULL = frozenset({429, 503})
_jitter = random.Random()
"""Of our own: an agent that seeds ``random`` neither makes all clients wait alike nor finds its draws shifted by us."""


class EnvClient:
    """One environment service. Methods block and may be called from several threads."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        token_name: str = "the token",
        timeout: float = 300.0,
        busy_timeout: float = 600.0,
        start_it: str = "astuner run FILE --with NAME, or say where it is with astuner.env_service.url",
    ) -> None:
        """
        :param token_name: what messages call the token, e.g. the variable it was read from.
        :param timeout: seconds one request may take; more than the service's own limits, so that it says what happened.
        :param busy_timeout: seconds to wait for room in a service that is full.
        :param start_it: what to type when nothing answers.
        :raises ConfigError: the URL or the token cannot be used.
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
        """The same client, whose waiting ends when ``over`` is set."""
        other = copy.copy(self)
        other._over = over
        return other

    def is_up(self) -> bool:
        """Whether it answers at all."""
        return self._http.is_up("/healthz")

    def task_ids(self, env_type: str, split: str, params: Mapping[str, Any]) -> list[str]:
        """The ids of a split's tasks."""
        body = _body(env_type=env_type, params={**params, "split": split})
        return self._ask("/get_env_profile", body, wire.task_ids)

    def create(self, env_type: str, task: Task, instance_id: str, params: Mapping[str, Any]) -> StepResult:
        """Make an instance and start it on ``task``.

        ``at_most_once`` is in its ``info`` where the service carries out a step once, however often it is sent with the
        same ``request_id``.

        :param instance_id: of the caller's choosing, and hard to guess, since whoever knows it can act in it.
        """
        given = wire.params_for(task, params)
        body = _body(env_type=env_type, task_id=task.task_id, instance_id=instance_id, params=given)
        return self._ask("/create", body, wire.started, before_again=lambda: self._forget(instance_id))

    def step(
        self, instance_id: str, action: Mapping[str, Any], *, request_id: str, at_most_once: bool = False
    ) -> StepResult:
        """Act.

        :param request_id: one for each step of an instance.
        :param at_most_once: what `create` says; otherwise a step whose answer is lost is lost.
        """
        body = _body(instance_id=instance_id, messages=dict(action), params={"request_id": request_id})
        return self._ask("/step", body, wire.stepped, repeatable=at_most_once)

    def evaluate(self, instance_id: str) -> Evaluation:
        """How good the episode is so far."""
        found = self._ask("/evaluate", _body(instance_id=instance_id, params={"details": True}), wire.evaluated)
        if isinstance(found, Evaluation):
            return found
        body = _body(instance_id=instance_id, params={"sparse": True})  # a report in words of its own: did it succeed?
        score = self._ask("/evaluate", body, lambda data: wire.number("the sparse score", data))
        return Evaluation(score=score, details=found)

    def describe(self, instance_id: str) -> Mapping[str, Any]:
        """What a person or an agent should know."""
        found = self._ask("/get_info", _body(instance_id=instance_id), lambda data: data)
        return found if isinstance(found, Mapping) else {"info": found}

    def release(self, instance_id: str) -> bool:
        """Give an instance back, whatever it is doing; False: there was none (any more)."""
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
        """The answer of ``route`` as ``read`` understands it.

        :param repeatable: whether the service may get the request twice.
        :param before_again: called before a request is made again that the service may have carried out.
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
        """Release what may have come of a request without an answer, so that it is not left behind."""
        try:
            self.release(instance_id)
        except EnvironmentFailed as e:
            logger.info("before asking again for the instance %s: %s", instance_id, e)

    def _wait(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise EnvironmentFailed(f"the episode is over; the environment service at {self.url} was not asked again")

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
                f"{start}: {error}; its token belongs in the variable astuner.env_service.token_env"
            )
        if error.unsent:
            return EnvironmentFailed(f"{start}: {error}; start it with: {self._start_it}")
        return EnvironmentFailed(f"{start}: {error}")


def _body(**fields: Any) -> dict[str, Any]:
    """A request; the reference wants every one of these to be there."""
    return {"env_type": "default", "task_id": None, "instance_id": None, "messages": {}, "params": {}, **fields}


def _refusal(document: Any) -> tuple[str, str, str]:
    """Code, message and reason of a refusal by our own service; empty where it is another's."""
    detail = document.get("detail") if isinstance(document, Mapping) else None
    if not isinstance(detail, Mapping) or not isinstance(detail.get("code"), str):
        return "", "", ""
    return detail["code"], wire.shown_text(detail.get("message")), wire.shown_text(detail.get("reason"))


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


def service_url(config: Config) -> str:
    """Where the environment service is; empty where there is none."""
    return config.astuner.env_service.url or variable(URL_VARIABLE)


def is_remote(config: Config, env_type: str) -> bool:
    """Whether an environment is the service's: where there is one, unless the experiment says otherwise.

    Code of the user's own and the tasks of the reader ``environment`` stay in this process.
    """
    reader = config.astuner.task_reader.type.rpartition("/")[2]
    if is_code(env_type) or reader == "environment":
        return False
    return reader == "env_service" or bool(service_url(config))


def find_client(config: Config) -> EnvClient:
    """A client of the experiment's service; connects to nothing yet.

    :raises ConfigError: nobody says where it is, or that is no address.
    """
    settings = config.astuner.env_service
    url = service_url(config)
    if not url:
        raise ConfigError(
            "no environment service is known; start one beside the run with --with NAME, or say where it is with "
            f"astuner.env_service.url (or the variable {URL_VARIABLE})"
        )
    return EnvClient(
        url,
        token=variable(settings.token_env) if settings.token_env else "",
        token_name=settings.token_env,
        timeout=settings.timeout,
        busy_timeout=settings.busy_timeout,
    )
