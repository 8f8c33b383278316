"""What a run's agents and judges have started ends with the run, however that ends.

All that a run starts has `RUN_VARIABLE` in its environment, if the code that starts it passes that on; a mere fork has
the run's end of a pipe; and as long as the run lives, what descends from it in its session is found too (helpers of
ours are in sessions of their own, and end by themselves).  A run that ends in order ends what is left.  One that is
killed, or left by C's ``exit``, can do nothing any more: a process beside it, in a session of its own, waits for that.
Should that be killed too, there is ``astuner kill``.
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
"""Of a run: its process's pid and start time, and its folder."""
_GRACE = 2.0
"""Seconds in which what is left may end in order."""
_END_THEMSELVES = ("multiprocessing.resource_tracker", "debugpy/adapter")
"""What Python and debugpy start beside a process, and need as long as it lives."""
_BESIDE = """
import os, select, sys
sys.path = [folder for folder in sys.path if folder]  # without the one that the run was started in
while os.getppid() == int(sys.argv[1].split()[0]) and not select.select([0], [], [], 1.0)[0]:
    pass
from astuner_debug.left_behind import ended_without_a_word
ended_without_a_word(*sys.argv[1:])
"""
"""What waits beside a run; it imports nothing before it has to."""


class LeftBehind(Subscriber):
    """Nothing that is started in a run outlives it."""

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
                start_new_session=True,  # Ctrl-C in the terminal is for the run
            )
            self._began = psutil.Process(self._beside.pid).create_time()
            atexit.register(self._beside.kill)  # whatever ends Python in order has something to say
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
                    self.remark(f"still there when the run was over, and ended: {ended}")


def ended_without_a_word(mark: str, again: str) -> None:
    """A run's process has: say so to the person and in the run's log, and end what is left of it."""
    pid, _, run_dir = mark.split(" ", 2)
    why = "it was killed (`kill -9`, or the system for want of memory), crashed, or code in it called C's exit"
    ended = _end_what_is_left(mark, os.fstat(0).st_ino) or "nothing"
    text = f"the run's process {pid} ended without a word: {why}; still there, and ended: {ended}{again}"
    if (log := Path(run_dir, "run.log")).exists():
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    print(f"astuner: {text}", file=sys.stderr, flush=True)


def left_behind(run_dir: Path | None = None) -> list[RecordedProcess]:
    """What runs that are gone have left; of one run folder when given."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError):  # it has gone, or the variable is not of ours
            pid, started, folder = _run_of(process).split(" ", 2)
            if not is_same_process(int(pid), started) and (run_dir is None or folder == str(run_dir.absolute())):
                what, began = f"left by a run: {command_line(process)}", str(process.create_time())
                found.append(RecordedProcess(pid=process.pid, started=began, what=what, run_dir=folder))
    return found


def command_line(process: psutil.Process) -> str:
    """Of what runs there, up to an argument that has the name of a secret; empty where it is gone."""
    text = ""
    with suppress(psutil.Error):
        text = without_secrets(" ".join(process.cmdline()))
    named = itertools.takewhile(lambda word: not is_secret(word.partition("=")[0]), text.split())
    return " ".join(named)[:200]


def _end_what_is_left(mark: str, pipe: int, below: Collection[psutil.Process] = ()) -> str:
    """End what is left of a run; what that was, for the person.

    :param pipe: the inode of the one of which the run's forks have an end.
    :param below: what descends from the run.
    """
    left = [p for p in psutil.process_iter() if p.pid != os.getpid() and _is_of(p, mark, pipe, below)]
    _, left = psutil.wait_procs(left, timeout=_GRACE / 2)  # Ray's take a moment
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
    """The `RUN_VARIABLE` that it was started with; empty where it has none that we may see."""
    with suppress(psutil.Error, OSError):  # another person's, or gone
        return str(process.environ().get(RUN_VARIABLE, ""))
    return ""


def _is_of(process: psutil.Process, mark: str, pipe: int, below: Collection[psutil.Process]) -> bool:
    """Whether a process is one of those that `_end_what_is_left` ends."""
    with suppress(psutil.Error, OSError):  # another person's, or gone, or there is no /proc
        if _run_of(process) == mark or (process in below and os.getsid(process.pid) == os.getsid(0)):
            return True
        with os.scandir(f"/proc/{process.pid}/fd") as found:
            return any(os.readlink(entry.path) == f"pipe:[{pipe}]" for entry in found)
    return False
