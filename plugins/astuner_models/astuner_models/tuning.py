"""Train from Python: `tune` writes an experiment file for its arguments and runs it."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

import yaml

from astuner import RunDir, find_backbone, find_user_file, is_code, load_config, run, user_module
from astuner.contracts.display import Displayed, RunView
from astuner.contracts.errors import ConfigError, told
from astuner.contracts.events import Event, Measured, Progressed, RunResumed, RunStarted, Subscriber
from astuner.contracts.interrupt import Interrupt
from astuner.contracts.places import Tree
from astuner.contracts.secrets import redact
from astuner.contracts.types import Task

if TYPE_CHECKING:
    from astuner.runs.launch import RunResult

NOT_IN_A_FILE = "not_in_a_file"
"""Module of objects without an import path, which exist only in this process."""


class Tuning(Subscriber, Displayed):
    """A run in a thread of this process. It ends with the process; a new call resumes it.

    Notebooks show a bar, the curve and the last metrics, and update them while the run lasts.
    """

    direct = True
    progress: Progressed | None = None
    """Progress of the current step or validation; None before the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._result: Future[RunResult] = Future()
        self._queues: list[SimpleQueue[Event | None]] = []
        self._interrupt = Interrupt()
        self._rows: list[Mapping[str, Any]] = []
        self._run_dir = Path()
        self._updates: list[threading.Thread] = []

    def _start(self, file: Path, options: Mapping[str, Any]) -> None:
        def work() -> None:
            try:
                self._result.set_result(run(file, **options, listeners=[self], interrupt=self._interrupt))
            except BaseException as e:  # raised by `result`
                self._result.set_exception(e)
            for queue in self._queues:
                queue.put(None)

        threading.Thread(target=work, name="astuner.tune", daemon=True).start()

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run_dir = event.run_dir
        elif isinstance(event, RunResumed):
            self._rows[:] = RunDir(self._run_dir).read_metrics()
        elif isinstance(event, Progressed):
            self.progress = event
        elif isinstance(event, Measured):
            self._rows.append({"step": event.step, **event.metrics})
        for queue in self._queues:
            queue.put(event)

    def events(self) -> Iterator[Event]:
        """Return an iterator over the events from now on (`astuner.contracts.events`), until the run is over."""
        queue: SimpleQueue[Event | None] = SimpleQueue()
        self._queues.append(queue)
        if self._result.done():
            queue.put(None)
        return iter(queue.get, None)

    def stop(self) -> None:
        """Stop the run like Ctrl-C: finished work is saved, and `result` raises `Interrupted`."""
        self._interrupt.request()

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the end of the run and return its result; raises the run's errors.

        :param timeout: Seconds.
        :raises concurrent.futures.TimeoutError: The run is not over; it continues.
        """
        try:
            return self._result.result(timeout)
        finally:
            if self._result.done():
                for update in self._updates:
                    update.join()

    @property
    def view(self) -> RunView:
        """State of the run, for display."""
        ended = self._result.done()
        error = self._result.exception() if ended else None
        status = told(error) if error else self._result.result().view.status if ended else "running"
        return RunView(name=self._name, status=status, progress=self.progress, rows=[*self._rows])

    def __repr__(self) -> str:
        return repr(self.view)

    def _ipython_display_(self) -> None:
        """Show the run; in a notebook, update it until the run is over."""
        from IPython.display import display

        handle = display(self._mime_bundle(), raw=True, display_id=True)
        if hasattr(_ipython(), "kernel"):
            self._updates.append(threading.Thread(target=self._update, args=(handle,), daemon=True))
            self._updates[-1].start()

    def _mime_bundle(self) -> dict[str, str]:
        html = self._repr_html_()
        return {"text/plain": repr(self), **({} if html is None else {"text/html": html})}

    def _update(self, handle: Any) -> None:
        """Update a display at most once per second, and at the end of the run."""
        state, ended = None, False
        while not ended:
            ended = bool(wait_for([self._result], timeout=1).done)
            if state != (state := (self.progress, len(self._rows), ended)):
                handle.update(self._mime_bundle(), raw=True)


@overload
def tune(workflow: Any, *, tasks: Any, model: str | Path, wait: Literal[True] = True, **options: Any) -> RunResult: ...
@overload
def tune(workflow: Any, *, tasks: Any, model: str | Path, wait: Literal[False], **options: Any) -> Tuning: ...
def tune(
    workflow: Any,
    *,
    judge: Any = None,
    tasks: Any,
    validation: Any = None,
    model: str | Path,
    backbone: str = "local",
    name: str | None = None,
    folder: str | Path = "launcher_record",
    settings: Mapping[str, Any] | None = None,
    wait: bool = True,
    **options: Any,
) -> RunResult | Tuning:
    """Train ``model`` inside ``workflow``, like ``astuner run`` with ``FOLDER/NAME.experiment/NAME.yaml``.

    The file is written first, so both the command and the same call resume the run where it stopped.

    :param workflow: Class or function ``(task, model)``, or a value of ``rollout.workflow``.
    :param judge: Class or function ``(task, response)`` that returns a `JudgeOutput`, a number or a bool, or a value of
        ``task_judge.judge``. None: the workflow returns the reward.
    :param tasks: Tasks or dicts, which are written next to the file; a JSON Lines file; or the name of a task reader,
        with its section in ``settings``.
    :param validation: Validation tasks or file, if ``tasks`` are tasks or a file.
    :param name: Name of the run folder in ``folder``; the workflow's name by default.
    :param settings: Further keys of the file, dotted or nested: ``{"astuner.trainer_common.total_steps": 20}``.
    :param wait: False to return immediately with an object to watch and stop the run.
    :param options: Options of `astuner.run`: ``resume``, ``dry_run``, ``services``.
    :raises ConfigError: As `astuner.run`; or the code has no import path, but the backbone's workers must import it.
    """
    unnamed: list[str] = []
    code = _reference(workflow, unnamed)
    name = name or code.replace("->", ":").rpartition(":")[2].rpartition("/")[2].strip("<>")  # of a lambda
    home = Path(folder).expanduser().absolute()
    place = home / f"{name}.experiment"
    place.mkdir(parents=True, exist_ok=True)
    section: dict[str, Any] = {
        "experiment_dir": str(home),
        "experiment_name": name,
        "backbone": backbone,
        "model": {"path": str(Path(model).absolute()) if Path(model).is_dir() else str(model)},
        "task_reader": _reader(tasks, validation, place),
        "rollout": {"workflow": code},
        **({} if judge is None else {"task_judge": {"judge": _reference(judge, unnamed)}}),
    }
    tree = Tree({"astuner": section})
    for key, value in (settings or {}).items():
        below: Any = value
        for part in reversed(key.split(".")):
            below = {part: below}
        tree = tree.merged(Tree(below))
    file = place / f"{name}.yaml"
    which = f"{', '.join(unnamed)} cannot be imported by other processes"
    expressions = {key: value for key, value in tree.leaves() if "${" in str(value)}
    if redact(tree.data, expressions) != tree.data:
        raise ConfigError("settings: a secret would be written to a file. Use a variable: ${oc.env:VARIABLE}")
    try:
        text = yaml.safe_dump(tree.data, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as e:
        raise ConfigError(f"settings cannot be written as YAML: {e}") from None
    RunDir.write_atomically(file, f"# Written by astuner.tune{f'; {which}' if unnamed else ''}.\n{text}")
    if unnamed:
        how = "define it at the top level of a .py file and pass the function, or FILE.py->NAME"
        if not find_backbone(load_config(file))[0].capabilities.in_process:
            raise ConfigError(f"{which}, but the workers of the backbone {backbone!r} must import it: {how}")
        warnings.warn(f"{which}: only this process can resume the run. For astuner run, {how}", stacklevel=2)
    if wait and asyncio._get_running_loop() is None:
        return run(file, **options)
    tuning = Tuning(name)
    tuning._start(file, options)
    if not wait:
        return tuning
    if hasattr(_ipython(), "kernel"):
        tuning._ipython_display_()
    try:  # the event loop of this thread, such as a notebook's, is blocked meanwhile
        return tuning.result()
    except KeyboardInterrupt:
        tuning.stop()
        return tuning.result()


def _ipython() -> Any:
    """Return the shell of this process if IPython runs it, without importing IPython."""
    module = sys.modules.get("IPython.core.getipython")
    return module.get_ipython() if module else None


def _reference(code: Any, unnamed: list[str]) -> str:
    """Return the reference to ``code`` in an experiment file; names only in this process go to ``unnamed``."""
    if isinstance(code, str):
        where, _, attribute = code.replace("->", ":").rpartition(":")
        own = find_user_file(code, Path.cwd()) if is_code(code) and where.endswith(".py") else None
        return f"{own}->{attribute}" if own else code
    if not isinstance(code, type) and not inspect.isfunction(code):
        raise ConfigError(f"a workflow or judge must be a class, a function or a name, not {type(code).__name__}")
    module, attribute = sys.modules[code.__module__], code.__qualname__
    if module.__name__.startswith("astuner_user_"):
        raise ConfigError(f"{module.__file__} is imported by a run. Put tune(…) below if __name__ == '__main__':")
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file() or getattr(module, attribute, None) is not code:  # a cell, or stdin
        label = f"{code.__name__}_{len(unnamed)}" if code.__name__ in unnamed else code.__name__  # two lambdas
        unnamed.append(label)
        setattr(sys.modules.setdefault(NOT_IN_A_FILE, ModuleType(NOT_IN_A_FILE)), label, code)
        return f"{NOT_IN_A_FILE}->{label}"
    if module.__package__ and module.__spec__:  # only its package name makes relative imports possible
        sys.modules[module.__spec__.name] = module
        return f"{module.__spec__.name}->{attribute}"
    path = Path(file).resolve()
    sys.modules[user_module(path)] = module
    return f"{path}->{attribute}"


def _reader(tasks: Any, validation: Any, place: Path) -> dict[str, Any]:
    if isinstance(tasks, str) and not tasks.endswith(".jsonl") and not Path(tasks).is_file():
        if validation is not None:
            raise ConfigError(f"the task reader {tasks!r} also provides validation tasks: remove validation=…")
        return {"type": tasks}
    splits = {"training": tasks, "validation": validation}
    files = {split: {"file_path": _file(given, split, place)} for split, given in splits.items() if given is not None}
    return {"type": "jsonl", "jsonl": files}


def _file(tasks: str | Path | Iterable[Task | Mapping[str, Any]], split: str, place: Path) -> str:
    """Return the absolute path of a task file. Tasks are written to a file named by their content."""
    if isinstance(tasks, (str, Path)):
        return str(Path(tasks).expanduser().absolute())
    lines = []
    for number, task in enumerate(tasks):
        row = task
        if isinstance(task, Task):
            own = {"task_id": task.task_id, "main_query": task.main_query, "env_type": task.env_type}
            row = {**task.metadata, **own, "init_messages": list(map(dict, task.init_messages))}
        try:
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as e:
            raise ConfigError(f"task {number} of {split} is not JSON: {e}") from None
    text = "".join(lines)
    file = place / f"{split}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    RunDir.write_atomically(file, text)
    return str(file)
