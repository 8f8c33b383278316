"""Run one world and its shell: forward API calls, enforce time limits, and end both processes.

`Options` holds the validated ``astuner.env_service.params`` for AppWorld. This code runs in the instance process, in
AppWorld's interpreter, so it is plain Python. The process contains neither a world nor answers, so every fork starts
clean, and it parses only JSON from the shell. Invariant: the code of an agent always results in an observation, within
`Options.longest_step`. Only a world that fails by itself raises `WorldFailed`.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from astuner_appworld.world import apps, evaluator, package, roots, shell
from astuner_sandbox.isolation.child import ForkedChild
from astuner_sandbox.isolation.confine import Confinement
from astuner_sandbox.isolation.proc import address_space_mb

CODE_FORMATS = ("first_block", "all_blocks", "raw")
REQUIRE_VARIABLE = "ASTUNER_APPWORLD_CONFINEMENT"
"""``require`` refuses to run model-written code if the kernel cannot confine it; ``auto`` confines if possible."""
MAX_TIMEOUT = 120
"""The service ends a step after 240 seconds, so `Options.longest_step` must be shorter."""
GRACE = 5.0
"""Seconds after its own limit until a shell is killed, because code can swallow the exception of the limit."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parameters of one instance. Times are in seconds."""

    max_interactions: int = 50
    """Steps until the episode is truncated; messages without code count."""
    timeout: int = 60
    """Time limit of one piece of code."""
    max_api_calls: int = 1000
    """Maximum number of API calls of one piece of code."""
    max_output: int = 20_000
    """Maximum characters of output per step for the agent; the middle of longer output is omitted."""
    code_format: str = "first_block"
    """``first_block``, ``all_blocks`` or ``raw``; see `astuner_appworld.world.environment.code_of`."""
    check_code: bool = True
    """Whether to refuse code with names that solutions do not need (`shell`). Processes are separated in any case."""
    seed: int = 100
    """Random seed of the apps and the shell; 100 is AppWorld's default."""

    api_timeout: ClassVar[float] = 30.0
    """Time limit of one API call."""
    keep_timeout: ClassVar[float] = 30.0
    """Time limit for writing the state."""
    start_timeout: ClassVar[float] = 50.0
    """Time limit for creating the world."""
    shell_timeout: ClassVar[float] = 40.0
    """Time limit for creating a shell."""
    evaluate_timeout: ClassVar[float] = 50.0
    """Time limit of one evaluation; a second one may follow, see `Session.evaluate`."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Options:
        """Return the validated parameters.

        :raises ValueError: A name is unknown or a value is out of range.
        """
        known = [field.name for field in fields(cls)]
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"unknown AppWorld parameter {name!r}; known parameters: {', '.join(known)}")
            if name == "code_format":
                if value not in CODE_FORMATS:
                    raise ValueError(f"code_format must be one of {', '.join(CODE_FORMATS)}, not {value!r}")
            elif name == "check_code":
                if not isinstance(value, bool):
                    raise ValueError(f"check_code must be true or false, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "seed" else 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        options = cls(**params)
        if options.timeout > MAX_TIMEOUT:
            raise ValueError(f"timeout must be at most {MAX_TIMEOUT}; otherwise the service kills the instance first")
        return options

    @property
    def require(self) -> bool:
        """Whether to refuse to start if the kernel cannot fully confine the shell."""
        return os.environ.get(REQUIRE_VARIABLE, "auto") == "require"

    @property
    def longest_step(self) -> float:
        """Maximum seconds of a step: code up to its limit, a last API call, a new shell, and writing the state."""
        return self.timeout + GRACE + self.api_timeout + self.shell_timeout + self.keep_timeout


_LONGEST_FROM_SHELL = 8 << 20
"""Maximum bytes of one message; parsing it takes several times that in the trusted process."""
_MB = 1 << 20
_SHELL_MB, _APPS_MB, _EVALUATOR_MB = 768, 640, 768
"""Address space of each process, in addition to the memory inherited from the fork and to the databases."""
_APPS_DATABASES, _EVALUATOR_DATABASES = 4, 8
"""Memory for databases as a multiple of their size: 2.1 in a world; evaluations hold two states."""
_APPS_FILE_MB = 8
"""Maximum size of an app's changes on disk, in addition to twice the initial size."""
_BROKEN = (EOFError, TimeoutError, ValueError, OSError, RecursionError)
"""Exceptions of a channel whose other end is gone, slow or sends invalid data."""


class WorldFailed(RuntimeError):
    """Raised if the world fails and the agent's code is not the cause."""


