"""End processes that a run's agents and judges started when the run ends, even if it was killed.

A process belongs to the run if `RUN_VARIABLE` is in its environment, if it is a fork that holds the run's end of a
pipe, or, while the run lives, if it descends from the run in the same session (ASTuner's own helpers have sessions of
their own and end by themselves).  A run that ends normally ends these processes itself.  For a run that is killed or
left through C's ``exit``, a watcher process in a separate session does it.  If the watcher is killed too, use
``astuner kill``.
"""

from __future__ import annotations

import atexit
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from astuner import RecordedProcess, is_same_process, process_start_time
from astuner.contracts.errors import safe_text
from astuner.contracts.events import Event, RunClosed, RunContext, RunStarted, Subscriber
from astuner.contracts.secrets import is_secret, without_secrets

RUN_VARIABLE = "ASTUNER_RUN"
"""Environment variable with the run's PID, start time and folder."""
_GRACE = 2.0
"""Seconds that remaining processes have to end before they are killed."""
_END_THEMSELVES = ("multiprocessing.resource_tracker", "debugpy/adapter")
"""Processes that Python and debugpy start and that end by themselves."""
_BESIDE = """
import os, select, sys
sys.path = [folder for folder in sys.path if folder]  # without the run's working directory
while os.getppid() == int(sys.argv[1].split()[0]) and not select.select([0], [], [], 1.0)[0]:
    pass
from astuner_debug.left_behind import ended_without_a_word
ended_without_a_word(*sys.argv[1:])
"""
"""Code of the watcher process; it imports nothing until the run has ended."""


class LeftBehind(Subscriber):
    """End all processes that a run started when the run ends."""

    direct = True

    def __init__(self, context: RunContext) -> None:
        here, self._began = os.getpid(), 0.0
        self._mark = f"{here} {process_start_time(here)} {context.run_dir}"
        self._again = f"; continue with: {again}" if (again := context.resume_command) else ""
        self._beside: subprocess.Popen[bytes] | None = None

    def wants(self, event: Event) -> bool:
        return isinstance(event, (RunStarted, RunClosed))

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._beside = subprocess.Popen(
                [sys.executable, "-c", _BESIDE, self._mark, self._again],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal must not reach the watcher
            )
            self._began = psutil.Process(self._beside.pid).create_time()
            atexit.register(self._beside.kill)  # a normal exit of Python reports its own error
            os.environ[RUN_VARIABLE] = self._mark
        elif self._beside is not None and self._beside.stdin is not None:
            atexit.unregister(self._beside.kill)
            if os.environ.get(RUN_VARIABLE) == self._mark:
                del os.environ[RUN_VARIABLE]
            self._beside.kill()
            with self._beside as beside:
                beside.wait()
                below = [p for p in psutil.Process().children(recursive=True) if p.create_time() > self._began]
                if ended := _end_what_is_left(self._mark, os.fstat(self._beside.stdin.fileno()).st_ino, below):
                    self.remark(f"ended processes that were still running when the run finished: {ended}")


def ended_without_a_word(mark: str, again: str) -> None:
    """Report the unexpected end of a run on standard error and in its log, and end its remaining processes."""
    pid, _, run_dir = mark.split(" ", 2)
    why = "it was killed (`kill -9` or out of memory), crashed, or called C's exit"
    ended = _end_what_is_left(mark, os.fstat(0).st_ino) or "nothing"
    text = f"run process {pid} ended unexpectedly: {why}; ended its remaining processes: {ended}{again}"
    if (log := Path(run_dir, "run.log")).exists():
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    print(f"astuner: {text}", file=sys.stderr, flush=True)


def left_behind(run_dir: Path | None = None) -> list[RecordedProcess]:
    """Return processes that ended runs left behind, optionally of one run folder only."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError):  # the process is gone, or the variable is not ASTuner's
            pid, started, folder = _run_of(process).split(" ", 2)
            if not is_same_process(int(pid), started) and (run_dir is None or folder == str(run_dir.absolute())):
                what, began = f"left by a run: {command_line(process)}", str(process.create_time())
                found.append(RecordedProcess(pid=process.pid, started=began, what=what, run_dir=folder))
    return found


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process up to an argument named like a secret; empty if the process is gone."""
    text = ""
    with suppress(psutil.Error):
        text = without_secrets(" ".join(process.cmdline()))
    named = itertools.takewhile(lambda word: not is_secret(word.partition("=")[0]), text.split())
    return " ".join(named)[:200]


def _end_what_is_left(mark: str, pipe: int, below: Collection[psutil.Process] = ()) -> str:
    """End the remaining processes of a run and return a description of them.

    :param pipe: Inode of the pipe that the run's forks hold open.
    :param below: Descendants of the run.
    """
    left = [p for p in psutil.process_iter() if p.pid != os.getpid() and _is_of(p, mark, pipe, below)]
    _, left = psutil.wait_procs(left, timeout=_GRACE / 2)  # Ray's processes need a moment
    told: dict[str, list[psutil.Process]] = {}
    for process in sorted(left, key=lambda p: p.pid):
        if (line := command_line(process)) and not any(name in line for name in _END_THEMSELVES):
            told.setdefault(line, []).append(process)
    left = list(itertools.chain(*told.values()))
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with suppress(psutil.Error):
                end(process)
        _, left = psutil.wait_procs(left, timeout=_GRACE)
    return safe_text("; ".join(f"{line} (pid {', '.join(str(p.pid) for p in of)})" for line, of in told.items()))


def _run_of(process: psutil.Process) -> str:
    """Return the value of `RUN_VARIABLE` in a process's environment; empty if missing or not readable."""
    with suppress(psutil.Error, OSError):  # another user's process, or gone
        return str(process.environ().get(RUN_VARIABLE, ""))
    return ""


def _is_of(process: psutil.Process, mark: str, pipe: int, below: Collection[psutil.Process]) -> bool:
    """Return whether `_end_what_is_left` must end a process."""
    with suppress(psutil.Error, OSError):  # another user's process, or gone, or no /proc
        if _run_of(process) == mark or (process in below and os.getsid(process.pid) == os.getsid(0)):
            return True
        with os.scandir(f"/proc/{process.pid}/fd") as found:
            return any(os.readlink(entry.path) == f"pipe:[{pipe}]" for entry in found)
    return False
