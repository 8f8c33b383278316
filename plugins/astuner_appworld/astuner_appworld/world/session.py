"""One world and the shell beside it, as their referee sees them: passing on calls, keeping the time, ending both.

`Options` is what ``astuner.env_service.params`` may say about AppWorld, checked.  The instance process runs this, in
AppWorld's own interpreter, so it is plain Python.  It holds no world and no answers, so every process forked from it
starts clean, and it parses nothing of what the shell sends beyond JSON.  Invariant: what the code does ends in an
observation, within `Options.longest_step`.  Only a world that fails on its own raises `WorldFailed`.
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
"""``require`` refuses to run model-written code where the kernel cannot confine it; ``auto`` does what it can."""
MAX_TIMEOUT = 120
"""The service ends a step after 240 seconds, and `Options.longest_step` must fit in."""
GRACE = 5.0
"""Seconds beyond its own limit after which a shell is killed: code can swallow the limit's exception."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One instance's parameters and their defaults. Times in seconds."""

    max_interactions: int = 50
    """Steps until the episode is truncated; a message without code counts."""
    timeout: int = 60
    """One piece of code."""
    max_api_calls: int = 1000
    """API calls of one piece of code."""
    max_output: int = 20_000
    """Characters of output that the agent sees of one step; the middle of a longer one is left out."""
    code_format: str = "first_block"
    """``first_block``, ``all_blocks`` or ``raw``, see `astuner_appworld.world.environment.code_of`."""
    check_code: bool = True
    """Refuse code that names what no solution needs (`shell`); the processes are separated with and without it."""
    seed: int = 100
    """Of Python's random numbers, in the apps and in the shell; 100 is AppWorld's own."""

    api_timeout: ClassVar[float] = 30.0
    """One API call."""
    keep_timeout: ClassVar[float] = 30.0
    """Writing the state."""
    start_timeout: ClassVar[float] = 50.0
    """Making the world."""
    shell_timeout: ClassVar[float] = 40.0
    """Making a shell."""
    evaluate_timeout: ClassVar[float] = 50.0
    """One evaluation; there may be a second, see `Session.evaluate`."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Options:
        """:raises ValueError: an unknown name or a value out of range."""
        known = [field.name for field in fields(cls)]
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"AppWorld has no parameter {name!r}; there are {', '.join(known)}")
            if name == "code_format":
                if value not in CODE_FORMATS:
                    raise ValueError(f"code_format is one of {', '.join(CODE_FORMATS)}, not {value!r}")
            elif name == "check_code":
                if not isinstance(value, bool):
                    raise ValueError(f"check_code is true or false, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "seed" else 1):
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        options = cls(**params)
        if options.timeout > MAX_TIMEOUT:
            raise ValueError(f"timeout must be at most {MAX_TIMEOUT}, or the service kills the instance first")
        return options

    @property
    def require(self) -> bool:
        """Refuse to start where the kernel cannot confine the shell completely."""
        return os.environ.get(REQUIRE_VARIABLE, "auto") == "require"

    @property
    def longest_step(self) -> float:
        """Seconds: code that runs on, a call in its last moment, a new shell, and keeping the state."""
        return self.timeout + GRACE + self.api_timeout + self.shell_timeout + self.keep_timeout


_LONGEST_FROM_SHELL = 8 << 20
"""Bytes of one message; a hostile one costs the trusted process several times that."""
_MB = 1 << 20
_SHELL_MB, _APPS_MB, _EVALUATOR_MB = 768, 640, 768
"""Address space of each process beyond what it shares when it is forked, and beyond what the root's databases take."""
_APPS_DATABASES, _EVALUATOR_DATABASES = 4, 8
"""How many times their size: we measured 2.1 in a world, and an evaluation holds them before and after."""
_APPS_FILE_MB = 8
"""One app's changes on disk, beyond twice what the task begins with."""
_BROKEN = (EOFError, TimeoutError, ValueError, OSError, RecursionError)
"""What a channel raises when its other end is gone, slow, or talks nonsense."""


class WorldFailed(RuntimeError):
    """The world failed, and not by what the agent's code did."""


class StateBroken(RuntimeError):
    """The agent left a state that cannot be evaluated; the one that it began with can."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of one piece of code."""

    output: str
    completed: bool = False
    lost: bool = False
    """The world is gone, by the code's own doing."""


class Session:
    """The processes of one episode."""

    def __init__(self, root: Path, task_id: str, folder: Path, options: Options) -> None:
        self._root, self._task_id, self._folder, self._options = root, task_id, folder, options
        self._apps: ForkedChild | None = None
        self._shell: ForkedChild | None = None
        self._api_calls = 0
        self._state = 0
        """The number of the state on disk that counts; 0 is the one that the world began with."""
        self.facts: Mapping[str, Any] = {}
        self.confined = ""
        """How far the shell is, in words."""
        self.restarts = 0
        """How many times the code lost its shell."""

    def start(self) -> Mapping[str, Any]:
        """Make the world and the shell; the task's instruction and the person it is for.

        :raises WorldFailed: it cannot be made.
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
        """Run one piece of code and keep the state it leaves.

        :raises WorldFailed: the world had failed before the code touched it.
        """
        assert self._apps is not None, "start() comes first"
        if not self._apps.alive:  # it was idle: nothing of the agent's ran
            raise WorldFailed(f"the world of {self._task_id} failed to begin a step: it {self._apps.ended}")
        self._api_calls = 0
        self._signal_shell(signal.SIGCONT)
        try:
            return self._run(code)
        finally:
            self._signal_shell(signal.SIGSTOP)  # threads that the code started do not run on between two steps

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
        except WorldFailed:  # it was well when the step began, and then the code called it
            self._apps.kill()
            return Ran(output=_LOST, lost=True)

    def evaluate(self) -> dict[str, Any]:
        """What the task's tests say about the state that the last step left.

        One that fails is tried on the state that the world began with: if that works, it is the agent's doing.

        :raises WorldFailed: the evaluation fails, whatever the state.
        :raises StateBroken: it fails for the agent's state only.
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
        """End every process; a second call is harmless."""
        for child in (self._shell, self._apps):
            if child is not None:
                child.kill()
        self._shell = self._apps = None

    def _ask_apps(self, what: str, timeout: float, **more: str) -> dict[str, Any]:
        assert self._apps is not None, "start() comes first"
        return _answer(self._apps, {"ask": what, **more}, timeout, f"the world of {self._task_id} failed to {what}")

    def _keep(self) -> bool:
        """Have the state written beside the last one, which counts until all of it is there; whether the task is over.

        :raises WorldFailed: it cannot be written; the last state is untouched.
        """
        last, now = self._state, self._state + 1
        completed = bool(self._ask_apps("end", self._options.keep_timeout, experiment=_experiment(now))["completed"])
        self._state = now
        if last:
            shutil.rmtree(self._folder / "world" / "experiments" / "outputs" / _experiment(last))
        return completed

    def _pass_on(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """One API call of the shell; ``{"lost": True}`` when it was too much for the world."""
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
        if seconds <= 0:  # an answer that is there already would be taken, and the next one, without end
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
        """The code lost its shell, and nothing else: the apps are as it left them."""
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
    """What one of our own processes answers.

    :param what: the beginning of the message, which the reason follows.
    :raises WorldFailed: there is no answer in time, or it says that it failed.
    """
    try:
        answer = dict(child.call(message, seconds))
    except _BROKEN as e:
        raise WorldFailed(f"{what}: {type(e).__name__}: {e}") from e
    if "failed" in answer:
        raise WorldFailed(f"{what}: {answer['failed']}")
    return answer


def _experiment(state: int) -> str:
    """AppWorld's name for the folder of a state."""
    return f"{roots.EXPERIMENT}{state}" if state else roots.EXPERIMENT


def _size_mb(folder: Path) -> int:
    """Rounded up."""
    return -(-sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) // _MB)


def _call_in(answer: Any) -> dict[str, Any]:
    """:raises ValueError: the shell talks nonsense; the code has got at its wire."""
    call = answer.get("call") if isinstance(answer, Mapping) else None
    if isinstance(call, Mapping):
        app, api, arguments = call.get("app"), call.get("api"), call.get("arguments")
        if isinstance(app, str) and isinstance(api, str) and isinstance(arguments, Mapping):
            return {"app": app, "api": api, "arguments": dict(arguments)}
    raise ValueError("the shell sent neither a call nor an output")
