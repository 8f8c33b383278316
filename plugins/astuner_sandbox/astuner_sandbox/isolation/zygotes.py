"""The server's side of a zygote: start it, ask it for children, hear of their ends.

Every method may be called from any thread; one thread of its own reads what the zygote says.  Nothing that a zygote
started outlives it: it kills its children when it is closed, and after a crash whatever carries its mark is killed.
A zygote that has ended stays ended; whoever owns it starts another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import astuner
from astuner.contracts.errors import AstunerError
from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.ending import how_it_ended
from astuner_sandbox.isolation.fork import Fork as Fork
from astuner_sandbox.isolation.orphans import MARK, kill_marked

_START = str(Path(__file__).absolute().with_name("start.py"))
_CORE = str(Path(astuner.__file__).absolute().parent)
_PASSED_ON = ("PATH", "LANG", "HOME", "TMPDIR")
_GRACE = 5.0


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


class Zygote:
    """One warm process and its children."""

    def __init__(self, spec: ZygoteSpec) -> None:
        self.spec = spec
        self._mark = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Future[Fork], socket.socket, Callable[[Fork], None] | None]] = {}
        self._forks: dict[int, Fork] = {}
        self._lock = threading.Lock()  # of the two above and `_why`
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
                raise ZygoteFailed(f"{self.spec.python} {how}\n{_tail(said)}".rstrip()) from None
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
        log: Path | None = None,
        timeout: float = 20,
        *,
        output: tuple[int, int] | None = None,
        on_exit: Callable[[Fork], None] | None = None,
    ) -> Fork:
        """A new child, in ``main`` or on its way there.

        :param options: handed to ``main``; JSON.
        :param log: a file that its standard output and error are appended to; nowhere when there is neither.
        :param output: two descriptors to use as its standard output and error instead; they stay open here.
        :param on_exit: called when it has ended, in the thread that reads: be quick.
        :raises ZygoteFailed: the zygote has ended, or cannot fork.
        """
        ours, theirs = socket.socketpair()
        number, asked = next(self._numbers), Future[Fork]()
        with theirs:
            with self._lock:
                if self._why is not None:
                    ours.close()
                    raise ZygoteFailed(f"the zygote of {self.spec.main} cannot fork: {self._why}")
                self._asked[number] = (asked, ours, on_exit)
            passed = [theirs.fileno(), *(output or ())]
            request = {
                "fork": number,
                "options": dict(options),
                "log": None if log is None else str(log),
                "descriptors": len(passed),
            }
            try:
                self._say(request, passed)
                return asked.result(timeout)
            except BaseException as e:
                with self._lock:
                    late = self._asked.pop(number, None) is not None
                if late:
                    ours.close()
                elif asked.exception(_GRACE) is None:  # it has come just now
                    if isinstance(e, FutureTimeout):
                        return asked.result()
                    ours.close()
                    asked.result().kill()
                if isinstance(e, FutureTimeout):
                    raise ZygoteFailed(f"the zygote of {self.spec.main} did not fork within {timeout:g} s") from None
                raise

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
        if "exited" in message:
            with self._lock:
                ended = self._forks.pop(message["exited"], None)
            if ended is not None:  # None: nobody waited for it any more
                ended.cpu_s, ended.peak_mb = message["cpu_s"], message["peak_mb"]
                ended.returncode = os.waitstatus_to_exitcode(message["status"])
                ended._has_ended(how_it_ended(ended.returncode))
        elif "forked" in message:
            with self._lock:
                asked = self._asked.pop(message["forked"], None)
                if asked is not None:
                    kill = partial(self._say, {"kill": message["pid"]})
                    fork = self._forks[message["pid"]] = Fork(kill, message["pid"], asked[1], asked[2])
                    asked[0].set_result(fork)
            if asked is None:  # it came too late
                self._say({"kill": message["pid"]})
        else:
            with self._lock:
                asked = self._asked.pop(message["refused"], None)
            if asked is not None:
                asked[1].close()
                asked[0].set_exception(ZygoteFailed(f"the zygote of {self.spec.main} cannot fork: {message['why']}"))

    def _lost(self, why: str) -> None:
        """Everything that hangs on the zygote ends with it; done once."""
        with self._lock:
            if self._control is None or (self._process is not None and self._control.fileno() < 0):
                return
            how = self._why = f"{why} ({self._end_process(_GRACE)})"
            asked, self._asked = self._asked, {}
            forks, self._forks = self._forks, {}
            self._control.close()
        if self._process is not None and self._process.returncode != 0:
            kill_marked(self._mark, set(forks))
        for future, sock, _ in asked.values():
            sock.close()
            future.set_exception(ZygoteFailed(f"the zygote of {self.spec.main} cannot fork: {how}"))
        for fork in forks.values():
            fork._has_ended(f"its zygote is gone: {how}")

    def _end_process(self, grace: float) -> str:
        assert self._process is not None
        try:
            return how_it_ended(self._process.wait(grace))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return how_it_ended(self._process.wait())


def _tail(said: IO[bytes]) -> str:
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 4000))
    return said.read().decode(errors="replace").strip()
