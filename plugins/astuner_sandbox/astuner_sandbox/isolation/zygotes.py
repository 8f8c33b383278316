"""Control a zygote from the server: start it, request children, and receive their exit status.

All methods are thread-safe; a separate thread reads the zygote's messages. Nothing that a zygote started outlives it:
it kills its children when it is closed, and after a crash all processes with its mark are killed. An ended zygote is
never restarted; its `Keeper` starts a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import astuner
from astuner.contracts.errors import AstunerError
from astuner_sandbox.isolation.channel import PID, Channel
from astuner_sandbox.isolation.proc import MARK, how_it_ended, kill_marked

_START = str(Path(__file__).absolute().with_name("start.py"))
_CORE = str(Path(astuner.__file__).absolute().parent)
_PASSED_ON = ("PATH", "LANG", "HOME", "TMPDIR")
_GRACE = 5.0
_HOLD = 2.0
"""Seconds during which a failed start is not repeated."""


class ZygoteFailed(AstunerError):
    """A zygote did not start, has ended or cannot fork; the message contains the reason."""


@dataclass(frozen=True, kw_only=True)
class ZygoteSpec:
    """Configuration of a zygote."""

    python: str
    """Path of the interpreter."""
    main: str
    """``module:function``, called in each child with its `Channel` and the options of the request."""
    lent: Mapping[str, str] = field(default_factory=dict)
    """Packages that the interpreter may lack: top-level name -> absolute directory. ``astuner`` is always lent."""
    path: Sequence[str] = ()
    """Directories to insert at the start of the interpreter's ``sys.path``."""
    preload: Sequence[str] = ()
    """Modules to import before forking; ``module:function`` is also called once.

    A function may ``sys.exit("why")``; `ZygoteFailed` then contains that text instead of a traceback.
    """
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that add to or replace PATH, LANG, HOME and TMPDIR. No other variables are passed on."""
    cwd: str = "/"
    """Working directory of the zygote and its children; an instance that needs its own directory changes to it."""


@dataclass(eq=False)
class Fork:
    """A child of a zygote, created by `Zygote.fork`."""

    _kill: Callable[[], object]
    socket: socket.socket
    """Socket to the child, not inherited by other processes; the caller of the fork closes it."""
    _on_exit: Callable[[Fork], None] | None = None
    pid: int = 0
    ended: str | None = None
    """Readable exit status: ``exit code 1``, ``killed by SIGKILL (out of memory?)``; None while it runs."""
    returncode: int | None = None
    """Exit code, or the negative signal number; None while it runs, or if its zygote ended with it."""
    cpu_s: float = 0.0
    """Used CPU seconds, known after its end."""
    _killed: bool = False
    _end: threading.Event = field(default_factory=threading.Event)

    def kill(self) -> None:
        """Kill the child and its process group. Can be called repeatedly; `ended` is set when the child is gone."""
        if self.ended is None:
            self._killed = True
            self._kill()

    def wait(self, timeout: float | None = None) -> str | None:
        """Wait for its end and return `ended`; None after ``timeout`` seconds."""
        self._end.wait(timeout)
        return self.ended

    def _has_ended(self, how: str) -> None:
        self.ended = "killed" if self._killed and self.returncode == -signal.SIGKILL else how
        try:
            if self._on_exit is not None:
                self._on_exit(self)
        except Exception:  # an error of a caller must not end the thread on which all others depend
            logging.getLogger(__name__).exception("on_exit of process %d failed", self.pid)
        finally:
            self._end.set()


class Zygote:
    """A warm process and its children."""

    def __init__(self, spec: ZygoteSpec) -> None:
        self.spec = spec
        self._mark = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._forks: dict[int, Fork] = {}
        self._lock = threading.Lock()  # guards the two attributes `_forks` and `_why`
        self._why: str | None = "it was not started"
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._reader = threading.Thread(target=self._listen, name="astuner-zygote", daemon=True)

    def start(self, timeout: float = 120) -> None:
        """Start the process and wait until all imports are done; once per object.

        :raises ZygoteFailed: It did not start; the message describes the failed import, or the end of the traceback.
        """
        ours, theirs = socket.socketpair()
        environ = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with tempfile.TemporaryFile() as said, theirs:
            try:
                self._process = subprocess.Popen(
                    [self.spec.python, "-I", "-X", "utf8", _START, str(theirs.fileno()), _CORE],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    cwd=self.spec.cwd,
                    env={**environ, **self.spec.environ, MARK: self._mark},
                    start_new_session=True,  # Ctrl-C is meant for the server, which then closes this process
                )
            except OSError as e:
                ours.close()
                raise ZygoteFailed(f"cannot start {self.spec.python}: {e}") from None
            theirs.close()
            self._control = Channel(ours)
            try:
                self._control.send(
                    {
                        "lent": dict(self.spec.lent),
                        "path": list(self.spec.path),
                        "preload": list(self.spec.preload),
                        "main": self.spec.main,
                    }
                )
                answer = self._control.recv(timeout)
            except (EOFError, TimeoutError) as e:
                slow = isinstance(e, TimeoutError)
                how = f"was not ready after {timeout:g} s" if slow else f"ended immediately: {self._end_process(1)}"
                self._process.kill()
                self.close()
                raise ZygoteFailed(f"{self.spec.python} {how}\n{tail(said)}".rstrip()) from None
        if "failed" in answer:
            self.close()
            raise ZygoteFailed(answer["failed"])
        self._why = None
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """Process ID of the zygote; None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can fork."""
        return self._why is None

    def fork(
        self,
        options: Mapping[str, Any],
        timeout: float = 20,
        *,
        output: tuple[int, int] | None = None,
        on_exit: Callable[[Fork], None] | None = None,
    ) -> Fork:
        """Return a new child that runs or will run ``main``.

        :param options: JSON options for ``main``.
        :param output: Two descriptors for its standard output and error, which stay open here; None discards the
            output.
        :param on_exit: Called in the reading thread when the child has ended; it must be fast.
        :raises ZygoteFailed: The zygote has ended or cannot fork.
        """
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        fork = Fork(partial(self._say, {"kill": number}), ours, on_exit)
        with theirs:
            with self._lock:
                if self._why is not None:
                    ours.close()
                    raise ZygoteFailed(f"the zygote of {self.spec.main} cannot fork: {self._why}")
                self._forks[number] = fork
            passed = [theirs.fileno(), *(output or ())]
            try:
                self._say({"fork": number, "options": dict(options), "descriptors": len(passed)}, passed)
            except BaseException:
                with self._lock:
                    self._forks.pop(number, None)
                ours.close()
                raise
        try:
            ours.settimeout(timeout)
            said = ours.recv(PID.size, socket.MSG_WAITALL)
            if len(said) < PID.size:
                raise ZygoteFailed(f"the zygote of {self.spec.main} cannot fork: {fork.wait(_GRACE)}")
            (fork.pid,) = PID.unpack(said)
            ours.settimeout(None)
        except BaseException as e:
            fork.kill()
            ours.close()
            if isinstance(e, TimeoutError):
                raise ZygoteFailed(f"the zygote of {self.spec.main} did not fork within {timeout:g} s") from None
            raise
        return fork

    def close(self) -> None:
        """Kill all children and end the zygote within about ten seconds. Can be called repeatedly."""
        if self._process is None or self._control is None:
            return
        self._control.shutdown()
        if self._reader.ident is not None and threading.current_thread() is not self._reader:
            self._reader.join(2 * _GRACE)
        self._lost("it was closed")

    def _say(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._control is not None
        # it has ended: the reader notices that too and notifies all children
        with contextlib.suppress(EOFError, OSError):
            self._control.send(message, descriptors=descriptors)

    def _listen(self) -> None:
        assert self._control is not None
        try:
            while True:
                self._dispatch(self._control.recv())
        except (EOFError, OSError):
            self._lost("its process ended")

    def _dispatch(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            fork = self._forks.pop(message["ended"])
        if "refused" in message:
            fork._has_ended(message["refused"])
        else:
            fork.cpu_s = message["cpu_s"]
            fork.returncode = os.waitstatus_to_exitcode(message["status"])
            fork._has_ended(how_it_ended(fork.returncode))

    def _lost(self, why: str) -> None:
        """End everything that depends on the zygote; only once."""
        with self._lock:
            if self._control is None or (self._process is not None and self._control.fileno() < 0):
                return
            how = self._why = f"{why} ({self._end_process(_GRACE)})"
            forks, self._forks = self._forks, {}
            self._control.close()
        if self._process is not None and self._process.returncode != 0:
            kill_marked(self._mark, {fork.pid for fork in forks.values() if fork.pid})
        for fork in forks.values():
            fork._has_ended(f"its zygote is gone: {how}")

    def _end_process(self, grace: float) -> str:
        assert self._process is not None
        try:
            return how_it_ended(self._process.wait(grace))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return how_it_ended(self._process.wait())


class Keeper:
    """Keep the zygote of a spec alive: start it before it is needed, and again after it died. Thread-safe.

    Invariant: at most one zygote lives, and callers do not repeat a failed start immediately.

    :param within: Seconds in which all imports must finish.
    :param on_death: Called when the zygote was found dead, before a new one starts.
    """

    def __init__(self, spec: ZygoteSpec, within: float, on_death: Callable[[int | None], object] = lambda pid: None):
        self._spec, self._within, self._on_death = spec, within, on_death
        self._zygote: Zygote | None = None
        self._starting = threading.Lock()
        self._failure: tuple[float, ZygoteFailed] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process ID of the living zygote."""
        return self._zygote.pid if self._zygote is not None and self._zygote.is_alive else None

    def ready(self) -> Zygote:
        """Return the living zygote; start one if there is none.

        :raises ZygoteFailed: It does not start; the message contains the end of its output.
        """
        with self._starting:
            if self._closed:
                raise ZygoteFailed("it was closed")
            if self._zygote is not None and self._zygote.is_alive:
                return self._zygote
            if self._failure is not None and time.monotonic() - self._failure[0] < _HOLD:
                raise self._failure[1]
            if self._zygote is not None:
                self._on_death(self._zygote.pid)
                self._zygote.close()
            zygote = self._zygote = Zygote(self._spec)  # set before it runs, so that `close` reaches it
            try:
                zygote.start(self._within)
            except ZygoteFailed as e:
                self._failure = time.monotonic(), e
                raise
            if self._closed:  # when there was nothing to close yet
                zygote.close()
            return zygote

    def fork(self, options: Mapping[str, Any], **how: Any) -> Fork:
        """Fork as `Zygote.fork` does; retry once if the zygote died before it began."""
        try:
            return self.ready().fork(options, **how)
        except ZygoteFailed:
            if self._closed or self.pid is not None:
                raise
        return self.ready().fork(options, **how)

    def close(self) -> None:
        """End the zygote and its children permanently, also during its start."""
        self._closed = True
        if self._zygote is not None:
            self._zygote.close()


def tail(said: IO[bytes], size: int = 4000) -> str:
    """Return the end of the output of a process."""
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - size))
    return said.read().decode(errors="replace").strip()
