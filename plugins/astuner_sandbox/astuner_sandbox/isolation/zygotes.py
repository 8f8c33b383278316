"""The server's side of a zygote: start it, ask it for children, hear of their ends.

Every method may be called from any thread; one thread of its own reads what the zygote says.  Nothing that a zygote
started outlives it: it kills its children when it is closed, and after a crash whatever carries its mark is killed.
A zygote that has ended stays ended; its `Keeper` starts another one.
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
"""Seconds for which a failed start is not repeated."""


class ZygoteFailed(AstunerError):
    """A zygote did not start, has ended, or cannot fork; says why."""


@dataclass(frozen=True, kw_only=True)
class ZygoteSpec:
    """What a zygote is made of."""

    python: str
    """The interpreter's path."""
    main: str
    """``module:function``; called in each child with its `Channel` and the request's options."""
    lent: Mapping[str, str] = field(default_factory=dict)
    """Packages the interpreter need not have: top-level name -> absolute folder. ``astuner`` is always lent."""
    path: Sequence[str] = ()
    """Folders put before the interpreter's ``sys.path``."""
    preload: Sequence[str] = ()
    """``module`` is imported, ``module:function`` called too, once, before anything is forked.

    A function may ``sys.exit("why")``: then `ZygoteFailed` says that, and no traceback.
    """
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables beside PATH, LANG, HOME and TMPDIR (or instead of them); no others of this process are passed on."""
    cwd: str = "/"
    """The folder the zygote and its children work in; an instance that needs one of its own changes to it."""


@dataclass(eq=False)
class Fork:
    """A child of a zygote; made by `Zygote.fork`."""

    _kill: Callable[[], object]
    socket: socket.socket
    """Connected to the child, not inherited by other processes; whoever asked for the fork closes it."""
    _on_exit: Callable[[Fork], None] | None = None
    pid: int = 0
    ended: str | None = None
    """How it ended, for people: ``exit code 1``, ``killed by SIGKILL (out of memory?)``. None: it runs."""
    returncode: int | None = None
    """The exit code, or minus the signal's number; None while it runs, or when its zygote ended with it."""
    cpu_s: float = 0.0
    """CPU seconds that it used, known when it has ended."""
    _killed: bool = False
    _end: threading.Event = field(default_factory=threading.Event)

    def kill(self) -> None:
        """Kill it and its process group; harmless when it has ended. `ended` follows when it is really gone."""
        if self.ended is None:
            self._killed = True
            self._kill()

    def wait(self, timeout: float | None = None) -> str | None:
        """Wait for its end: `ended`, None when ``timeout`` seconds have passed."""
        self._end.wait(timeout)
        return self.ended

    def _has_ended(self, how: str) -> None:
        self.ended = "killed" if self._killed and self.returncode == -signal.SIGKILL else how
        try:
            if self._on_exit is not None:
                self._on_exit(self)
        except Exception:  # a caller's mistake must not end the thread that everybody waits for
            logging.getLogger(__name__).exception("on_exit of process %d failed", self.pid)
        finally:
            self._end.set()


class Zygote:
    """One warm process and its children."""

    def __init__(self, spec: ZygoteSpec) -> None:
        self.spec = spec
        self._mark = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._forks: dict[int, Fork] = {}
        self._lock = threading.Lock()  # of the one above and `_why`
        self._why: str | None = "it was not started"
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._reader = threading.Thread(target=self._listen, name="astuner-zygote", daemon=True)

    def start(self, timeout: float = 120) -> None:
        """Start the process and wait until everything is imported; once per object.

        :raises ZygoteFailed: it did not come up; with what is wrong in what it imported, or the end of its traceback.
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
                    start_new_session=True,  # Ctrl-C is for the server, which then closes this
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
                how = f"was not ready after {timeout:g} s" if slow else f"ended at once: {self._end_process(1)}"
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
        """The zygote's own; None before `start`."""
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
        """A new child, in ``main`` or on its way there.

        :param options: handed to ``main``; JSON.
        :param output: two descriptors to use as its standard output and error, which stay open here; None: nowhere.
        :param on_exit: called when it has ended, in the thread that reads: be quick.
        :raises ZygoteFailed: the zygote has ended, or cannot fork.
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
        """Kill everything it started and end it; within about ten seconds, and harmless when done already."""
        if self._process is None or self._control is None:
            return
        self._control.shutdown()
        if self._reader.ident is not None and threading.current_thread() is not self._reader:
            self._reader.join(2 * _GRACE)
        self._lost("it was closed")

    def _say(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._control is not None
        with contextlib.suppress(EOFError, OSError):  # it has ended: the reader sees that too, and tells everybody
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
        """Everything that hangs on the zygote ends with it; done once."""
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
    """The zygote of one spec: started before it is needed, and anew when it has died. From any thread.

    Invariant: at most one lives, and one that fails to start is not tried again at once by everybody who waits.

    :param within: seconds in which it must have imported everything.
    :param on_death: called when it was found dead, before another one is started.
    """

    def __init__(self, spec: ZygoteSpec, within: float, on_death: Callable[[int | None], object] = lambda pid: None):
        self._spec, self._within, self._on_death = spec, within, on_death
        self._zygote: Zygote | None = None
        self._starting = threading.Lock()
        self._failure: tuple[float, ZygoteFailed] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The living zygote's pid."""
        return self._zygote.pid if self._zygote is not None and self._zygote.is_alive else None

    def ready(self) -> Zygote:
        """The living zygote; starts one when there is none.

        :raises ZygoteFailed: it does not start; has the end of what it said.
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
            zygote = self._zygote = Zygote(self._spec)  # before it runs, so that `close` reaches it
            try:
                zygote.start(self._within)
            except ZygoteFailed as e:
                self._failure = time.monotonic(), e
                raise
            if self._closed:  # when there was nothing to close yet
                zygote.close()
            return zygote

    def fork(self, options: Mapping[str, Any], **how: Any) -> Fork:
        """As `Zygote.fork`; tries once more where the zygote died before anything was begun."""
        try:
            return self.ready().fork(options, **how)
        except ZygoteFailed:
            if self._closed or self.pid is not None:
                raise
        return self.ready().fork(options, **how)

    def close(self) -> None:
        """End the zygote and all that was forked from it, for good; also while it is started."""
        self._closed = True
        if self._zygote is not None:
            self._zygote.close()


def tail(said: IO[bytes], size: int = 4000) -> str:
    """The end of what a process wrote to a file."""
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - size))
    return said.read().decode(errors="replace").strip()