class StateBroken(RuntimeError):
    """Raised if the agent's final state cannot be evaluated but the initial state can."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Result of one piece of code."""

    output: str
    completed: bool = False
    lost: bool = False
    """Whether the code destroyed the world."""


class Session:
    """Processes of one episode."""

    def __init__(self, root: Path, task_id: str, folder: Path, options: Options) -> None:
        self._root, self._task_id, self._folder, self._options = root, task_id, folder, options
        self._apps: ForkedChild | None = None
        self._shell: ForkedChild | None = None
        self._api_calls = 0
        self._state = 0
        """Number of the current state on disk; 0 is the initial state."""
        self.facts: Mapping[str, Any] = {}
        self.confined = ""
        """Description of the shell's confinement."""
        self.restarts = 0
        """Number of times the shell was replaced."""

    def start(self) -> Mapping[str, Any]:
        """Create the world and the shell; return the task's instruction and its person.

        :raises WorldFailed: The world cannot be created.
        """
        (self._folder / "shell").mkdir()
        own = roots.make_world_root(self._root, self._task_id, self._folder)
        confinement = Confinement(
            read=(*package.places_to_read(), *roots.what_a_world_reads(self._root, self._task_id), str(own)),
            write=(str(own), os.devnull),
            memory_mb=address_space_mb() + _APPS_MB + _APPS_DATABASES * self._database_mb(),
            file_mb=_APPS_FILE_MB + 2 * _size_mb(roots.task_folder(self._root, self._task_id) / "dbs"),
        )
        options = {"seed": self._options.seed, "max_api_calls": self._options.max_api_calls}
        self._apps = ForkedChild(apps.main, str(own), self._task_id, options, confinement=confinement)
        self.facts = self._ask_apps("start", self._options.start_timeout)
        self._start_shell()
        return self.facts

    def run(self, code: str) -> Ran:
        """Run one piece of code and save the resulting state.

        :raises WorldFailed: The world failed before the code used it.
        """
        assert self._apps is not None, "call start() first"
        if not self._apps.alive:  # no code of the agent was running
            raise WorldFailed(f"the world of {self._task_id} failed to begin a step: it {self._apps.ended}")
        self._api_calls = 0
        self._signal_shell(signal.SIGCONT)
        try:
            return self._run(code)
        finally:
            self._signal_shell(signal.SIGSTOP)  # threads of the code do not run between two steps

    def _run(self, code: str) -> Ran:
        assert self._apps is not None
        end = time.monotonic() + self._options.timeout + GRACE
        message: dict[str, Any] = {"code": code}
        output: str | None = None
        while output is None:
            try:
                answer = self._shell_answers(message, end - time.monotonic())
                said = answer.get("output") if isinstance(answer, Mapping) else None
                output = said if isinstance(said, str) else None
                call = None if output is not None else _call_in(answer)
            except TimeoutError:
                output = self._another_shell(f"it ran for more than {self._options.timeout} seconds and was stopped")
                break
            except _BROKEN:
                output = self._another_shell("it ended the Python process it ran in")
                break
            if call is not None:
                message = self._pass_on(call)
                if "lost" in message:
                    return Ran(output=_LOST, lost=True)
        if not self._api_calls:
            return Ran(output=output)
        try:
            return Ran(output=output, completed=self._keep())
        except WorldFailed:  # the world worked until the code called it
            self._apps.kill()
            return Ran(output=_LOST, lost=True)

    def evaluate(self) -> dict[str, Any]:
        """Return the results of the task's tests for the current state.

        A failed evaluation is repeated on the initial state: if that works, the agent's state is the cause.

        :raises WorldFailed: The evaluation fails for any state.
        :raises StateBroken: The evaluation fails only for the agent's state.
        """
        try:
            return self._evaluate(self._state)
        except WorldFailed as e:
            if self._state == 0:
                raise
            self._evaluate(0)
            raise StateBroken(str(e)) from e

    def _evaluate(self, state: int) -> dict[str, Any]:
        own = roots.make_evaluation_root(self._root, self._folder)
        data = str(self._root.resolve() / "data")
        read = (*package.places_to_read(), *package.lent_sources(), data, str(self._folder))
        memory_mb = address_space_mb() + _EVALUATOR_MB + _EVALUATOR_DATABASES * self._database_mb()
        confinement = Confinement(read=read, write=(os.devnull,), memory_mb=memory_mb)
        child = ForkedChild(evaluator.main, str(own), self._task_id, _experiment(state), confinement=confinement)
        try:
            what = f"the evaluation of {self._task_id} failed"
            return _answer(child, {"ask": "evaluate"}, self._options.evaluate_timeout, what)
        finally:
            child.kill()

    def close(self) -> None:
        """End all processes; idempotent."""
        for child in (self._shell, self._apps):
            if child is not None:
                child.kill()
        self._shell = self._apps = None

    def _ask_apps(self, what: str, timeout: float, **more: str) -> dict[str, Any]:
        assert self._apps is not None, "call start() first"
        return _answer(self._apps, {"ask": what, **more}, timeout, f"the world of {self._task_id} failed to {what}")

    def _keep(self) -> bool:
        """Write a new state next to the last one, then delete the last one; return whether the task is over.

        :raises WorldFailed: The state cannot be written; the last state remains.
        """
        last, now = self._state, self._state + 1
        completed = bool(self._ask_apps("end", self._options.keep_timeout, experiment=_experiment(now))["completed"])
        self._state = now
        if last:
            shutil.rmtree(self._folder / "world" / "experiments" / "outputs" / _experiment(last))
        return completed

    def _pass_on(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Forward an API call of the shell; return ``{"lost": True}`` if the call destroyed the world."""
        assert self._apps is not None
        first = self._api_calls == 0
        self._api_calls += 1
        try:
            answer = dict(self._apps.call({"ask": "call", "first": first, **call}, self._options.api_timeout))
        except _BROKEN:
            self._apps.kill()
            return {"lost": True}
        return {"error": answer["failed"]} if "failed" in answer else answer

    def _database_mb(self) -> int:
        task = roots.task_folder(self._root, self._task_id)
        return _size_mb(self._root / "data" / "base_dbs") + _size_mb(task / "dbs")

    def _signal_shell(self, number: int) -> None:
        if self._shell is not None and self._shell.alive:
            os.kill(self._shell.pid, number)

    def _shell_answers(self, message: Mapping[str, Any], seconds: float) -> Any:
        assert self._shell is not None
        if seconds <= 0:  # otherwise a shell that always answers could continue forever
            raise TimeoutError("its time is over")
        return self._shell.call(message, seconds)

    def _start_shell(self) -> None:
        options = self._options
        facts = {
            "apis": self.facts["apis"],
            "datetime": self.facts["datetime"],
            "timeout": options.timeout,
            "seed": options.seed,
            "check_code": options.check_code,
            "folder": str(self._folder / "shell"),
        }
        confinement = Confinement(
            read=package.places_to_read(), memory_mb=address_space_mb() + _SHELL_MB, file_mb=0, open_files=64
        )
        self._shell = ForkedChild(shell.main, facts, confinement, options.require, max_bytes=_LONGEST_FROM_SHELL)
        what = f"the shell for {self._task_id} did not start"
        ready = _answer(self._shell, {"start": True}, options.shell_timeout, what)
        self.confined = str(ready.get("ready", ""))

    def _another_shell(self, why: str) -> str:
        """Replace the shell; the apps keep their state. Return the observation."""
        assert self._shell is not None
        self._shell.kill()
        self.restarts += 1
        self._start_shell()
        return (
            f"Execution failed: {why}. A new Python session was started: variables and imports of earlier blocks are "
            "gone, and what you did in the apps stays done."
        )


_LOST = (
    "Execution failed: what this block did was more than the apps could bear, and they have stopped. The task ends "
    "here, as it stood before this block."
)


def _answer(child: ForkedChild, message: Mapping[str, Any], seconds: float, what: str) -> dict[str, Any]:
    """Return the answer of a child process.

    :param what: Beginning of the error message.
    :raises WorldFailed: No answer in time, or the process reports a failure.
    """
    try:
        answer = dict(child.call(message, seconds))
    except _BROKEN as e:
        raise WorldFailed(f"{what}: {type(e).__name__}: {e}") from e
    if "failed" in answer:
        raise WorldFailed(f"{what}: {answer['failed']}")
    return answer


def _experiment(state: int) -> str:
    """Return AppWorld's folder name of a state."""
    return f"{roots.EXPERIMENT}{state}" if state else roots.EXPERIMENT


def _size_mb(folder: Path) -> int:
    """Return the size of a folder in MB, rounded up."""
    return -(-sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) // _MB)


def _call_in(answer: Any) -> dict[str, Any]:
    """Return the API call in a message of the shell.

    :raises ValueError: The message is invalid, because the code tampered with the channel.
    """
    call = answer.get("call") if isinstance(answer, Mapping) else None
    if isinstance(call, Mapping):
        app, api, arguments = call.get("app"), call.get("api"), call.get("arguments")
        if isinstance(app, str) and isinstance(api, str) and isinstance(arguments, Mapping):
            return {"app": app, "api": api, "arguments": dict(arguments)}
    raise ValueError("the shell sent neither a call nor an output")
