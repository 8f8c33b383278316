"""Import everything once and fork a ready child for each request.

The process has one thread, which forks, reaps and kills. Children never outlive it: the kernel kills the children of a
zygote that dies, and a zygote whose control socket closes (because its server is gone) kills them and ends. A child is
signaled only while it is not reaped, so its process ID cannot belong to another process. Processes that a child leaves
behind are killed when it has ended or no longer owns them.

From the server: the spec, then ``{"fork": id, "options", "descriptors"}`` with the child's socket and, if they are
read, its standard output and error; ``{"kill": id}``. To the server: ``{"ready"}`` or ``{"failed": why}``, and
``{"ended": id, "status", "cpu_s"}`` or ``{"ended": id, "refused": why}``. A child sends its process ID itself.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

from astuner_sandbox.isolation.channel import PID, Channel
from astuner_sandbox.isolation.linux import adopt_orphans, die_with
from astuner_sandbox.isolation.proc import children_of_this_process, kill_group, kill_with_group, leave_after
from astuner_sandbox.isolation.start import lend

_LOOK_MS = 1000
Main = Callable[[Channel, Mapping[str, Any]], object]


def main(descriptor: int) -> None:
    """Serve until the control socket closes."""
    control = Channel(socket.socket(fileno=descriptor), descriptors=True)
    os.set_inheritable(descriptor, False)
    spec = control.recv()
    try:
        child_main = _prepare(spec)
    except BaseException as e:
        if isinstance(e, SystemExit) and isinstance(e.code, str):  # a preloaded function describes its own failure
            why = e.code
        else:
            trace = traceback.format_exc()[-4000:].strip()
            why = f"{sys.executable} could not import the requested modules:\n{trace}"
        control.send({"failed": why})
        sys.exit(1)
    zygote = _Zygote(control, child_main)
    control.send({"ready": os.getpid()})
    zygote.serve()


def _prepare(spec: Mapping[str, Any]) -> Main:
    """Import everything, so that children share it."""
    lend(spec["lent"])
    sys.path[:0] = spec["path"]
    for name in spec["preload"]:
        module, _, function = name.partition(":")
        found = import_module(module)
        if function:
            getattr(found, function)()
    module, _, function = spec["main"].partition(":")
    child_main: Main = getattr(import_module(module), function)
    if threading.active_count() > 1:
        running = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
        raise RuntimeError(
            f"preloading {', '.join(spec['preload'])} left threads running ({running}), and a process with threads "
            "cannot be forked. Start threads when an instance is created"
        )
    adopt_orphans()
    gc.collect()
    gc.freeze()  # keeps memory shared: garbage collection in a child does not touch it
    return child_main


class _Zygote:
    def __init__(self, control: Channel, child_main: Main) -> None:
        self.control, self.child_main = control, child_main
        self.living: dict[int, int] = {}  # process ID -> ID of the fork
        self.own = children_of_this_process()  # a preloaded module may have started helpers
        self.wake, self.waker = os.pipe()
        for end in (self.wake, self.waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the waker

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll(_LOOK_MS)}
                if not ready:
                    self.kill_strays()
                if self.wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                    self.reap()
                if self.control.fileno() in ready:
                    self.answer(self.control.recv())
        except EOFError:
            pass  # the server is gone or has closed this process: the regular end
        finally:
            self.end_all()

    def answer(self, request: Mapping[str, Any]) -> None:
        if "kill" in request:
            for pid in [pid for pid, number in self.living.items() if number == request["kill"]]:
                kill_with_group(pid)
            return
        given = [self.control.received.popleft() for _ in range(request["descriptors"])]
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:
            self.control.send({"ended": request["fork"], "refused": f"{type(e).__name__}: {e}"})
        else:
            if pid == 0:
                leave_after(lambda: self.live(parent, given, request))
            self.living[pid] = request["fork"]
        finally:
            for descriptor in given:
                os.close(descriptor)

    def live(self, parent: int, given: list[int], request: Mapping[str, Any]) -> None:
        """Run the child."""
        os.setsid()
        die_with(parent)
        # so that the children of the zygote are only instances and processes that ended instances left behind
        adopt_orphans()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        os.close(self.wake)
        os.close(self.waker)
        _connect_standard_streams(given[1:])
        sock = socket.socket(fileno=given[0])
        sock.sendall(PID.pack(os.getpid()))
        self.child_main(Channel(sock), request["options"])

    def reap(self) -> None:
        while (ended := _ended(self.living)) is not None:
            pid, status, usage = ended
            self.kill_strays()
            if (number := self.living.pop(pid, None)) is not None:
                with contextlib.suppress(EOFError):  # nothing reads it when all children are being ended
                    self.control.send(
                        {
                            "ended": number,
                            "status": status,
                            "cpu_s": usage.ru_utime + usage.ru_stime,
                        }
                    )

    def kill_strays(self) -> None:
        """Kill what an ended child left behind and what a living child released, which the kernel does not report."""
        for orphan in children_of_this_process() - self.living.keys() - self.own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)

    def end_all(self) -> None:
        for pid in self.living:
            kill_with_group(pid)
        while children_of_this_process() - self.own or self.living:
            self.reap()
            select.select([self.wake], [], [], 0.05)


def _connect_standard_streams(output: list[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    out, err = output or (null, null)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in {null, out, err}:
        os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that the log is complete when the process is killed


def _ended(living: Collection[int]) -> tuple[int, int, resource.struct_rusage] | None:
    """Reap an ended child, if any, after killing the rest of its process group."""
    try:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            ended = os.wait4(-1, os.WNOHANG)
            return ended if ended[0] else None
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_pid in living:
            kill_group(found.si_pid)  # not reaped yet, so the group still belongs to it
        return os.wait4(found.si_pid, 0)
    except ChildProcessError:
        return None
