"""Run one environment in the process of an instance and answer questions over a socket.

This module uses only the standard library, because it runs in the environment's interpreter, which may not have
ASTuner's packages. Invariant: every question gets one answer, in order. An error of the environment is also an answer;
only the end of the process is not.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from astuner import import_user_code, raised_at
from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import PluginError, safe_text, shown
from astuner.contracts.scalars import as_float
from astuner.contracts.types import Task
from astuner_env.older_environment import adapt, stand_in
from astuner_sandbox.isolation.linux import keep_apart

if TYPE_CHECKING:
    from astuner_sandbox.isolation.channel import Channel

_ENTRY_VARIABLE = "ASTUNER_ENV_ENTRY"
_MOST_TASKS = 1_000_000
_LONGEST_MESSAGE = 4000


def preload() -> None:
    """Import the environment in the zygote, so that instances start with it; exit with a message if that fails.

    The environment's code is untrusted: it loses access to other processes first, where the kernel supports it.
    """
    _keep_apart()
    try:
        load(os.environ[_ENTRY_VARIABLE])
    except PluginError as e:
        sys.exit(str(e))


def load(entry: str) -> type[Environment]:
    """Return the environment's class: ``package.module:Class`` or ``/absolute/file.py:Class``.

    :raises PluginError: It cannot be imported, or is neither an environment nor a class for the older service.
    """
    stand_in()
    found = import_user_code(entry)
    if not isinstance(found, type):
        raise PluginError(f"{entry} is {found!r}, not a class")
    try:
        return adapt(found)
    except TypeError as e:
        raise PluginError(f"{entry}: {e}") from None


def main(channel: Channel, options: Mapping[str, Any]) -> None:
    """Answer questions until ``close`` or until the service is gone.

    :param options: ``entry`` (see `load`), ``folder`` (working directory) and ``max_memory_mb``.
    """
    _settle(options["folder"], options["max_memory_mb"])
    world = World(load(options["entry"]), options["environment"])
    while True:
        try:
            question = channel.recv()
        except EOFError:
            return
        answer = world.answer(question)
        try:
            channel.send(answer)
        except (TypeError, ValueError) as e:
            channel.send(_failure("env_error", e))
        if question["op"] == "close":
            return


def _keep_apart() -> None:
    with contextlib.suppress(OSError):  # Landlock is missing or too old; `astuner env doctor` reports it
        keep_apart()


def _settle(folder: str, max_memory_mb: int) -> None:
    """Set up the process: private folder, no access to other instances, no core dumps, limited memory.

    The service periodically measures the total memory of an instance. Between two measurements, each process is limited
    to twice the memory limit and gets a `MemoryError` beyond it.
    """
    os.chdir(folder)
    _keep_apart()
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None  # reset the cached folder
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm") as file:
            own = int(file.read().split()[5]) * resource.getpagesize()  # inherited from the zygote
    except OSError:  # macOS, which does not enforce the limit either
        return
    resource.setrlimit(resource.RLIMIT_DATA, (own + (2 * max_memory_mb << 20),) * 2)


class World:
    """Environment with plain data as its interface."""

    def __init__(self, environment_class: type[Environment], name: str = "") -> None:
        self._class = environment_class
        self._name = name
        self._environment: Environment | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"ok": data}`` or ``{"error": {"kind", "type", "message", "place", "traceback"}}``."""
        operation = getattr(self, f"_{question['op']}")
        try:
            return {"ok": operation(question)}
        except _Refused as e:
            return _failure(e.kind, e.cause)
        except BaseException as e:  # the environment may raise anything
            return _failure("env_error", e)

    def _tasks(self, question: Mapping[str, Any]) -> dict[str, Any]:
        offset, limit = question["offset"], question["limit"]
        try:
            tasks = list(islice(self._class.tasks(question["split"], question["params"]), _MOST_TASKS + 1))
        except ValueError as e:
            self._made(question["params"])  # raises bad_params if the parameters are the cause
            raise _Refused("unknown_split", e) from e
        if len(tasks) > _MOST_TASKS:
            raise RuntimeError(f"the split has more than {_MOST_TASKS} tasks")
        if limit < 0:
            return {"tasks": [task.task_id for task in tasks], "total": len(tasks)}
        page = [
            {"task_id": task.task_id, "main_query": task.main_query, "metadata": plain(task.metadata)}
            for task in tasks[offset : offset + limit]
        ]
        return {"tasks": page, "total": len(tasks)}

    def _reset(self, question: Mapping[str, Any]) -> dict[str, Any]:
        given = question["task"]
        task = Task(
            task_id=given["task_id"],
            main_query=given.get("main_query", ""),
            env_type=self._name,
            metadata=given.get("metadata", {}),
        )
        self._environment = self._made(question["params"])
        try:
            result = self._environment.reset(task)
        except ValueError as e:
            raise _Refused("unknown_task", e) from e
        return _step_result(result)

    def _step(self, question: Mapping[str, Any]) -> dict[str, Any]:
        return _step_result(self._started.step(question["action"]))

    def _evaluate(self, question: Mapping[str, Any]) -> dict[str, Any]:
        found = Evaluation.of(self._started.evaluate())
        return {
            "score": _number(found.score, "score"),
            "success": found.is_success,
            "details": plain(found.details),
        }

    def _describe(self, question: Mapping[str, Any]) -> Any:
        return plain(self._started.describe())

    def _close(self, question: Mapping[str, Any]) -> None:
        if self._environment is not None:
            self._environment.close()

    def _made(self, params: Mapping[str, Any]) -> Environment:
        try:
            return self._class(params)
        except ValueError as e:
            raise _Refused("bad_params", e) from e

    @property
    def _started(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("the environment was not reset")
        return self._environment


class _Refused(Exception):
    """A ValueError with a meaning defined by the contract.

    :param kind: ``unknown_task``, ``unknown_split``, or ``bad_params`` (from the constructor).
    """

    def __init__(self, kind: str, cause: ValueError) -> None:
        super().__init__(str(cause))
        self.kind, self.cause = kind, cause


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON data: NumPy values become Python values, non-finite numbers become null.

    :raises TypeError: A value cannot be represented.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy numbers and arrays
        return plain(value.tolist())
    raise TypeError(f"the environment returned a {type(value).__name__}, which JSON cannot represent: {value!r:.200}")


def _step_result(result: StepResult) -> dict[str, Any]:
    if not isinstance(result, StepResult):
        raise TypeError(f"the environment returned {result!r:.200} instead of a StepResult")
    return {
        "observation": str(result.observation),
        "messages": [_message(message) for message in result.as_messages],
        "reward": _number(result.reward, "reward"),
        "terminated": bool(result.terminated),
        "truncated": bool(result.truncated),
        "info": plain(result.info),
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"the environment returned the message {message!r:.200}, which is not a mapping")
    return {"role": "user", "content": "", **plain(message)}


def _number(value: Any, what: str) -> float:
    """Return a finite number; any other value is an error of the environment."""
    if (number := as_float(value)) is None:
        raise ValueError(f"the environment's {what} is {shown(value)}; it must be a finite number")
    return number


def _failure(kind: str, error: BaseException) -> dict[str, Any]:
    message = safe_text(error)[:_LONGEST_MESSAGE]
    if isinstance(error, MemoryError):
        message = f"{message} (the limit per process is twice max_memory_mb)".strip()
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {
        "error": {
            "kind": kind,
            "type": type(error).__name__,
            "message": message,
            "place": raised_at(error, caller=__file__),
            "traceback": trace[-_LONGEST_MESSAGE * 2 :],
        }
    }
